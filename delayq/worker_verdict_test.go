package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Every reason is in the list, or metrics and filters would not know it.
func TestReasonsAreAllThere(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("verdict.go")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range regexp.MustCompile(`(?m)^\tReason\w+ += "(\w+)"`).FindAllStringSubmatch(string(source), -1) {
		want = append(want, m[1])
	}
	if len(want) == 0 || !slices.Equal(delayq.Reasons(), want) {
		t.Errorf("%v, want %v", delayq.Reasons(), want)
	}
}

func TestVerdictDecidesWhatBecomesOfTheTask(t *testing.T) {
	for _, c := range []struct {
		name    string
		handler delayq.HandlerFunc
		state   delayq.State
		from    time.Duration // due at the earliest, after the run
		to      time.Duration
		failed  int
		reason  string
		text    string // part of the last error
		count   func(delayq.RunStats) int64
	}{
		{
			"nil is done", func(context.Context, *delayq.Task) error { return nil },
			delayq.StateDone, 0, 0, 0, "", "", func(s delayq.RunStats) int64 { return s.Succeeded },
		},
		{
			"an error is retried by the curve", failing,
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonError, "no luck",
			func(s delayq.RunStats) int64 { return s.Retried },
		},
		{
			"permanent is dead at once", func(context.Context, *delayq.Task) error {
				return fmt.Errorf("wrapped: %w", delayq.Permanent(errHandler))
			},
			delayq.StateDead, 0, 0, 1, delayq.ReasonPermanent, "wrapped: no luck", func(s delayq.RunStats) int64 { return s.Dead },
		},
		{
			"retry after comes when asked", func(context.Context, *delayq.Task) error {
				return fmt.Errorf("wrapped: %w", delayq.RetryAfter(time.Minute, errHandler))
			},
			delayq.StatePending, time.Minute, time.Minute + time.Millisecond, 1, delayq.ReasonError, "no luck",
			func(s delayq.RunStats) int64 { return s.Retried },
		},
		{
			"snooze charges no attempt", func(context.Context, *delayq.Task) error { return delayq.Snooze(time.Minute) },
			delayq.StatePending, time.Minute, time.Minute + time.Millisecond, 0, "", "", func(s delayq.RunStats) int64 { return s.Released },
		},
		{
			"a part that remains is retried alone", func(context.Context, *delayq.Task) error {
				return delayq.Remaining([]byte("rest"), errHandler)
			},
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonPartial, "no luck",
			func(s delayq.RunStats) int64 { return s.Retried },
		},
		{
			"a panic is an error with its stack", func(context.Context, *delayq.Task) error { panic("oh dear") },
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonPanic, "worker_verdict_test.go",
			func(s delayq.RunStats) int64 { return s.Retried },
		},
		{
			"ending the goroutine is an error", func(context.Context, *delayq.Task) error {
				runtime.Goexit()
				return nil
			},
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonError, "Goexit",
			func(s delayq.RunStats) int64 { return s.Retried },
		},
		{
			"a timeout of the handler's own is one", func(context.Context, *delayq.Task) error { return delayq.Timeout(errHandler) },
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonTimeout, "no luck",
			func(s delayq.RunStats) int64 { return s.TimedOut },
		},
		{
			"outliving the limit is a timeout", taking(time.Hour),
			delayq.StatePending, 10 * time.Second, 15*time.Second + time.Millisecond, 1, delayq.ReasonTimeout, "timed out",
			func(s delayq.RunStats) int64 { return s.TimedOut },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				s.add(q, "a", carrying("whole"))
				w := s.worker(c.handler, q)
				w.Timeout = 20 * time.Second
				w.MaxPoll = 100 * time.Millisecond
				stats := s.drain(w)
				ended := time.Now()

				in := s.get(q, "a")
				if in.State != c.state || in.Failed != c.failed || in.Lost != 0 || in.Reason != c.reason || !strings.Contains(in.LastError, c.text) {
					t.Errorf("state %s, failed %d, lost %d, reason %q, error %q", in.State, in.Failed, in.Lost, in.Reason, in.LastError)
				}
				if c.state == delayq.StatePending {
					// Run comes back within two polls of the end of the handler.
					if due := in.Due.Sub(ended); !between(due, c.from-2*w.MaxPoll, c.to) {
						t.Errorf("due in %s, want %s to %s", due, c.from, c.to)
					}
					if want := 1 + c.failed; in.Attempt != want {
						t.Errorf("the next attempt is number %d, want %d", in.Attempt, want)
					}
					if want := map[bool]string{true: "rest", false: "whole"}[c.reason == delayq.ReasonPartial]; string(in.Payload) != want {
						t.Errorf("payload is %q, want %q", in.Payload, want)
					}
				}
				if stats.Leased != 1 || c.count(stats) != 1 {
					t.Errorf("stats: %+v", stats)
				}
				if got := s.stats(q).Failed[c.reason]; c.failed > 0 && got != 1 {
					t.Errorf("redis counts %d failures of reason %s, want 1", got, c.reason)
				}
			})
		})
	}
}

