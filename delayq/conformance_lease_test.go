package delayq_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

func TestLeaseMovesWhatIsDueAndNoMore(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.add("b", delayq.At(instant(2*time.Second)))
		r.add("a", delayq.At(instant(time.Second)))
		r.add("c", delayq.At(instant(3*time.Second)))
		r.pass(time.Second - time.Microsecond)
		if got := r.lease(10); len(got) != 0 {
			r.Fatalf("leased %q too early", idsOf(got))
		}
		r.pass(time.Microsecond)
		if got := r.lease(10); !slices.Equal(idsOf(got), []string{"a"}) {
			r.Fatalf("leased %q", idsOf(got))
		}
		r.pass(time.Second)
		r.lease1()
		r.holds(`
			pending c 3000
			processing a 31000
			processing b 32000
			task a of-a
			task b of-b
			task c of-c
			state a L t1 1:0:0 1000
			state b L t2 1:0:0 2000`)
	})
}

func TestTheMostOverdueIsLeasedFirst(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		for i := range 20 {
			r.add(fmt.Sprint(i), delayq.At(instant(time.Duration(i*7%20)*time.Second)))
		}
		r.pass(time.Minute)
		var got []string
		for range 4 {
			got = append(got, idsOf(r.lease(5))...)
		}
		for i, id := range got {
			if want := fmt.Sprint(i * 3 % 20); id != want { // 7 and 3 undo each other modulo 20
				r.Errorf("place %d: %s, want %s", i, id, want)
			}
		}
		if len(got) != 20 {
			r.Errorf("leased %q", got)
		}
	})
}

func TestALeaseTellsTheWholeStory(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		before := time.Now().Truncate(time.Millisecond)
		_, err := r.q.Enqueue(r.Context(), delayq.Task{ID: "x", Type: "mail", Key: "order 7", Payload: []byte("hello"), RunAt: instant(time.Second)})
		r.ok(err)
		r.pass(2 * time.Second)
		check := func(attempt, failed, lost, deliveries int, due time.Duration) *delayq.Lease {
			r.Helper()
			l := r.lease1()
			if l.Attempt != attempt || l.Failed != failed || l.Lost != lost || l.Deliveries != deliveries || !l.Due.Equal(instant(due)) {
				r.Errorf("got %+v, due %v after zero", l.Task, l.Due.Sub(instant(0)))
			}
			if l.ID != "x" || l.Type != "mail" || l.Key != "order 7" || string(l.Payload) != "hello" || l.Queue != r.q.Name() ||
				l.EnqueuedAt.Before(before) || l.EnqueuedAt.After(time.Now()) || len(l.Token()) != 32 {
				r.Errorf("got %+v", l.Task)
			}
			if left := time.Until(l.Deadline); left > leaseTime || left < 0 {
				r.Errorf("%s left of the lease", left)
			}
			return l
		}
		l := check(1, 0, 0, 1, time.Second)
		r.ok(r.q.Retry(r.Context(), l, time.Second, errBoom)) // due at 3 s
		r.pass(2 * time.Second)
		l = check(2, 1, 0, 2, 3*time.Second+time.Microsecond)
		r.ok(r.q.Release(r.Context(), time.Second, l)) // due at 5 s
		r.pass(2 * time.Second)
		check(2, 1, 0, 3, 5*time.Second+time.Microsecond) // leased at 6 s, not charged
		r.pass(leaseTime + time.Second)
		check(3, 1, 1, 4, 36*time.Second) // its old deadline
		info, err := r.q.Get(r.Context(), "x")
		r.ok(err)
		if info.Attempt != 3 || info.Failed != 1 || info.Lost != 1 || info.Deliveries != 4 || info.Reason != delayq.ReasonError ||
			info.LastError != "boom" || !info.LeasedAt.Equal(instant(37*time.Second)) {
			r.Errorf("get says %+v", info)
		}
	})
}

