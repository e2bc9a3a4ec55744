package delayq

import (
	"context"
	"slices"
	"sync"
)

// A committer lets callers that enqueue at the same time share one script call. Whoever finds fewer than two calls under way
// leads: it sends all that wait and hands the lead to the first who came meanwhile. No timer, and a caller that is alone
// sends at once, without a goroutine.
type committer struct {
	mu     sync.Mutex
	queue  []*waiter
	flying int
}

type waiter struct {
	entry *entry
	ctx   context.Context //nolint:containedctx // a waiter lives as long as its caller's call
	wake  chan bool       // true: lead; false: res is there. At most one of each is sent, false last.
	asked bool            // to lead
	res   Result
}

const maxFlying = 2

// commit enqueues one entry together with those of other callers.
func (sh *shard) commit(ctx context.Context, e *entry) Result {
	c := &sh.group
	w := &waiter{entry: e, ctx: ctx, wake: make(chan bool, 2)}
	c.mu.Lock()
	c.queue = append(c.queue, w)
	lead := c.flying < maxFlying
	if lead {
		c.flying++
	}
	c.mu.Unlock()
	for {
		if lead {
			c.lead(sh, w)
		}
		select {
		case lead = <-w.wake:
			if !lead {
				return w.res
			}
		case <-ctx.Done():
			if res, answered := c.leave(w); answered {
				return res
			}
			return Result{ID: e.task.ID, Err: &TaskError{"enqueue", sh.q.name, e.task.ID, ctx.Err()}}
		}
	}
}

// lead sends one batch and passes the lead on. The leader's own entry may be too far behind to be in it; then one of those
// before it, who have all been asked to lead, takes it along.
func (c *committer) lead(sh *shard, leader *waiter) {
	c.mu.Lock()
	c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool {
		busy := sh.patience.has(w.entry.task.ID)
		if busy {
			w.res = Result{ID: w.entry.task.ID, Err: ErrBusy}
			w.wake <- false
		}
		return busy
	})
	entries := make([]*entry, min(len(c.queue), maxBatch))
	for i := range entries {
		entries[i] = c.queue[i].entry
	}
	n := fit(entries)
	batch := c.queue[:n:n]
	c.queue = c.queue[n:]
	c.mu.Unlock()
	if n > 0 && (n > 1 || batch[0] != leader) && leader.ctx.Done() != nil {
		go c.send(sh, batch, entries[:n]) // it may outlast the leader's own deadline
		return
	}
	c.send(sh, batch, entries[:n])
}

// send makes one call, hands out its answers and passes the lead on. What remains with a ledger, to tell Redis, comes last: nobody
// waits for a Redis that is away but the leader, and it has its answer by then.
func (c *committer) send(sh *shard, batch []*waiter, entries []*entry) {
	tell := func() {}
	if len(batch) > 0 {
		ctx, cancel := sharedContext(batch)
		defer cancel()
		var results []Result
		results, tell = sh.enqueueing(ctx, entries)
		c.mu.Lock()
		for i, w := range batch {
			w.res = results[i]
			w.wake <- false
		}
		c.mu.Unlock()
	}

	c.mu.Lock()
	c.pass()
	c.mu.Unlock()
	tell()
}

// pass hands the lead to the first who waits for one, if any. Callers hold mu.
func (c *committer) pass() {
	for _, w := range c.queue {
		if !w.asked {
			w.asked = true
			w.wake <- true
			return
		}
	}
	c.flying--
}

// leave takes out a waiter whose caller goes, and passes on a lead that was on its way to it. It gets its answer if that has
// come; a call that is under way goes on without it.
func (c *committer) leave(w *waiter) (res Result, answered bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = slices.DeleteFunc(c.queue, func(o *waiter) bool { return o == w })
	for {
		select {
		case lead := <-w.wake:
			if !lead {
				return w.res, true
			}
			c.pass()
		default:
			return Result{}, false
		}
	}
}

// sharedContext lives until the longest deadline of the batch, so that one caller's end does not undo the others'.
func sharedContext(batch []*waiter) (context.Context, context.CancelFunc) {
	if len(batch) == 1 {
		return batch[0].ctx, func() {}
	}
	ctx := context.WithoutCancel(batch[0].ctx)
	latest, bounded := batch[0].ctx.Deadline()
	for _, w := range batch[1:] {
		d, ok := w.ctx.Deadline()
		bounded = bounded && ok
		if d.After(latest) {
			latest = d
		}
	}
	if !bounded {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, latest)
}
