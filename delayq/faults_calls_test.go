package delayq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// A apiCall is a call of the API that runs one script once, in a world where it has every kind of thing to do.
type apiCall struct {
	name   string // "ledger: ..." is made in a queue that has one
	verb   string // of the script
	reads  bool   // changes nothing
	create bool   // needs memory: a full Redis refuses it
	do     func(ctx context.Context, w *world) (any, error)
}

var apiCalls = slices.Concat(redisCalls, mirrorCalls)

var redisCalls = []apiCall{
	{"open", "init", false, false, func(ctx context.Context, w *world) (any, error) {
		q, err := delayq.Open(ctx, w.rdb, w.q.Name(), w.cfg)
		if err != nil {
			return nil, err
		}
		return fmt.Sprint(q.Name(), q.Shards(), q.MaxPayload()), nil
	}},
	{"enqueue", "enqueue", false, true, func(ctx context.Context, w *world) (any, error) {
		return w.q.Enqueue(ctx, task("new"), delayq.In(time.Hour))
	}},
	{"enqueue many", "enqueue", false, true, func(ctx context.Context, w *world) (any, error) {
		return w.q.EnqueueMany(ctx, []delayq.Task{task("new"), task("waits"), task("held"), task("dead1"), task("done"), task("cancelled")}, delayq.In(time.Hour))
	}},
	{"enqueue, replacing", "enqueue", false, true, func(ctx context.Context, w *world) (any, error) {
		results, err := w.q.EnqueueMany(ctx, []delayq.Task{task("retried"), task("held")}, delayq.In(time.Hour), delayq.OnConflict(delayq.Replace))
		if results[0].Outcome == delayq.Created {
			results[0].Outcome = delayq.Replaced // as a resend answers when it cannot know
		}
		return results, err
	}},
	{"enqueue, rejecting", "enqueue", false, true, func(ctx context.Context, w *world) (any, error) {
		return w.q.EnqueueMany(ctx, []delayq.Task{task("new"), task("waits")}, delayq.In(time.Hour), delayq.OnConflict(delayq.Reject))
	}},
	{"lease", "lease", false, false, func(ctx context.Context, w *world) (any, error) {
		got, err := delayq.DoLease(ctx, w.q, 0, delayq.LeaseCall{Max: 2, Lease: leaseTime, Consumer: "other", Group: "g", Register: true, Keep: 1})
		if err != nil {
			return nil, err
		}
		w.name(got.Leases...)
		var tasks []delayq.Task
		for _, l := range got.Leases {
			t := l.Task
			t.EnqueuedAt = time.Time{}
			tasks = append(tasks, t)
		}
		slices.SortFunc(tasks, func(a, b delayq.Task) int { return strings.Compare(a.ID, b.ID) })
		return []any{tasks, got.Stay, got.Version, got.Missing}, nil
	}},
	{"extend", "extend", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Extend(ctx, time.Minute, w.leases()...)
	}},
	{"ack", "ack", false, false, func(ctx context.Context, w *world) (any, error) { return nil, w.q.Ack(ctx, w.leases()...) }},
	{"release", "release", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Release(ctx, time.Minute, w.leases()...)
	}},
	{"retry", "retry", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Retry(ctx, w.held, time.Minute, errBoom)
	}},
	{"retry when told to stop", "retry", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Retry(ctx, w.stopped, time.Minute, errBoom)
	}},
	{"bury", "bury", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Bury(ctx, w.held, errBoom)
	}},
	{"bury when told to stop", "bury", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Bury(ctx, w.stopped, errBoom)
	}},
	{"bury when the lease is lost", "bury", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Bury(ctx, w.lost, errBoom)
	}},
	{"cancel", "cancel", false, false, func(ctx context.Context, w *world) (any, error) {
		return w.q.CancelMany(ctx, []string{"waits", "held", "expired", "dead1", "done", "unknown", "stopped", "retried"})
	}},
	{"reschedule", "reschedule", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.RescheduleIn(ctx, "waits", 2*time.Hour)
	}},
	{"reschedule of a running task", "reschedule", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.RescheduleIn(ctx, "held", 2*time.Hour)
	}},
	{"replay", "replay", false, false, func(ctx context.Context, w *world) (any, error) { return nil, w.q.Replay(ctx, "dead1", "dead2") }},
	{"purge", "purge", false, false, func(ctx context.Context, w *world) (any, error) { return nil, w.q.Purge(ctx, "dead1", "dead2") }},
	{"stats", "stats", true, false, func(ctx context.Context, w *world) (any, error) {
		s, err := w.q.Stats(ctx)
		if err != nil {
			return nil, err
		}
		return []int64{s.Pending, s.Due, s.Processing, s.Dead, s.Created, s.Leased}, nil
	}},
	{"get", "get", true, false, func(ctx context.Context, w *world) (any, error) {
		in, err := w.q.Get(ctx, "dead1")
		if err != nil {
			return nil, err
		}
		return []any{in.State, in.LastError}, nil
	}},
	{"list", "list", true, false, func(ctx context.Context, w *world) (any, error) {
		page, err := w.q.List(ctx, delayq.ListOptions{State: delayq.StateDead})
		if err != nil {
			return nil, err
		}
		return len(page.Tasks), nil
	}},
	{"beat", "beat", false, false, func(ctx context.Context, w *world) (any, error) {
		reply, err := delayq.RunScript(ctx, w.q, 0, "beat", w.now(), "other", `{"v":1}`)
		if err != nil {
			return nil, err
		}
		return reply.([]any)[0], nil
	}},
	{"consumers", "consumers", true, false, func(ctx context.Context, w *world) (any, error) { return w.q.Consumers(ctx, 10) }},
	{"audit", "audit", true, false, func(ctx context.Context, w *world) (any, error) {
		report, err := w.q.Audit(ctx, delayq.AuditOptions{})
		if err != nil {
			return nil, err
		}
		return report, nil
	}},
}

