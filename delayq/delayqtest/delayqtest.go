// Package delayqtest tests code that uses delayq, in-process and without waiting: a queue on a Redis imitation whose clock
// the test moves.
//
//	func TestUnpaidOrderIsCancelled(t *testing.T) {
//		h := delayqtest.New(t)
//		shop := NewShop(h.Queue)
//		shop.Place(42)
//		delayqtest.RequireEnqueued(t, h.Queue, delayqtest.Want{ID: "cancel-order:42", DueIn: 30 * time.Minute})
//		h.Advance(30 * time.Minute)
//		h.RunDue(shop.Handlers())
//		if shop.Status(42) != "cancelled" {
//			t.Error("order 42 is still open")
//		}
//	}
//
// The imitation runs the scripts that Redis runs. What it cannot show (its speed, lost connections, a full server) needs a
// test on a real one; RequireEnqueued and RequireNotEnqueued work there too.
package delayqtest

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// A Harness is a queue of one test and its clock. It ends with the test.
type Harness struct {
	// Queue is empty and has one shard.
	Queue *delayq.Queue
	// Worker tunes RunDue: attempts, curves, concurrency. Its polls, IdleExit and Logger are the harness's.
	Worker delayq.WorkerConfig

	t     testing.TB
	redis *miniredis.Miniredis
	mu    sync.Mutex
	now   time.Time
}

// New makes a queue whose clock stands at the present and moves by Advance alone (and by some microseconds with each call,
// as calls do not happen at once).
func New(t testing.TB) *Harness {
	t.Helper()
	h := &Harness{t: t, redis: miniredis.NewMiniRedis(), now: time.Now().Round(0)}
	t.Cleanup(h.redis.Close)
	rdb := redis.NewClient(&redis.Options{
		Addr:   "127.0.0.1:6379", // never dialled, and nothing to look up
		Dialer: func(context.Context, string, string) (net.Conn, error) { return h.redis.Dial() },
	})
	t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(ticking{h})
	q, err := delayq.Open(context.Background(), rdb, "test", delayq.Config{
		OnWarning: func(w delayq.Warning) {
			if w.Code != "unchecked" { // the imitation tells neither version nor eviction policy
				t.Logf("delayq: %s: %s", w.Code, w.Message)
			}
		},
	})
	if err != nil {
		t.Fatalf("delayqtest: %v", err)
	}
	h.Queue = q
	return h
}

// Now is the queue's time. Code that computes absolute due times should get its time from here instead of time.Now.
func (h *Harness) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

// Advance moves the queue's clock on. Nothing runs until RunDue; leases run out.
func (h *Harness) Advance(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = h.now.Add(d)
	h.redis.SetTime(h.now)
}

// RunDue runs all tasks that are due, and those that their handlers make due at once, and comes back when all have ended.
// Retries wait for their curve: Advance, then RunDue again.
func (h *Harness) RunDue(handler delayq.Handler) delayq.RunStats {
	h.t.Helper()
	w := delayq.NewWorker(handler, h.Queue)
	w.WorkerConfig = h.Worker
	w.MinPoll, w.MaxPoll, w.IdleExit = time.Millisecond, 10*time.Millisecond, time.Millisecond
	w.Logger = slog.New(slog.NewTextHandler(h.t.Output(), nil))
	var sum delayq.RunStats
	for {
		h.Advance(time.Millisecond) // beyond the places in their call of what was added just now
		got, err := w.Run(context.Background())
		if err != nil {
			h.t.Fatalf("delayqtest: %v", err)
		}
		add(&sum, got)
		if got.Leased == 0 { // a task that comes back as Run leaves is found by the next
			return sum
		}
	}
}

func add(sum *delayq.RunStats, s delayq.RunStats) {
	sum.Leased += s.Leased
	sum.Succeeded += s.Succeeded
	sum.Retried += s.Retried
	sum.Dead += s.Dead
	sum.Cancelled += s.Cancelled
	sum.Released += s.Released
	sum.LeaseLost += s.LeaseLost
	sum.TimedOut += s.TimedOut
	sum.Stuck += s.Stuck
	sum.Missing += s.Missing
	sum.Polls += s.Polls
	sum.Elapsed += s.Elapsed
	sum.Stop = s.Stop
}

// ticking moves the clock by a little before each call: on a clock that stands still a task without a delay, which is due
// just after the call that added it, would never fall due.
type ticking struct{ h *Harness }

const tick = 10 * time.Microsecond

func (k ticking) DialHook(next redis.DialHook) redis.DialHook { return next }

func (k ticking) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		k.h.Advance(tick)
		return next(ctx, cmd)
	}
}

func (k ticking) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		k.h.Advance(tick)
		return next(ctx, cmds)
	}
}
