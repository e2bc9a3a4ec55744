package delayq_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

func TestHandlerLongerThanItsLeaseKeepsItByHeartbeatsAtAThird(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var d diary
		w := s.worker(d.noting(taking(100*time.Second)), q)
		r := s.start(w)
		time.Sleep(time.Second)
		// A second consumer would be given the task as soon as its lease ran out.
		other := s.start(s.worker(d.noting(nil), q))
		time.Sleep(2 * time.Minute)
		if a, b := r.halt(), other.halt(); a.Succeeded+b.Succeeded != 1 || a.Leased+b.Leased != 1 {
			t.Errorf("stats: %+v and %+v", a, b)
		}
		if n := len(d.of("a")); n != 1 {
			t.Errorf("%d runs, want 1", n)
		}
		last := d.of("a")[0].at
		beats := s.calls.of("extend")
		if !between(time.Duration(len(beats)), 8, 10) {
			t.Errorf("%d heartbeats in 100 s of a 30 s lease, want about 9", len(beats))
		}
		for _, b := range beats {
			// The watch looks once a second.
			if gap := b.at.Sub(last); !between(gap, 9*time.Second, 11*time.Second) {
				t.Errorf("a heartbeat after %s, want 10 s", gap)
			}
			last = b.at
		}
	})
}

func TestNoCallIsMadeAfterRunReturned(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 4})
		s.addAll(q, tasksNamed("a", 20))
		w := s.worker(taking(time.Hour), q)
		w.Lease = 3 * time.Second
		r := s.start(w)
		time.Sleep(10 * time.Second)
		r.halt()
		s.calls.forget()
		time.Sleep(10 * time.Minute)
		if n := len(s.calls.of("extend")) + len(s.calls.of("lease")) + len(s.calls.of("release")); n != 0 {
			t.Errorf("%d calls after Run returned", n)
		}
	})
}

// Case B16: a heartbeat or a verdict of a consumer whose lease was taken must change nothing.
func TestTaskTakenByAnotherEndsTheContextAndTheVerdictChangesNothing(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var cause atomic.Value
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
			<-ctx.Done()
			cause.Store(context.Cause(ctx))
			time.Sleep(time.Second)
			return errHandler
		}), q)
		w.MaxPoll = 20 * time.Second // it shall not lease the task again itself
		r := s.start(w)
		time.Sleep(time.Second)
		// What a pause of Redis or of this machine does: the lease runs out, and another consumer takes the task.
		if _, err := s.redis.ZAdd(delayq.Keys(q, 0)[1], 1, "a"); err != nil {
			t.Fatal(err)
		}
		stolen, err := q.Lease(t.Context(), delayq.LeaseOptions{Max: 1, Lease: time.Minute, Consumer: "thief"})
		if err != nil || len(stolen) != 1 {
			t.Fatal(stolen, err)
		}
		time.Sleep(12 * time.Second)
		if got, _ := cause.Load().(error); !errors.Is(got, delayq.ErrLeaseLost) {
			t.Errorf("cause is %v", got)
		}
		if in := s.get(q, "a"); in.State != delayq.StateProcessing || in.Failed != 0 || in.Lost != 1 {
			t.Errorf("the other's lease was touched: %+v", in)
		}
		if err := q.Ack(t.Context(), stolen...); err != nil {
			t.Errorf("the other's ack: %v", err)
		}
		if stats := r.halt(); stats.LeaseLost != 1 || stats.Released+stats.Retried+stats.Succeeded != 0 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

// Case B25.
func TestContextEndsBeforeALeaseThatCannotBeRenewed(t *testing.T) {
	for name, fault := range map[string]func(*wire){"refused": (*wire).cut, "no answer": (*wire).hang} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				s.add(q, "a")
				began := time.Now()
				var ended atomic.Int64
				var cause atomic.Value
				w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
					<-ctx.Done()
					ended.Store(int64(time.Since(began)))
					cause.Store(context.Cause(ctx))
					return context.Cause(ctx)
				}), q)
				r := s.start(w)
				time.Sleep(12 * time.Second) // one heartbeat has been answered, at 10 s or a little later
				fault(s.wire)
				time.Sleep(35 * time.Second)
				if got := time.Duration(ended.Load()); !between(got, 30*time.Second, 39*time.Second) {
					t.Errorf("the context ended after %s, want shortly before the lease's end at 40 s", got)
				}
				if got, _ := cause.Load().(error); !errors.Is(got, delayq.ErrLeaseLost) {
					t.Errorf("cause is %v", got)
				}
				s.wire.mend()
				time.Sleep(time.Minute)
				r.halt()
			})
		})
	}
}