// A lost reply is repaired by the same call once more, not by the end of the lease.
func TestALeaseCallRepeatedGetsTheSameTasks(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.bring("a", "released")
		for _, id := range []string{"b", "c"} {
			r.add(id, delayq.In(2*time.Hour))
		}
		r.pass(3 * time.Hour)
		call := delayq.LeaseCall{Max: 2, Lease: leaseTime, Consumer: "c"}
		first := r.do(call)
		call.Token = first.Token
		state := r.state()
		if got := idsOf(first.Leases); len(got) != 2 {
			r.Fatalf("leased %q", got)
		}
		for range 3 {
			again := r.do(call)
			for i, l := range again.Leases {
				if f := first.Leases[i]; l.ID != f.ID || string(l.Payload) != string(f.Payload) || l.Deliveries != f.Deliveries || l.Attempt != f.Attempt {
					r.Errorf("the repeat got %+v, the call had got %+v", l.Task, f.Task)
				}
			}
			if len(again.Leases) != 2 || r.state() != state {
				r.Errorf("the repeat got %q, and the queue holds\n%s\nbefore\n%s", idsOf(again.Leases), r.state(), state)
			}
		}
		r.ok(r.q.Ack(r.Context(), first.Leases[0]))
		if again := r.do(call); !slices.Equal(idsOf(again.Leases), idsOf(first.Leases[1:])) {
			r.Errorf("after an ack the repeat got %q", idsOf(again.Leases))
		}
		// Another consumer's call in the same instant is another lease.
		other := r.do(delayq.LeaseCall{Max: 10, Lease: leaseTime, Consumer: "d"})
		if len(other.Leases) != 1 {
			r.Errorf("another consumer got %q", idsOf(other.Leases))
		}
		if again := r.do(call); len(again.Leases) != 1 {
			r.Errorf("the repeat got %q, not its own", idsOf(again.Leases))
		}
		r.pass(leaseTime) // too late for a repeat: a call like any other
		if late := r.do(call); len(late.Leases) != 2 || late.Leases[0].Lost != 1 {
			r.Errorf("after the lease's end the call got %q", idsOf(late.Leases))
		}
	})
}

func (r *rig) do(c delayq.LeaseCall) *delayq.Leased {
	r.Helper()
	got, err := delayq.DoLease(r.Context(), r.q, 0, c)
	r.ok(err)
	r.name(got.Leases...)
	return got
}

// Expired leases stand in line at their old deadline, with what fell due meanwhile: neither starves the other, and a task
// that kills its consumers does not stand first for ever. Public case: B82.
func TestExpiredLeasesMergeWithDueTasksInTimeOrder(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		for i := range 4 {
			r.add(fmt.Sprint("expires", i))
			r.pass(time.Second)
			r.lease1() // runs out at 31, 32, 33, 34 s
		}
		for i := range 4 {
			r.add(fmt.Sprint("due", i), delayq.At(instant(time.Duration(31+i)*time.Second+500*time.Millisecond)))
		}
		r.pass(time.Minute)
		// The first call takes back no more than it leases.
		if got := r.lease(1); !slices.Equal(idsOf(got), []string{"expires0"}) {
			r.Fatalf("leased %q", idsOf(got))
		}
		r.holds(`
			processing expires0 94000
			processing expires1 32000
			processing expires2 33000
			processing expires3 34000
			pending due0 31500
			pending due1 32500
			pending due2 33500
			pending due3 34500
			task expires0 of-expires0
			task expires1 of-expires1
			task expires2 of-expires2
			task expires3 of-expires3
			task due0 of-due0
			task due1 of-due1
			task due2 of-due2
			task due3 of-due3
			state expires0 L t5 2:0:1 64000
			state expires1 L t2 1:0:0 2000
			state expires2 L t3 1:0:0 3000
			state expires3 L t4 1:0:0 4000`)
		var got []string
		for range 4 {
			got = append(got, idsOf(r.lease(2))...)
		}
		if want := "due0 expires1 due1 expires2 due2 expires3 due3"; strings.Join(got, " ") != want {
			r.Errorf("leased %q, want %q", got, want)
		}
	})
}

func TestATaskTakenBackKeepsItsOldDeadlineAsDueTime(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.bring("x", "taken back")
		r.holds(`
			pending x 30001
			task x of-x
			state x E t1 1:0:1 1
			done older t2`)
	})
}

// Public case: B64.
func TestOneLeaseReplyIsBoundedInBytes(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		tasks := make([]delayq.Task, 300)
		for i := range tasks {
			tasks[i] = delayq.Task{ID: fmt.Sprintf("%03d", i), Type: "t", Payload: make([]byte, 10_000), RunAt: instant(time.Duration(i) * time.Millisecond)}
		}
		_, err := r.q.EnqueueMany(r.Context(), tasks)
		r.ok(err)
		r.pass(time.Second)
		seen := 0
		for calls := 0; seen < len(tasks); calls++ {
			got := r.do(delayq.LeaseCall{Max: 500, Lease: leaseTime, Consumer: "c"})
			bytes := 0
			for i, l := range got.Leases {
				bytes += len(l.Payload)
				if want := tasks[seen+i].ID; l.ID != want {
					r.Fatalf("got %s, want %s", l.ID, want)
				}
			}
			seen += len(got.Leases)
			if bytes > delayq.MaxReply || len(got.Leases) == 0 {
				r.Fatalf("call %d got %d tasks with %d bytes", calls, len(got.Leases), bytes)
			}
			if more := got.Next == 0; more != (seen < len(tasks)) {
				r.Errorf("with %d left the call says that more is due: %v", len(tasks)-seen, more)
			}
		}
		if calls := r.lease(500); len(calls) != 0 {
			r.Errorf("leased %q twice", idsOf(calls))
		}
	})
}

