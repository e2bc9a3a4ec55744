package delayq

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// A run is the state of one Worker.Run. Three kinds of goroutine share it: the poll loop leases, the heartbeat loop renews and
// watches, each source's settler reports. Each handler has a goroutine of its own.
type run struct {
	cfg      WorkerConfig
	handler  Handler
	types    func(string) TypeConfig
	names    []string        // of the types it has handlers for, nil when it takes all
	base     context.Context //nolint:containedctx // values for handlers, without the end of Run's context
	began    time.Time
	deadline time.Time       // of Run's context, zero for none
	moved    atomic.Int64    // last progress, ns since began
	told     context.Context //nolint:containedctx // of beats: ends when there is no time left for them
	sources  []*source
	backups  []*backup // one for each queue that has a ledger

	mu       sync.Mutex
	inflight map[*running]struct{} // leased and not yet settled
	active   int                   // handlers running, without the stuck ones
	stuck    int                   // handlers given up that still run
	stopping error                 // cause handed to handlers, once set
	stats    RunStats

	freed chan struct{} // a slot or the last handler came free
	kick  chan struct{} // the heartbeat loop should look again
}

// running is one leased task. Fields below the first block are guarded by run.mu.
type running struct {
	lease   *Lease
	src     *source
	started time.Time
	lasts   time.Duration // of the lease
	cfg     TypeConfig    // with the worker's values filled in
	cancel  context.CancelCauseFunc
	seen    atomic.Int64 // last sign of life, ns since run began

	run      *run
	phase    phase
	cause    error     // why its context was ended, nil while it was not
	endBy    time.Time // when it is given up, zero while its context lives
	deadline time.Time // of the lease
	nextBeat time.Time
	beating  bool
}

type phase int

const (
	phaseRunning phase = iota
	phaseSettling
	phaseGivenUp
)

func newRun(ctx context.Context, w *Worker) *run {
	r := &run{
		cfg: w.withDefaults(), handler: w.handler, base: context.WithoutCancel(ctx), began: time.Now(),
		inflight: map[*running]struct{}{}, freed: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		types: func(string) TypeConfig { return TypeConfig{} },
	}
	if m, ok := w.handler.(*Mux); ok {
		r.types, r.names = m.typeConfig, m.types()
	}
	for _, q := range w.queues {
		first := len(r.sources)
		for _, sh := range q.shards {
			s := &source{sh: sh, run: r, nextAt: r.began, register: true}
			s.settler = newSettler(s)
			r.sources = append(r.sources, s)
		}
		if q.lq != nil {
			r.backups = append(r.backups, &backup{q: q, sources: r.sources[first:], at: r.began.Add(ledgerLook)})
		}
	}
	return r
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// alive notes a sign of life.
func (t *running) alive() {
	t.seen.Store(int64(time.Since(t.run.began)))
	t.run.progress()
}

// start runs a leased task's handler, or settles at once what must not run.
func (r *run) start(s *source, l *Lease) {
	cfg := r.types(l.Type)
	t := &running{lease: l, src: s, run: r, started: time.Now(), lasts: r.cfg.Lease, cfg: cfg, deadline: l.Deadline}
	if cfg.Lease > 0 {
		t.lasts = cfg.Lease
	}
	if cfg.Timeout <= 0 {
		t.cfg.Timeout = r.cfg.Timeout
	}
	if cfg.Stall <= 0 {
		t.cfg.Stall = r.cfg.Stall
	}
	if cfg.Retry == nil {
		t.cfg.Retry = r.cfg.Retry
	}
	if cfg.MaxAttempts <= 0 {
		t.cfg.MaxAttempts = r.cfg.MaxAttempts
	}
	t.nextBeat = t.started.Add(min(t.lasts, r.cfg.Lease) / 3)
	t.alive()
	ctx, cancel := context.WithCancelCause(context.WithValue(r.base, taskKey{}, t))
	t.cancel = cancel

	r.mu.Lock()
	r.inflight[t] = struct{}{}
	r.active++
	r.stats.Leased++
	stopping := r.stopping
	r.mu.Unlock()
	switch {
	case stopping != nil:
		r.settle(t, settlement{verb: verbRelease})
	case l.broken != nil:
		r.settle(t, r.failed(t, l.broken, ReasonUnread))
	case l.Lost >= r.cfg.MaxLost:
		r.settle(t, settlement{verb: verbBuryUnrun, reason: ReasonLost, err: errLostTooOften})
	default:
		go r.handle(ctx, t)
		return
	}
	cancel(nil)
}

var errLostTooOften = errors.New("its leases ran out too often; the handler was not run again")

func (r *run) handle(ctx context.Context, t *running) {
	ctx, cancel := context.WithDeadlineCause(ctx, t.started.Add(t.cfg.Timeout), ErrTimeout)
	err := errGoexit
	defer func() { // deferred, as runtime.Goexit must not keep the slot
		cause := context.Cause(ctx)
		cancel()
		t.cancel(nil)
		r.progress()
		r.mu.Lock()
		if t.phase == phaseGivenUp {
			r.stuck--
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		r.settle(t, r.verdict(t, err, cause))
	}()
	err = r.guarded(ctx, t)
}

var errGoexit = errors.New("the handler ended its goroutine (runtime.Goexit; t.FailNow does)")

// guarded turns a panic into an error with its stack.
func (r *run) guarded(ctx context.Context, t *running) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &panicError{v, debug.Stack()}
		}
	}()
	return r.handler.HandleTask(ctx, &t.lease.Task)
}