func TestAckCountsAfterTheLeaseIfNobodyTookTheTask(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			time.Sleep(20 * time.Second)
			return nil
		}), q)
		r := s.start(w)
		time.Sleep(5 * time.Second)
		s.wire.cut()
		time.Sleep(40 * time.Second)
		if in := len(s.calls.of("ack")); in == 0 {
			t.Error("no ack was tried")
		}
		s.wire.mend()
		time.Sleep(time.Minute)
		if in := s.get(q, "a"); in.State != delayq.StateDone {
			t.Errorf("the task is %s", in.State)
		}
		// Whether the ack or the next lease call came first is open; either way the effect stands and is told once.
		stats := r.halt()
		if stats.Succeeded < 1 || stats.Succeeded+stats.LeaseLost != stats.Leased {
			t.Errorf("stats: %+v", stats)
		}
	})
}

func TestOutcomeIsReportedAgainUntilRedisAnswers(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 5))
		r := s.start(s.worker(taking(8*time.Second), q))
		time.Sleep(5 * time.Second)
		s.wire.cut()
		time.Sleep(15 * time.Second) // within the lease
		s.wire.mend()
		time.Sleep(time.Minute)
		if stats := r.halt(); stats.Leased != 5 || stats.Succeeded != 5 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

// Case B23.
func TestHungHandlerLosesItsSlotAfterTimeoutAndGraceAndTheTaskIsHandedOn(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "hung")
		var d diary
		free := make(chan struct{})
		w := s.worker(d.noting(func(_ context.Context, task *delayq.Task) error {
			if task.ID == "hung" && task.Failed == 0 {
				<-free
			}
			return nil
		}), q)
		w.Concurrency, w.Timeout, w.Grace = 2, 4*time.Second, 2*time.Second
		began := time.Now()
		r := s.start(w)
		time.Sleep(3 * time.Second)
		s.addAll(q, tasksNamed("a", 3)) // one slot is left for these
		time.Sleep(2900 * time.Millisecond)
		if in := s.get(q, "hung"); in.State != delayq.StateProcessing {
			t.Errorf("before timeout and grace it is %s", in.State)
		}
		time.Sleep(200 * time.Millisecond)
		in := s.get(q, "hung")
		if in.State != delayq.StatePending || in.Failed != 1 || in.Reason != delayq.ReasonTimeout {
			t.Errorf("after timeout and grace: %+v", in)
		}
		time.Sleep(time.Minute)
		if runs := d.of("hung"); len(runs) != 2 || !between(runs[1].at.Sub(began), 16*time.Second, 22*time.Second) {
			t.Errorf("runs: %v", runs)
		}
		stats := r.halt()
		if stats.Stuck != 1 || stats.TimedOut != 1 || stats.Succeeded != 4 {
			t.Errorf("stats: %+v", stats)
		}
		if !strings.Contains(s.log.String(), "ignores the end of its context") {
			t.Error("the log does not tell")
		}
		close(free)
	})
}

func TestHungHandlerThatComesBackGivesItsRoomBack(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var d diary
		w := s.worker(d.noting(func(context.Context, *delayq.Task) error {
			time.Sleep(8 * time.Second) // beyond Timeout and Grace, each time
			return nil
		}), q)
		w.Concurrency, w.Timeout, w.Grace, w.MaxAttempts = 2, 4*time.Second, 2*time.Second, 3
		r := s.start(w)
		time.Sleep(5 * time.Minute)
		if r.returned() {
			t.Fatalf("stuck handlers that ended were still counted: %+v, %v", r.stats, r.err)
		}
		stats := r.halt()
		if n := len(d.all()); n != 3 || stats.Stuck != 3 || stats.Dead != 1 || stats.Succeeded != 0 {
			t.Errorf("%d runs, stats: %+v", n, stats)
		}
		if in := s.get(q, "a"); in.State != delayq.StateDead || in.Reason != delayq.ReasonTimeout {
			t.Errorf("ended as %+v", in)
		}
	})
}

