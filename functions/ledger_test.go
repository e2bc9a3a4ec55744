package functions

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// newLedgerBench is a bench whose queue has a ledger, in a database of its own.
func newLedgerBench(t *testing.T, server *servers.Redis, vars ...string) (*bench, *pgxpool.Pool) {
	t.Helper()
	url := servers.NewDatabase(t)
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	led, err := ledger.Open(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), DisableIdentity: true})
	t.Cleanup(func() { _ = rdb.Close() })
	name := queueOf(t)
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{Ledger: led})
	if err != nil {
		t.Fatal(err)
	}
	return &bench{t: t, rdb: rdb, q: q, name: name, vars: append([]string{
		"DELAYQ_REDIS_URL=" + server.URL(), "DELAYQ_DATABASE_URL=" + url, "DELAYQ_QUEUES=" + name,
		"DELAYQ_MARGIN=500ms", "DELAYQ_LEASE=1s",
	}, vars...)}, pool
}

func (b *bench) reconciler(vars ...string) *environment {
	b.t.Helper()
	return newEnvironment(b.t, program(b.t, reconcilerBin), append(append([]string{}, b.vars...), vars...)...)
}

// reconcile is one invocation.
func reconcile(t *testing.T, e *environment, budget time.Duration) Reconciled {
	t.Helper()
	e.start(budget)
	a := e.answer()
	var got Reconciled
	if a.failure != "" || json.Unmarshal(a.raw, &got) != nil {
		t.Fatalf("answer %s, failure %q", a.raw, a.failure)
	}
	return got
}

func TestAWorkerWithALedgerRunsWhatATransactionEnqueued(t *testing.T) {
	t.Parallel()
	b, pool := newLedgerBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s")
	err := ledger.BeginFunc(t.Context(), pool, func(tx *ledger.Tx) error {
		_, err := b.q.EnqueueTx(t.Context(), tx, delayq.Task{ID: "x", Type: "quick"})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	e := b.environment()
	e.start(8 * time.Second)
	if a := e.answer(); a.failure != "" || a.Succeeded != 1 {
		t.Errorf("%+v", a)
	}
	if in := b.get("x"); in.State != delayq.StateDone {
		t.Errorf("%+v", in)
	}
}

func TestAWorkerWithALedgerWorksWithoutRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server)
	b.enqueueMany(30)
	server.Stop()
	e := b.environment()
	e.start(9 * time.Second)
	if a := e.answer(); a.failure != "" || a.Succeeded != 30 || a.FromLedger != 30 {
		t.Errorf("%+v", a)
	}
}

func TestTheReconcilerRestoresRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server)
	b.enqueueMany(700)
	if err := b.rdb.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	one, two := b.reconciler(), b.reconciler()
	one.start(20 * time.Second) // two at once
	two.start(20 * time.Second)
	var restored int64
	for _, e := range []*environment{one, two} {
		var got Reconciled
		if a := e.answer(); a.failure != "" || json.Unmarshal(a.raw, &got) != nil || len(got.Queues) != 1 || !got.Queues[0].Complete {
			t.Fatalf("%s %s", a.raw, a.failure)
		}
		restored += got.Queues[0].Repaired
	}
	if restored != 700 {
		t.Errorf("restored %d", restored)
	}
	if got := reconcile(t, one, 20*time.Second); got.Queues[0].Drift != 0 || got.ColdStart {
		t.Errorf("%+v", got)
	}
	stats, err := b.q.Stats(t.Context())
	if err != nil || stats.Due != 700 {
		t.Errorf("%+v %v", stats, err)
	}
}

