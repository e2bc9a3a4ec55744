package reconciler_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

// A rig is a queue with a ledger on real servers, and its reconciler.
type rig struct {
	*testing.T
	rdb  *redis.Client
	pool *pgxpool.Pool
	cfg  delayq.Config
	q    *delayq.Queue
	r    *reconciler.Reconciler
	key  string // prefix of the keys of shard 0
}

func newRig(t *testing.T, cfg delayq.Config) *rig {
	t.Helper()
	t.Parallel()
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, servers.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := &rig{T: t, pool: pool, rdb: redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr()})}
	t.Cleanup(func() { r.rdb.Close() })
	_, err = migrations.Up(ctx, pool)
	r.ok(err)
	led, err := ledger.Open(ctx, pool)
	r.ok(err)
	cfg.Ledger, cfg.Logger, cfg.OnWarning = led, quiet(), func(delayq.Warning) {}
	r.cfg = cfg
	r.open(servers.QueueName(t))
	return r
}

func (r *rig) open(name string) {
	r.Helper()
	var err error
	r.q, err = delayq.Open(r.Context(), r.rdb, name, r.cfg)
	r.ok(err)
	r.r = r.another()
	r.key = "dq:{" + name + ":0}:"
}

func (r *rig) another() *reconciler.Reconciler {
	r.Helper()
	rec, err := reconciler.New(r.q, reconciler.Config{Logger: quiet()})
	r.ok(err)
	return rec
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) add(n int, opts ...delayq.Option) {
	r.Helper()
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = delayq.Task{ID: fmt.Sprintf("%d", i), Type: "t", Payload: []byte("p")}
	}
	_, err := r.q.EnqueueMany(r.Context(), tasks, opts...)
	r.ok(err)
}

// told waits until Redis has heard of n tasks: a part of what a large call has to tell is sent after it.
func (r *rig) told(n int64) {
	r.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		var got int64
		for i := range r.q.Shards() {
			sizes, err := r.q.Mirror().Sizes(r.Context(), i)
			r.ok(err)
			got += sizes.Tasks
		}
		if got == n {
			return
		}
		if time.Now().After(deadline) {
			r.Fatalf("redis has heard of %d of %d", got, n)
		}
	}
}

// pass makes a full pass and checks what it counts.
func (r *rig) pass(want reconciler.Counts) {
	r.Helper()
	rep, err := r.r.Pass(r.Context())
	r.ok(err)
	got := rep.Pass
	got.Rows, got.Entries = 0, 0
	if got != want || !rep.Complete || rep.Coverage != 1 {
		r.Errorf("pass: %+v, want %+v", rep, want)
	}
}

// agrees checks that a pass finds nothing, and that the queue keeps its invariants.
func (r *rig) agrees() {
	r.Helper()
	r.pass(reconciler.Counts{})
	audit, err := r.q.Audit(r.Context(), delayq.AuditOptions{})
	r.ok(err)
	for _, v := range audit.Violations {
		r.Errorf("%+v", v)
	}
}

func (r *rig) lease(n int) []*delayq.Lease {
	r.Helper()
	got, err := r.q.Lease(r.Context(), delayq.LeaseOptions{Max: n, Lease: time.Minute, Consumer: "c"})
	r.ok(err)
	return got
}

func (r *rig) exec(sql string, args ...any) {
	r.Helper()
	_, err := r.pool.Exec(r.Context(), sql, args...)
	r.ok(err)
}

// lose deletes the queue's keys, as FLUSHALL would.
func (r *rig) lose() {
	r.Helper()
	for shard := range r.q.Shards() {
		keys, err := r.rdb.Keys(r.Context(), fmt.Sprintf("dq:{%s:%d}:*", r.q.Name(), shard)).Result()
		r.ok(err)
		if len(keys) > 0 {
			r.ok(r.rdb.Del(r.Context(), keys...).Err())
		}
	}
}

func TestPassRestoresWhatRedisLost(t *testing.T) {
	r := newRig(t, delayq.Config{Shards: 3})
	r.add(1200)
	r.told(1200)
	r.agrees()
	running := r.lease(10)
	r.ok(r.q.Ack(t.Context(), running[:5]...))
	r.lose()
	r.pass(reconciler.Counts{Drift: 1195, Repaired: 1195, Restored: 1195})
	r.agrees()
	// Those that run were put back at the end of their lease, and still end by their own ack.
	r.ok(r.q.Ack(t.Context(), running[5:]...))
	r.agrees()
	if got := r.lease(10_000); len(got) != 1190 {
		t.Errorf("%d tasks are left", len(got))
	}
}