func TestRunEndsWithErrStuckWhenNoRoomIsLeft(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 2))
		free := make(chan struct{})
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			<-free
			return nil
		}), q)
		w.Concurrency, w.Timeout, w.Grace = 2, 4*time.Second, 2*time.Second
		r := s.start(w)
		<-r.done
		if !errors.Is(r.err, delayq.ErrStuck) || r.stats.Stop != "error" {
			t.Errorf("stopped with %q, %v", r.stats.Stop, r.err)
		}
		if r.stats.Stuck != 2 || r.stats.TimedOut != 2 || !between(r.stats.Elapsed, 6*time.Second, 7*time.Second) {
			t.Errorf("stats: %+v", r.stats)
		}
		if st := s.stats(q); st.Pending != 2 {
			t.Errorf("the tasks did not go back: %+v", st)
		}
		close(free)
	})
}

func TestSilenceLongerThanStallEndsTheContextAndProgressKeepsIt(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		began := time.Now()
		var ended atomic.Int64
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
			for range 10 {
				time.Sleep(3 * time.Second)
				if err := delayq.Progress(ctx); err != nil {
					t.Errorf("a handler in good health is told %v", err)
				}
			}
			<-ctx.Done()
			ended.Store(int64(time.Since(began)))
			return delayq.Progress(ctx)
		}), q)
		w.Stall = 5 * time.Second
		stats := s.drain(w)
		if got := time.Duration(ended.Load()); !between(got, 35*time.Second, 36*time.Second) {
			t.Errorf("the context ended after %s, want 35 s", got)
		}
		if in := s.get(q, "a"); stats.TimedOut != 1 || in.Reason != delayq.ReasonTimeout {
			t.Errorf("stats %+v, task %+v", stats, in)
		}
	})
}

func TestProgressOutsideAWorkerDoesNothing(t *testing.T) {
	if err := delayq.Progress(t.Context()); err != nil {
		t.Error(err)
	}
	if task := delayq.TaskFrom(t.Context()); task != nil {
		t.Error(task)
	}
}

// Case B59.
func TestCancelReachesARunningHandlerWithinAPoll(t *testing.T) {
	for _, c := range []struct {
		name        string
		concurrency int
		verdict     error
		state       delayq.State
	}{
		{"and the task ends as cancelled", 10, errHandler, delayq.StateCancelled},
		{"also when every slot is taken", 1, errHandler, delayq.StateCancelled},
		{"also when the failure is permanent", 10, delayq.Permanent(errHandler), delayq.StateCancelled},
		{"but success stands", 10, nil, delayq.StateDone},
	} {
		t.Run(c.name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{Shards: 3})
				s.add(q, "a")
				var heard atomic.Int64
				w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
					<-ctx.Done()
					if !errors.Is(context.Cause(ctx), delayq.ErrCancelled) {
						t.Errorf("cause is %v", context.Cause(ctx))
					}
					heard.Store(time.Now().UnixNano())
					return c.verdict
				}), q)
				w.Concurrency = c.concurrency
				r := s.start(w)
				time.Sleep(12345 * time.Millisecond)
				asked := time.Now()
				if got, err := q.Cancel(t.Context(), "a"); got != delayq.Running || err != nil {
					t.Fatal(got, err)
				}
				time.Sleep(5 * time.Second)
				if took := time.Unix(0, heard.Load()).Sub(asked); !between(took, 0, 510*time.Millisecond) {
					t.Errorf("the handler heard of it after %s, want a poll of half a second at most", took)
				}
				if in := s.get(q, "a"); in.State != c.state {
					t.Errorf("ended as %s, want %s", in.State, c.state)
				}
				stats := r.halt()
				if c.state == delayq.StateCancelled && stats.Cancelled != 1 || c.state == delayq.StateDone && stats.Succeeded != 1 {
					t.Errorf("stats: %+v", stats)
				}
			})
		})
	}
}

