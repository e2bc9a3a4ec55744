package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

func TestShutdownLetsHandlersEndWithinGrace(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 5))
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
			time.Sleep(5 * time.Second)
			return ctx.Err()
		}), q)
		w.Concurrency = 2
		r := s.start(w)
		time.Sleep(time.Second)
		stats := r.halt()
		if stats.Stop != "cancelled" || stats.Succeeded != 2 || stats.Leased != 2 || !between(stats.Elapsed, 5*time.Second, 5010*time.Millisecond) {
			t.Errorf("stats: %+v", stats)
		}
		if st := s.stats(q); st.Due != 3 || st.Processing != 0 {
			t.Errorf("left in the queue: %+v", st)
		}
	})
}

// Cases B10, B11: what a shutdown interrupts comes back at once and uncharged, and its report does not need Run's context.
func TestShutdownReleasesUnchargedWhatItInterrupts(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 2})
		s.addAll(q, tasksNamed("a", 20))
		var wrong atomic.Int64
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), delayq.ErrStopping) {
				wrong.Add(1)
			}
			return errHandler
		}), q)
		r := s.start(w)
		time.Sleep(time.Second)
		stopped := time.Now()
		stats := r.halt()
		if took := time.Since(stopped); !between(took, 5*time.Second, 5100*time.Millisecond) {
			t.Errorf("shutting down took %s, want the grace of 5 s", took)
		}
		if stats.Released != 20 || stats.Retried+stats.Dead+stats.LeaseLost+stats.Stuck != 0 || wrong.Load() != 0 {
			t.Errorf("%d other causes, stats: %+v", wrong.Load(), stats)
		}
		time.Sleep(time.Millisecond)
		due := s.list(q, delayq.StateDue)
		if len(due) != 20 {
			t.Errorf("%d tasks are due again, want 20", len(due))
		}
		for _, in := range due {
			if in.Failed != 0 || in.Lost != 0 || in.Attempt != 1 {
				t.Errorf("%s was charged: %+v", in.ID, in.Task)
			}
		}
	})
}

func TestOutcomeIsReportedWhenAHandlerEndsAsRunStops(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		for i := range 50 {
			s.addAll(q, tasksNamed(fmt.Sprint(i), 3))
			r := s.start(s.worker(taking(10*time.Millisecond), q))
			time.Sleep(15 * time.Millisecond) // they are found in the second round, after 5 ms
			if stats := r.halt(); stats.Succeeded != 3 {
				t.Fatalf("run %d: %+v", i, stats)
			}
		}
	})
}

func TestFailureOfItsOwnDuringTheGraceIsCharged(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		r := s.start(s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			time.Sleep(3 * time.Second)
			return errHandler
		}), q))
		time.Sleep(time.Second)
		if stats := r.halt(); stats.Retried != 1 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

func TestShutdownLeavesAStubbornHandlersTaskToItsLease(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		free := make(chan struct{})
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			<-free
			return nil
		}), q)
		r := s.start(w)
		time.Sleep(time.Second)
		stopped := time.Now()
		stats := r.halt()
		if took := time.Since(stopped); !between(took, 10*time.Second, 11*time.Second) {
			t.Errorf("shutting down took %s, want twice the grace", took)
		}
		if stats.Stuck != 1 || stats.Released+stats.Retried != 0 {
			t.Errorf("stats: %+v", stats)
		}
		if in := s.get(q, "a"); in.State != delayq.StateProcessing {
			t.Errorf("the task is %s while its handler may still run", in.State)
		}
		time.Sleep(time.Minute)
		if in := s.get(q, "a"); in.State != delayq.StateDue {
			t.Errorf("after its lease the task is %s", in.State)
		}
		close(free)
	})
}

// deadlined starts a worker whose context ends in d, as an invocation's does.
func (s *stage) deadlined(w *delayq.Worker, d time.Duration) *started {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	r := s.startIn(ctx, w)
	stop := r.stop
	r.stop = func() { stop(); cancel() }
	return r
}

