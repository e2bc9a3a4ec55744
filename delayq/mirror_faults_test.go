package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// mirrorCalls are made in a ledger world. No faults_*_test.go knows them: each stands its trials like any other call.
var mirrorCalls = []apiCall{
	{"ledger: open", "init", false, false, func(ctx context.Context, w *world) (any, error) {
		// Open itself lives without Redis, so this goes by the shard.
		return delayq.Init(ctx, w.q, 0)
	}},
	{"ledger: show what is new", "put", false, true, func(ctx context.Context, w *world) (any, error) {
		return w.q.Mirror().Show(ctx, []delayq.LedgerRow{row("new", 100, time.Hour), row("waits", 101, time.Hour)}, delayq.Showing{})
	}},
	{"ledger: show what moves", "put", false, false, func(ctx context.Context, w *world) (any, error) {
		return w.q.Mirror().Show(ctx, []delayq.LedgerRow{
			row("waits", 100, 2*time.Hour), row("held", 101, time.Hour), row("lost", 102, time.Hour), row("stray1", 1, time.Hour),
			row("unbooked", 103, time.Hour), row("twice", 104, time.Hour), row("idle", 105, time.Hour),
		}, delayq.Showing{})
	}},
	{"ledger: show what has ended", "drop", false, false, func(ctx context.Context, w *world) (any, error) {
		return w.q.Mirror().Show(ctx, []delayq.LedgerRow{
			ended("waits", 100), ended("held", 101), ended("stray1", 102), ended("unbooked", 103), ended("twice", 104), ended("idle", 105),
			ended("no record", 106), ended("no place", 107), ended("unknown", 108), ended("dropped", 1), ended("due", 1),
		}, delayq.Showing{Durations: true})
	}},
	{"ledger: lease", "lease", false, false, func(ctx context.Context, w *world) (any, error) {
		got, err := delayq.DoLease(ctx, w.q, 0, delayq.LeaseCall{Max: 5, Lease: leaseTime, Consumer: "other"})
		if err != nil {
			return nil, err
		}
		w.name(got.Leases...)
		words := strings.Fields(revisions(got))
		slices.Sort(words) // a repeat has another order
		return words, nil
	}},
	{"ledger: quarantine", "quarantine", false, false, func(ctx context.Context, w *world) (any, error) {
		n, err := w.q.Mirror().Quarantine(ctx, []delayq.Suspect{
			{ID: "waits", Rev: 1},
			{ID: "held", Rev: 1, Token: delayq.BareToken(w.held)},
			{ID: "lost", Rev: 7},
			{ID: "stray2", Rev: 1},
			{ID: "unbooked"},
			{ID: "no place", Rev: 1},
			{ID: "unknown"},
		}, "unbooked", "nobody knows it")
		return min(n, 0), err // a repeat cannot tell its own from what the cap took, or from what was there before
	}},
	{"ledger: quarantine what has no record", "quarantine", false, false, func(ctx context.Context, w *world) (any, error) {
		n, err := w.q.Mirror().Quarantine(ctx, []delayq.Suspect{{ID: "no record", Rev: 1}}, "unbooked", "nobody knows it")
		return min(n, 0), err // a repeat finds nothing
	}},
	{"ledger: mend", "mend", false, false, func(ctx context.Context, w *world) (any, error) {
		n, unbooked, err := w.q.Mirror().Mend(ctx, []string{"no record", "no place", "unbooked", "held", "no record either"})
		return []any{n, unbooked}, err
	}},
	{"ledger: mend to make whole", "mend", false, false, func(ctx context.Context, w *world) (any, error) {
		_, unbooked, err := w.q.Mirror().Mend(ctx, []string{"twice", "idle"})
		return unbooked, err // a repeat finds them whole
	}},
	{"ledger: nudge", "nudge", false, false, func(ctx context.Context, w *world) (any, error) {
		return nil, w.q.Mirror().Nudge(ctx, []string{"held", "waits"})
	}},
	{"ledger: check", "check", true, false, func(ctx context.Context, w *world) (any, error) {
		return w.q.Mirror().Check(ctx, []delayq.LedgerWant{{ID: "waits", Rev: 1}, {ID: "held", Rev: 2}, {ID: "twice", Rev: 1}, {ID: "idle", Rev: 1}})
	}},
	{"ledger: audit", "audit", true, false, func(ctx context.Context, w *world) (any, error) {
		report, err := w.q.Audit(ctx, delayq.AuditOptions{})
		if err != nil {
			return nil, err
		}
		slices.SortFunc(report.Violations, func(a, b delayq.Violation) int { return strings.Compare(a.ID+a.Detail, b.ID+b.Detail) })
		return report, nil
	}},
}

