package delayq_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// beat sends a beat with what a worker says.
func (r *rig) beat(consumer, said string) {
	r.Helper()
	reply, err := delayq.RunScript(r.Context(), r.q, 0, "beat", r.now(), consumer, said)
	r.ok(err)
	if f := reply.([]any); f[0] != int64(1) || f[1] != instant(time.Duration(r.clock.Load())*time.Microsecond).UnixMicro() {
		r.Errorf("beat of %s answered %v", consumer, f)
	}
}

// consumers is a line a consumer: the name and everything else as JSON.
func (r *rig) consumers(limit int) string {
	r.Helper()
	list, err := r.q.Consumers(r.Context(), limit)
	r.ok(err)
	var lines []string
	for _, c := range list {
		b, err := json.Marshal(c)
		r.ok(err)
		lines = append(lines, string(b))
	}
	return strings.Join(lines, "\n")
}

// sameConsumers compares with what a list should be.
func (r *rig) sameConsumers(want ...delayq.Consumer) {
	r.Helper()
	var lines []string
	for _, c := range want {
		b, err := json.Marshal(c)
		r.ok(err)
		lines = append(lines, string(b))
	}
	if got := r.consumers(10); got != strings.Join(lines, "\n") {
		r.Errorf("consumers\n%s\nwant\n%s", got, strings.Join(lines, "\n"))
	}
}

func TestConsumersAreListedWithWhatTheySaid(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyServer(t, shards, func(r *rig) {
				r.sameConsumers()
				r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "bare"})
				r.pass(time.Minute)
				r.beat("worker", `{"v":1,"s":60000,"p":1500,"r":3,"c":32,"k":1,"o":20000,"w":-2500,"t":["a","b,c \u0000"],"x":4}`)
				worker := delayq.Consumer{
					Name: "worker", Seen: instant(time.Minute), Beat: instant(time.Minute), Started: instant(0), Progress: instant(58500 * time.Millisecond),
					Running: 3, Concurrency: 32, Stuck: 1, OldestRun: 20 * time.Second, Skew: -2500 * time.Microsecond,
					Types: []string{"a", "b,c \x00"}, TypesCut: 4,
				}
				bare := delayq.Consumer{Name: "bare", Seen: instant(0)}
				r.sameConsumers(worker, bare)
				r.pass(time.Second)
				r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: "bare"})
				bare.Seen = instant(time.Minute + time.Second)
				r.sameConsumers(bare, worker)
				if got := r.consumers(1); !strings.Contains(got, "worker") || strings.Contains(got, "bare") {
					r.Errorf("the one that matters most is %s", got)
				}

				// What it says last is that it is gone, and that it was there stays known.
				r.pass(time.Second)
				for range 2 {
					r.beat("worker", "")
				}
				r.sameConsumers(delayq.Consumer{Name: "worker", Seen: instant(time.Minute + 2*time.Second)}, bare)
				if n := r.rdb.HLen(r.Context(), delayq.Keys(r.q, 0)[12]).Val(); n != 1 {
					r.Errorf("beats has %d entries, want the sentinel", n)
				}
				stats, err := r.q.Stats(r.Context())
				r.ok(err)
				if !stats.LastRun.Equal(instant(time.Minute + 2*time.Second)) {
					r.Errorf("last run %v", stats.LastRun)
				}
			})
		})
	}
}

// A worker of a later version may say more, or something else: what can be read is read.
func TestBeatsOfOtherVersionsAreReadAsFarAsTheyGo(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.pass(time.Minute)
		at := instant(time.Minute)
		for said, want := range map[string]delayq.Consumer{
			`{"v":2,"s":1000,"p":0,"r":1,"c":2,"new":{"x":[1]}}`: {Started: at.Add(-time.Second), Progress: at, Running: 1, Concurrency: 2},
			`{"v":0}`:           {},
			`{"v":1,"s":"no"}`:  {},
			"not JSON \x00\xff": {},
			"2 of another kind": {},
			`{"s":1000,"c":7}`:  {},
		} {
			r.beat("w", said)
			want.Name, want.Seen, want.Beat = "w", at, at
			r.sameConsumers(want)
		}
		r.ok(r.rdb.HSet(r.Context(), delayq.Keys(r.q, 0)[12], "w", "by hand").Err())
		r.sameConsumers(delayq.Consumer{Name: "w", Seen: at})
	})
}