func TestTheReconcilerGoesOnWhereItWasCutShort(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server, "DELAYQ_MARGIN=1s")
	b.enqueueMany(20_000)
	if err := b.rdb.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	e := b.reconciler()
	var restored int64
	for n := 1; ; n++ {
		began := time.Now()
		got := reconcile(t, e, 2200*time.Millisecond)
		if took := time.Since(began); took > 2200*time.Millisecond {
			t.Errorf("invocation %d took %s", n, took)
		}
		restored += got.Queues[0].Restored
		if got.Queues[0].Complete {
			break
		}
		if n > 60 {
			t.Fatalf("no end: %+v", got)
		}
	}
	if restored != 20_000 {
		t.Errorf("restored %d", restored)
	}
}

func TestOneQueueThatFailsDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	b, pool := newLedgerBench(t, servers.SharedRedis(t))
	// A queue that Redis has with another number of shards than the ledger.
	if _, err := pool.Exec(t.Context(), "insert into delayq.queue (name, shards, retention_ms, max_payload) values ($1, 3, 60000, 1000)", b.name+"-2"); err != nil {
		t.Fatal(err)
	}
	if _, err := delayq.Open(t.Context(), b.rdb, b.name+"-2", delayq.Config{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	got := reconcile(t, b.reconciler("DELAYQ_QUEUES="+b.name+"-2,"+b.name), 10*time.Second)
	if len(got.Queues) != 1 || got.Queues[0].Queue != b.name || !strings.Contains(got.Errors[b.name+"-2"], "shard count") {
		t.Errorf("%+v", got)
	}
}

func TestAFunctionSaysWhatIsWrongWithItsDatabase(t *testing.T) {
	t.Parallel()
	b, _ := newLedgerBench(t, servers.SharedRedis(t))
	empty := servers.NewDatabase(t)
	const secret = "canary-7Q"
	for name, row := range map[string]struct{ url, password, want string }{
		"none":         {"", "", "DELAYQ_DATABASE_URL: is not set"},
		"no URL":       {secret, "", "DELAYQ_DATABASE_URL: is not a URL"},
		"bad option":   {"postgres://u:" + secret + "@127.0.0.1/x?pool_max_conns=" + secret, "", "DELAYQ_DATABASE_URL: is not a URL"},
		"not migrated": {empty, "", "run `delayq migrate`"},
		"refused":      {"postgres://u@127.0.0.1:1/x?sslmode=disable", secret, "connect"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := b.reconciler("DELAYQ_DATABASE_URL="+row.url, "DELAYQ_DATABASE_PASSWORD="+row.password)
			e.start(8 * time.Second)
			a := e.answer()
			if !strings.Contains(a.failure, row.want) {
				t.Errorf("failure %q, want %q in it", a.failure, row.want)
			}
			if seen := a.failure + string(a.raw) + e.log.String(); strings.Contains(seen, secret) {
				t.Errorf("a secret got out: %s", seen)
			}
		})
	}
}

func TestPoolOfADatabase(t *testing.T) {
	t.Parallel()
	cfg := Config{DatabaseURL: "postgres://u:old@host:5432/shop?pool_max_conns=2", DatabasePassword: "p@ss/word"}
	pool, bad := cfg.database()
	if bad != nil {
		t.Fatal(bad)
	}
	if pool.MaxConns != 2 || pool.ConnConfig.Password != "p@ss/word" || pool.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeCacheDescribe ||
		pool.ConnConfig.ConnectTimeout != databaseConnect || pool.MaxConnIdleTime != idleConn {
		t.Errorf("%+v", pool)
	}
	cfg.DatabaseURL += "&default_query_exec_mode=simple_protocol&connect_timeout=1&pool_max_conn_idle_time=10s"
	if pool, bad = cfg.database(); bad != nil || pool.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeSimpleProtocol ||
		pool.ConnConfig.ConnectTimeout != time.Second || pool.MaxConnIdleTime != 10*time.Second {
		t.Errorf("%+v %v", pool, bad)
	}
	if s := fmt.Sprintf("%+v %#v", cfg, cfg); strings.Contains(s, "p@ss") || strings.Contains(s, "old") {
		t.Error("a secret is printed:", s)
	}
}
