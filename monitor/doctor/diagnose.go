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
	// Timeout bounds what is read beyond the looks: the database's time, then all queues together. Defaults to 5 s.
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

// atOnce is how many queues are read at once, as many as a look reads.
const atOnce = 8

// read adds what a View does not hold.
func (o *Options) read(ctx context.Context, m *monitor.Monitor, e *Evidence) {
	if o.Database != nil {
		e.Database = o.ask(ctx)
	}
	bounded, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	missing := false
	parts := make([]chan More, len(e.Now.Queues))
	places := make(chan struct{}, atOnce)
	for i := range e.Now.Queues {
		q := &e.Now.Queues[i]
		missing = missing || q.Stats == nil
		if !readable(e, q) {
			continue
		}
		parts[i] = make(chan More, 1)
		go func() {
			select {
			case places <- struct{}{}:
				defer func() { <-places }()
				parts[i] <- more(bounded, m, e, q)
			case <-bounded.Done():
				parts[i] <- More{Err: bounded.Err()}
			}
		}()
	}
	late, stop := context.WithTimeout(ctx, o.Timeout+time.Second) // by then all have answered that heed bounded
	defer stop()
	for i, part := range parts {
		if part == nil {
			continue
		}
		name := e.Now.Queues[i].Name
		select {
		case e.More[name] = <-part:
		case <-late.Done(): // its client does not heed its context
			e.More[name] = More{Err: late.Err()}
		}
	}
	o.audit(ctx, m, e)
	if missing && o.Redis != nil && e.Now.Server.Err == nil {
		quick, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		e.Known, _ = delayq.Queues(quick, o.Redis) // without them there is no guess
	}
}

// ask asks the ledger's database for its time.
func (o *Options) ask(ctx context.Context) *Database {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	sent := time.Now()
	now, err := o.Database(ctx)
	d := &Database{Err: err}
	if took := time.Since(sent); err == nil {
		d.Skew = now.Sub(sent.Add(took / 2))
	}
	return d
}

// readable reports whether a queue can be opened as workers open it; where not, a finding of its own says why.
func readable(e *Evidence, v *monitor.QueueView) bool {
	redisUp, ledgerUp := e.Now.Server.Err == nil, e.Database != nil && e.Database.Err == nil
	return !v.RedisOnly && (e.Database == nil || ledgerUp) && redisUp == (v.Stats != nil) && (redisUp || ledgerUp)
}

// more reads of a queue that is readable.
func more(ctx context.Context, m *monitor.Monitor, e *Evidence, v *monitor.QueueView) (more More) {
	q, err := m.Queue(ctx, v.Name)
	if err != nil {
		return More{Err: err}
	}
	lq := q.LedgerQueue()
	if lq != nil {
		counts, err := lq.Counts(ctx, mostCounted, q.Horizon())
		if err != nil {
			return More{Err: err}
		}
		more.Ledger = &counts
	}
	if e.Now.Server.Err != nil {
		return more
	}
	page, err := q.List(ctx, delayq.ListOptions{State: delayq.StateDue, Limit: 100})
	if err != nil {
		more.Err = err
		return more
	}
	more.Due = append([]delayq.Info{}, page.Tasks...)
	since := v.Stats.Now.Add(-deadLately)
	if lq != nil && inRedis(v.Stats) > 0 {
		since = time.Time{} // how many of them are in quarantine is of interest whatever their age
	}
	more.Err = more.readDead(ctx, q, since)
	return more
}

// Pages of dead letters that are read of a queue.
const (
	deadPages = 6
	deadPage  = 500
)

// readDead walks dead letters from the last to die to those before since, a few pages far.
func (m *More) readDead(ctx context.Context, q *delayq.Queue, since time.Time) error {
	o := delayq.ListOptions{State: delayq.StateDead, Limit: deadPage, NewestFirst: true}
	for range deadPages {
		page, err := q.List(ctx, o)
		if err != nil {
			return err
		}
		m.Dead = append(m.Dead, page.Tasks...)
		if o.Cursor = page.Next; o.Cursor == "" {
			m.DeadAll = true
			return nil
		}
		if n := len(m.Dead); n > 0 && m.Dead[n-1].At.Before(since) {
			return nil
		}
	}
	return nil
}

// audit reads one queue after the other, since each is read whole.
func (o *Options) audit(ctx context.Context, m *monitor.Monitor, e *Evidence) {
	for i := range e.Now.Queues {
		name := e.Now.Queues[i].Name
		more, ok := e.More[name]
		if !o.Audit || !ok || more.Err != nil || e.Now.Server.Err != nil {
			continue
		}
		q, err := m.Queue(ctx, name)
		if err == nil {
			more.Audit, err = q.Audit(ctx, delayq.AuditOptions{Progress: func(done, total int64) {
				if o.Progress != nil {
					o.Progress(name, done, total)
				}
			}})
		}
		more.Err = err
		e.More[name] = more
	}
}
