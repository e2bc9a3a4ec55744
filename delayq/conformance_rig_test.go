package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// backends are the servers that every conformance test runs on. The strict one refuses what scripts must not do with keys.
var backends = []struct {
	name   string
	header string
	open   func(t *testing.T) redis.UniversalClient
}{
	{"miniredis", "", func(t *testing.T) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
	}},
	{"redis by RESP2", "", func(t *testing.T) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr(), Protocol: 2})
	}},
	{"redis by RESP3", "", func(t *testing.T) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr(), Protocol: 3})
	}},
	{"cluster", "", func(t *testing.T) redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: servers.SharedCluster(t).Addrs()})
	}},
	{"strict cluster", "#!lua", func(t *testing.T) redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: servers.SharedStrict(t).Addrs()})
	}},
}

// A rig is a queue under test. Its scripts read the rig's clock, so that no test waits.
type rig struct {
	*testing.T
	rdb    redis.UniversalClient
	cfg    delayq.Config
	q      *delayq.Queue
	clock  *atomic.Int64     // us since zero
	tokens map[string]string // names for state: t1 is the first lease call that got something
	broken bool              // the test breaks invariants by hand: no audit at the end
	pool   *pgxpool.Pool     // of the ledger, nil without one
}

// zero is where the clock of a rig starts, in ms.
const zero = 1_900_000_000_000

// everyServer runs a test on every backend, with a queue of so many shards.
func everyServer(t *testing.T, shards int, test func(r *rig)) {
	t.Helper()
	t.Parallel()
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			rdb := b.open(t)
			t.Cleanup(func() { rdb.Close() })
			test(newRig(t, rdb, delayq.Config{Shards: shards, ScriptHeader: b.header}))
		})
	}
}

// everyMode runs a test on every backend, and with a ledger. There it is the data that goes back in time, not the clock that goes
// on, and state is what the ledger holds.
func everyMode(t *testing.T, shards int, test func(r *rig)) {
	t.Helper()
	everyServer(t, shards, test)
	t.Run("ledger", func(t *testing.T) {
		t.Parallel()
		pool := newLedgerPool(t)
		led, err := ledger.Open(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		test(newRigOn(t, pool, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{Shards: shards, Ledger: led}))
	})
}

// onRedis runs a test on the shared real server alone.
func onRedis(t *testing.T, cfg delayq.Config, test func(r *rig)) {
	t.Helper()
	t.Parallel()
	test(newRig(t, realClient(t, servers.SharedRedis(t).Addr()), cfg))
}

func realClient(t *testing.T, addr string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	return rdb
}

func newRig(t *testing.T, rdb redis.UniversalClient, cfg delayq.Config) *rig {
	t.Helper()
	return newRigOn(t, nil, rdb, cfg)
}

// newRigOn is newRig where the ledger is in a database.
func newRigOn(t *testing.T, pool *pgxpool.Pool, rdb redis.UniversalClient, cfg delayq.Config) *rig {
	t.Helper()
	if cfg.OnWarning == nil {
		cfg.OnWarning = func(delayq.Warning) {}
	}
	r := &rig{T: t, pool: pool, rdb: rdb, cfg: cfg, clock: &atomic.Int64{}, tokens: map[string]string{}}
	r.q = r.open(servers.QueueName(t), cfg)
	t.Cleanup(func() {
		ctx := context.Background()
		if !r.broken {
			for _, v := range r.audit(ctx) {
				t.Errorf("queue %s at the end: %+v", r.q.Name(), v)
			}
		}
		for shard := range r.q.Shards() {
			rdb.Del(ctx, delayq.Keys(r.q, shard)...)
		}
	})
	return r
}

func (r *rig) open(name string, cfg delayq.Config) *delayq.Queue {
	r.Helper()
	q, err := delayq.Open(r.Context(), r.rdb, name, cfg)
	if err != nil {
		r.Fatal(err)
	}
	if r.pool == nil {
		delayq.SetClock(q, r.now)
	}
	return q
}

// now is the rig's clock in ms.
func (r *rig) now() float64 { return zero + float64(r.clock.Load())/1000 }

// sub is a rig on another queue of the same server, for a row of a table. It ends without an audit, which would take longer
// than the row.
func (r *rig) sub(t *testing.T) *rig {
	s := newRigOn(t, r.pool, r.rdb, r.cfg)
	s.broken = true
	return s
}

func (r *rig) audit(ctx context.Context) []delayq.Violation {
	r.Helper()
	report, err := r.q.Audit(ctx, delayq.AuditOptions{})
	if err != nil {
		r.Error(err)
		return nil
	}
	return report.Violations
}

// pass lets time go by, or back.
func (r *rig) pass(d time.Duration) {
	r.Helper()
	r.clock.Add(d.Microseconds())
	if r.pool == nil {
		return
	}
	_, err := r.pool.Exec(r.Context(), `update delayq.task set run_at = run_at - $1::interval, locked_until = locked_until - $1::interval,
		finished_at = finished_at - $1::interval, dead_at = dead_at - $1::interval
		where queue = (select id from delayq.queue where name = $2)`, d, r.q.Name())
	r.ok(err)
	for shard := range r.q.Shards() {
		for _, key := range delayq.Keys(r.q, shard)[:3] {
			for _, z := range r.rdb.ZRangeWithScores(r.Context(), key, 0, -1).Val() {
				if z.Member != "" {
					r.ok(r.rdb.ZIncrBy(r.Context(), key, -float64(d.Microseconds()), z.Member.(string)).Err())
				}
			}
		}
	}
}

// instant is a time by the rig's clock.
func instant(sinceZero time.Duration) time.Time { return time.UnixMilli(zero).Add(sinceZero) }

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) add(id string, opts ...delayq.Option) {
	r.Helper()
	res, err := r.q.Enqueue(r.Context(), task(id), opts...)
	if err != nil || res.Outcome != delayq.Created {
		r.Fatalf("enqueue %q: %v, %v", id, res.Outcome, err)
	}
}

