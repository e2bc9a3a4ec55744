package delayq_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Public case: B63.
func TestBatchesOfAnySize(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			onRedis(t, delayq.Config{Shards: shards}, func(r *rig) {
				ctx := r.Context()
				for _, n := range []int{1, 500, 501, 8000} {
					tasks := make([]delayq.Task, n)
					ids := make([]string, n)
					for i := range tasks {
						tasks[i] = task(fmt.Sprint(n, "-", i))
						ids[i] = tasks[i].ID
					}
					enqueue := func() {
						results, err := r.q.EnqueueMany(ctx, tasks)
						r.ok(err)
						for i, res := range results {
							if res.ID != ids[i] || res.Outcome != delayq.Created {
								r.Fatalf("batch of %d, task %d: %+v", n, i, res)
							}
						}
						r.pass(time.Second)
					}
					lease := func() []*delayq.Lease {
						leases := r.lease(10_000)
						if len(leases) != n {
							r.Fatalf("leased %d of %d", len(leases), n)
						}
						return leases
					}
					enqueue()
					leases := lease()
					r.ok(r.q.Extend(ctx, time.Minute, leases...))
					r.ok(r.q.Release(ctx, 0, leases...))
					r.pass(time.Second)
					leases = lease()
					r.ok(r.q.Ack(ctx, leases...))
					r.ok(r.q.Ack(ctx, leases...))
					r.pass(5 * time.Minute) // forgotten, so the ids are free

					enqueue()
					answers, err := r.q.CancelMany(ctx, ids)
					r.ok(err)
					for i, a := range answers {
						if a != delayq.Cancelled {
							r.Fatalf("cancel of %s: %v", ids[i], a)
						}
					}
					r.pass(5 * time.Minute)
				}
				r.pass(5 * time.Minute)
				r.bring("last", "done")
				stats, err := r.q.Stats(ctx)
				r.ok(err)
				if n := stats.Pending + stats.Due + stats.Processing; n != 0 || stats.Expired != 0 || stats.Stale != 0 {
					r.Errorf("left over: %+v", stats)
				}
			})
		})
	}
}

func TestAThousandLargePayloads(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			onRedis(t, delayq.Config{Shards: shards}, func(r *rig) {
				tasks := make([]delayq.Task, 1000)
				for i := range tasks {
					id := fmt.Sprintf("%04d", i)
					tasks[i] = delayq.Task{ID: id, Type: "t", Payload: bytes.Repeat([]byte(id), 2500)}
				}
				_, err := r.q.EnqueueMany(r.Context(), tasks)
				r.ok(err)
				r.pass(time.Second)
				leases := r.lease(1000)
				for _, l := range leases {
					if !bytes.Equal(l.Payload, bytes.Repeat([]byte(l.ID), 2500)) {
						r.Errorf("%s came back with another payload", l.ID)
					}
				}
				if len(leases) != 1000 {
					r.Errorf("leased %d", len(leases))
				}
				r.ok(r.q.Ack(r.Context(), leases...))
			})
		})
	}
}

func TestThePayloadLimit(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		const limit = 256 << 10
		r.cfg.MaxPayload = limit
		r.q = r.open(r.q.Name(), r.cfg)
		largest := func(id string) delayq.Task {
			return delayq.Task{ID: id, Type: "t", Payload: bytes.Repeat([]byte{0xfe}, limit)}
		}
		tooLarge := largest("x")
		tooLarge.Payload = append(tooLarge.Payload, 0)
		_, err := r.q.Enqueue(r.Context(), tooLarge)
		var input *delayq.InputError
		if !errors.As(err, &input) || input.Field != "Payload" || !strings.Contains(input.Limit, "262144") || len(err.Error()) > 200 {
			r.Errorf("error %v", err)
		}
		for i := range 10 {
			_, err := r.q.Enqueue(r.Context(), largest(fmt.Sprint(i)))
			r.ok(err)
		}
		r.pass(time.Second)
		leases := r.lease(10)
		for _, l := range leases {
			if !bytes.Equal(l.Payload, largest("").Payload) {
				r.Errorf("%s came back with %d bytes", l.ID, len(l.Payload))
			}
		}
		if len(leases) != 10 {
			r.Errorf("leased %d", len(leases))
		}
	})
}

// The greatest batch of the greatest dead letters: pages of it are bounded in bytes too.
func TestAPageOfLargeTasks(t *testing.T) {
	onRedis(t, delayq.Config{}, func(r *rig) {
		tasks := make([]delayq.Task, 100)
		for i := range tasks {
			tasks[i] = delayq.Task{ID: fmt.Sprint(i), Type: "t", Payload: make([]byte, 60_000)}
		}
		_, err := r.q.EnqueueMany(r.Context(), tasks, delayq.In(time.Hour))
		r.ok(err)
		page := r.list(delayq.ListOptions{State: delayq.StatePending, Limit: 500})
		if len(page.Tasks) != 100 || len(page.Tasks[99].Payload) != 60_000 {
			r.Errorf("%d tasks", len(page.Tasks))
		}
	})
}

// Ten thousand tasks fall due together, and the half of them is cancelled at that moment: what was told to the caller is what
// happened. Public case: B58.
func TestCancelAtTheInstantOfFallingDue(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			onRedis(t, delayq.Config{Shards: shards}, func(r *rig) {
				ctx := r.Context()
				delayq.SetClock(r.q, func() float64 { return 0 })
				const n = 10_000
				tasks := make([]delayq.Task, n)
				for i := range tasks {
					tasks[i] = task(fmt.Sprint(i))
				}
				_, err := r.q.EnqueueMany(ctx, tasks)
				r.ok(err)

				var runs [n]atomic.Int32
				begun := make(chan struct{})
				var once sync.Once
				w := delayq.NewWorker(delayq.HandlerFunc(func(_ context.Context, t *delayq.Task) error {
					i, err := strconv.Atoi(t.ID)
					runs[i].Add(1)
					once.Do(func() { close(begun) })
					return err
				}), r.q)
				w.Concurrency, w.IdleExit, w.Logger = 256, time.Millisecond, quiet()

				var answers [n]delayq.Cancellation
				var cancels sync.WaitGroup
				for c := range 8 {
					cancels.Go(func() {
						<-begun
						// Every other task, the last ones first: worker and cancels meet somewhere.
						for k := n - 2 - 20*c; k >= 0; k -= 160 {
							var ids []string
							for i := k; i >= 0 && i > k-20; i -= 2 {
								ids = append(ids, fmt.Sprint(i))
							}
							got, err := r.q.CancelMany(ctx, ids)
							if err != nil {
								r.Error(err)
							}
							for j, a := range got {
								answers[k-2*j] = a
							}
						}
					})
				}
				_, err = w.Run(ctx)
				r.ok(err)
				cancels.Wait()
				told := map[delayq.Cancellation]int{}
				for i := range n {
					told[answers[i]]++
					ran := runs[i].Load()
					switch answers[i] {
					case delayq.Cancelled:
						if ran != 0 {
							r.Errorf("task %d was cancelled and ran", i)
						}
					case delayq.Finished, delayq.Running, 0:
						if ran != 1 {
							r.Errorf("task %d, answer %q, ran %d times", i, answers[i], ran)
						}
					default:
						r.Errorf("task %d: %v", i, answers[i])
					}
				}
				if told[delayq.Cancelled] == 0 || told[delayq.Finished]+told[delayq.Running] == 0 {
					r.Errorf("no race was run: %v", told)
				}
			})
		})
	}
}
