package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// Two hundred callers share calls. Whatever their policies, their ids and the ends of their contexts, each gets the answer to
// its own task, and the lead is never lost on the way: one more caller is served at once.
func TestCallersThatEnqueueTogether(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			onRedis(t, delayq.Config{Shards: shards}, func(r *rig) {
				const callers, each = 200, 10
				var created, replaced, duplicates, conflicts, gaveUp, shared atomic.Int64
				var callersDone sync.WaitGroup
				for c := range callers {
					callersDone.Go(func() {
						for i := range each {
							ctx, cancel := context.WithCancel(r.Context())
							tk := task(fmt.Sprint(c, ":", i))
							tk.Conflict = delayq.Conflict((c + i) % 3)
							common := i == 5 // all callers have this id
							if common {
								tk.ID = "common"
							}
							switch c % 10 {
							case 3:
								cancel()
							case 4:
								go cancel() // somewhere on the way
							}
							res, err := r.q.Enqueue(ctx, tk, delayq.In(time.Hour))
							cancel()
							switch {
							case errors.Is(err, context.Canceled):
								gaveUp.Add(1)
								continue
							case errors.Is(err, delayq.ErrConflict):
								conflicts.Add(1)
							case err != nil:
								r.Error(err)
							case res.Outcome == delayq.Created:
								created.Add(1)
							case res.Outcome == delayq.Replaced:
								replaced.Add(1)
							case res.Outcome == delayq.DuplicatePending:
								duplicates.Add(1)
							}
							if res.ID != tk.ID {
								r.Errorf("the answer for %s went to %s", res.ID, tk.ID)
							}
							if common {
								shared.Add(1)
								if want := tk.Conflict; err == nil && res.Outcome == delayq.DuplicatePending && want == delayq.Replace ||
									err == nil && res.Outcome == delayq.Replaced && want != delayq.Replace {
									r.Errorf("policy %d: %v", want, res.Outcome)
								}
							} else if err != nil || res.Outcome != delayq.Created {
								r.Errorf("%s: %+v, %v", tk.ID, res, err)
							}
						}
					})
				}
				callersDone.Wait()
				stats, err := r.q.Stats(r.Context())
				r.ok(err)
				// A caller that gave up may have been served all the same.
				if got := stats.Pending; got < created.Load() || got > created.Load()+gaveUp.Load() {
					r.Errorf("%d are pending, %d callers heard of a new task and %d gave up", got, created.Load(), gaveUp.Load())
				}
				if n := replaced.Load() + duplicates.Load() + conflicts.Load(); n < shared.Load()-1 || n > shared.Load() {
					r.Errorf("%d answers say that the common id was known, of %d", n, shared.Load())
				}
				if gaveUp.Load() < callers/10*each {
					r.Errorf("only %d calls under ended contexts gave up", gaveUp.Load())
				}
				for shard := range shards {
					if n := delayq.Flying(r.q, shard); n != 0 {
						r.Errorf("shard %d: %d calls are under way for nobody", shard, n)
					}
				}
				r.add("one more", delayq.In(time.Hour))
			})
		})
	}
}

// instantly answers enqueues without a server: every task is created, in no time.
type instantly struct {
	on   atomic.Bool
	sent atomic.Int64
}

func (h *instantly) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *instantly) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h *instantly) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !h.on.Load() {
			return next(ctx, cmd)
		}
		if ctx.Err() != nil {
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
		n := cmd.Args()[3+cmd.Args()[2].(int)+3].(int)
		if h.sent.Add(int64(n))%3 == 0 {
			runtime.Gosched()
		}
		cmd.(interface{ SetVal(v any) }).SetVal([]any{int64(n)})
		return nil
	}
}

// Calls that take no time make the hand-over of the lead the common case.
func TestTheLeadIsNeverLost(t *testing.T) {
	onRedis(t, delayq.Config{}, func(r *rig) {
		var calls instantly
		r.rdb.(*redis.Client).AddHook(&calls)
		calls.on.Store(true)
		const callers, each = 50, 400
		var gaveUp atomic.Int64
		var callersDone sync.WaitGroup
		for c := range callers {
			callersDone.Go(func() {
				for i := range each {
					ctx, cancel := context.WithCancel(r.Context())
					switch c % 10 {
					case 0:
						cancel()
					case 1:
						go cancel()
					}
					tk := task(fmt.Sprint(c, " ", i))
					tk.Conflict = delayq.Conflict(i % 3)
					res, err := r.q.Enqueue(ctx, tk)
					cancel()
					if err != nil {
						gaveUp.Add(1)
					}
					if res.ID != tk.ID || err != nil && c%10 > 1 {
						r.Errorf("%q: answer for %q, %v", tk.ID, res.ID, err)
					}
				}
			})
		}
		callersDone.Wait()
		calls.on.Store(false)
		if n := delayq.Flying(r.q, 0); n != 0 {
			r.Errorf("%d calls are under way for nobody", n)
		}
		if sent := calls.sent.Load(); sent > callers*each || sent < callers*each-gaveUp.Load() {
			r.Errorf("%d of %d tasks were sent, %d callers gave up", sent, callers*each, gaveUp.Load())
		}
	})
}

// A caller's end is heeded although its task travels in a call that others wait for longer. Public case: B68.
func TestACallerLeavesACallThatHangs(t *testing.T) {
	onRedis(t, delayq.Config{}, func(r *rig) {
		gate := &gated{arrived: make(chan struct{}, 10), open: make(chan struct{})}
		r.rdb.(*redis.Client).AddHook(gate)
		enqueue := func(ctx context.Context, id string) chan error {
			result := make(chan error, 1)
			go func() {
				_, err := r.q.Enqueue(ctx, task(id), delayq.In(time.Hour))
				result <- err
			}()
			return result
		}
		waiting := func(n int) {
			for delayq.Waiting(r.q, 0) < n {
				runtime.Gosched()
			}
		}
		first := []chan error{enqueue(r.Context(), "a"), enqueue(r.Context(), "b")}
		<-gate.arrived
		<-gate.arrived
		patient := enqueue(r.Context(), "patient")
		waiting(1)
		ctx, cancel := context.WithCancel(r.Context())
		hasty := enqueue(ctx, "hasty")
		waiting(2)
		gate.open <- struct{}{} // one of the first ends, and patient leads a call for two
		<-gate.arrived
		cancel()
		r.is(<-hasty, context.Canceled)
		close(gate.open)
		for _, result := range append(first, patient) {
			r.ok(<-result)
		}
		res, err := r.q.Enqueue(r.Context(), task("hasty"), delayq.In(time.Hour))
		if err != nil || res.Outcome != delayq.DuplicatePending {
			r.Errorf("the caller's repeat: %+v, %v", res, err)
		}
		if n := delayq.Flying(r.q, 0); n != 0 {
			r.Errorf("%d calls are under way for nobody", n)
		}
	})
}

// gated holds calls back until its gate is open.
type gated struct {
	arrived, open chan struct{}
}

func (g *gated) DialHook(next redis.DialHook) redis.DialHook { return next }

func (g *gated) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (g *gated) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			select {
			case g.arrived <- struct{}{}:
			default:
			}
			<-g.open
		}
		return next(ctx, cmd)
	}
}