// world is what the call is made in.
func (call apiCall) world(t *testing.T, rdb redis.UniversalClient) *world {
	t.Helper()
	if strings.HasPrefix(call.name, "ledger: ") {
		return newLedgerWorld(t, rdb)
	}
	return newWorld(t, rdb, delayq.Config{})
}

// A world is a queue of one shard with a task in every situation, the same each time it is made.
type world struct {
	*rig
	held, stopped, lost *delayq.Lease
}

func newWorld(t *testing.T, rdb redis.UniversalClient, cfg delayq.Config) *world {
	t.Helper()
	cfg.DeadCap = 2 // one more trims
	w := &world{rig: newRig(t, rdb, cfg)}
	w.broken = true // its users look at more than an audit does
	ctx := w.Context()
	take := func(d time.Duration, ids ...string) []*delayq.Lease {
		t.Helper()
		for _, id := range ids {
			w.add(id)
		}
		w.pass(time.Millisecond)
		got := w.do(delayq.LeaseCall{Max: 10, Lease: d, Consumer: "c"}).Leases
		if len(got) != len(ids) {
			t.Fatalf("leased %q, want %q", idsOf(got), ids)
		}
		return got
	}
	take(leaseTime, "expired", "told to stop and expired")
	w.cancel("told to stop and expired", delayq.Running)
	w.ok(w.q.Ack(ctx, take(leaseTime, "done")...))
	w.add("cancelled", delayq.In(time.Hour))
	w.cancel("cancelled", delayq.Cancelled)
	w.ok(w.q.Retry(ctx, take(leaseTime, "retried")[0], time.Hour, errBoom))
	for _, id := range []string{"dead1", "dead2"} {
		w.ok(w.q.Bury(ctx, take(leaseTime, id)[0], errBoom))
	}
	w.lost = take(leaseTime, "lost")[0]
	w.ok(w.q.Release(ctx, 0, w.lost))
	w.pass(time.Millisecond)
	w.do(delayq.LeaseCall{Max: 1, Lease: time.Hour, Consumer: "c"})
	w.held = take(time.Hour, "held")[0]
	w.stopped = take(time.Hour, "stopped")[0]
	w.cancel("stopped", delayq.Running)
	w.add("waits", delayq.In(time.Hour))
	w.add("due", delayq.In(time.Minute))
	w.pass(3 * time.Minute) // leases have run out, and the next tombstone rotates its generations
	return w
}

func (w *world) leases() []*delayq.Lease { return []*delayq.Lease{w.held, w.stopped, w.lost} }

// told is what a call answered, without the names that differ from one world to another.
func (w *world) told(answer any, err error) string {
	b, _ := json.Marshal(answer)
	return strings.ReplaceAll(fmt.Sprint(string(b), ", error ", err), w.q.Name(), "Q")
}

// counted are the counters, but for those of events that really happen twice when a call is sent twice.
func (w *world) counted() string {
	w.Helper()
	s, err := w.q.Stats(context.Background())
	w.ok(err)
	s.Queue, s.Duplicates, s.Stale, s.Rescheduled, s.Shards[0].Epoch = "", 0, 0, 0, ""
	b, _ := json.Marshal(s)
	return string(b)
}

// dump is every key of the queue as Redis would save it.
func (w *world) dump() map[string]string {
	w.Helper()
	dump := map[string]string{}
	for _, k := range delayq.Keys(w.q, 0) {
		v, err := w.rdb.Dump(context.Background(), k).Result()
		if !errors.Is(err, redis.Nil) {
			w.ok(err)
		}
		_, name, _ := strings.Cut(k, "}:")
		dump[name] = v
	}
	return dump
}

// unchanged checks that a failed call has written nothing.
func (w *world) unchanged(before map[string]string, what string) {
	w.Helper()
	for name, v := range w.dump() {
		if v != before[name] {
			w.Errorf("%s: %s changed", what, name)
		}
	}
}

// twin runs a call in two worlds on one server, the second one with a fault, and expects the same of both.
func twin(t *testing.T, call apiCall, plain, faulty redis.UniversalClient, fault func(w *world)) {
	t.Helper()
	want := call.world(t, plain)
	wantTold := want.told(call.do(t.Context(), want))
	got := call.world(t, faulty)
	fault(got)
	if told := got.told(call.do(t.Context(), got)); told != wantTold {
		t.Errorf("answered\n%s\nwithout the fault\n%s", told, wantTold)
	}
	if got.state() != want.state() {
		t.Errorf("the queue holds\n%s\nwithout the fault\n%s", got.state(), want.state())
	}
	if got.counted() != want.counted() {
		t.Errorf("counters\n%s\nwithout the fault\n%s", got.counted(), want.counted())
	}
}