func TestErrorRunsThroughTheCurveAndEndsDead(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var d diary
		w := s.worker(d.noting(failing), q)
		w.MaxPoll = time.Minute
		r := s.start(w)
		time.Sleep(30 * time.Minute)
		stats := r.halt()
		if stats.Retried != 4 || stats.Dead != 1 {
			t.Errorf("stats: %+v", stats)
		}
		runs := d.of("a")
		if len(runs) != 5 {
			t.Fatalf("%d runs, want 5", len(runs))
		}
		for i, gap := range []struct{ base, jitter time.Duration }{
			{10 * time.Second, 5 * time.Second},
			{30 * time.Second, 10 * time.Second},
			{2 * time.Minute, 30 * time.Second},
			{10 * time.Minute, 2 * time.Minute},
		} {
			if got := runs[i+1].at.Sub(runs[i].at); !between(got, gap.base, gap.base+gap.jitter+10*time.Millisecond) {
				t.Errorf("attempt %d came after %s, want %s and up to %s", i+2, got, gap.base, gap.jitter)
			}
			if got := runs[i].task; got.Attempt != i+1 || got.Failed != i || got.Deliveries != i+1 {
				t.Errorf("run %d: attempt %d, failed %d, deliveries %d", i, got.Attempt, got.Failed, got.Deliveries)
			}
		}
		if in := s.get(q, "a"); in.State != delayq.StateDead || in.Failed != 5 || in.Reason != delayq.ReasonError {
			t.Errorf("ended as %+v", in)
		}
	})
}

// Case B81: retries of tasks that failed together must not come back together.
func TestTasksThatFailTogetherAreSpreadByJitter(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 1000))
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			time.Sleep(time.Second)
			return errHandler
		}), q)
		w.Concurrency = 1000
		began := time.Now().Add(time.Second)
		if stats := s.drain(w); stats.Retried != 1000 {
			t.Fatalf("stats: %+v", stats)
		}
		slots := map[int64]int{}
		for _, in := range s.list(q, delayq.StatePending) {
			due := in.Due.Sub(began)
			if !between(due, 10*time.Second, 16*time.Second) {
				t.Errorf("%s comes back after %s", in.ID, due)
			}
			slots[due.Milliseconds()/250]++
		}
		// 20 slots of a quarter second, 50 each on average; 100 would be seven standard deviations off.
		for slot, n := range slots {
			if n > 100 {
				t.Errorf("%d of 1000 come back in the quarter second from %d ms on", n, slot*250)
			}
		}
	})
}

func TestTaskWhoseRecordIsGoneIsCountedAndNamed(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 2))
		s.redis.HDel(delayq.Keys(q, 0)[3], "a-0")
		if stats := s.drain(s.worker(taking(0), q)); stats.Missing != 1 || stats.Succeeded != 1 {
			t.Errorf("stats: %+v", stats)
		}
		if log := s.log.String(); !strings.Contains(log, "task_id=a-0") {
			t.Errorf("the log does not name it:\n%s", log)
		}
	})
}

func TestTaskWhoseRecordCannotBeReadEndsDeadWithoutRunning(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		s.redis.HSet(delayq.Keys(q, 0)[3], "a", "\xffrubbish")
		var d diary
		w := s.worker(d.noting(nil), q)
		w.MaxAttempts = 2
		w.IdleExit = time.Minute
		if stats := s.start(w).wait(); stats.Retried != 1 || stats.Dead != 1 || len(d.all()) != 0 {
			t.Errorf("ran %d times, stats: %+v", len(d.all()), stats)
		}
		if in := s.get(q, "a"); in.State != delayq.StateDead || in.Reason != delayq.ReasonUnread {
			t.Errorf("ended as %+v", in)
		}
	})
}

