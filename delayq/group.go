package delayq

import (
	"context"
	"sync"
)

// A committer lets callers that enqueue at the same time share one script call. Whoever finds fewer than two calls under way
// leads: it sends all that wait and hands the lead to the first who came meanwhile. No goroutine, no timer, and a caller
// that is alone sends at once.
type committer struct {
	mu     sync.Mutex
	queue  []*waiter
	flying int
}

type waiter struct {
	entry *entry
	ctx   context.Context //nolint:containedctx // a waiter lives as long as its caller's call
	wake  chan bool       // true: lead; false: res is there. At most one of each is sent.
	asked bool            // to lead
	res   Result
	done  bool
}

const maxFlying = 2

func (c *committer) do(ctx context.Context, e *entry, send func(context.Context, []*entry) []Result) Result {
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
			c.lead(send)
			c.mu.Lock()
			done := w.done
			c.mu.Unlock()
			if done {
				return w.res
			}
		}
		select {
		case lead = <-w.wake:
			if !lead {
				return w.res
			}
		case <-ctx.Done():
			if c.leave(w) {
				err := &TaskError{"enqueue", "", e.task.ID, ctx.Err()}
				return Result{ID: e.task.ID, Err: err}
			}
			// Its call is under way, with a deadline no earlier than this one's: the answer is near.
			lead = <-w.wake
			if !lead {
				return w.res
			}
		}
	}
}

// lead sends one batch and passes the lead on.
func (c *committer) lead(send func(context.Context, []*entry) []Result) {
	c.mu.Lock()
	entries := make([]*entry, min(len(c.queue), maxBatch))
	for i := range entries {
		entries[i] = c.queue[i].entry
	}
	n := fit(entries)
	batch := c.queue[:n:n]
	c.queue = c.queue[n:]
	c.mu.Unlock()

	if n > 0 {
		ctx, cancel := sharedContext(batch)
		results := send(ctx, entries[:n])
		cancel()
		c.mu.Lock()
		for i, w := range batch {
			w.res, w.done = results[i], true
			w.wake <- false
		}
		c.mu.Unlock()
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.queue {
		if !w.asked {
			w.asked = true
			w.wake <- true
			return
		}
	}
	c.flying--
}

// leave takes a waiter out whose call has not been sent.
func (c *committer) leave(w *waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.asked {
		return false
	}
	for i, o := range c.queue {
		if o == w {
			c.queue = append(c.queue[:i:i], c.queue[i+1:]...)
			return true
		}
	}
	return false
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