func TestCancelDuringAHeartbeatIsHeardBeforeTheNextOne(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		r := s.start(s.worker(taking(time.Minute), q))
		time.Sleep(15 * time.Second) // one heartbeat has taught Redis the script
		s.calls.forget()
		s.calls.slowDown("extend", time.Second)
		for len(s.calls.of("extend")) == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(100 * time.Millisecond) // Redis has renewed the lease, the reply is on its way
		if _, err := q.Cancel(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		if in := s.get(q, "a"); in.State != delayq.StateCancelled {
			t.Errorf("the task is %s", in.State)
		}
		if stats := r.halt(); stats.Cancelled != 1 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

func TestCancelOfOneLeavesTheOthersAlone(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 10))
		w := s.worker(taking(30*time.Second), q)
		r := s.start(w)
		time.Sleep(5 * time.Second)
		if _, err := q.Cancel(t.Context(), "a-3"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if stats := r.halt(); stats.Cancelled != 1 || stats.Succeeded != 9 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

// Case B82: a task that takes its consumers down must end without running for ever; a crash is not a failure of the handler.
func TestTaskThatKillsItsConsumersEndsDeadAsLostWithoutRunningAgain(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "poison")
		time.Sleep(time.Second)
		for i := range 3 {
			got, err := q.Lease(t.Context(), delayq.LeaseOptions{Max: 1, Lease: time.Second, Consumer: "doomed"})
			if err != nil || len(got) != 1 {
				t.Fatal(got, err)
			}
			if got[0].Lost != i || got[0].Failed != 0 || got[0].Attempt != i+1 {
				t.Errorf("after %d crashes: %+v", i, got[0].Task)
			}
			time.Sleep(2 * time.Second) // the consumer is gone
		}
		var d diary
		w := s.worker(d.noting(nil), q)
		w.MaxLost = 3
		if stats := s.drain(w); stats.Dead != 1 || len(d.all()) != 0 {
			t.Errorf("ran %d times, stats: %+v", len(d.all()), stats)
		}
		if in := s.get(q, "poison"); in.State != delayq.StateDead || in.Reason != delayq.ReasonLost || in.Lost != 3 || in.Failed != 0 {
			t.Errorf("ended as %+v", in)
		}
	})
}

func TestTaskRunsAgainALeaseAfterACrash(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		time.Sleep(time.Second)
		if _, err := q.Lease(t.Context(), delayq.LeaseOptions{Max: 1, Lease: 30 * time.Second, Consumer: "doomed"}); err != nil {
			t.Fatal(err)
		}
		crashed := time.Now()
		var d diary
		r := s.start(s.worker(d.noting(nil), q))
		time.Sleep(time.Minute)
		r.halt()
		runs := d.of("a")
		if len(runs) != 1 || !between(runs[0].at.Sub(crashed), 30*time.Second, 30*time.Second+10*time.Millisecond) {
			t.Fatalf("runs: %v", runs)
		}
		if got := runs[0].task; got.Lost != 1 || got.Failed != 0 || got.Deliveries != 2 || got.Attempt != 2 {
			t.Errorf("the second run sees %+v", got)
		}
	})
}

func TestLeaseOfATypeMayBeMuchLongerOrShorterThanTheWorkers(t *testing.T) {
	for name, lease := range map[string]time.Duration{"longer": 10 * time.Minute, "shorter": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				s.add(q, "a")
				mux := delayq.NewMux()
				mux.HandleFunc("t", taking(4*time.Minute), delayq.TypeConfig{Lease: lease})
				w := s.worker(mux, q)
				w.MaxPoll = 10 * time.Second
				r := s.start(w)
				time.Sleep(30 * time.Second)
				in := s.get(q, "a")
				if left := time.Until(in.At); in.State != delayq.StateProcessing || !between(left, lease/3, lease) {
					t.Errorf("after half a minute the task is %s, its lease runs out in %s", in.State, left)
				}
				time.Sleep(4 * time.Minute)
				if stats := r.halt(); stats.Succeeded != 1 || stats.Leased != 1 {
					t.Errorf("stats: %+v", stats)
				}
			})
		})
	}
}

// A lease call that Redis executes after the caller has stopped waiting is asked again, not forgotten with all it leased.
func TestALeaseCallWithoutAnswerIsSentAgain(t *testing.T) {
	redisServer := servers.NewRedis(t)
	rdb := redis.NewClient(&redis.Options{Addr: redisServer.Addr(), ContextTimeoutEnabled: true, ReadTimeout: 200 * time.Millisecond, MaxRetries: -1})
	defer rdb.Close()
	q, err := delayq.Open(t.Context(), rdb, "q", delayq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan delayq.Task, 10)
	w := delayq.NewWorker(delayq.HandlerFunc(func(_ context.Context, task *delayq.Task) error {
		ran <- *task
		return nil
	}), q)
	w.Lease = 30 * time.Second
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	if _, err := q.Enqueue(ctx, delayq.Task{ID: "a", Type: "t"}, delayq.In(500*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	go func() { defer close(done); _, _ = w.Run(ctx) }()
	time.Sleep(100 * time.Millisecond)
	if err := redisServer.Pause(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * time.Second) // longer than one call goes on
	if err := redisServer.Resume(); err != nil {
		t.Fatal(err)
	}
	select {
	case task := <-ran:
		if task.Lost != 0 || task.Attempt != 1 {
			t.Errorf("it ran as %+v", task)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for the end of a lease that nobody holds")
	}
	stop()
	<-done
}