func TestTypeWithoutHandlerBacksOffAndEndsDeadWithoutBlockingOthers(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "orphan", ofType("nobody's"))
		s.add(q, "a")
		var d diary
		mux := delayq.NewMux()
		mux.Handle("t", d.noting(nil))
		w := s.worker(mux, q)
		w.Concurrency = 1
		w.MaxPoll = 10 * time.Second
		began := time.Now()
		r := s.start(w)
		time.Sleep(30 * time.Second)
		if runs := d.of("a"); len(runs) != 1 || runs[0].at.Sub(began) > 20*time.Millisecond {
			t.Errorf("the task behind it ran %v", runs)
		}
		if in := s.get(q, "orphan"); in.State != delayq.StatePending || in.Reason != delayq.ReasonNoHandler || !strings.Contains(in.LastError, "nobody's") {
			t.Errorf("after its first try: %+v", in)
		}
		time.Sleep(30 * time.Minute)
		stats := r.halt()
		if stats.Retried != 4 || stats.Dead != 1 || stats.Leased != 6 {
			t.Errorf("stats: %+v", stats)
		}
		if in := s.get(q, "orphan"); in.State != delayq.StateDead || in.Reason != delayq.ReasonNoHandler {
			t.Errorf("ended as %+v", in)
		}
	})
}

func TestTypeConfigOverridesTheWorker(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		for _, typ := range []string{"plain", "short", "curve", "once"} {
			s.add(q, typ, ofType(typ))
		}
		mux := delayq.NewMux()
		mux.HandleFunc("plain", taking(8*time.Second))
		mux.HandleFunc("short", taking(8*time.Second), delayq.TypeConfig{Timeout: 3 * time.Second})
		mux.HandleFunc("curve", failing, delayq.TypeConfig{Retry: func(int) time.Duration { return time.Hour }})
		mux.HandleFunc("once", failing, delayq.TypeConfig{MaxAttempts: 1})
		w := s.worker(mux, q)
		w.Timeout = 10 * time.Second
		began := time.Now()
		stats := s.drain(w)
		if stats.Succeeded != 1 || stats.TimedOut != 1 || stats.Retried != 2 || stats.Dead != 1 {
			t.Errorf("stats: %+v", stats)
		}
		if in := s.get(q, "short"); in.Reason != delayq.ReasonTimeout || !between(in.Due.Sub(began), 13*time.Second, 19*time.Second) {
			t.Errorf("timeout by type: %+v", in)
		}
		if in := s.get(q, "curve"); !between(in.Due.Sub(began), time.Hour, time.Hour+time.Second) {
			t.Errorf("curve by type: %+v", in)
		}
		if in := s.get(q, "once"); in.State != delayq.StateDead {
			t.Errorf("attempts by type: %+v", in)
		}
	})
}

func TestMiddlewareRunsFromTheFirstAddedInwards(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var trace []string
		wrap := func(name string) delayq.Middleware {
			return func(h delayq.Handler) delayq.Handler {
				return delayq.HandlerFunc(func(ctx context.Context, t *delayq.Task) error {
					trace = append(trace, name)
					err := h.HandleTask(ctx, t)
					trace = append(trace, "/"+name)
					return err
				})
			}
		}
		mux := delayq.NewMux()
		mux.Use(wrap("first"))
		mux.HandleFunc("t", func(ctx context.Context, task *delayq.Task) error {
			if delayq.TaskFrom(ctx) != task {
				t.Error("the context does not lead to the task")
			}
			trace = append(trace, "handler")
			return nil
		})
		mux.Use(wrap("second"), wrap("third"))
		s.drain(s.worker(mux, q))
		want := []string{"first", "second", "third", "handler", "/third", "/second", "/first"}
		if !slices.Equal(trace, want) {
			t.Errorf("order is %v, want %v", trace, want)
		}
	})
}

func TestTypedHandlerGetsItsValueAndBuriesWhatItCannotReadWithoutQuotingIt(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		type cancelOrder struct {
			Order int `json:"order"`
		}
		q := s.queue("q", delayq.Config{})
		s.add(q, "good", carrying(`{"order":42}`))
		s.add(q, "text", carrying(`{"order":"secret-4711"}`))
		s.add(q, "broken", carrying(`secret-4711{`))
		s.add(q, "empty")
		var got []int
		mux := delayq.NewMux()
		delayq.Handle(mux, "t", func(ctx context.Context, c cancelOrder) error {
			got = append(got, c.Order)
			return nil
		})
		if stats := s.drain(s.worker(mux, q)); stats.Succeeded != 1 || stats.Dead != 3 {
			t.Errorf("stats: %+v", stats)
		}
		if !slices.Equal(got, []int{42}) {
			t.Errorf("handled %v", got)
		}
		for id, text := range map[string]string{"text": `field "order" wants a int`, "broken": "malformed JSON at byte 1", "empty": "malformed JSON"} {
			in := s.get(q, id)
			if in.State != delayq.StateDead || in.Reason != delayq.ReasonPermanent || !strings.Contains(in.LastError, text) {
				t.Errorf("%s: %s, %s, %q", id, in.State, in.Reason, in.LastError)
			}
			if strings.Contains(in.LastError, "secret") {
				t.Errorf("%s: the error quotes the payload: %s", id, in.LastError)
			}
		}
		if log := s.log.String(); strings.Contains(log, "secret") || !strings.Contains(log, "task_id=broken") {
			t.Errorf("the log quotes the payload or names no task:\n%s", log)
		}
	})
}