// newLedgerWorld is a world of a queue with a ledger, with an entry in every situation, whole and in pieces; each is of revision 1.
func newLedgerWorld(t *testing.T, rdb redis.UniversalClient) *world {
	t.Helper()
	w := &world{rig: newRig(t, rdb, delayq.Config{DeadCap: 2, Ledger: paperLedger{}})}
	w.broken = true
	for _, id := range []string{"lost", "held"} {
		w.show("1 0 0 0", row(id, 1, 0))
		w.pass(time.Millisecond)
		d := leaseTime
		if id == "held" {
			d = time.Hour
		}
		got := w.do(delayq.LeaseCall{Max: 10, Lease: d, Consumer: "c"}).Leases
		w.held = got[len(got)-1]
	}
	w.show("9 0 0 0", row("stray1", 1, time.Hour), row("stray2", 1, time.Hour), row("waits", 1, time.Hour), row("due", 1, time.Minute),
		row("no record", 1, time.Hour), row("no place", 1, time.Hour), row("twice", 1, time.Hour), row("idle", 1, time.Hour),
		row("unbooked", 1, time.Hour))
	w.quarantine(1, delayq.Suspect{ID: "stray1", Rev: 1})
	w.pass(time.Millisecond)
	w.quarantine(1, delayq.Suspect{ID: "stray2", Rev: 1})
	w.show("0 1 0 0", ended("dropped", 1))
	w.harm("no record", "record")
	w.rdb.HSet(w.Context(), delayq.Keys(w.q, 0)[11], "no record either", 1)
	w.harm("no place", "place")
	w.harm("twice", "dead")
	w.harm("idle", "lease without state")
	w.harm("unbooked", "rev")
	w.pass(3 * time.Minute) // leases have run out, and the next tombstone rotates its generations
	return w
}

// harm takes a piece of an entry away by hand, or adds one.
func (r *rig) harm(id, what string) {
	r.Helper()
	ctx, k := r.Context(), delayq.Keys(r.q, delayq.ShardOf(r.q, id))
	pipe := r.rdb.Pipeline()
	switch what {
	case "record":
		pipe.HDel(ctx, k[3], id)
	case "rev":
		pipe.HDel(ctx, k[11], id)
	case "place":
		for _, zset := range k[:3] {
			pipe.ZRem(ctx, zset, id)
		}
	case "state":
		pipe.HDel(ctx, k[4], id)
	case "dead": // as well
		pipe.ZAdd(ctx, k[2], redis.Z{Score: zero * 1000, Member: id})
	case "pending":
		pipe.ZAdd(ctx, k[0], redis.Z{Score: zero * 1000, Member: id})
	case "lease without state":
		pipe.ZRem(ctx, k[0], id)
		pipe.ZAdd(ctx, k[1], redis.Z{Score: (zero + 3_600_000) * 1000, Member: id})
	default:
		r.Fatalf("no harm %q", what)
	}
	_, err := pipe.Exec(ctx)
	r.ok(err)
}

func (r *rig) quarantine(want int, suspects ...delayq.Suspect) {
	r.Helper()
	n, err := r.q.Mirror().Quarantine(r.Context(), suspects, delayq.ReasonUnbooked, "nobody knows it")
	if r.ok(err); n != want {
		r.Errorf("%d quarantined, want %d", n, want)
	}
}

// A put of what is new is refused by a full Redis as a whole, and the rest of the message goes through: what ends makes room.
func TestAFullRedisRefusesOnlyNewEntries(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := realClient(t, server.Addr())
	r := newRig(t, rdb, delayq.Config{Shards: 2, Ledger: paperLedger{}})
	m := r.q.Mirror()
	fill := func(limit string) { r.ok(rdb.ConfigSet(context.Background(), "maxmemory", limit).Err()) }
	defer fill("0")
	name := func(shard int, what string) string { return inShard(r.q, shard, what) }
	old0, old1, gone0, gone1 := name(0, "old"), name(1, "old"), name(0, "gone"), name(1, "gone")
	r.show("4 0 0 0", row(old0, 1, time.Hour), row(old1, 1, time.Hour), row(gone0, 1, time.Hour), row(gone1, 1, time.Hour))
	fill("1")
	shown, err := m.Show(r.Context(), []delayq.LedgerRow{
		row(name(0, "new"), 2, 0), row(old0, 3, 0), row(old1, 4, 0), ended(gone0, 5), ended(gone1, 6),
	}, delayq.Showing{Counts: map[string]int64{"e:retried": 2}})
	if !errors.Is(err, delayq.ErrFull) || shown != (delayq.Shown{Put: 1, Dropped: 2}) {
		t.Errorf("%+v, %v", shown, err)
	}
	if got := r.revs(); got != fmt.Sprint(min(old0+"@1 "+old1+"@4", old1+"@4 "+old0+"@1")) {
		t.Error(got)
	}
	fill("0")
}

// inShard is an id of a shard.
func inShard(q *delayq.Queue, shard int, what string) string {
	for i := 0; ; i++ {
		if id := fmt.Sprint(what, i); delayq.ShardOf(q, id) == shard {
			return id
		}
	}
}

// Counters that a message carries are counted at most once, however often it is sent.
func TestCountsOfALostMessage(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	for name, row := range map[string]struct {
		lose func(p *servers.Proxy)
		want int64
	}{
		"none":    {func(*servers.Proxy) {}, 3},
		"reply":   {func(p *servers.Proxy) { p.DropReply("evalsha") }, 3},
		"request": {func(p *servers.Proxy) { p.DropRequest("evalsha") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := servers.NewProxy(t, server.Addr())
			r := newRig(t, realClient(t, proxy.Addr()), delayq.Config{Shards: 3, Ledger: paperLedger{}})
			rows := []delayq.LedgerRow{}
			for i := range 20 {
				rows = append(rows, ended(fmt.Sprint(i), int64(i+1)))
			}
			row.lose(proxy)
			_, err := r.q.Mirror().Show(r.Context(), rows, delayq.Showing{Counts: map[string]int64{"e:succeeded": 3, "f:timeout": 2 * 3, "e:none": 0}})
			r.ok(err)
			if a, b := r.counter("e:succeeded"), r.counter("f:timeout"); a != row.want || b != 2*row.want {
				t.Errorf("%d and %d counted", a, b)
			}
		})
	}
}
