package delayq_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// paperLedger is a ledger that knows how a queue is configured and nothing else: what touches only Redis needs no more.
type paperLedger struct{}

func (paperLedger) OpenQueue(_ context.Context, _ string, want delayq.LedgerConfig, _ bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	want.Shards, want.Retention, want.MaxPayload = max(want.Shards, 1), max(want.Retention, 2*time.Minute), max(want.MaxPayload, 64<<10)
	return paperQueue{}, want, nil
}

type paperQueue struct{ delayq.LedgerQueue }

func (paperQueue) Counts(context.Context, int, time.Duration) (delayq.LedgerCounts, error) {
	return delayq.LedgerCounts{}, nil
}

// ledgerServer is everyServer with a queue that has a ledger.
func ledgerServer(t *testing.T, shards int, test func(r *rig)) {
	t.Helper()
	t.Parallel()
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			rdb := b.open(t)
			t.Cleanup(func() { rdb.Close() })
			test(newRig(t, rdb, delayq.Config{Shards: shards, ScriptHeader: b.header, Ledger: paperLedger{}}))
		})
	}
}

// stamp is that of every row here.
const stamp = "123456abcdef"

// row is an open row of a task that is due some time after zero; its payload tells the revision.
func row(id string, rev int64, due time.Duration) delayq.LedgerRow {
	return delayq.LedgerRow{
		ID: id, Rev: rev, Status: delayq.LedgerPending, RunAt: instant(due), Type: "t", Payload: fmt.Appendf(nil, "%s@%d", id, rev), Stamp: []byte(stamp),
	}
}

// ended is a row that is no longer open.
func ended(id string, rev int64) delayq.LedgerRow {
	r := row(id, rev, 0)
	r.Status = delayq.LedgerSucceeded
	return r
}

// show shows rows and checks what became of them: "put dropped current newer".
func (r *rig) show(want string, rows ...delayq.LedgerRow) {
	r.Helper()
	r.showing(want, delayq.Showing{}, rows...)
}

func (r *rig) showing(want string, s delayq.Showing, rows ...delayq.LedgerRow) {
	r.Helper()
	s.Now = r.instantNow()
	got, err := r.q.Mirror().Show(r.Context(), rows, s)
	r.ok(err)
	if text := fmt.Sprint(got.Put, got.Dropped, got.Current, got.Newer); text != want {
		r.Errorf("shown %s, want %s", text, want)
	}
}

func (r *rig) instantNow() time.Time { return time.UnixMicro(int64(r.now() * 1000)) }

// leaseRedis leases in Redis, as a worker does before it asks the ledger.
func (r *rig) leaseRedis(shard, most int) *delayq.Leased {
	r.Helper()
	got, err := delayq.DoLease(r.Context(), r.q, shard, delayq.LeaseCall{Max: most, Lease: leaseTime, Consumer: "c"})
	r.ok(err)
	r.name(got.Leases...)
	return got
}

// revisions are ids and revisions of the leases of a call.
func revisions(l *delayq.Leased) string {
	var words []string
	for _, le := range l.Leases {
		words = append(words, fmt.Sprint(le.ID, "@", delayq.Rev(le)))
	}
	return strings.Join(words, " ")
}

// revs is what the shards have of revisions, as "id@rev" in order.
func (r *rig) revs() string {
	r.Helper()
	all := map[string]string{}
	for shard := range r.q.Shards() {
		m, err := r.rdb.HGetAll(r.Context(), delayq.Keys(r.q, shard)[11]).Result()
		r.ok(err)
		maps.Copy(all, m)
	}
	delete(all, "")
	var words []string
	for _, id := range slices.Sorted(maps.Keys(all)) {
		words = append(words, id+"@"+all[id])
	}
	return strings.Join(words, " ")
}

func (r *rig) counter(field string) int64 {
	r.Helper()
	var n int64
	for shard := range r.q.Shards() {
		v, _ := strconv.ParseInt(r.rdb.HGet(r.Context(), delayq.Keys(r.q, shard)[8], field).Val(), 10, 64)
		n += v
	}
	return n
}