// A worker that was killed is seen for as long as it is remembered, however many have come and gone since.
func TestAKilledWorkerIsNotHiddenByLaterRuns(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		const killed, ended, calls = 3, 40, 30
		for i := range killed {
			r.beat(fmt.Sprint("killed", i), `{"v":1}`)
		}
		for i := range ended {
			r.pass(time.Second)
			r.beat(fmt.Sprint("ended", i), `{"v":1}`)
			r.beat(fmt.Sprint("ended", i), "")
		}
		for i := range calls {
			r.pass(time.Second)
			r.do(delayq.LeaseCall{Lease: leaseTime, Consumer: fmt.Sprint("calls", i)})
		}
		for _, limit := range []int{2, 3, 10, 50, 73, 100} {
			list, err := r.q.Consumers(r.Context(), limit)
			r.ok(err)
			if want := min(limit, killed+ended+calls); len(list) != want {
				r.Errorf("%d of at most %d, want %d", len(list), limit, want)
			}
			found := 0
			for i, c := range list {
				if strings.HasPrefix(c.Name, "killed") {
					found++
				}
				if i > 0 && c.Seen.After(list[i-1].Seen) {
					r.Errorf("%s stands behind %s", c.Name, list[i-1].Name)
				}
			}
			if found != min(limit, killed) {
				r.Errorf("of %d listed %d were killed", limit, found)
			}
			if limit > killed && list[0].Name != fmt.Sprint("calls", calls-1) {
				r.Errorf("the latest is %s", list[0].Name)
			}
		}
	})
}

func TestConsumersAreManyOrRefused(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		const n = 1003
		long := strings.Repeat("x", 2048-len(`{"v":1,"t":["`)-len(`"]}`))
		for i := range n {
			r.beat(fmt.Sprintf("w%04d", i), `{"v":1,"t":["`+long+`"]}`)
			r.pass(time.Millisecond)
		}
		for _, limit := range []int{1, 499, 500, 501, 1000} {
			list, err := r.q.Consumers(r.Context(), limit)
			r.ok(err)
			if len(list) != limit {
				r.Fatalf("%d of %d", len(list), limit)
			}
			for i, c := range list {
				if want := fmt.Sprintf("w%04d", n-1-i); c.Name != want || len(c.Types) != 1 || c.Types[0] != long {
					r.Fatalf("place %d of %d is %s with %d types, want %s", i, limit, c.Name, len(c.Types), want)
				}
			}
		}
		for _, limit := range []int{0, -1, 1001} {
			_, err := r.q.Consumers(r.Context(), limit)
			r.is(err, delayq.ErrInvalid, limit)
		}
		for _, args := range [][]any{{r.now(), "", "x"}, {r.now(), "c", long + strings.Repeat("x", 50)}, {r.now(), "c"}} {
			if _, err := delayq.RunScript(r.Context(), r.q, 0, "beat", args...); err == nil || !strings.Contains(err.Error(), "malformed") {
				r.Errorf("beat of %d arguments: %v", len(args), err)
			}
		}
		for _, args := range [][]any{{r.now(), 0, 0}, {r.now(), 0, 501}, {r.now(), -1, 1}, {r.now(), 0}} {
			if _, err := delayq.RunScript(r.Context(), r.q, 0, "consumers", args...); err == nil || !strings.Contains(err.Error(), "malformed") {
				r.Errorf("consumers of %v: %v", args, err)
			}
		}
	})
}

// A beat does not make a shard that Redis has lost: it would have no epoch.
func TestABeatMakesNoShard(t *testing.T) {
	everyServer(t, 2, func(r *rig) {
		r.broken = true
		for shard := range 2 {
			r.ok(r.rdb.Del(r.Context(), delayq.Keys(r.q, shard)[8]).Err())
		}
		reply, err := delayq.RunScript(r.Context(), r.q, 0, "beat", r.now(), "w", `{"v":1}`)
		r.ok(err)
		if f := reply.([]any); f[0] != int64(-9) {
			r.Errorf("answered %v", f)
		}
		if r.rdb.HLen(r.Context(), delayq.Keys(r.q, 0)[12]).Val() != 1 {
			r.Error("and wrote")
		}
		r.sameConsumers() // makes it again
	})
}

// A version from before the beats has made the shard: it gets the key with its sentinel.
func TestABeatMakesItsKeyWhole(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.ok(r.rdb.Del(r.Context(), delayq.Keys(r.q, 0)[12]).Err())
		r.sameConsumers()
		r.beat("w", `{"v":1}`)
		r.beat("w", "")
		r.beat("w", "")
	}) // and the audit at the end
}

