package console

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// A queueRow is a queue on the overview.
type queueRow struct {
	monitor.QueueView
	Status status
	Age    string // the level of the oldest due age
	Recent recent
}

// Lacks is the key of the text that says why the numbers are those of Redis alone, "" when they are whole.
func (r queueRow) Lacks() string {
	switch {
	case !r.RedisOnly:
		return ""
	case r.Err == nil:
		return "queue.no_ledger"
	case errors.Is(r.Err, delayq.ErrLedger):
		return "queue.other_ledger"
	}
	return "queue.ledger_silent"
}

// mostQueues are shown at most: a page of more would be megabytes, every few seconds.
const mostQueues = 200

type overviewData struct {
	View       *monitor.View
	Rows       []queueRow
	All        int    // queues
	More       int    // of them that are not among Rows
	Concern    int    // queues that want a look
	Down       string // why there are no numbers, a key of the catalogue
	ServerDown bool
}

func (c *Console) overview(w http.ResponseWriter, r *http.Request) {
	view, err := c.views.now(r.Context())
	if err != nil {
		c.fail(w, r, err)
		return
	}
	d := overviewData{View: view, ServerDown: view.Server.Err != nil}
	code := http.StatusOK
	answered := slices.ContainsFunc(view.Queues, func(q monitor.QueueView) bool { return q.Stats != nil })
	if view.Err != nil && !answered {
		d.Down = asRefusal(view.Err).key
		code = http.StatusServiceUnavailable
		c.log.Warn("console: the overview could not be made", "error", view.Err)
	}
	for i := range view.Queues {
		row := c.row(&view.Queues[i])
		if row.Status.Level == "bad" || row.Status.Level == "warn" {
			d.Concern++
		}
		d.Rows = append(d.Rows, row)
	}
	slices.SortStableFunc(d.Rows, func(a, b queueRow) int {
		return cmp.Or(-cmp.Compare(urgency(&a), urgency(&b)), cmp.Compare(a.Name, b.Name))
	})
	d.All = len(d.Rows)
	d.Rows, d.More = cutRows(d.Rows)
	c.show(w, r, code, "overview", text("overview.title"), d)
}

// cutRows keeps the first rows, and says how many it leaves out.
func cutRows(rows []queueRow) (first []queueRow, more int) {
	n := min(len(rows), mostQueues)
	return rows[:n], len(rows) - n
}

// urgency puts the queue whose oldest task is due for longest first, after those that do not answer.
func urgency(r *queueRow) time.Duration {
	if r.Stats == nil {
		return 1 << 62
	}
	return r.Stats.OldestDueAge
}

func (c *Console) row(q *monitor.QueueView) queueRow {
	row := queueRow{QueueView: *q, Recent: c.views.recent(q.Name), Status: statusOf(q)}
	if row.Lacks() == "queue.ledger_silent" && row.Status.Level != "bad" {
		row.Status.Level = "warn"
	}
	if row.Stats != nil {
		row.Age = ageLevel(row.Stats.OldestDueAge)
	}
	return row
}

// statusOf says in a word how a queue is, the worst first.
func statusOf(q *monitor.QueueView) status {
	s := q.Stats
	switch {
	case s == nil:
		return status{"bad", text("status.silent")}
	case s.Due > 0 && q.Healthy == 0:
		return status{"bad", text("status.unserved")}
	case s.OldestDueAge >= 5*lateFrom:
		return status{"bad", text("status.late")}
	case q.Stuck > 0:
		return status{"warn", text("status.stuck")}
	case s.OldestDueAge >= lateFrom:
		return status{"warn", text("status.late")}
	case q.Healthy > 0:
		return status{"ok", text("status.served")}
	}
	return status{"idle", text("status.idle")}
}

// series are the points of the charts, of one queue or of all, since a time.
func (c *Console) series(w http.ResponseWriter, r *http.Request) {
	since := time.Now().Add(-4 * time.Hour)
	if s, err := strconv.ParseFloat(r.URL.Query().Get("since"), 64); err == nil && s > 0 && s < 1<<40 {
		since = time.UnixMilli(int64(s*1000 + 0.5))
	}
	if _, err := c.views.now(r.Context()); err != nil {
		return // nobody is there any more
	}
	points := c.views.points(r.URL.Query().Get("queue"), since)
	if points == nil {
		points = []point{}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(points) // the connection's error
}