func TestATaskWithoutARecordIsReportedAndRemoved(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.bring("lost", "retried")
		r.add("a")
		r.add("b")
		r.pass(time.Hour + time.Millisecond)
		r.ok(r.rdb.HDel(r.Context(), delayq.Keys(r.q, 0)[3], "lost", "a").Err())
		got := r.do(delayq.LeaseCall{Max: 10, Lease: leaseTime, Consumer: "c"})
		slices.Sort(got.Missing)
		if !slices.Equal(got.Missing, []string{"a", "lost"}) || !slices.Equal(idsOf(got.Leases), []string{"b"}) {
			r.Errorf("missing %q, leased %q", got.Missing, idsOf(got.Leases))
		}
		r.holds(`
			processing b 3630002
			task b of-b
			state b L t2 1:0:0 3600002`)
	})
}

func TestALeaseSaysWhenToComeBack(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		next := func(most int, want time.Duration) {
			r.Helper()
			got := r.do(delayq.LeaseCall{Max: most, Lease: leaseTime, Consumer: "c"})
			if got.Next != want && (want >= 0 || got.Next >= 0) {
				r.Errorf("next in %v, want %v", got.Next, want)
			}
		}
		next(10, -1)
		r.add("a", delayq.At(instant(10*time.Second)))
		r.add("b", delayq.At(instant(10*time.Second)))
		r.add("c", delayq.At(instant(41*time.Second)))
		next(10, 10*time.Second)
		r.pass(10 * time.Second)
		next(0, 0)              // only asked
		next(1, 0)              // leases a; b is due too
		next(1, 30*time.Second) // leases b; the first lease ends then
		r.pass(29 * time.Second)
		next(10, time.Second)
		r.pass(time.Second)
		next(10, time.Second) // leases a and b again; c is due then
		r.pass(time.Second)
		next(10, 29*time.Second)
	})
}

// The n youngest runners of a group stay. Each row is a lease call of one runner at one instant.
func TestTheBatonGoesToTheYoungestRunners(t *testing.T) {
	type call struct {
		runner   string
		register bool
		keep     int
		stay     bool
	}
	const first, later = true, false
	everyServer(t, 1, func(r *rig) {
		for name, calls := range map[string][]call{
			"one at a time": {
				{"a", first, 1, true},
				{"a", later, 1, true},
				{"b", first, 1, true},
				{"a", later, 1, false},
				{"b", later, 1, true},
				{"a", later, 1, false},
				{"c", first, 1, true},
				{"b", later, 1, false},
				{"a", later, 1, false},
				{"c", later, 1, true},
			},
			"a registration repeated counts once": {
				{"a", first, 2, true},
				{"a", first, 2, true},
				{"b", first, 2, true},
				{"b", first, 2, true},
				{"a", later, 2, true},
				{"b", later, 2, true},
				{"c", first, 2, true},
				{"a", later, 2, false},
				{"b", later, 2, true},
			},
			"the two youngest stay": {
				{"a", first, 2, true},
				{"b", first, 2, true},
				{"c", first, 2, true},
				{"a", later, 2, false},
				{"b", later, 2, true},
				{"c", later, 2, true},
				{"d", first, 2, true},
				{"b", later, 2, false},
				{"c", later, 2, true},
				{"d", later, 2, true},
			},
			"fewer runners wanted": {
				{"a", first, 2, true}, {"b", first, 2, true}, {"a", later, 1, false}, {"b", later, 1, true},
			},
			"a runner that Redis has forgotten stays where there is room": {
				{"a", later, 1, true}, {"b", later, 1, false}, {"a", later, 1, true},
			},
			"no group, no baton": {{"", first, 1, true}, {"", later, 1, true}},
		} {
			r.Run(name, func(t *testing.T) {
				r := r.sub(t)
				for i, c := range calls {
					// The clock may well stand still or step back between two runners.
					r.pass([]time.Duration{0, time.Second, -time.Minute}[i%3])
					group, consumer := name[:3], c.runner
					if c.runner == "" {
						group, consumer = "", "x"
					}
					got := r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: consumer, Group: group, Register: c.register, Keep: c.keep})
					if got.Stay != c.stay {
						t.Errorf("call %d, %+v: stay %v", i, c, got.Stay)
					}
					// A group of its own is not touched.
					if other := r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "z", Group: "other", Register: true, Keep: 1}); !other.Stay {
						t.Errorf("call %d sent the runner of another group home", i)
					}
				}
			})
		}
	})
}