// Of many leases the ones that end soon are looked at, and the workers tell of the others.
func TestTheAgeOfWhatRuns(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		age := func(want time.Duration) {
			r.Helper()
			stats, err := r.q.Stats(r.Context())
			r.ok(err)
			if stats.OldestProcessingAge != want {
				r.Errorf("age %v, want %v", stats.OldestProcessingAge, want)
			}
		}
		age(0)
		r.add("first")
		r.pass(time.Millisecond)
		first := r.lease1()
		age(0)
		r.pass(10 * time.Second)
		r.ok(r.q.Extend(r.Context(), time.Minute, first)) // a heartbeat does not make it younger
		r.add("second")
		r.pass(time.Second)
		second := r.lease1()
		age(11 * time.Second)
		r.ok(r.q.Ack(r.Context(), first))
		age(0)
		r.pass(time.Second)
		age(time.Second)
		r.pass(leaseTime)
		age(0) // nobody holds it any more
		r.is(r.q.Ack(r.Context(), second), nil)

		// 300 leases, the oldest of which ends last.
		r.add("old")
		r.pass(time.Millisecond)
		old := r.lease1()
		r.pass(10 * time.Second)
		tasks := make([]delayq.Task, 299)
		for i := range tasks {
			tasks[i] = task(fmt.Sprint("new", i))
		}
		_, err := r.q.EnqueueMany(r.Context(), tasks)
		r.ok(err)
		r.pass(time.Second)
		r.lease(500)
		r.ok(r.q.Extend(r.Context(), time.Hour, old))
		r.pass(time.Second)
		age(time.Second)
		r.beat("w", `{"v":1,"o":11000}`)
		age(11 * time.Second)
		r.pass(31 * time.Second) // a beat of the past; of the leases only the old one is left
		age(43 * time.Second)
	})
}

// A worker that has not beaten for long may be dead, and what it said then counts no more.
func TestTheAgeOfWhatRunsForgetsTheDead(t *testing.T) {
	onRedis(t, delayq.Config{}, func(r *rig) {
		tasks := make([]delayq.Task, 250)
		for i := range tasks {
			tasks[i] = task(fmt.Sprint(i))
		}
		_, err := r.q.EnqueueMany(r.Context(), tasks)
		r.ok(err)
		r.pass(time.Second)
		r.beat("dead", `{"v":1,"o":99000}`)
		got, err := r.q.Lease(r.Context(), delayq.LeaseOptions{Max: 250, Lease: time.Hour, Consumer: "c"})
		r.ok(err)
		r.name(got...)
		for wait, want := range map[time.Duration]time.Duration{29 * time.Second: 99 * time.Second, 31 * time.Second: 31 * time.Second} {
			r.clock.Store((time.Second + wait).Microseconds())
			stats, err := r.q.Stats(r.Context())
			r.ok(err)
			if stats.OldestProcessingAge != want {
				r.Errorf("after %v: age %v, want %v", wait, stats.OldestProcessingAge, want)
			}
		}
	})
}

func TestQueuesAreFoundOnEveryMaster(t *testing.T) {
	everyServer(t, 3, func(r *rig) {
		ctx := r.Context()
		var want []string
		for i := range 30 {
			name := fmt.Sprint(r.q.Name(), "/a.b_c-d:0:", i)
			q := r.open(name, delayq.Config{Shards: 1 + i%3, ScriptHeader: r.cfg.ScriptHeader, OnWarning: func(delayq.Warning) {}})
			r.Cleanup(func() {
				for shard := range q.Shards() {
					r.rdb.Del(context.Background(), delayq.Keys(q, shard)...)
				}
			})
			want = append(want, name)
		}
		want = append(want, r.q.Name())
		slices.Sort(want)
		for key, kind := range map[string]string{
			"dq:{" + r.q.Name() + "*:0}:meta": "hash", "dq:{" + r.q.Name() + "x:0}:meta": "string", "dq:{" + r.q.Name() + "y:0}:metax": "hash",
			"dq:{:0}:meta": "hash", "xdq:{" + r.q.Name() + "z:0}:meta": "hash",
		} {
			if kind == "hash" {
				r.ok(r.rdb.HSet(ctx, key, "epoch", "e").Err())
			} else {
				r.ok(r.rdb.Set(ctx, key, "v", 0).Err())
			}
			r.Cleanup(func() { r.rdb.Del(context.Background(), key) })
		}
		got, err := delayq.Queues(ctx, r.rdb)
		r.ok(err)
		if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			r.Errorf("not in order, or one twice: %q", got)
		}
		got = slices.DeleteFunc(got, func(name string) bool { return !strings.HasPrefix(name, r.q.Name()) })
		if !slices.Equal(got, want) {
			r.Errorf("queues %q\nwant %q", got, want)
		}
	})
}