func TestPassMovesWhatRedisHasOld(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(3, delayq.In(time.Hour))
	old, err := r.rdb.Dump(t.Context(), r.key+"revs").Result()
	r.ok(err)
	pending, err := r.rdb.Dump(t.Context(), r.key+"pending").Result()
	r.ok(err)
	r.ok(r.q.RescheduleIn(t.Context(), "1", 0))
	// Redis goes back to what it was before it heard.
	r.ok(r.rdb.RestoreReplace(t.Context(), r.key+"revs", 0, old).Err())
	r.ok(r.rdb.RestoreReplace(t.Context(), r.key+"pending", 0, pending).Err())
	r.pass(reconciler.Counts{Drift: 1, Repaired: 1, Moved: 1})
	r.agrees()
	if got := r.lease(10); len(got) != 1 || got[0].ID != "1" {
		t.Errorf("leased %v", got)
	}
}

func TestPassDropsWhatHasEnded(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(4, delayq.In(time.Hour))
	r.exec("update delayq.task set status = 'succeeded', finished_at = clock_timestamp(), rev = nextval('delayq.rev') where id = '0'")
	r.exec("update delayq.task set status = 'cancelled', finished_at = clock_timestamp(), rev = nextval('delayq.rev') where id = '1'")
	r.exec("update delayq.task set status = 'dead', dead_at = clock_timestamp(), rev = nextval('delayq.rev') where id = '2'")
	r.pass(reconciler.Counts{Drift: 3, Repaired: 3, Dropped: 3})
	r.agrees()
	stats, err := r.q.Stats(t.Context())
	r.ok(err)
	if stats.Pending != 1 || stats.Dead != 1 {
		t.Errorf("%+v", stats)
	}
}

func TestPassQuarantinesTheUnknownAndLiftsTheKnown(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.add(3)
	r.exec("create table aside as select * from delayq.task where id = '1'")
	r.exec("delete from delayq.task where id = '1'")
	r.pass(reconciler.Counts{Drift: 1, Repaired: 1, Quarantined: 1})
	r.agrees()
	in, err := r.q.Get(ctx, "1")
	r.ok(err)
	if in.State != delayq.StateDead || in.Reason != delayq.ReasonUnbooked {
		t.Errorf("%+v", in)
	}
	page, err := r.q.List(ctx, delayq.ListOptions{State: delayq.StateDead})
	r.ok(err)
	if len(page.Tasks) != 1 || page.Tasks[0].ID != "1" || string(page.Tasks[0].Payload) != "p" {
		t.Errorf("%+v", page)
	}
	if got := r.lease(10); len(got) != 2 {
		t.Errorf("leased %d", len(got))
	}
	r.exec("insert into delayq.task select * from aside") // a restore of the database, say
	r.pass(reconciler.Counts{Drift: 1, Repaired: 1, Lifted: 1})
	r.agrees()
	if got := r.lease(10); len(got) != 1 || got[0].ID != "1" {
		t.Errorf("leased %v", got)
	}
}

func TestReplayAdoptsTheQuarantined(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(2, delayq.In(time.Hour))
	r.exec("delete from delayq.task")
	r.pass(reconciler.Counts{Drift: 2, Repaired: 2, Quarantined: 2})
	r.ok(r.q.Replay(t.Context(), "0"))
	r.ok(r.q.Purge(t.Context(), "1"))
	if err := r.q.Purge(t.Context(), "1"); !errors.Is(err, delayq.ErrNotFound) {
		t.Error(err)
	}
	r.agrees()
	if got := r.lease(10); len(got) != 1 || got[0].ID != "0" || string(got[0].Payload) != "p" {
		t.Errorf("leased %v", got)
	}
}

func TestPassMendsPieces(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.add(6, delayq.In(time.Hour))
	r.ok(r.rdb.HDel(ctx, r.key+"tasks", "0").Err())   // membership without record
	r.ok(r.rdb.ZRem(ctx, r.key+"pending", "1").Err()) // record without membership
	r.ok(r.rdb.HDel(ctx, r.key+"revs", "2").Err())    // an entry without revision
	r.ok(r.rdb.ZAdd(ctx, r.key+"processing", redis.Z{Score: 1, Member: "3"}).Err())
	r.ok(r.rdb.HSet(ctx, r.key+"state", "nobody", "L").Err())
	rep, err := r.r.Pass(ctx)
	r.ok(err)
	if rep.Drift == 0 || rep.Mended < 3 {
		t.Errorf("%+v", rep)
	}
	r.pass(reconciler.Counts{})
	page, err := r.q.List(ctx, delayq.ListOptions{State: delayq.StatePending})
	r.ok(err)
	stats, err := r.q.Stats(ctx)
	r.ok(err)
	if len(page.Tasks) != 6 || stats.Pending != 6 {
		t.Errorf("%d tasks wait, %d in Redis", len(page.Tasks), stats.Pending)
	}
}