func TestARunnerSentHomeStillGetsItsTasksRepeated(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.bring("x", "due")
		a := delayq.LeaseCall{Max: 1, Lease: leaseTime, Consumer: "a", Group: "g", Register: true, Keep: 1}
		first := r.do(a)
		r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "b", Group: "g", Register: true, Keep: 1})
		a.Token, a.Register = first.Token, false
		if again := r.do(a); again.Stay || !slices.Equal(idsOf(again.Leases), []string{"x"}) {
			r.Errorf("the repeat says stay %v and gives %q", again.Stay, idsOf(again.Leases))
		}
	})
}

// Workers look for cancelled tasks when this number changes.
func TestACancelOfARunningTaskRaisesTheVersion(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		version := func() int64 { return r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "c"}).Version }
		r.bring("waiting", "cancelled")
		l := r.bring("x", "leased")
		before := version()
		r.cancel("x", delayq.Running)
		after := version()
		r.cancel("x", delayq.Running)
		r.cancel("unknown", delayq.Unknown)
		if again := version(); after == before || again != after {
			r.Errorf("version %d, after a cancel %d, after a repeat %d", before, after, again)
		}
		repeat := r.do(delayq.LeaseCall{Token: rawToken(l), Max: 1, Lease: leaseTime, Consumer: "c"})
		if repeat.Version != after {
			r.Errorf("a repeated call says version %d, want %d", repeat.Version, after)
		}
	})
}

// rawToken is a lease's token as Redis has it.
func rawToken(l *delayq.Lease) string {
	var raw []byte
	if _, err := fmt.Sscanf(l.Token(), "%x", &raw); err != nil {
		panic(err)
	}
	return string(raw)
}

// Public case: B87.
func TestConsumersAreForgottenAfterAnHour(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		ctx := r.Context()
		r.add("x", delayq.In(time.Second))
		for i := range 50 {
			name := fmt.Sprint("short-lived-", i)
			r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: name})
			r.beat(name, `{"v":1}`)
		}
		r.pass(time.Second + time.Millisecond)
		r.do(delayq.LeaseCall{Max: 1, Lease: leaseTime, Consumer: "with-a-lease"})
		stats, err := r.q.Stats(ctx)
		r.ok(err)
		if stats.Consumers != 51 {
			r.Errorf("%d consumers, want 51", stats.Consumers)
		}
		r.pass(2 * time.Hour)
		r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "new"})
		if stats, err = r.q.Stats(ctx); err != nil || stats.Consumers != 1 {
			r.Errorf("%d consumers, %v; want 1", stats.Consumers, err)
		}
		if n := r.rdb.HLen(ctx, delayq.Keys(r.q, 0)[9]).Val(); n != 1 {
			r.Errorf("req has %d entries, want the sentinel", n)
		}
		if n := r.rdb.HLen(ctx, delayq.Keys(r.q, 0)[12]).Val(); n != 1 {
			r.Errorf("beats has %d entries, want the sentinel", n)
		}
	})
}

func TestWhatLeaseRefuses(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		for _, o := range []delayq.LeaseOptions{
			{Max: 0, Lease: leaseTime, Consumer: "c"},
			{Max: 10_001, Lease: leaseTime, Consumer: "c"},
			{Max: 1, Lease: 99 * time.Millisecond, Consumer: "c"},
			{Max: 1, Lease: 13 * time.Hour, Consumer: "c"},
			{Max: 1, Lease: leaseTime},
			{Max: 1, Lease: leaseTime, Consumer: "a b"},
			{Max: 1, Lease: leaseTime, Consumer: strings.Repeat("x", 129)},
		} {
			_, err := r.q.Lease(r.Context(), o)
			r.is(err, delayq.ErrInvalid, o)
		}
	})
}

func TestEveryShardIsServed(t *testing.T) {
	everyMode(t, 16, func(r *rig) {
		want := map[string]bool{}
		for i := range 200 {
			want[fmt.Sprint(i)] = true
			r.add(fmt.Sprint(i))
		}
		r.pass(time.Second)
		firsts := map[int]bool{}
		for len(want) > 0 {
			got := r.lease(7)
			if len(got) == 0 {
				r.Fatalf("%d tasks are never leased", len(want))
			}
			firsts[delayq.ShardOf(r.q, got[0].ID)] = true
			for _, l := range got {
				if !want[l.ID] {
					r.Errorf("%s leased twice", l.ID)
				}
				delete(want, l.ID)
			}
			r.ok(r.q.Ack(r.Context(), got...))
		}
		if len(firsts) != 16 {
			r.Errorf("only %d of 16 shards had a turn at being first", len(firsts))
		}
	})
}
