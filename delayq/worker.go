package delayq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// WorkerConfig tunes a Worker; set its fields before Run. The zero value is ready to use.
type WorkerConfig struct {
	// Concurrency is how many handlers run at once; no more is leased than can start. Defaults to 32. 1 to 10,000.
	Concurrency int
	// Lease is how long a task is owned between heartbeats, which come at a third of it; after a crash the task waits that
	// long. Defaults to 30 s. 1 s to 12 h.
	Lease time.Duration
	// Timeout is a handler's hard limit; its context then ends with cause ErrTimeout. Defaults to 5 minutes.
	Timeout time.Duration
	// Stall is the longest silence between calls of Progress (the start counts as one); then as Timeout. 0, the default, is
	// no such limit.
	Stall time.Duration
	// Grace is how long a handler may go on after its context has ended. Then its lease is no longer renewed, its slot is
	// freed and it counts as stuck. When Run's context is cancelled, running handlers first get Grace to end by themselves.
	// Defaults to 5 s.
	Grace time.Duration
	// Margin is how long before its context's deadline Run ends the contexts of handlers; it stops leasing at twice that, and
	// is back before the deadline. Without a deadline it has no use. Defaults to 2 s. At least 100 ms.
	Margin time.Duration
	// MinPoll is the least time between rounds of lease calls, MaxPoll the most: tasks known to fall due are leased on time,
	// tasks added meanwhile with a shorter delay within MaxPoll on a quiet queue and much sooner on a busy one. Default to
	// 5 ms and 550 ms: with its beats an idle worker then makes less than two calls a second.
	MinPoll, MaxPoll time.Duration
	// IdleExit makes Run return when nothing is running and nothing falls due within it. 0, the default, is never.
	IdleExit time.Duration
	// StartTimeout bounds how long Run goes on without a single call answered before it gives up with the error. Defaults to
	// 10 s.
	StartTimeout time.Duration
	// Group is the baton group: of its runners only the youngest Runners go on leasing, older ones drain and return. It turns
	// a one-minute trigger into a gapless runner. Empty, the default, is no baton. Runners defaults to 1.
	Group   string
	Runners int
	// Consumer names this run in Redis; no other run may have the name at the same time. 1 to 128 bytes without blanks.
	// Defaults to host, process and random digits.
	Consumer string
	// Retry is the curve between attempts. Defaults to DefaultRetry.
	Retry RetryPolicy
	// MaxAttempts failed runs end in the dead letters. Defaults to 5.
	MaxAttempts int
	// MaxLost lost leases end in the dead letters too: a task that takes its consumers down. Defaults to 5.
	MaxLost int
	// Logger gets a line for each failed attempt, dead letter and lost lease, with task_id, type, biz_key and attempt, never a
	// payload. Defaults to slog.Default().
	Logger *slog.Logger
}

const (
	defaultMaxAttempts = 5
	defaultMaxLost     = 5
)