// A task that has lost its revision looks like one from before the ledger. It is not, if it has been cancelled since.
func TestAdoptionRevivesNothing(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.add(2, delayq.In(time.Hour))
	r.ok(r.rdb.HDel(ctx, r.key+"revs", "0", "1").Err())
	_, err := r.q.LedgerQueue().Cancel(ctx, nil, []string{"0"}) // Redis does not hear of it
	r.ok(err)
	for range 2 {
		_, err = r.r.Pass(ctx)
		r.ok(err)
	}
	for id, want := range map[string]delayq.State{"0": delayq.StateCancelled, "1": delayq.StatePending} {
		if in, err := r.q.Get(ctx, id); err != nil || in.State != want {
			t.Errorf("%s: %+v, %v", id, in, err)
		}
	}
	r.agrees()
}

// An id that no task can have, planted in Redis, holds up nothing and does not run.
func TestAPlantedIDIsQuarantined(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	long := strings.Repeat("x", 257)
	r.add(1, delayq.In(time.Hour))
	record, err := r.rdb.HGet(ctx, r.key+"tasks", "0").Result()
	r.ok(err)
	for _, rev := range []bool{true, false} {
		r.ok(r.rdb.HSet(ctx, r.key+"tasks", long, record).Err())
		r.ok(r.rdb.ZAdd(ctx, r.key+"pending", redis.Z{Score: 1, Member: long}).Err())
		r.ok(r.rdb.HSet(ctx, r.key+"revs", long, 7).Err())
		if !rev {
			r.ok(r.rdb.HDel(ctx, r.key+"revs", long).Err())
		}
		if got := r.lease(10); len(got) != 0 {
			t.Errorf("leased %d", len(got))
		}
		r.ok(r.rdb.ZAddXX(ctx, r.key+"processing", redis.Z{Score: 1, Member: long}).Err())
		for range 2 {
			rep, err := r.r.Pass(ctx)
			r.ok(err)
			if !rep.Complete {
				t.Errorf("%+v", rep)
			}
		}
		if died, err := r.rdb.ZScore(ctx, r.key+"dead", long).Result(); err != nil || died == 0 {
			t.Errorf("it is not among the dead: %v", err)
		}
		r.lose()
	}
}

// A full Redis does not keep a pass from its end, where room is made.
func TestAFullRedisEndsItsPass(t *testing.T) {
	server := servers.NewRedis(t)
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.rdb = redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { r.rdb.Close() })
	r.open(servers.QueueName(t))
	r.add(300, delayq.In(time.Hour))
	r.exec("update delayq.task set status = 'succeeded', finished_at = clock_timestamp(), rev = nextval('delayq.rev') where id <> '0'")
	r.ok(r.rdb.HDel(ctx, r.key+"tasks", "0").Err())
	r.ok(r.rdb.ConfigSet(ctx, "maxmemory", "1").Err())
	rep, err := r.r.Pass(ctx)
	r.ok(err)
	if !rep.Complete || rep.Dropped != 299 {
		t.Errorf("%+v", rep)
	}
	r.ok(r.rdb.ConfigSet(ctx, "maxmemory", "0").Err())
	_, err = r.r.Pass(ctx)
	r.ok(err)
	r.agrees()
}

// A container that was lost alone comes back with its sentinel, or sizes would be one off for ever.
func TestPassMakesAContainerAgain(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(3)
	for _, name := range []string{"pending", "processing", "dead", "tasks", "state", "done:0", "errors", "req", "consumers", "revs", "beats"} {
		r.ok(r.rdb.Unlink(t.Context(), r.key+name).Err())
		_, err := r.r.Pass(t.Context())
		r.ok(err)
		stats, err := r.q.Stats(t.Context())
		r.ok(err)
		if stats.Due != 3 || stats.Dead != 0 || stats.Processing != 0 {
			t.Errorf("without %s: %+v", name, stats)
		}
		audit, err := r.q.Audit(t.Context(), delayq.AuditOptions{})
		r.ok(err)
		for _, v := range audit.Violations {
			if v.Invariant != "I5" { // what was lost in the key is not counted
				t.Errorf("without %s: %+v", name, v)
			}
		}
	}
}

