package delayq

import (
	"context"
	"errors"
	"sync"
	"time"
)

// heartbeats renews leases, ends contexts of handlers that stall or are about to lose their lease, and gives up those that
// ignore it. The loop itself never waits for Redis.
func (r *run) heartbeats(ctx context.Context) {
	timer := time.NewTimer(farAway)
	defer timer.Stop()
	var beats sync.WaitGroup // a frozen function must not wake up in the middle of one
	defer beats.Wait()
	for {
		due, wake := r.watch(time.Now())
		for k, group := range due {
			beats.Go(func() { r.beat(ctx, k, group) })
		}
		timer.Reset(time.Until(wake))
		select {
		case <-ctx.Done():
			return
		case <-r.kick:
		case <-timer.C:
		}
	}
}

// A beatKey groups leases that one extend call can renew.
type beatKey struct {
	src   *source
	lasts time.Duration
}

// watch looks at every task: which to renew now, and when to look again.
func (r *run) watch(now time.Time) (due map[beatKey][]*running, wake time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	wake = now.Add(min(r.cfg.Lease/3, time.Second))
	soon := func(t time.Time) {
		if t.Before(wake) {
			wake = t
		}
	}
	for t := range r.inflight {
		// Before the lease ends, not after: somebody else may have the task from then on. The first lease is the worker's.
		if guard := t.deadline.Add(-min(t.lasts, r.cfg.Lease) / 10); !now.Before(guard) && sabotage != "lease-end-ignored" {
			t.end(ErrLeaseLost, r.cfg.Grace)
		} else {
			soon(guard)
		}
		if t.phase == phaseRunning {
			r.watchHandler(t, now, soon)
		}
		if t.phase == phaseGivenUp || t.beating {
			continue
		}
		if now.Before(t.nextBeat) {
			soon(t.nextBeat)
			continue
		}
		t.beating = true
		t.nextBeat = now.Add(t.lasts / 3) // set now: beatNow may bring it forward while the call is under way
		if due == nil {
			due = map[beatKey][]*running{}
		}
		k := beatKey{t.src, t.lasts}
		due[k] = append(due[k], t)
	}
	return due, wake
}

// watchHandler ends or gives up one handler when its time has come. Callers hold mu.
func (r *run) watchHandler(t *running, now time.Time, soon func(time.Time)) {
	if t.cause == nil {
		limit := t.started.Add(t.cfg.Timeout)
		end := t.noteEnd // its context has the same deadline, and then ends as exceeded, not as cancelled
		if t.cfg.Stall > 0 {
			if quiet := r.began.Add(time.Duration(t.seen.Load())).Add(t.cfg.Stall); quiet.Before(limit) {
				limit, end = quiet, t.end
			}
		}
		if now.Before(limit) {
			soon(limit)
			return
		}
		end(ErrTimeout, r.cfg.Grace)
	}
	if now.Before(t.endBy) {
		soon(t.endBy)
		return
	}
	if r.stopping != nil && errors.Is(t.cause, ErrStopping) {
		return // drain decides
	}
	t.phase = phaseGivenUp
	r.active--
	r.stuck++
	r.stats.Stuck++
	s := settlement{verb: verbRelease, lease: t.lease}
	if errors.Is(t.cause, ErrTimeout) {
		s = r.failed(t, ErrTimeout, ReasonTimeout)
		s.lease = t.lease
	}
	r.cfg.Logger.Error("delayq: handler ignores the end of its context; its slot is freed and the task handed on", "queue", t.lease.Queue,
		"task_id", printable(t.lease.ID), "type", printable(t.lease.Type), "biz_key", printable(t.lease.Key), "attempt", t.lease.Attempt)
	signal(r.freed)
	t.src.settler.push(t, s)
}

// beat renews one group, at most maxBatch at a call.
func (r *run) beat(ctx context.Context, k beatKey, group []*running) {
	for len(group) > 0 {
		batch := group[:min(len(group), maxBatch)]
		group = group[len(batch):]
		leases := make([]*Lease, len(batch))
		for i, t := range batch {
			leases[i] = t.lease
		}
		call, cancel := r.call(ctx, k.lasts/3, r.cfg.Margin/8)
		sent := time.Now()
		errs := k.src.sh.extend(call, k.lasts, leases)
		cancel()
		r.mu.Lock()
		for i, t := range batch {
			t.beating = false
			err := errs[i]
			switch {
			case err == nil:
				t.deadline = sent.Add(k.lasts)
			case errors.Is(err, ErrCancelled):
				t.deadline = sent.Add(k.lasts)
				t.end(ErrCancelled, r.cfg.Grace)
			case errors.Is(err, ErrLeaseLost), errors.Is(err, ErrNotFound):
				t.end(ErrLeaseLost, r.cfg.Grace)
				t.nextBeat = sent.Add(farAway)
			default: // no answer: again soon, until the guard before the lease's end
				t.nextBeat = time.Now().Add(k.lasts / 20)
			}
		}
		r.mu.Unlock()
	}
	signal(r.kick)
}

// beatNow renews all of a source at once: a cancellation has been made, and extend says whose.
func (r *run) beatNow(s *source) {
	r.mu.Lock()
	now := time.Now()
	for t := range r.inflight {
		if t.src == s && t.phase == phaseRunning {
			t.nextBeat = now
		}
	}
	r.mu.Unlock()
	signal(r.kick)
}
