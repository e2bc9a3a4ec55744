package doctor

import (
	"cmp"
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// Options tune Diagnose. The zero Options make one look, and ask for no more than the monitor has.
type Options struct {
	// Watch is the time between two looks: what grows and what fails now is seen in their difference. 0 makes one look.
	Watch time.Duration
	// Timeout bounds what is read beyond the looks. Defaults to 5 s.
	Timeout time.Duration
	// StaleAfter and StuckAfter are those of the monitor. Default to 60 s and 5 minutes.
	StaleAfter, StuckAfter time.Duration
	// Redis finds names like one that is not there; nil to leave that out.
	Redis redis.UniversalClient
	// Database asks the ledger's database for its time; nil when there is no ledger.
	Database func(context.Context) (time.Time, error)
	// Audit reads each queue whole, and tells Progress how far it is. It takes as long as it takes.
	Audit    bool
	Progress func(queue string, done, total int64)
}

// Diagnose looks at queues through m and says what is wrong. It always answers: what cannot be read is a finding.
func Diagnose(ctx context.Context, m *monitor.Monitor, o Options) *Report {
	o.Timeout = cmp.Or(o.Timeout, 5*time.Second)
	began := time.Now()
	e := Evidence{StaleAfter: cmp.Or(o.StaleAfter, time.Minute), StuckAfter: cmp.Or(o.StuckAfter, 5*time.Minute), More: map[string]More{}}
	e.Now = m.Look(ctx)
	r := &Report{At: began}
	if o.Watch > 0 && e.Now.Server.Err == nil {
		timer := time.NewTimer(o.Watch)
		defer timer.Stop()
		select {
		case <-timer.C:
			e.Before, e.Now = e.Now, m.Look(ctx)
			r.Watched = e.Now.At.Sub(e.Before.At)
		case <-ctx.Done():
		}
	}
	o.read(ctx, m, &e)
	r.Findings = Examine(e)
	r.Worst, r.Took, r.Queues = Worst(r.Findings), time.Since(began), []string{}
	for _, q := range e.Now.Queues {
		r.Queues = append(r.Queues, q.Name)
	}
	return r
}

// read adds what a View does not hold.
func (o *Options) read(ctx context.Context, m *monitor.Monitor, e *Evidence) {
	bounded, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if o.Database != nil {
		sent := time.Now()
		now, err := o.Database(bounded)
		e.Database = &Database{Err: err}
		if took := time.Since(sent); err == nil {
			e.Database.Skew = now.Sub(sent.Add(took / 2))
		}
	}
	missing := false
	for i := range e.Now.Queues {
		q := &e.Now.Queues[i]
		missing = missing || q.Stats == nil
		if more, ok := o.more(ctx, bounded, m, e, q); ok {
			e.More[q.Name] = more
		}
	}
	if missing && o.Redis != nil && e.Now.Server.Err == nil {
		quick, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		e.Known, _ = delayq.Queues(quick, o.Redis) // without them there is no guess
	}
}

// more reads of a queue that could be opened as workers open it.
func (o *Options) more(ctx, bounded context.Context, m *monitor.Monitor, e *Evidence, v *monitor.QueueView) (more More, ok bool) {
	redisUp, ledgerUp := e.Now.Server.Err == nil, e.Database != nil && e.Database.Err == nil
	if v.RedisOnly || e.Database != nil && !ledgerUp || redisUp == (v.Stats == nil) || !redisUp && !ledgerUp {
		return more, false
	}
	q, err := m.Queue(bounded, v.Name)
	if err != nil {
		return More{Err: err}, true
	}
	if lq := q.LedgerQueue(); lq != nil {
		counts, err := lq.Counts(bounded, mostCounted, q.Horizon())
		if more.Err = err; err == nil {
			more.Ledger = &counts
		}
	}
	if !redisUp || more.Err != nil {
		return more, true
	}
	page, err := q.List(bounded, delayq.ListOptions{State: delayq.StateDue, Limit: 100})
	if err != nil {
		more.Err = err
		return more, true
	}
	more.Due = append([]delayq.Info{}, page.Tasks...)
	more.Dead, more.DeadAll, more.Err = newestDead(bounded, q)
	if o.Audit && more.Err == nil {
		more.Audit, more.Err = q.Audit(ctx, delayq.AuditOptions{Progress: func(done, total int64) {
			if o.Progress != nil {
				o.Progress(v.Name, done, total)
			}
		}})
	}
	return more, true
}

// newestDead walks dead letters, which come oldest first, a few pages far and keeps the last page and a half.
func newestDead(ctx context.Context, q *delayq.Queue) (newest []delayq.Info, all bool, err error) {
	const pages, size = 6, 500
	cursor := ""
	for range pages {
		page, err := q.List(ctx, delayq.ListOptions{State: delayq.StateDead, Limit: size, Cursor: cursor})
		if err != nil {
			return nil, false, err
		}
		newest = append(newest[max(0, len(newest)-size):], page.Tasks...)
		if cursor = page.Next; cursor == "" {
			return newest, true, nil
		}
	}
	return newest, false, nil
}
