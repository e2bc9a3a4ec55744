package delayq_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// A schedule fires once in each minute, somewhere in it, and starts an invocation of five minutes at most.
type schedule struct {
	s       *stage
	group   string
	runners int
	queue   *delayq.Queue
	handler delayq.Handler
	random  *rand.Rand
	started []*started
	ticking sync.WaitGroup
}

const (
	invocation = 5 * time.Minute
	maxPoll    = 1500 * time.Millisecond // more than the second between tasks: fewer calls, as fake Redis is slow
)

func (s *stage) schedule(group string, q *delayq.Queue, h delayq.Handler) *schedule {
	return &schedule{s: s, group: group, queue: q, handler: h, random: rand.New(rand.NewPCG(4, 2))}
}

func (c *schedule) fire() {
	w := c.s.worker(c.handler, c.queue)
	w.Group, w.Runners = c.group, c.runners
	w.Consumer = fmt.Sprintf("%s-%d", c.group, len(c.started))
	w.MaxPoll, w.MinPoll = maxPoll, maxPoll/4
	c.started = append(c.started, c.s.deadlined(w, invocation))
}

// minutes fires once in each of n minutes, but not in the lost ones, and ends with the last minute.
func (c *schedule) minutes(n int, lost ...int) {
	for minute := range n {
		at := time.Duration(c.random.Int64N(int64(time.Minute)))
		time.Sleep(at)
		if !slices.Contains(lost, minute) {
			c.fire()
		}
		time.Sleep(time.Minute - at)
	}
}

func (c *schedule) wait() (all []delayq.RunStats) {
	c.ticking.Wait()
	for _, r := range c.started {
		all = append(all, r.wait())
	}
	return all
}

// A reign is the time between the first and the last lease call of one runner.
type reign struct {
	consumer    string
	first, last time.Time
}

func (s *stage) reigns() (all []reign) {
	place := map[string]int{}
	for _, c := range s.calls.of("lease") {
		i, ok := place[c.consumer]
		if !ok {
			i = len(all)
			place[c.consumer] = i
			all = append(all, reign{consumer: c.consumer, first: c.at})
		}
		all[i].last = c.at
	}
	slices.SortStableFunc(all, func(a, b reign) int { return a.first.Compare(b.first) })
	return all
}

// checkReigns: of each runner, the one that comes n places behind ends the reign within a poll, and at no time is there nobody.
func checkReigns(t *testing.T, all []reign, n int) {
	t.Helper()
	for i, r := range all {
		if i+n < len(all) && r.last.Sub(all[i+n].first) > maxPoll {
			t.Errorf("%s went on for %s after %s had come", r.consumer, r.last.Sub(all[i+n].first), all[i+n].consumer)
		}
		if i > 0 {
			latest := slices.MaxFunc(all[:i], func(a, b reign) int { return a.last.Compare(b.last) })
			if gap := r.first.Sub(latest.last); gap > maxPoll {
				t.Errorf("nobody leased for %s before %s", gap, r.consumer)
			}
		}
	}
}

// feed adds a task due at every second, a minute ahead, in one minute of every few, and checkFed checks that each started on
// time.
func feed(s *stage, q *delayq.Queue, minutes, every int) {
	for minute := range minutes {
		if minute%every != 0 {
			time.Sleep(time.Minute)
			continue
		}
		tasks := make([]delayq.Task, 60)
		for second := range tasks {
			tasks[second] = delayq.Task{
				ID: fmt.Sprintf("%d:%02d", minute, second), Type: "t", Delay: time.Minute + time.Duration(second)*time.Second,
			}
		}
		s.addAll(q, tasks)
		time.Sleep(time.Minute)
	}
}

func checkFed(t *testing.T, d *diary, began time.Time, minutes, every int) {
	t.Helper()
	runs := map[string][]time.Duration{}
	for _, run := range d.all() {
		runs[run.task.ID] = append(runs[run.task.ID], run.at.Sub(began))
	}
	var worst time.Duration
	for minute := 0; minute < minutes; minute += every {
		for second := range 60 {
			id := fmt.Sprintf("%d:%02d", minute, second)
			due := time.Duration(minute+1)*time.Minute + time.Duration(second)*time.Second
			if len(runs[id]) != 1 {
				t.Errorf("%s ran %d times, after %v", id, len(runs[id]), runs[id])
				continue
			}
			worst = max(worst, runs[id][0]-due)
			if runs[id][0] < due {
				t.Errorf("%s ran %s early", id, due-runs[id][0])
			}
		}
	}
	if worst > maxPoll {
		t.Errorf("the latest task ran %s after it fell due", worst)
	}
}