func task(id string) delayq.Task {
	return delayq.Task{ID: id, Type: "t", Payload: []byte("of-" + id)}
}

const leaseTime = 30 * time.Second

// lease leases what is due.
func (r *rig) lease(most int) []*delayq.Lease {
	r.Helper()
	got, err := r.q.Lease(r.Context(), delayq.LeaseOptions{Max: most, Lease: leaseTime, Consumer: "c", Dues: true})
	r.ok(err)
	r.name(got...)
	return got
}

// lease1 leases the one task that is due.
func (r *rig) lease1() *delayq.Lease {
	r.Helper()
	got := r.lease(10)
	if len(got) != 1 {
		r.Fatalf("leased %q, want one", idsOf(got))
	}
	return got[0]
}

func (r *rig) name(leases ...*delayq.Lease) {
	for _, l := range leases {
		if r.tokens[l.Token()] == "" {
			r.tokens[l.Token()] = "t" + strconv.Itoa(len(r.tokens)+1)
		}
	}
}

func idsOf(leases []*delayq.Lease) []string {
	ids := []string{}
	for _, l := range leases {
		ids = append(ids, l.ID)
	}
	return ids
}

// state is everything a queue holds, but for counters and consumers, a line an entry: the container, the id and what it
// says. Times are ms since zero, tokens have the names of lease.
func (r *rig) state() string {
	r.Helper()
	if r.pool != nil {
		return r.ledgerState()
	}
	var lines []string
	add := func(container, id string, words ...string) {
		if id != "" {
			lines = append(lines, strings.Join(append([]string{container, id}, words...), " "))
		}
	}
	ms := func(us float64) string {
		s := strconv.FormatFloat(us/1000-zero, 'f', 3, 64)
		return strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	for shard := range r.q.Shards() {
		k := delayq.Keys(r.q, shard)
		pipe := r.rdb.Pipeline()
		var zsets []*redis.ZSliceCmd
		for _, key := range k[:3] {
			zsets = append(zsets, pipe.ZRangeWithScores(r.Context(), key, 0, -1))
		}
		var hashes []*redis.MapStringStringCmd
		for _, key := range slices.Concat(k[3:8], k[11:12]) {
			hashes = append(hashes, pipe.HGetAll(r.Context(), key))
		}
		_, err := pipe.Exec(r.Context())
		r.ok(err)
		for i, name := range []string{"pending", "processing", "dead"} {
			for _, z := range zsets[i].Val() {
				add(name, z.Member.(string), ms(z.Score))
			}
		}
		for id, v := range hashes[0].Val() {
			if t, err := delayq.Decode([]byte(v)); err == nil {
				add("task", id, string(t.Payload))
			} else {
				add("task", id, "unreadable")
			}
		}
		for id, v := range hashes[1].Val() {
			if id != "" {
				i := strings.LastIndex(v, ":")
				start, _ := strconv.ParseFloat(v[i+1:], 64)
				add("state", id, v[:1], r.tokenName(v[1:17]), v[17:i], ms(start*1000))
			}
		}
		for _, done := range hashes[2:4] {
			for id, v := range done.Val() {
				add("done", id, r.tokenName(v))
			}
		}
		for id, v := range hashes[4].Val() {
			add("error", id, strings.ReplaceAll(v, "\n", " "))
		}
		for id, v := range hashes[5].Val() {
			add("rev", id, v)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// ledgerState is every row of the queue, but for the end of a lease, which a repeated extend moves.
func (r *rig) ledgerState() string {
	r.Helper()
	rows, err := r.pool.Query(r.Context(), `select concat_ws(' ', encode(id, 'escape'), status, run_at, rev, token, cancel_requested, failed, lost,
		deliveries, reason, last_error, encode(payload, 'escape')) from delayq.task
		where queue = (select id from delayq.queue where name = $1) order by id`, r.q.Name())
	r.ok(err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.ok(err)
	return strings.Join(lines, "\n")
}

func (r *rig) tokenName(token string) string {
	if token == "cancelled" || strings.HasPrefix(token, "rev:") {
		return token
	}
	if name := r.tokens[fmt.Sprintf("%x", token)]; name != "" {
		return name
	}
	return "t?"
}

// holds checks the whole state; blanks and the order of lines do not matter.
func (r *rig) holds(want string) {
	r.Helper()
	if r.pool != nil {
		return // it is about Redis' own keys
	}
	var lines []string
	for line := range strings.Lines(want) {
		if fields := strings.Fields(line); len(fields) > 0 {
			lines = append(lines, strings.Join(fields, " "))
		}
	}
	slices.Sort(lines)
	if got := r.state(); got != strings.Join(lines, "\n") {
		r.Errorf("the queue holds\n%s\nwant\n%s", got, strings.Join(lines, "\n"))
	}
}

// is checks an error by its kind, nil for none.
func (r *rig) is(err, want error, what ...any) {
	r.Helper()
	if (err == nil) != (want == nil) || !errors.Is(err, want) {
		r.Errorf("%v: error %v, want %v", fmt.Sprint(what...), err, want)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

var errBoom = errors.New("boom")

// bring brings a task into a situation and answers the first lease that it took on the way, if any. It leaves no other task.
func (r *rig) bring(id, situation string) (l *delayq.Lease) {
	r.Helper()
	ctx := r.Context()
	switch situation {
	case "unknown":
	case "pending":
		r.add(id, delayq.In(time.Hour))
	case "due":
		r.add(id)
		r.pass(time.Millisecond)
	case "leased":
		r.bring(id, "due")
		l = r.lease1()
	case "expired":
		l = r.bring(id, "leased")
		r.pass(leaseTime)
	case "taken back":
		r.add("older", delayq.In(time.Second))
		l = r.bring(id, "expired")
		got := r.lease(1)
		if len(got) != 1 || got[0].ID != "older" {
			r.Fatalf("leased %q", idsOf(got))
		}
		r.ok(r.q.Ack(ctx, got...))
	case "leased by another":
		l = r.bring(id, "expired")
		r.lease1()
	case "told to stop":
		l = r.bring(id, "leased")
		r.cancel(id, delayq.Running)
	case "retried":
		l = r.bring(id, "leased")
		r.ok(r.q.Retry(ctx, l, time.Hour, errBoom))
	case "released":
		l = r.bring(id, "leased")
		r.ok(r.q.Release(ctx, time.Hour, l))
	case "dead":
		l = r.bring(id, "leased")
		r.ok(r.q.Bury(ctx, l, errBoom))
	case "replayed":
		l = r.bring(id, "dead")
		r.ok(r.q.Replay(ctx, id))
	case "purged":
		l = r.bring(id, "dead")
		r.ok(r.q.Purge(ctx, id))
	case "replaced":
		l = r.bring(id, "retried")
		res, err := r.q.Enqueue(ctx, task(id), delayq.In(time.Hour), delayq.OnConflict(delayq.Replace))
		if err != nil || res.Outcome != delayq.Replaced {
			r.Fatal(res, err)
		}
	case "done":
		l = r.bring(id, "leased")
		r.ok(r.q.Ack(ctx, l))
	case "forgotten":
		l = r.bring(id, "done")
		r.pass(5 * time.Minute)
		if r.pool != nil { // what retention does after days
			_, err := r.pool.Exec(ctx, "delete from delayq.task where finished_at is not null")
			r.ok(err)
		}
	case "cancelled":
		r.bring(id, "pending")
		r.cancel(id, delayq.Cancelled)
	case "cancelled while running":
		l = r.bring(id, "told to stop")
		r.is(r.q.Release(ctx, 0, l), delayq.ErrCancelled)
	case "cancelled after its lease":
		l = r.bring(id, "expired")
		r.cancel(id, delayq.Cancelled)
	case "cancelled and enqueued again":
		l = r.bring(id, "cancelled while running")
		r.add(id, delayq.In(time.Hour))
	default:
		r.Fatalf("no situation %q", situation)
	}
	return l
}

func (r *rig) cancel(id string, want delayq.Cancellation) {
	r.Helper()
	if got, err := r.q.Cancel(r.Context(), id); err != nil || got != want {
		r.Errorf("cancel %q: %v, %v; want %v", id, got, err, want)
	}
}