func (c WorkerConfig) withDefaults() WorkerConfig {
	c.Concurrency = cmp.Or(c.Concurrency, 32)
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.Timeout = cmp.Or(c.Timeout, 5*time.Minute)
	c.Grace = cmp.Or(c.Grace, 5*time.Second)
	c.Margin = cmp.Or(c.Margin, 2*time.Second)
	c.MinPoll = cmp.Or(c.MinPoll, 5*time.Millisecond)
	c.MaxPoll = cmp.Or(c.MaxPoll, 550*time.Millisecond)
	c.StartTimeout = cmp.Or(c.StartTimeout, 10*time.Second)
	c.Runners = cmp.Or(c.Runners, 1)
	c.MaxAttempts = cmp.Or(c.MaxAttempts, defaultMaxAttempts)
	c.MaxLost = cmp.Or(c.MaxLost, defaultMaxLost)
	if c.Consumer == "" {
		host, _ := os.Hostname()
		c.Consumer = fmt.Sprintf("%.60s-%d-%s", cmp.Or(host, "host"), os.Getpid(), randomHex()[:12])
	}
	if c.Retry == nil {
		c.Retry = DefaultRetry
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate reports every field that is out of bounds, each as an InputError.
func (c WorkerConfig) Validate() error {
	c = c.withDefaults()
	var errs []error
	check := func(ok bool, field, limit string, got any) {
		if !ok {
			errs = append(errs, &InputError{"WorkerConfig." + field, limit, fmt.Sprint(got)})
		}
	}
	check(c.Concurrency >= 1 && c.Concurrency <= 10_000, "Concurrency", "1 to 10000", c.Concurrency)
	check(c.Lease >= time.Second && c.Lease <= 12*time.Hour, "Lease", "1 s to 12 h", c.Lease)
	check(c.Timeout > 0, "Timeout", "positive", c.Timeout)
	check(c.Stall >= 0, "Stall", "0 or positive", c.Stall)
	check(c.Grace > 0, "Grace", "positive", c.Grace)
	check(c.Margin >= 100*time.Millisecond, "Margin", "at least 100 ms", c.Margin)
	check(c.MinPoll > 0, "MinPoll", "positive", c.MinPoll)
	check(c.MaxPoll >= c.MinPoll && c.MaxPoll <= time.Minute, "MaxPoll", "MinPoll ("+c.MinPoll.String()+") to 1 minute", c.MaxPoll)
	check(c.IdleExit >= 0, "IdleExit", "0 or positive", c.IdleExit)
	check(c.StartTimeout > 0, "StartTimeout", "positive", c.StartTimeout)
	check(len(c.Group) <= 128, "Group", "at most 128 bytes", len(c.Group))
	check(c.Runners >= 1 && c.Runners <= 100, "Runners", "1 to 100", c.Runners)
	check(c.MaxAttempts >= 1, "MaxAttempts", "at least 1", c.MaxAttempts)
	check(c.MaxLost >= 1, "MaxLost", "at least 1", c.MaxLost)
	if err := validConsumer("WorkerConfig.Consumer", c.Consumer); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// A Worker leases due tasks of its queues and runs their handlers: one loop for a server, a function and a test.
type Worker struct {
	WorkerConfig
	handler Handler
	queues  []*Queue
}

// NewWorker returns a worker of one or more queues, served in turn. Set fields of its WorkerConfig before Run.
func NewWorker(h Handler, queues ...*Queue) *Worker { return &Worker{handler: h, queues: queues} }

// RunStats counts what one Run did.
type RunStats struct {
	Leased    int64 `json:"leased"`
	Succeeded int64 `json:"succeeded"`
	Retried   int64 `json:"retried"`
	Dead      int64 `json:"dead"`
	Cancelled int64 `json:"cancelled"`  // told to stop, and ended as cancelled
	Released  int64 `json:"released"`   // given back uncharged: never started, interrupted, or snoozed
	LeaseLost int64 `json:"lease_lost"` // ended after their lease was another's: refused by Redis, nothing changed
	// Unreported ended without Redis hearing of it, which did not answer in time: their leases run out and they run again.
	Unreported int64 `json:"unreported"`
	TimedOut   int64 `json:"timed_out"` // part of Retried and Dead
	Stuck      int64 `json:"stuck"`     // handlers that outlived the end of their context by Grace
	Missing    int64 `json:"missing"`   // ids whose record was gone from Redis
	Polls      int64 `json:"polls"`     // lease calls
	// Refused by the ledger: Redis had leased them, but they had moved on, or run elsewhere. Only with a ledger, as the next.
	Refused    int64 `json:"refused,omitempty"`
	FromLedger int64 `json:"from_ledger,omitempty"` // part of Leased: not from Redis, which was away or did not have them
	// Stop says why Run came back: "cancelled", "deadline", "baton" (a younger runner took over), "idle" or "error".
	Stop    string        `json:"stop"`
	Elapsed time.Duration `json:"elapsed_ns"`
}

// Run works until its context ends, a younger runner takes over, or the queues are idle for IdleExit. It then drains: no new
// leases, running handlers end or are ended, what was never started goes back uncharged, heartbeats stop. A handler that
// uses up at least half of the whole time before a deadline and is still cut off is charged with a timeout, or a task that
// never fits would come back for ever.
//
// The error is nil for all of these; it is not nil when Run could not work at all: ErrInvalid, ErrNoTime when less than twice
// the Margin is left before the deadline, the connection's error when not one call succeeded within StartTimeout (at once when Redis refuses), ErrStuck.
func (w *Worker) Run(ctx context.Context) (RunStats, error) {
	if err := w.Validate(); err != nil {
		return RunStats{Stop: "error"}, fmt.Errorf("delayq: worker: %w", err)
	}
	if len(w.queues) == 0 || w.handler == nil {
		return RunStats{Stop: "error"}, &InputError{"NewWorker", "given a handler and a queue", "none"}
	}
	r := newRun(ctx, w)
	if d, ok := ctx.Deadline(); ok {
		if left := time.Until(d); left <= 2*r.cfg.Margin {
			return RunStats{Stop: "error"}, fmt.Errorf("delayq: worker: %w: %s, need more than %s (twice the margin): raise the function's timeout",
				ErrNoTime, left.Round(time.Millisecond), 2*r.cfg.Margin)
		}
		r.deadline = d
	}
	background, stop := context.WithCancel(r.base)
	var beats, settlers sync.WaitGroup
	beats.Go(func() { r.heartbeats(background) })
	lastWord := r.tellAll(w.queues)
	for _, s := range r.sources {
		settlers.Go(func() { s.settler.loop(background) })
	}
	var err error
	r.stats.Stop, err = r.poll(ctx)
	r.letGo()
	r.drain(ctx)
	for _, s := range r.sources {
		s.settler.close()
	}
	gone := lastWord()
	waitUntil(&settlers, r.settleBy(), stop)
	stop()
	gone()
	beats.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stats.Elapsed = time.Since(r.began)
	return r.stats, err
}

// waitUntil waits for wg, and from an instant on with its work cut off by stop.
func waitUntil(wg *sync.WaitGroup, at time.Time, stop func()) {
	t := time.AfterFunc(time.Until(at), stop)
	defer t.Stop()
	wg.Wait()
}
