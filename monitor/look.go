// Package monitor watches delay queues: metrics, alert rules, a dashboard, and what a doctor would say.
//
//	m, err := monitor.New(monitor.Config{Redis: rdb})
//	view := m.Look(ctx)                         // everything at this moment, for a person or a rule
//	prometheus.MustRegister(m.Collector())      // the same at each scrape; docs/metrics.md lists the metrics
//	http.Handle("/metrics", m.Handler())
//
// It reads what Redis and the ledger hold, at the moment it is asked, and keeps no number: what cannot be read now is an error now.
package monitor

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/reconciler"
)

// Config says what to watch. Redis is all that it needs.
type Config struct {
	// Redis is any go-redis client, the caller's; set ContextTimeoutEnabled on it.
	Redis redis.UniversalClient
	// Ledger keeps the queues that have one; nil for none. Without it a queue that has one shows what Redis knows of it.
	Ledger delayq.Ledger
	// Horizon must be the one that the queues are opened with elsewhere.
	Horizon time.Duration
	// ScriptHeader is the first line of every script, as in delayq.Config.
	ScriptHeader string
	// Queues to watch. Empty means all that are found in Redis, and in the ledger; looked for at the start and then once a minute, and
	// at each look while there is none.
	Queues []string
	// MostQueues bounds the queues that are watched, and so the series: the first by name are. More are counted as left out.
	//
	// Defaults to 100. At most 10,000.
	MostQueues int
	// Timeout bounds one look.
	//
	// Defaults to 5 s. At least 10 ms.
	Timeout time.Duration
	// StaleAfter is how long a consumer may be silent.
	//
	// Defaults to 60 s. At least 1 s.
	StaleAfter time.Duration
	// StuckAfter is how long a consumer may live without progress.
	//
	// Defaults to 5 minutes. At least 1 s.
	StuckAfter time.Duration
	// Logger hears what cannot be read any more, and what can again; nil for nobody.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	c.MostQueues = cmp.Or(c.MostQueues, 100)
	c.Timeout = cmp.Or(c.Timeout, 5*time.Second)
	c.StaleAfter = cmp.Or(c.StaleAfter, time.Minute)
	c.StuckAfter = cmp.Or(c.StuckAfter, 5*time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Queues = slices.Compact(slices.Sorted(slices.Values(c.Queues)))
	return c
}

func (c Config) validate() error {
	switch {
	case c.Redis == nil:
		return &delayq.InputError{Field: "Config.Redis", Limit: "a client", Got: "nil"}
	case c.Horizon < 0 || c.Horizon > 0 && c.Ledger == nil:
		return &delayq.InputError{Field: "Config.Horizon", Limit: "0, or positive together with Config.Ledger", Got: c.Horizon.String()}
	case c.MostQueues < 1 || c.MostQueues > 10_000:
		return &delayq.InputError{Field: "Config.MostQueues", Limit: "1 to 10000", Got: fmt.Sprint(c.MostQueues)}
	case c.Timeout < 10*time.Millisecond:
		return &delayq.InputError{Field: "Config.Timeout", Limit: "at least 10 ms", Got: c.Timeout.String()}
	case c.StaleAfter < time.Second:
		return &delayq.InputError{Field: "Config.StaleAfter", Limit: "at least 1 s", Got: c.StaleAfter.String()}
	case c.StuckAfter < time.Second:
		return &delayq.InputError{Field: "Config.StuckAfter", Limit: "at least 1 s", Got: c.StuckAfter.String()}
	}
	for _, name := range c.Queues {
		if !validName(name) {
			return &delayq.InputError{Field: "Config.Queues", Limit: "of names with 1 to 128 letters, digits and . _ - : /", Got: fmt.Sprintf("%.140q", name)}
		}
	}
	return nil
}

// A Monitor looks at queues, for as many callers at once as there are. It never changes one, and makes none.
type Monitor struct {
	cfg                         Config
	inRedisNames, inLedgerNames finder

	mu      sync.Mutex
	handles map[string]*handle
	failing map[string]error // by what could not be read when it was last looked at
	next    *flight          // the look that callers may still join
	running chan struct{}    // a place for each look that may go on at once
}

// New returns a monitor. Nothing is dialled yet: servers that are away show in what it sees. Errors: delayq.ErrInvalid.
func New(cfg Config) (*Monitor, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	m := &Monitor{cfg: cfg, handles: map[string]*handle{}, failing: map[string]error{}, running: make(chan struct{}, 2)}
	m.finders()
	return m, nil
}

// A View is what one look has seen.
type View struct {
	At      time.Time     `json:"at"`
	Took    time.Duration `json:"took_ns"`
	Server  Server        `json:"server"`
	Queues  []QueueView   `json:"queues"`   // by name
	LeftOut int           `json:"left_out"` // queues beyond MostQueues
	// Listed says that each server has told its queues, if perhaps a while ago. Without, some may be missing.
	Listed  bool  `json:"listed"`
	FindErr error `json:"-"` // the names could not be listed this time: Queues are those of an earlier list, or of one server
	Err     error `json:"-"` // FindErr, or else that of a Redis that did not answer at all
}

// A QueueView is one queue as seen by one look. With Err the other fields may be nil: never numbers of an earlier look.
type QueueView struct {
	Name string `json:"name"`
	Err  error  `json:"-"` // of Redis: then Stats is nil; or of the ledger, a delayq.LedgerError or delayq.ErrLedger: then RedisOnly is set
	// RedisOnly says that the queue has a ledger and Stats lack what that alone knows: Later, and Dead but for the quarantined.
	// So it is without Config.Ledger, and while that does not answer.
	RedisOnly             bool              `json:"redis_only,omitempty"`
	Stats                 *delayq.Stats     `json:"stats,omitempty"`
	Consumers             []delayq.Consumer `json:"consumers"` // at most 1000, latest first; see delayq.Queue.Consumers
	Healthy, Stale, Stuck int               // of them; those that are gone are none of these
	// Reconciler is nil without a ledger, or before its first slice.
	Reconciler *reconciler.Status `json:"reconciler,omitempty"`
}

// A flight is a look on its way, for all who asked before it began.
type flight struct {
	done chan struct{}
	view *View
}

// Look looks at all queues at once, bounded by Config.Timeout and ctx. Callers may share a look, but none gets one that began before
// its call; so a view is for reading only. There always is one; what failed is in its errors.
func (m *Monitor) Look(ctx context.Context) *View {
	if end, ok := ctx.Deadline(); ok && time.Until(end) < m.cfg.Timeout {
		return m.look(ctx) // in a hurry: what is not there in time is an error, the rest is shown
	}
	m.mu.Lock()
	f := m.next
	if f == nil {
		f = &flight{done: make(chan struct{})}
		m.next = f
		go m.fly(context.WithoutCancel(ctx), f)
	}
	m.mu.Unlock()
	select {
	case <-f.done:
		return f.view
	case <-ctx.Done():
		return m.blind(ctx.Err())
	}
}

func (m *Monitor) fly(ctx context.Context, f *flight) {
	m.running <- struct{}{}
	defer func() { <-m.running }()
	m.mu.Lock()
	m.next = nil // from here on it is too old for those who come
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	f.view = m.look(ctx)
	close(f.done)
}

// blind is the view of one who did not get to look.
func (m *Monitor) blind(err error) *View {
	v := &View{At: time.Now(), Server: unknownServer(err), Err: err}
	for _, name := range m.cfg.Queues {
		v.Queues = append(v.Queues, QueueView{Name: name, Err: err})
	}
	return v
}

// Parts of a look that go on at once. Those of Redis and of the ledger wait in lines of their own, so that one that hangs does not
// keep the other's numbers back.
const (
	redisAtOnce  = 8
	ledgerAtOnce = 4
)

func (m *Monitor) look(ctx context.Context) *View {
	began := time.Now()
	server := make(chan Server, 1)
	go func() { server <- m.Server(ctx) }()
	v := &View{At: began}
	var names []string
	names, v.LeftOut, v.Listed, v.FindErr = m.queues(ctx)
	v.Queues = make([]QueueView, len(names))
	redisParts, ledgerParts := spread(ctx, names, redisAtOnce, m.inRedis), spread(ctx, names, ledgerAtOnce, m.inLedger)
	for i, name := range names {
		r, l := await(ctx, redisParts[i]), await(ctx, ledgerParts[i])
		v.Queues[i] = m.merge(name, r, l)
	}
	select {
	case v.Server = <-server:
	case <-ctx.Done():
		select { // it may have come together with the end
		case v.Server = <-server:
		default:
			v.Server = unknownServer(ctx.Err())
		}
	}
	v.Err = cmp.Or(v.FindErr, v.Server.Err)
	v.Took = time.Since(began)
	m.tell(v)
	return v
}

// A part is what one server told of one queue.
type part[T any] struct {
	got T
	err error
}

// spread asks for all names, so many at once. Each answer has a channel of its own, since a client that does not heed ctx may take
// longer than anybody waits.
func spread[T any](ctx context.Context, names []string, atOnce int, ask func(context.Context, string) (T, error)) []chan part[T] {
	parts := make([]chan part[T], len(names))
	for i := range parts {
		parts[i] = make(chan part[T], 1)
	}
	work := make(chan int, len(names))
	for i := range names {
		work <- i
	}
	close(work)
	for range min(atOnce, len(names)) {
		go func() {
			for i := range work {
				var p part[T]
				if p.err = ctx.Err(); p.err == nil {
					p.got, p.err = ask(ctx, names[i])
				}
				parts[i] <- p
			}
		}()
	}
	return parts
}

// await returns what has come by the end of ctx.
func await[T any](ctx context.Context, from chan part[T]) part[T] {
	select {
	case p := <-from:
		return p
	case <-ctx.Done():
	}
	select {
	case p := <-from:
		return p
	default:
		return part[T]{err: fmt.Errorf("monitor: no answer in time: %w", ctx.Err())}
	}
}

// Health says how a consumer is at now, which is Redis' clock (Stats.Now): "healthy", "stale" (silent for StaleAfter), or "stuck"
// (alive, but without progress for StuckAfter, or with stuck handlers in all its slots). One that only calls Lease is healthy while it
// calls. "gone" is one that is silent and not missed: its run has ended, as a function's does, or it only ever called Lease.
func (m *Monitor) Health(c *delayq.Consumer, now time.Time) string {
	switch silent := now.Sub(lastSign(c)) > m.cfg.StaleAfter; {
	case silent && c.Beat.IsZero(): // a worker takes its beat back when it ends, and leaves it behind when it is killed
		return Gone
	case silent:
		return Stale
	case c.Beat.IsZero():
		return Healthy
	}
	progress := c.Progress
	if c.Started.After(progress) {
		progress = c.Started
	}
	// As it was at the beat: beats are 10 s apart, and between them nothing is known.
	if c.Beat.Sub(progress) > m.cfg.StuckAfter || c.Concurrency > 0 && c.Stuck >= c.Concurrency {
		return Stuck
	}
	return Healthy
}

// lastSign is when a consumer was last heard of, in any way.
func lastSign(c *delayq.Consumer) time.Time {
	if c.Beat.After(c.Seen) {
		return c.Beat
	}
	return c.Seen
}

// What Health says.
const (
	Healthy = "healthy"
	Stale   = "stale"
	Stuck   = "stuck"
	Gone    = "gone"
)