func TestPassAdoptsWhatWasThereBeforeTheLedger(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	name := servers.QueueName(t)
	plain, err := delayq.Open(ctx, r.rdb, name, delayq.Config{Shards: 2})
	r.ok(err)
	for _, id := range []string{"a", "b", "running", "dead"} {
		_, err = plain.Enqueue(ctx, delayq.Task{ID: id, Type: "t", Payload: []byte("old")})
		r.ok(err)
	}
	held, err := plain.Lease(ctx, delayq.LeaseOptions{Max: 10, Lease: time.Minute, Consumer: "old"})
	r.ok(err)
	for _, l := range held {
		switch l.ID {
		case "dead":
			r.ok(plain.Bury(ctx, l, errors.New("boom")))
		case "a", "b":
			r.ok(plain.Release(ctx, 0, l))
		}
	}
	r.open(name)
	if r.q.Shards() != 2 {
		t.Fatal(r.q.Shards())
	}
	if _, err := plain.Enqueue(ctx, delayq.Task{ID: "c", Type: "t"}); !errors.Is(err, delayq.ErrLedger) {
		t.Error("enqueue past the ledger:", err)
	}
	if _, err := plain.Lease(ctx, delayq.LeaseOptions{Max: 10, Lease: time.Minute, Consumer: "old"}); !errors.Is(err, delayq.ErrLedger) {
		t.Error("lease past the ledger:", err)
	}
	r.pass(reconciler.Counts{Drift: 2, Repaired: 2, Adopted: 2})
	got := r.lease(10)
	if len(got) != 2 || string(got[0].Payload) != "old" {
		t.Errorf("leased %v", got)
	}
	r.ok(r.q.Ack(ctx, got...))
	r.ok(r.q.Replay(ctx, "dead"))
	if got := r.lease(10); len(got) != 1 || got[0].ID != "dead" {
		t.Errorf("leased %v", got)
	}
}

func TestHorizonKeepsLaterTasksOut(t *testing.T) {
	r := newRig(t, delayq.Config{Horizon: time.Hour})
	ctx := t.Context()
	r.add(3, delayq.In(2*time.Hour))
	inRedis := func() int64 {
		n, err := r.rdb.HLen(ctx, r.key+"tasks").Result()
		r.ok(err)
		return n - 1
	}
	if n := inRedis(); n != 0 {
		t.Errorf("%d in Redis", n)
	}
	r.agrees()
	stats, err := r.q.Stats(ctx)
	r.ok(err)
	if stats.Pending != 3 || stats.Later != 3 {
		t.Errorf("%+v", stats)
	}
	r.ok(r.q.RescheduleIn(ctx, "0", time.Minute)) // into it
	if n := inRedis(); n != 1 {
		t.Errorf("%d in Redis", n)
	}
	r.ok(r.q.RescheduleIn(ctx, "0", 3*time.Hour)) // and out
	if n := inRedis(); n != 0 {
		t.Errorf("%d in Redis", n)
	}
	r.agrees()
	if got, err := r.q.Cancel(ctx, "1"); err != nil || got != delayq.Cancelled {
		t.Error(got, err)
	}
	r.exec("update delayq.task set run_at = clock_timestamp() + interval '50 minutes' where id = '2'") // time goes by: same revision
	r.pass(reconciler.Counts{Drift: 1, Repaired: 1, Restored: 1})
	if n := inRedis(); n != 1 {
		t.Errorf("%d in Redis", n)
	}
	r.agrees()
}

func TestRunningTooLongIsLeasedAgain(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.add(1)
	lost := r.lease(1)
	r.exec("update delayq.task set locked_until = clock_timestamp() - interval '1 second'")
	r.lose()
	rep, err := r.r.Pass(ctx)
	r.ok(err)
	if rep.RunningTooLong != 1 || rep.Restored != 1 {
		t.Errorf("%+v", rep)
	}
	again := r.lease(1)
	if len(again) != 1 || again[0].Lost != 1 || again[0].Attempt != 2 {
		t.Fatalf("leased %+v", again)
	}
	if err := r.q.Ack(ctx, lost...); !errors.Is(err, delayq.ErrLeaseLost) {
		t.Error("stale ack:", err)
	}
	r.ok(r.q.Ack(ctx, again...))
	r.agrees()
}