func TestDeadlineStopsLeasingThenEndsContextsThenReturnsInTime(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		for _, c := range []struct {
			id  string
			due time.Duration
		}{{"early", 0}, {"last", 55 * time.Second}, {"late", 56500 * time.Millisecond}} {
			s.add(q, c.id, delayq.In(c.due))
		}
		began := time.Now()
		var d diary
		var ended atomic.Int64
		w := s.worker(d.noting(func(ctx context.Context, task *delayq.Task) error {
			if task.ID == "early" {
				return nil
			}
			<-ctx.Done()
			ended.Store(int64(time.Since(began)))
			return context.Cause(ctx)
		}), q)
		stats := s.deadlined(w, time.Minute).wait()
		if stats.Stop != "deadline" || stats.Succeeded != 1 || stats.Released != 1 || !between(stats.Elapsed, 58*time.Second, 58100*time.Millisecond) {
			t.Errorf("stats: %+v", stats)
		}
		if got := time.Duration(ended.Load()); !between(got, 58*time.Second, 58010*time.Millisecond) {
			t.Errorf("the context ended after %s, want 58 s: one margin before the deadline", got)
		}
		leases := s.calls.of("lease")
		if last := leases[len(leases)-1].at.Sub(began); !between(last, 55*time.Second, 56*time.Second) {
			t.Errorf("the last lease call came after %s, want none in the last two margins", last)
		}
		if len(d.of("late")) != 0 {
			t.Error("a task was leased within two margins of the deadline")
		}
		if in := s.get(q, "last"); in.Failed != 0 || in.Attempt != 1 {
			t.Errorf("what was cut off after a short while was charged: %+v", in)
		}
	})
}

func TestDeadlineIsKeptWithAHandlerThatDoesNotStop(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 3))
		free := make(chan struct{})
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			<-free
			return nil
		}), q)
		stats := s.deadlined(w, time.Minute).wait()
		if stats.Stuck != 3 || !between(stats.Elapsed, 58*time.Second, 59500*time.Millisecond) {
			t.Errorf("stats: %+v", stats)
		}
		close(free)
	})
}

func TestDeadlineIsKeptWhenRedisStopsAnswering(t *testing.T) {
	for name, at := range map[string]time.Duration{
		"before a heartbeat": 49 * time.Second, "while leasing": 55*time.Second + 900*time.Millisecond,
		"while handlers run": 57 * time.Second, "while reporting": 58*time.Second - time.Millisecond,
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				s.addAll(q, tasksNamed("a", 3))
				s.add(q, "b", delayq.In(at))
				r := s.deadlined(s.worker(taking(time.Hour), q), time.Minute)
				time.Sleep(at)
				s.wire.hang()
				stats := r.wait()
				if stats.Elapsed >= time.Minute {
					t.Errorf("Run came back after %s, its deadline was at one minute", stats.Elapsed)
				}
				s.wire.mend()
				time.Sleep(10 * time.Minute)
			})
		})
	}
}

// Case B13: a function that is too short for a task must not begin it for ever.
func TestTaskThatNeverFitsIsChargedWithTimeoutsAndEndsDead(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "long")
		var d diary
		for i := 1; i <= 5; i++ {
			stats := s.deadlined(s.worker(d.noting(taking(time.Minute)), q), 30*time.Second).wait()
			if stats.TimedOut != 1 || stats.Released != 0 {
				t.Fatalf("invocation %d: %+v", i, stats)
			}
			in := s.get(q, "long")
			if in.Failed != i || in.Reason != delayq.ReasonTimeout {
				t.Fatalf("after invocation %d: %+v", i, in)
			}
			if i < 5 {
				time.Sleep(time.Until(in.Due) + time.Second)
			} else if in.State != delayq.StateDead {
				t.Errorf("ended as %s", in.State)
			}
		}
		if n := len(d.all()); n != 5 {
			t.Errorf("%d runs, want 5", n)
		}
	})
}