func TestBatonTurnsAMinuteTriggerIntoOneGaplessRunner(t *testing.T) {
	minutes := 60
	if testing.Short() {
		minutes = 6
	}
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		began := time.Now()
		c := s.schedule("g", q, d.noting(nil))
		c.fire() // somebody is there from the beginning
		c.ticking.Go(func() { c.minutes(minutes) })
		feed(s, q, minutes-1, 3)
		time.Sleep(time.Minute)
		time.Sleep(invocation)
		stats := c.wait()
		checkFed(t, &d, began, minutes-1, 3)
		checkReigns(t, s.reigns(), 1)
		for i, st := range stats {
			want := "baton"
			if i == len(stats)-1 {
				want = "deadline"
			}
			if st.Stop != want {
				t.Errorf("invocation %d stopped with %s, want %s", i, st.Stop, want)
			}
		}
	})
}

func TestLostTicksLeaveNoGap(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		began := time.Now()
		c := s.schedule("g", q, d.noting(nil))
		c.fire()
		c.ticking.Go(func() { c.minutes(7, 1, 2, 4, 5) })
		feed(s, q, 6, 1)
		time.Sleep(time.Minute)
		c.wait()
		checkFed(t, &d, began, 6, 1)
		checkReigns(t, s.reigns(), 1)
	})
}

func TestGroupsHoldBatonsOfTheirOwn(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		a, b := s.schedule("a", q, d.noting(nil)), s.schedule("b", q, d.noting(nil))
		b.random = rand.New(rand.NewPCG(7, 7))
		a.ticking.Go(func() { a.minutes(5) })
		b.minutes(5)
		time.Sleep(invocation)
		for _, stats := range [][]delayq.RunStats{a.wait(), b.wait()} {
			for i, st := range stats {
				if want := map[bool]string{true: "deadline", false: "baton"}[i == 4]; st.Stop != want {
					t.Errorf("invocation %d stopped with %s, want %s", i, st.Stop, want)
				}
			}
		}
		for _, group := range []string{"a", "b"} {
			all := slices.DeleteFunc(s.reigns(), func(r reign) bool { return r.consumer[:1] != group })
			checkReigns(t, all, 1)
		}
	})
}

func TestRunnersSideBySideAreTheYoungest(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		c := s.schedule("g", q, d.noting(nil))
		c.runners = 2
		c.minutes(6)
		time.Sleep(invocation)
		for i, st := range c.wait() {
			if want := map[bool]string{true: "deadline", false: "baton"}[i >= 4]; st.Stop != want {
				t.Errorf("invocation %d stopped with %s, want %s", i, st.Stop, want)
			}
		}
		all := s.reigns()
		checkReigns(t, all, 2)
		for i := 0; i+1 < len(all); i++ {
			if all[i].last.Before(all[i+1].first) {
				t.Errorf("%s had gone before %s came", all[i].consumer, all[i+1].consumer)
			}
		}
	})
}

// Case B26: a schedule that fires several invocations at once.
func TestOfRunnersThatStartTogetherOneStays(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		c := s.schedule("g", q, d.noting(nil))
		for range 5 {
			c.fire()
		}
		feed(s, q, 2, 1)
		time.Sleep(invocation)
		stops := map[string]int{}
		for _, st := range c.wait() {
			stops[st.Stop]++
		}
		if stops["baton"] != 4 || stops["deadline"] != 1 {
			t.Errorf("stopped with %v", stops)
		}
		if n := len(d.all()); n != 120 {
			t.Errorf("%d runs, want 120", n)
		}
	})
}

func TestLostDataSendsNobodyHome(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		var d diary
		c := s.schedule("g", q, d.noting(nil))
		c.runners = 2
		c.fire()
		c.fire()
		time.Sleep(30 * time.Second)
		s.redis.FlushAll()
		time.Sleep(30 * time.Second)
		s.add(q, "a", delayq.In(time.Second))
		time.Sleep(2 * time.Second)
		for i, r := range c.started {
			if r.returned() {
				t.Errorf("runner %d went home: %+v, %v", i, r.stats, r.err)
			}
		}
		if len(d.of("a")) != 1 {
			t.Error("a task added afterwards did not run")
		}
		c.fire() // and the baton still passes
		time.Sleep(2 * maxPoll)
		gone := 0
		for _, r := range c.started {
			if r.returned() {
				gone++
			}
		}
		if gone != 1 || c.started[2].returned() {
			t.Errorf("%d of 3 runners have gone, want one of the older", gone)
		}
		time.Sleep(invocation)
		c.wait()
	})
}

func TestRunnerThatIsSentHomeFinishesWhatItRuns(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		q := s.queue("q", delayq.Config{})
		s.add(q, "long")
		c := s.schedule("g", q, taking(2*time.Minute))
		c.fire()
		time.Sleep(time.Minute)
		c.fire()
		time.Sleep(invocation)
		stats := c.wait()
		if first := stats[0]; first.Stop != "baton" || first.Succeeded != 1 || !between(first.Elapsed, 2*time.Minute, 2*time.Minute+time.Second) {
			t.Errorf("stats: %+v", first)
		}
		if second := stats[1]; second.Leased != 0 {
			t.Errorf("the task was leased again: %+v", second)
		}
		checkReigns(t, s.reigns(), 1)
	})
}