func TestSlicesGoOnWhereTheLastStopped(t *testing.T) {
	r := newRig(t, delayq.Config{Shards: 2})
	ctx := t.Context()
	r.add(3000, delayq.In(time.Hour))
	r.told(3000)
	r.lose()
	var sum reconciler.Counts
	slices := 0
	for {
		rep, err := r.another().Slice(ctx, time.Nanosecond) // each a process of its own, with time for nothing
		r.ok(err)
		if rep.Rows+rep.Entries == 0 && !rep.Complete && slices > 100 {
			t.Fatal("no progress")
		}
		if rep, err = r.another().Slice(ctx, 20*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		slices++
		sum.Restored += rep.Restored
		if rep.Complete {
			if rep.Pass.Restored != 3000 || rep.LastFull.IsZero() {
				t.Errorf("%+v", rep)
			}
			break
		}
		if rep.Coverage <= 0 && rep.Pass.Rows > 0 || rep.Coverage >= 1 {
			t.Errorf("coverage %v of %+v", rep.Coverage, rep)
		}
	}
	if slices < 3 {
		t.Errorf("only %d slices", slices)
	}
	r.agrees()
}

func TestSliceBeginsAnewWhenRedisIsLost(t *testing.T) {
	r := newRig(t, delayq.Config{})
	ctx := t.Context()
	r.add(3000, delayq.In(time.Hour))
	r.told(3000)
	if rep, err := r.r.Slice(ctx, 5*time.Millisecond); err != nil || rep.Complete {
		t.Fatal(rep, err)
	}
	r.lose()
	rep, err := r.r.Slice(ctx, time.Minute)
	r.ok(err)
	if !rep.Complete || rep.Restored != 3000 {
		t.Errorf("%+v", rep)
	}
}

func TestStateOfAnotherVersionIsNoHarm(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(5)
	for _, state := range []string{"", "{", `{"phase": "new", "shard": 99}`, `{"phase": "redis", "shard": 99, "cursor": "x"}`} {
		r.ok(r.q.LedgerQueue().SetState(t.Context(), []byte(state)))
		if rep, err := r.r.Slice(t.Context(), time.Minute); err != nil || !rep.Complete {
			t.Errorf("%q: %+v, %v", state, rep, err)
		}
	}
}

func TestManyReconcilersBesideAWorker(t *testing.T) {
	r := newRig(t, delayq.Config{Shards: 2})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r.add(2000)
	var all sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		all.Go(func() {
			rec := r.another()
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := rec.Pass(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	var mu sync.Mutex
	ran := map[string]int{}
	working, done := context.WithCancel(ctx)
	w := delayq.NewWorker(delayq.HandlerFunc(func(_ context.Context, task *delayq.Task) error {
		mu.Lock()
		defer mu.Unlock()
		if ran[task.ID]++; len(ran) == 2000 {
			done()
		}
		return nil
	}), r.q)
	w.Logger = quiet()
	stats, err := w.Run(working)
	r.ok(err)
	close(stop)
	all.Wait()
	for id, n := range ran {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
	if len(ran) != 2000 || stats.Succeeded != 2000 {
		t.Errorf("%d ran: %+v", len(ran), stats)
	}
	r.agrees()
}

func TestNewNeedsALedger(t *testing.T) {
	q, err := delayq.Open(t.Context(), redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr()}), servers.QueueName(t), delayq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reconciler.New(q, reconciler.Config{}); !errors.Is(err, delayq.ErrNoLedger) {
		t.Error(err)
	}
}

// What a busy queue always shows is no warning; what was lost is.
func TestMessagesOnTheirWayAreNoWarning(t *testing.T) {
	r := newRig(t, delayq.Config{})
	var log bytes.Buffer
	rec, err := reconciler.New(r.q, reconciler.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	r.ok(err)
	pass := func(level string) {
		t.Helper()
		log.Reset()
		_, err := rec.Pass(t.Context())
		r.ok(err)
		if got := log.String(); !strings.Contains(got, "level="+level+" ") || strings.Count(got, "\n") != 1 {
			t.Errorf("want one line of %s: %s", level, got)
		}
	}
	r.add(3, delayq.In(time.Hour))
	r.exec("update delayq.task set status = 'cancelled', finished_at = clock_timestamp(), rev = nextval('delayq.rev') where id = '0'")
	pass("INFO")
	r.lose()
	pass("WARN")
}
