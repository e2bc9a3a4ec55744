package delayq_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

func TestIdleQueueIsAskedTwiceASecondAShardAtMost(t *testing.T) {
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprintf("shards=%d", shards), func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{Shards: shards})
				s.addAll(q, tasksNamed("a", 10), delayq.In(time.Hour))
				r := s.start(s.worker(delayq.HandlerFunc(failing), q))
				time.Sleep(10 * time.Second) // the interval grows to its greatest
				s.calls.forget()
				time.Sleep(30 * time.Second)
				leases, beats := len(s.calls.of("lease")), len(s.calls.of("beat"))
				if leases < 53*shards || leases > 55*shards || beats < 2 || leases+beats > 60*shards {
					t.Errorf("%d lease calls and %d beats in 30 s of %d shards, want 54 a shard and 3, at most 60 in all", leases, beats, shards)
				}
				r.halt()
			})
		})
	}
}

func TestWorkerWithoutAFreeSlotAsksTwiceASecondAndLeasesNothing(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 100))
		w := s.worker(taking(25*time.Second), q)
		w.Concurrency = 3
		r := s.start(w)
		time.Sleep(2 * time.Second)
		s.calls.forget()
		time.Sleep(20 * time.Second)
		leases := s.calls.of("lease")
		if n := len(leases); n < 35 || n > 37 {
			t.Errorf("%d lease calls in 20 s, want 36", n)
		}
		for _, c := range leases {
			if c.max != 0 {
				t.Errorf("asked for %d tasks without a free slot", c.max)
			}
		}
		r.halt()
	})
}

// T22: tasks wait in the queue, where others can take them, not in a worker.
func TestNoMoreIsLeasedThanCanStart(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 4})
		s.addAll(q, tasksNamed("a", 60))
		var running, most atomic.Int64
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			most.Store(max(most.Load(), running.Add(1)))
			time.Sleep(time.Second)
			running.Add(-1)
			return nil
		}), q)
		w.Concurrency = 7
		r := s.start(w)
		for range 100 {
			time.Sleep(90 * time.Millisecond)
			if st := s.stats(q); st.Processing > 7 {
				t.Fatalf("%d tasks are leased by 7 slots", st.Processing)
			}
		}
		stats := r.halt()
		if stats.Succeeded != 60 || most.Load() != 7 {
			t.Errorf("at most %d ran at once, stats: %+v", most.Load(), stats)
		}
		// 60 tasks of a second in 7 slots are 8.6 s: slots do not stand empty between.
		if !between(stats.Elapsed, 9*time.Second, 9100*time.Millisecond) {
			t.Errorf("took %s", stats.Elapsed)
		}
	})
}

func TestRoundsKeepMinPollApartUnlessABacklogWaits(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		began := time.Now()
		for i := range 200 { // one a millisecond
			s.add(q, fmt.Sprint("a-", i), delayq.In(time.Second+time.Duration(i)*time.Millisecond))
		}
		w := s.worker(taking(time.Second), q)
		w.Concurrency = 200
		w.MinPoll = 20 * time.Millisecond
		r := s.start(w)
		time.Sleep(time.Until(began.Add(990 * time.Millisecond)))
		s.calls.forget()
		time.Sleep(220 * time.Millisecond)
		leases := s.calls.of("lease")
		for i := 1; i < len(leases); i++ {
			if gap := leases[i].at.Sub(leases[i-1].at); gap < w.MinPoll {
				t.Errorf("two rounds within %s", gap)
			}
		}
		if stats := r.halt(); len(leases) > 12 || stats.Succeeded != 200 {
			t.Errorf("%d lease calls, stats: %+v", len(leases), stats)
		}
	})
}

func TestBacklogIsLeasedInFullBatchesWithoutWaiting(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.addAll(q, tasksNamed("a", 1500))
		time.Sleep(time.Second)
		s.calls.forget()
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
			time.Sleep(10 * time.Millisecond)
			return nil
		}), q)
		w.Concurrency = 500
		w.IdleExit = time.Second
		stats := s.start(w).wait()
		if stats.Succeeded != 1500 || stats.Elapsed > 100*time.Millisecond {
			t.Errorf("stats: %+v", stats)
		}
		full := 0
		for _, c := range s.calls.of("lease") {
			if c.max == 500 {
				full++
			}
		}
		if full < 2 {
			t.Errorf("calls: %v", s.calls.of("lease"))
		}
	})
}

// Cases B29, B36: never early, whatever the delay, and late by milliseconds only.
func TestTasksStartWhenTheyFallDueAndNeverBefore(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 2})
		var d diary
		w := s.worker(d.noting(nil), q)
		w.MaxPoll = 500 * time.Millisecond
		r := s.start(w)
		type promise struct {
			due  time.Time
			late time.Duration // at most
		}
		promises := map[string]promise{}
		time.Sleep(1234567 * time.Microsecond)
		for i, after := range []time.Duration{
			0, time.Nanosecond, 999 * time.Microsecond, time.Millisecond, 7 * time.Millisecond, 333 * time.Millisecond, time.Second, 1999 * time.Millisecond,
			10*time.Second + 123*time.Microsecond, time.Minute, 90*time.Second + 1,
		} {
			p := promise{time.Now().Add(after), 10 * time.Millisecond}
			if after < w.MaxPoll {
				p.late = w.MaxPoll + 10*time.Millisecond // the next poll may have to find it
			}
			in, at := fmt.Sprint("in-", i), fmt.Sprint("at-", i)
			promises[in], promises[at] = p, p
			s.add(q, in, delayq.In(after))
			s.add(q, at, delayq.At(p.due))
		}
		s.add(q, "years", delayq.In(100*365*24*time.Hour))
		time.Sleep(2 * time.Minute)
		r.halt()
		for id, p := range promises {
			runs := d.of(id)
			if len(runs) != 1 {
				t.Errorf("%s ran %d times", id, len(runs))
			} else if late := runs[0].at.Sub(p.due); !between(late, 0, p.late) {
				t.Errorf("%s ran %s after it fell due", id, late)
			}
		}
		if len(d.of("years")) != 0 {
			t.Error("a task due in a century ran")
		}
	})
}

