package console

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// A filter chooses dead letters. Neither Redis nor the ledger has an index for it, so it reads them one page after the other,
// and no more than a bound at a time.
type filter struct {
	Reason, Type string
	Until        time.Time // those that died later are left out; zero = all
}

func (f *filter) any() bool { return f.Reason != "" || f.Type != "" }

func (f *filter) match(in *delayq.Info) bool {
	return (f.Reason == "" || in.Reason == f.Reason) && (f.Type == "" || in.Type == f.Type) && (f.Until.IsZero() || !in.At.After(f.Until))
}

func (f *filter) query() url.Values {
	v := url.Values{}
	if f.Reason != "" {
		v.Set("reason", f.Reason)
	}
	if f.Type != "" {
		v.Set("type", f.Type)
	}
	return v
}

const (
	mostLooked  = 2000 // dead letters that one page with a filter looks through
	lookFor     = 3 * time.Second
	lookedAPage = 100
)

type deadData struct {
	queueName
	Filter  filter
	Tasks   []delayq.Info
	Total   int64
	Looked  int
	Next    string
	First   bool
	Reasons []string
	Now     time.Time
}

// Filtered reports whether the page leaves anything out.
func (d *deadData) Filtered() bool { return d.Filter.any() }

type queueName struct{ Queue string }

func (c *Console) deadLetters(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	q, err := c.opened(ctx, r)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	ask := r.URL.Query()
	d := deadData{
		queueName: queueName{q.Name()}, Filter: filter{Reason: ask.Get("reason"), Type: ask.Get("type")}, First: ask.Get("cursor") == "",
		Reasons: delayq.Reasons(), Now: time.Now(),
	}
	stats, err := q.Stats(ctx)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	d.Total = stats.Dead
	opts := delayq.ListOptions{State: delayq.StateDead, Limit: rowsShown, Cursor: ask.Get("cursor"), NewestFirst: true}
	if d.Filter.any() {
		opts.Limit = lookedAPage
	}
	next := ""
	for began := time.Now(); ; {
		page, err := q.List(ctx, opts)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		d.Looked += len(page.Tasks)
		for i := range page.Tasks {
			if d.Filter.match(&page.Tasks[i]) {
				d.Tasks = append(d.Tasks, page.Tasks[i])
			}
		}
		next = page.Next
		if next == "" || len(d.Tasks) >= rowsShown || d.Looked >= mostLooked || time.Since(began) > lookFor {
			break
		}
		opts.Cursor = next
	}
	if next != "" {
		v := d.Filter.query()
		v.Set("cursor", next)
		d.Next = "?" + v.Encode()
	}
	c.show(w, r, http.StatusOK, "dead", text("dead.title_of", shown(q.Name())), &d)
}

type deadQueuesData struct {
	Rows   []queueRow
	More   int // queues that are not among them
	Listed bool
}

// deadQueues is where the dead letters of which queue are.
func (c *Console) deadQueues(w http.ResponseWriter, r *http.Request) {
	view, err := c.views.now(r.Context())
	if err == nil {
		err = blind(view)
	}
	if err != nil {
		c.fail(w, r, err)
		return
	}
	d := deadQueuesData{Listed: view.Listed}
	for i := range view.Queues {
		d.Rows = append(d.Rows, c.row(&view.Queues[i]))
	}
	most := func(q *queueRow) int64 {
		if q.Stats == nil || q.RedisOnly { // those whose letters nobody has counted come last
			return -1
		}
		return q.Stats.Dead
	}
	slices.SortStableFunc(d.Rows, func(a, b queueRow) int { return cmp.Or(-cmp.Compare(most(&a), most(&b)), cmp.Compare(a.Name, b.Name)) })
	d.Rows, d.More = cutRows(d.Rows)
	c.show(w, r, http.StatusOK, "deadqueues", text("dead.title"), d)
}