// settle frees the task's slot and hands what to tell Redis to the source's settler.
func (r *run) settle(t *running, s settlement) {
	s.lease = t.lease
	r.mu.Lock()
	if t.phase != phaseRunning { // given up between the handler's return and here
		r.stuck--
		r.mu.Unlock()
		return
	}
	t.phase = phaseSettling
	t.src.settler.push(t, s) // before the slot counts as free: with all of them free, drain closes the settlers
	r.active--
	r.mu.Unlock()
	signal(r.freed)
}

// settled counts an answer and forgets the task.
func (r *run) settled(t *running, s settlement, err error) {
	r.mu.Lock()
	delete(r.inflight, t)
	t.src.touched = t.src.touched || s.verb == verbRetry || s.verb == verbRelease // it may fall due at once
	last := len(r.inflight) == 0
	switch {
	case err == nil:
		switch s.verb {
		case verbAck:
			r.stats.Succeeded++
		case verbRetry:
			r.stats.Retried++
		case verbRelease:
			r.stats.Released++
		default:
			r.stats.Dead++
		}
		if s.reason == ReasonTimeout {
			r.stats.TimedOut++
		}
	case errors.Is(err, ErrCancelled):
		r.stats.Cancelled++
	case known(err):
		r.stats.LeaseLost++
	default:
		r.stats.Unreported++
	}
	r.mu.Unlock()
	if err != nil && !errors.Is(err, ErrCancelled) {
		r.cfg.Logger.Warn("delayq: outcome not recorded", "verb", s.verb.String(), "queue", t.lease.Queue, "task_id", printable(t.lease.ID),
			"type", printable(t.lease.Type), "biz_key", printable(t.lease.Key), "attempt", t.lease.Attempt, "error", err.Error())
	}
	if last {
		signal(r.freed)
	}
}

// drain waits for running handlers: until they end by themselves, then with their contexts ended, then no more.
func (r *run) drain(ctx context.Context) {
	var endContexts, giveUp time.Time
	if !r.deadline.IsZero() {
		endContexts = r.deadline.Add(-r.cfg.Margin)
		giveUp = r.deadline.Add(-r.cfg.Margin / 2)
	}
	r.mu.Lock()
	r.stopping = ErrStopping
	r.mu.Unlock()
	cancelled := ctx.Done()
	for {
		r.mu.Lock()
		active := r.active
		r.mu.Unlock()
		if active == 0 {
			return
		}
		now := time.Now()
		if !endContexts.IsZero() && !now.Before(endContexts) {
			r.endAll(ErrStopping)
			endContexts = time.Time{}
			if giveUp.IsZero() || giveUp.After(now.Add(r.cfg.Grace)) {
				giveUp = now.Add(r.cfg.Grace)
			}
		}
		if !giveUp.IsZero() && endContexts.IsZero() && !now.Before(giveUp) {
			r.abandonAll()
			return
		}
		wake := endContexts
		if wake.IsZero() {
			wake = giveUp
		}
		var timer <-chan time.Time
		if !wake.IsZero() {
			timer = time.After(time.Until(wake))
		}
		select {
		case <-r.freed:
		case <-timer:
		case <-cancelled:
			cancelled = nil
			if grace := time.Now().Add(r.cfg.Grace); endContexts.IsZero() && giveUp.IsZero() || grace.Before(endContexts) {
				endContexts = grace
			}
		}
	}
}

// call bounds a call to Redis: a server that does not answer must not keep Run beyond its deadline, less what is kept for
// the steps that follow.
func (r *run) call(ctx context.Context, most, keep time.Duration) (context.Context, context.CancelFunc) {
	end := time.Now().Add(most)
	if last := r.deadline.Add(-keep); !r.deadline.IsZero() && last.Before(end) {
		end = last
	}
	return context.WithDeadline(ctx, end)
}

// settleBy is when the last report must be out.
func (r *run) settleBy() time.Time {
	if r.deadline.IsZero() {
		return time.Now().Add(r.cfg.Grace)
	}
	return r.deadline.Add(-r.cfg.Margin / 8)
}

// end ends a handler's context; callers hold mu.
func (t *running) end(cause error, grace time.Duration) {
	if t.noteEnd(cause, grace); t.phase == phaseRunning {
		t.cancel(t.cause)
	}
}

// noteEnd says how long a handler has whose context ends.
func (t *running) noteEnd(cause error, grace time.Duration) {
	if t.cause == nil && t.phase == phaseRunning {
		t.cause, t.endBy = cause, time.Now().Add(grace)
	}
}

func (r *run) endAll(cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for t := range r.inflight {
		t.end(cause, r.cfg.Grace)
	}
}

// abandonAll leaves what still runs to the end of its lease: nobody else may have it before the handler is surely gone.
func (r *run) abandonAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for t := range r.inflight {
		if t.phase == phaseRunning {
			t.phase = phaseGivenUp
			r.active--
			r.stuck++
			r.stats.Stuck++
			delete(r.inflight, t)
			r.cfg.Logger.Error("delayq: handler did not stop; its lease is left to run out", "queue", t.lease.Queue,
				"task_id", printable(t.lease.ID), "type", printable(t.lease.Type), "biz_key", printable(t.lease.Key), "attempt", t.lease.Attempt)
		}
	}
}
