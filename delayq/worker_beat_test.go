package delayq_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// consumer is the one consumer of a queue.
func (s *stage) consumer(q *delayq.Queue) delayq.Consumer {
	s.Helper()
	synctest.Wait()
	list, err := q.Consumers(s.Context(), 10)
	if err != nil || len(list) != 1 {
		s.Fatalf("consumers %+v, %v; want one", list, err)
	}
	return list[0]
}

// beats is how many records of beats a queue has.
func (s *stage) beats(q *delayq.Queue) int64 {
	s.Helper()
	n, err := s.rdb.HLen(s.Context(), delayq.Keys(q, 0)[12]).Result()
	if err != nil {
		s.Fatal(err)
	}
	return n - 1
}

// ago checks that an instant lies so long back, within a tenth of a second.
func ago(t *testing.T, what string, at time.Time, d time.Duration) {
	t.Helper()
	if got := time.Since(at); !between(got, d-100*time.Millisecond, d+100*time.Millisecond) {
		t.Errorf("%s was %s ago, want %s", what, got, d)
	}
}

func TestWorkerTellsHowItIsUntilItsEnd(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q, other := s.queue("q", delayq.Config{Shards: 3}), s.queue("other", delayq.Config{})
		mux := delayq.NewMux()
		mux.Handle("t", taking(25*time.Second))
		mux.Handle("a", taking(time.Hour))
		w := s.worker(mux, q, other, q)
		w.Concurrency, w.Consumer = 5, "me"
		s.add(q, "x")
		r := s.start(w)
		time.Sleep(15 * time.Second)
		c := s.consumer(q)
		ago(t, "the beat", c.Beat, 5*time.Second)
		ago(t, "the start", c.Started, 15*time.Second)
		if c.Name != "me" || c.Running != 1 || c.Concurrency != 5 || c.Stuck != 0 || fmt.Sprint(c.Types) != "[a t]" || c.TypesCut != 0 {
			t.Errorf("it says %+v", c)
		}
		if c.OldestRun.Round(100*time.Millisecond) != 10*time.Second || c.Skew.Abs() > time.Millisecond {
			t.Errorf("oldest run %s, skew %s", c.OldestRun, c.Skew)
		}
		if age := c.Beat.Sub(c.Progress); age < 0 || age > time.Second {
			t.Errorf("progress %s before the beat", age)
		}
		if c := s.consumer(other); c.Running != 1 || c.OldestRun != 0 || c.Concurrency != 5 {
			t.Errorf("it says to the other queue %+v", c)
		}
		if got := len(s.calls.of("beat")); got != 4 {
			t.Errorf("%d beats in 15 s to two queues, want 4", got)
		}
		time.Sleep(time.Minute)
		r.halt()
		if c := s.consumer(q); s.beats(q) != 0 || s.beats(other) != 0 || !c.Beat.IsZero() {
			t.Errorf("%d and %d beats are left: %+v", s.beats(q), s.beats(other), c)
		}
		if stats := s.stats(q); time.Since(stats.LastRun) > time.Second || stats.Consumers != 1 {
			t.Errorf("%d consumers, the last at %s", stats.Consumers, stats.LastRun)
		}
		if at := s.stats(q).LastSuccess; time.Since(at).Round(time.Second) != 50*time.Second {
			t.Errorf("last success %s", at)
		}
	})
}

