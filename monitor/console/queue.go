package console

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

const (
	rowsShown      = 50
	consumersShown = 100
	patience       = 10 * time.Second // of one page
)

// A consumerRow is a consumer and how it is.
type consumerRow struct {
	delayq.Consumer
	Health string
	Silent time.Duration
}

type shardRow struct {
	Index int
	delayq.ShardStats
}

type reasonRow struct {
	Reason string
	Count  int64
}

type queueData struct {
	queueRow
	Live      bool // only the numbers are asked for
	State     delayq.State
	States    []delayq.State
	Tasks     *delayq.Page // nil when they cannot be listed
	First     bool
	Next      string // address of the next page
	Now       time.Time
	Consumers []consumerRow
	More      int // consumers that are not shown
	Shards    []shardRow
	Reasons   []reasonRow
}

// opened is a queue by its part of an address.
func (c *Console) opened(ctx context.Context, r *http.Request) (*delayq.Queue, error) {
	name, ok := unsegment(r.PathValue("queue"))
	if !ok {
		return nil, errNoQueue
	}
	return c.m.Queue(ctx, name)
}

func (c *Console) queue(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	d := queueData{
		State: delayq.StateDue, States: []delayq.State{delayq.StateDue, delayq.StatePending, delayq.StateProcessing, delayq.StateDead},
		Live: live(r), First: r.URL.Query().Get("cursor") == "",
	}
	q, seen, err := c.seen(ctx, r)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	c.describe(&d, seen)
	if s := r.URL.Query().Get("state"); s != "" {
		d.State = delayq.State(s)
	} else if d.Stats.Due == 0 && d.Stats.Pending > 0 {
		d.State = delayq.StatePending
	}
	if !d.Live && q != nil {
		d.Tasks, err = q.List(ctx, delayq.ListOptions{State: d.State, Limit: rowsShown, Cursor: r.URL.Query().Get("cursor")})
		if err != nil {
			c.fail(w, r, err)
			return
		}
		if d.Tasks.Next != "" {
			d.Next = "?" + url.Values{"state": {string(d.State)}, "cursor": {d.Tasks.Next}}.Encode() + "#tasks"
		}
	}
	c.show(w, r, http.StatusOK, "queue", shown(seen.Name), d)
}

// seen gives a queue and its numbers: those of the last view, or its own when the monitor does not watch it. Without its ledger there
// are Redis' numbers alone, and no queue.
func (c *Console) seen(ctx context.Context, r *http.Request) (*delayq.Queue, *monitor.QueueView, error) {
	name, ok := unsegment(r.PathValue("queue"))
	if !ok {
		return nil, nil, errNoQueue
	}
	view, err := c.views.now(ctx)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(view.Queues, func(v monitor.QueueView) bool { return v.Name == name })
	switch {
	case i >= 0 && view.Queues[i].RedisOnly:
		return nil, &view.Queues[i], nil
	case i >= 0 && view.Queues[i].Stats == nil:
		return nil, nil, view.Queues[i].Err
	}
	q, err := c.m.Queue(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	if i >= 0 {
		return q, &view.Queues[i], nil
	}
	seen := &monitor.QueueView{Name: name}
	if seen.Stats, err = q.Stats(ctx); err != nil {
		return nil, nil, err
	}
	if seen.Consumers, err = q.Consumers(ctx, 1000); err != nil {
		return nil, nil, err
	}
	c.m.Tally(seen)
	return q, seen, nil
}

// describe fills in the numbers.
func (c *Console) describe(d *queueData, seen *monitor.QueueView) {
	d.queueRow = c.row(seen)
	d.Now = seen.Stats.Now
	for i := range seen.Consumers {
		one := &seen.Consumers[i]
		d.Consumers = append(d.Consumers, consumerRow{*one, c.m.Health(one, d.Now), max(0, d.Now.Sub(one.Seen))})
	}
	worst := map[string]int{monitor.Stuck: 0, monitor.Stale: 1, monitor.Healthy: 2, monitor.Gone: 3}
	slices.SortStableFunc(d.Consumers, func(a, b consumerRow) int { return cmp.Compare(worst[a.Health], worst[b.Health]) })
	if d.More = len(d.Consumers) - consumersShown; d.More > 0 {
		d.Consumers = d.Consumers[:consumersShown]
	}
	for i, s := range seen.Stats.Shards {
		d.Shards = append(d.Shards, shardRow{i, s})
	}
	for reason, n := range seen.Stats.Failed {
		if n > 0 {
			d.Reasons = append(d.Reasons, reasonRow{reason, n})
		}
	}
	slices.SortFunc(d.Reasons, func(a, b reasonRow) int {
		return cmp.Or(-cmp.Compare(a.Count, b.Count), cmp.Compare(a.Reason, b.Reason))
	})
}