func TestTooLittleTimeIsRefusedBeforeAnythingIsLeased(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		r := s.deadlined(s.worker(delayq.HandlerFunc(failing), q), 4*time.Second)
		<-r.done
		r.stop()
		if !errors.Is(r.err, delayq.ErrNoTime) || !strings.Contains(r.err.Error(), "raise the function's timeout") || len(s.calls.of("lease")) != 0 {
			t.Errorf("%v, after %d lease calls", r.err, len(s.calls.of("lease")))
		}
	})
}

func TestRunGivesUpWithTheConnectionsErrorWhenRedisNeverAnswers(t *testing.T) {
	for name, fault := range map[string]func(*wire){"refused": (*wire).cut, "no answer": (*wire).hang} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				fault(s.wire)
				w := s.worker(delayq.HandlerFunc(failing), q)
				w.StartTimeout = 5 * time.Second
				r := s.start(w)
				<-r.done
				r.stop()
				var netErr net.Error
				if r.stats.Stop != "error" || !errors.As(r.err, &netErr) || !between(r.stats.Elapsed, 5*time.Second, 20*time.Second) {
					t.Errorf("stopped with %q after %s: %v", r.stats.Stop, r.stats.Elapsed, r.err)
				}
				s.wire.mend()
				time.Sleep(2 * time.Second) // the pool tries to dial once a second when it has failed often
			})
		})
	}
}

// Cases B68, B69.
func TestRunOutlivesAnOutageOfRedisAndLosesNothing(t *testing.T) {
	for name, fault := range map[string]func(*wire){"refused": (*wire).cut, "no answer": (*wire).hang} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{Shards: 2})
				s.addAll(q, tasksNamed("before", 10), delayq.In(5*time.Second))
				s.addAll(q, tasksNamed("meanwhile", 10), delayq.In(40*time.Second))
				s.addAll(q, tasksNamed("after", 10), delayq.In(3*time.Minute))
				began := time.Now()
				var d diary
				r := s.start(s.worker(d.noting(taking(3*time.Second)), q))
				time.Sleep(7 * time.Second) // the first ten are running
				fault(s.wire)
				time.Sleep(time.Minute)
				s.wire.mend()
				back := time.Now()
				time.Sleep(4 * time.Minute)
				stats := r.halt()
				if st := s.stats(q); st.Succeeded != 30 || st.Pending+st.Due+st.Processing+st.Dead != 0 {
					t.Errorf("redis counts %+v, Run %+v", st, stats)
				}
				for _, run := range d.all() {
					switch name, _, _ := strings.Cut(run.task.ID, "-"); name {
					case "meanwhile":
						// Within the longest wait between tries, and one that was under way.
						if late := run.at.Sub(back); !between(late, 0, 16*time.Second) {
							t.Errorf("%s ran %s after redis was back", run.task.ID, late)
						}
					case "after":
						if at := run.at.Sub(began); !between(at, 3*time.Minute, 3*time.Minute+10*time.Millisecond) {
							t.Errorf("%s ran after %s", run.task.ID, at)
						}
					}
				}
			})
		})
	}
}

func TestOutageIsMetWithBackoff(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		r := s.start(s.worker(taking(0), s.queue("q", delayq.Config{})))
		time.Sleep(5 * time.Second)
		s.wire.cut()
		s.calls.forget()
		time.Sleep(time.Minute)
		// A round of four sends every 3 to 6 seconds, more often in the beginning.
		if n := len(s.calls.of("lease")); !between(time.Duration(n), 40, 130) {
			t.Errorf("%d lease calls were sent during a minute without Redis", n)
		}
		s.wire.mend()
		time.Sleep(10 * time.Second)
		r.halt()
	})
}

func TestWorkerGoesOnWhenRedisHasLostEverything(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 2})
		s.addAll(q, tasksNamed("gone", 10), delayq.In(time.Minute))
		var d diary
		r := s.start(s.worker(d.noting(nil), q))
		time.Sleep(10 * time.Second)
		s.redis.FlushAll()
		time.Sleep(10 * time.Second)
		s.addAll(q, tasksNamed("new", 10))
		time.Sleep(time.Minute)
		if stats := r.halt(); stats.Succeeded != 10 || len(d.all()) != 10 {
			t.Errorf("%d runs, stats: %+v", len(d.all()), stats)
		}
	})
}