// Alive and of no use: it beats and does not get on.
func TestProgressStandsStill(t *testing.T) {
	stuck := func(ctx context.Context, _ *delayq.Task) error { <-ctx.Done(); return ctx.Err() }
	for name, row := range map[string]struct {
		h     delayq.HandlerFunc
		stop  func(s *stage) // after 20 s
		moves bool
	}{
		"it idles":                              {stuck, func(*stage) {}, true},
		"all handlers are deadlocked":           {stuck, func(s *stage) { s.addAll(s.queues[0], tasksNamed("a", 3)) }, false},
		"two of three handlers are deadlocked":  {stuck, func(s *stage) { s.addAll(s.queues[0], tasksNamed("a", 2)) }, true},
		"the poll loop hangs":                   {stuck, func(s *stage) { s.calls.slowDown("lease", 10*time.Minute) }, false},
		"the poll loop is refused":              {stuck, func(s *stage) { s.ok(s.rdb.Set(s.Context(), delayq.Keys(s.queues[0], 0)[0], "broken", 0).Err()) }, false},
		"handlers end while no slot is free":    {taking(7 * time.Second), func(s *stage) { s.addAll(s.queues[0], tasksNamed("a", 100)) }, true},
		"handlers report while no slot is free": {reporting(time.Hour), func(s *stage) { s.addAll(s.queues[0], tasksNamed("a", 3)) }, true},
		"handlers are long and no slot is free": {taking(4 * time.Minute), func(s *stage) { s.addAll(s.queues[0], tasksNamed("a", 3)) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				w := s.worker(row.h, q)
				w.Concurrency = 3
				r := s.start(w)
				time.Sleep(20 * time.Second)
				row.stop(s)
				time.Sleep(2*time.Minute + 5*time.Second)
				c := s.consumer(q)
				ago(t, "the beat", c.Beat, 5*time.Second)
				if still := c.Beat.Sub(c.Progress); row.moves && still > 10*time.Second || !row.moves && !between(still, 119*time.Second, 121*time.Second) {
					t.Errorf("no progress for %s", still)
				}
				if name == "the poll loop is refused" {
					s.ok(s.rdb.Del(s.Context(), delayq.Keys(q, 0)[0]).Err())
					s.ok(s.rdb.ZAdd(s.Context(), delayq.Keys(q, 0)[0], redis.Z{Score: 1<<53 - 1, Member: ""}).Err())
				}
				s.calls.slowDown("", 0)
				r.halt()
			})
		})
	}
}

// reporting is a handler that needs d and calls Progress every second.
func reporting(d time.Duration) delayq.HandlerFunc {
	return func(ctx context.Context, _ *delayq.Task) error {
		for range int(d / time.Second) {
			if err := delayq.Progress(ctx); err != nil {
				return err
			}
			time.Sleep(time.Second)
		}
		return nil
	}
}

func TestWorkerTellsOfHandlersThatDoNotStop(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		end := make(chan struct{})
		w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { <-end; return nil }), q)
		w.Concurrency, w.Timeout, w.Grace = 3, 2*time.Second, time.Second
		s.add(q, "x")
		r := s.start(w)
		time.Sleep(11 * time.Second)
		if c := s.consumer(q); c.Stuck < 1 || c.Stuck > 2 || c.Running > 1 { // it is retried meanwhile
			t.Errorf("it says %+v", c)
		}
		close(end)
		time.Sleep(10 * time.Second)
		if c := s.consumer(q); c.Stuck != 0 || c.Running != 0 {
			t.Errorf("it says %+v", c)
		}
		r.halt()
	})
}

// Functions come and go by the thousand: what they said of themselves goes with them.
func TestShortRunsLeaveNoBeats(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var most int64
		for i := range 300 {
			s.add(q, fmt.Sprint(i))
			w := s.worker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), q)
			w.IdleExit = time.Millisecond
			if stats := s.start(w).wait(); stats.Succeeded != 1 {
				t.Fatalf("run %d: %+v", i, stats)
			}
			time.Sleep(30 * time.Second)
			if n := s.beats(q); n != 0 {
				t.Fatalf("run %d left %d beats", i, n)
			}
			most = max(most, s.rdb.ZCard(t.Context(), delayq.Keys(q, 0)[10]).Val()-1)
		}
		if most < 100 || most > 125 { // those of an hour
			t.Errorf("up to %d consumers were known", most)
		}
	})
}

// A run that was killed could not say that it has gone.
func TestBeatsOfTheKilledGoAfterAnHour(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		for range 150 {
			r := s.start(s.worker(taking(time.Hour), q))
			time.Sleep(time.Second)
			s.wire.hang()
			r.halt()
			s.wire.mend()
			for s.rdb.Ping(t.Context()).Err() != nil { // on a connection that was cut
			}
		}
		if n := s.beats(q); n < 150 {
			t.Fatalf("%d beats are left, of 150", n)
		}
		time.Sleep(2 * time.Hour)
		r := s.start(s.worker(taking(time.Hour), q))
		time.Sleep(time.Minute)
		if n := s.beats(q); n != 1 {
			t.Errorf("%d beats are left, want the living worker's", n)
		}
		r.halt()
	})
}