func TestLogOfAFailedAttemptNamesTheTask(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("orders", delayq.Config{})
		s.add(q, "cancel-order:42", carrying("secret"), func(t *delayq.Task) { t.Key = "order 42" })
		s.drain(s.worker(delayq.HandlerFunc(failing), q))
		log := s.log.String()
		for _, want := range []string{"task_id=cancel-order:42", "type=t", `biz_key="order 42"`, "attempt=1", "queue=orders", "reason=error", `error="no luck"`} {
			if !strings.Contains(log, want) {
				t.Errorf("no %s in the log:\n%s", want, log)
			}
		}
		if strings.Contains(log, "secret") {
			t.Errorf("the log holds the payload:\n%s", log)
		}
	})
}

func TestRunRefusesAConfigurationThatCannotWork(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		w := s.worker(delayq.HandlerFunc(failing), q)
		w.Lease = time.Millisecond
		w.Concurrency = -1
		w.Consumer = "two words"
		_, err := w.Run(t.Context())
		if !errors.Is(err, delayq.ErrInvalid) {
			t.Fatalf("error is %v", err)
		}
		for _, field := range []string{"WorkerConfig.Lease", "WorkerConfig.Concurrency", "WorkerConfig.Consumer"} {
			if !strings.Contains(err.Error(), field) {
				t.Errorf("%v does not name %s", err, field)
			}
		}
		for _, w := range []*delayq.Worker{s.worker(nil, q), s.worker(delayq.HandlerFunc(failing))} {
			if _, err := w.Run(t.Context()); !errors.Is(err, delayq.ErrInvalid) {
				t.Errorf("without a handler or a queue: %v", err)
			}
		}
	})
}

// A handler that is cut off has still said what is left: the whole task again would do the first part twice.
func TestRemainingCountsThoughTheContextHasEnded(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		var seen []string
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, task *delayq.Task) error {
			seen = append(seen, string(task.Payload))
			if len(seen) == 2 {
				return nil
			}
			<-ctx.Done()
			return delayq.Remaining([]byte("the rest"), ctx.Err())
		}), q)
		w.Timeout = 2 * time.Second
		w.Retry = func(int) time.Duration { return time.Second }
		r := s.start(w)
		time.Sleep(time.Minute)
		if stats := r.halt(); len(seen) != 2 || seen[1] != "the rest" || stats.TimedOut != 1 {
			t.Errorf("payloads %q, %+v", seen, stats)
		}
	})
}

func TestRemainingOverTheLimitRetriesTheWholeTask(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "a")
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			return delayq.Remaining(make([]byte, q.MaxPayload()+1), nil)
		}), q)
		r := s.start(w)
		time.Sleep(time.Second)
		r.halt()
		if info, err := q.Get(t.Context(), "a"); err != nil || len(info.Payload) > q.MaxPayload() || !strings.Contains(info.LastError, "limit") {
			t.Errorf("%d bytes, %q, %v", len(info.Payload), info.LastError, err)
		}
	})
}

// Whichever clock is first: a handler that outlives its limit sees a deadline that has passed, not a cancellation.
func TestTheEndOfTheLimitIsADeadline(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 64))
		var other atomic.Int64
		w := s.worker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
			<-ctx.Done()
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) || !errors.Is(context.Cause(ctx), delayq.ErrTimeout) {
				other.Add(1)
			}
			return ctx.Err()
		}), q)
		w.Concurrency, w.Timeout, w.MaxAttempts = 16, 3*time.Second, 1
		if stats := s.drain(w); stats.TimedOut != 64 || other.Load() != 0 {
			t.Errorf("%d of %d were told otherwise", other.Load(), stats.TimedOut)
		}
	})
}