func TestTaskDueSoonerThanTheKnownOnesIsFoundWithinMaxPoll(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "known", delayq.In(time.Hour))
		var d diary
		w := s.worker(d.noting(nil), q)
		w.MaxPoll = 2 * time.Second
		r := s.start(w)
		time.Sleep(time.Minute + 100*time.Millisecond)
		added := time.Now()
		s.add(q, "new")
		time.Sleep(3 * time.Second)
		r.halt()
		if runs := d.of("new"); len(runs) != 1 || runs[0].at.Sub(added) > 2*time.Second {
			t.Errorf("added at %s, runs: %v", added, runs)
		}
	})
}

func TestIdleExitComesBackOnlyWhenNothingFallsDueWithinIt(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q, other := s.queue("q", delayq.Config{Shards: 2}), s.queue("other", delayq.Config{})
		s.add(q, "now")
		s.add(other, "soon", delayq.In(20*time.Second))
		s.add(q, "later", delayq.In(2*time.Minute))
		w := s.worker(taking(10*time.Second), q, other)
		w.IdleExit = 30 * time.Second
		stats := s.start(w).wait()
		if stats.Stop != "idle" || stats.Succeeded != 2 || !between(stats.Elapsed, 30*time.Second, 31*time.Second) {
			t.Errorf("stats: %+v", stats)
		}
		stats = s.start(w).wait()
		if stats.Stop != "idle" || stats.Leased != 0 || stats.Polls != 3 || stats.Elapsed > time.Millisecond {
			t.Errorf("with nothing to do: %+v", stats)
		}
	})
}

func TestFloodOfOneQueueDoesNotStarveAnother(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		flooded, quiet := s.queue("flooded", delayq.Config{}), s.queue("quiet", delayq.Config{})
		testFairness(t, s, flooded, tasksNamed("flood", 400), quiet, tasksNamed("quiet", 20))
	})
}

func TestFloodOfOneShardDoesNotStarveAnother(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 2})
		var flood, quiet []delayq.Task
		for _, task := range tasksNamed("a", 800) {
			if delayq.ShardOf(q, task.ID) == 0 {
				flood = append(flood, task)
			} else if len(quiet) < 20 {
				task.ID = "quiet" + task.ID
				if delayq.ShardOf(q, task.ID) == 1 {
					quiet = append(quiet, task)
				}
			}
		}
		testFairness(t, s, q, flood, q, quiet)
	})
}

// testFairness adds a few tasks beside a flood that keeps every slot busy. Being served in turn, they get about
// half of the slots, though which shard is first when a single slot comes free is chance.
func testFairness(t *testing.T, s *stage, a *delayq.Queue, flood []delayq.Task, b *delayq.Queue, quiet []delayq.Task) {
	t.Helper()
	s.addAll(a, flood)
	var last atomic.Int64
	var left atomic.Int64
	left.Store(int64(len(quiet)))
	queues := []*delayq.Queue{a, b}
	if a == b {
		queues = queues[:1]
	}
	w := s.worker(delayq.HandlerFunc(func(_ context.Context, task *delayq.Task) error {
		time.Sleep(100 * time.Millisecond)
		if strings.HasPrefix(task.ID, "quiet") {
			left.Add(-1)
			last.Store(time.Now().UnixNano())
		}
		return nil
	}), queues...)
	w.Concurrency = 4
	r := s.start(w)
	time.Sleep(2 * time.Second)
	s.addAll(b, quiet)
	added := time.Now()
	time.Sleep(4 * time.Second)
	if took := time.Unix(0, last.Load()).Sub(added); left.Load() != 0 || took > 3*time.Second {
		t.Errorf("20 tasks beside a flood took %s, %d are left; a quarter of the slots would do them in 2 s", took, left.Load())
	}
	r.halt()
}

func TestSeveralRunsShareAQueueWithoutRunningATaskTwice(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{Shards: 3})
		s.addAll(q, tasksNamed("a", 200))
		var mu sync.Mutex
		seen := map[string]int{}
		h := delayq.HandlerFunc(func(_ context.Context, task *delayq.Task) error {
			mu.Lock()
			seen[task.ID]++
			mu.Unlock()
			time.Sleep(50 * time.Millisecond)
			return nil
		})
		runs := make([]*started, 5)
		for i := range runs {
			w := s.worker(h, q)
			w.IdleExit, w.Concurrency = time.Second, 10
			runs[i] = s.start(w)
		}
		total := int64(0)
		for _, r := range runs {
			total += r.wait().Succeeded
		}
		if total != 200 || len(seen) != 200 {
			t.Errorf("%d succeeded, %d ran", total, len(seen))
		}
		for id, n := range seen {
			if n != 1 {
				t.Errorf("%s ran %d times", id, n)
			}
		}
	})
}