// A Redis that does not answer beats delays nothing, and nobody hears of it.
func TestBeatsThatFailAreSilentAndDelayNothing(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		w := s.worker(d.noting(nil), q)
		s.calls.slowDown("beat", 5*time.Minute)
		r := s.start(w)
		for i := range 60 {
			s.add(q, fmt.Sprint(i))
			time.Sleep(time.Second)
		}
		s.addAll(q, tasksNamed("last", 3), delayq.In(100*time.Millisecond))
		time.Sleep(time.Second)
		if n := len(d.all()); n != 63 {
			t.Errorf("%d tasks ran, of 63", n)
		}
		s.calls.slowDown("", 0)
		time.Sleep(5 * time.Minute)
		s.ok(s.rdb.Set(t.Context(), delayq.Keys(q, 0)[12], "broken", 0).Err())
		time.Sleep(time.Minute)
		r.halt()
		s.ok(s.rdb.Del(t.Context(), delayq.Keys(q, 0)[12]).Err())
		s.ok(s.rdb.HSet(t.Context(), delayq.Keys(q, 0)[12], "", "").Err())
		if log := s.log.String(); log != "" {
			t.Errorf("logged %s", log)
		}
	})
}

// The end of a run does not wait long for a last word that does not arrive.
func TestALastWordThatHangsHoldsNobody(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		w := s.worker(taking(time.Second), q)
		r := s.start(w)
		time.Sleep(15 * time.Second)
		s.wire.hang()
		began := time.Now()
		r.halt()
		if took := time.Since(began); took > 12*time.Second { // a lease call that hangs is waited for, too
			t.Errorf("it took %s", took)
		}
		s.wire.mend()
	})
}

// After a loss of all data the next beat says it again.
func TestBeatsComeBackWhenRedisHasLostEverything(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		r := s.start(s.worker(taking(time.Second), q))
		time.Sleep(15 * time.Second)
		s.redis.FlushAll()
		time.Sleep(10 * time.Second)
		ago(t, "the beat", s.consumer(q).Beat, 5*time.Second)
		r.halt()
	})
}

// What a worker says is bounded, however many types it has handlers for and whatever their names.
func TestTypesOfABeatAreBounded(t *testing.T) {
	for name, row := range map[string]struct{ n, size, least, most int }{
		"many": {250, 4, 100, 100}, "long": {90, 200, 7, 10}, "one of great length": {1, 5000, 0, 0}, "none": {0, 1, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				q := s.queue("q", delayq.Config{})
				mux := delayq.NewMux()
				for i := range row.n {
					mux.Handle(fmt.Sprintf("%04d", i)+strings.Repeat("x", row.size-4), taking(0))
				}
				r := s.start(s.worker(mux, q))
				time.Sleep(11 * time.Second)
				c := s.consumer(q)
				if c.Beat.IsZero() || len(c.Types) < row.least || len(c.Types) > row.most || len(c.Types)+c.TypesCut != row.n {
					t.Errorf("%d types and %d left out at %v", len(c.Types), c.TypesCut, c.Beat)
				}
				r.halt()
			})
		})
	}
}

// A clock that is off shows, and only there: all other times are by Redis'.
func TestSkewOfAWorkersClock(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		delayq.SetClock(q, func() float64 { return float64(time.Now().Add(time.Hour).UnixMilli()) })
		r := s.start(s.worker(taking(time.Second), q))
		time.Sleep(15 * time.Second)
		c := s.consumer(q)
		if c.Skew.Round(10*time.Millisecond) != -time.Hour {
			t.Errorf("skew %s", c.Skew)
		}
		ago(t, "the start", c.Started.Add(-time.Hour), 15*time.Second)
		ago(t, "the beat", c.Beat.Add(-time.Hour), 5*time.Second)
		r.halt()
	})
}

func (s *stage) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}
