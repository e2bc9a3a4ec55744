package functions

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
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

// newLedger makes a ledger in a database of its own, and says where that is.
func newLedger(t *testing.T) (*pgxpool.Pool, *ledger.Ledger, string) {
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
	return pool, led, url
}

// newLedgerBench is a bench whose queue has a ledger.
func newLedgerBench(t *testing.T, server *servers.Redis, vars ...string) (*bench, *pgxpool.Pool) {
	t.Helper()
	pool, led, url := newLedger(t)
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
	const tasks, budget = 10_000, 2500 * time.Millisecond
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server)
	b.enqueueMany(tasks)
	if err := b.rdb.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	proxy := servers.NewProxy(t, server.Addr())
	proxy.SetLatency(20 * time.Millisecond) // twenty pages, two calls each, are over 1.6 s
	e := b.reconciler("DELAYQ_REDIS_URL=redis://" + proxy.Addr())
	var restored int64
	for n := 1; ; n++ {
		ev := e.start(budget) // 1.5 s of work
		var got Reconciled
		a := e.answer()
		if a.failure != "" || json.Unmarshal(a.raw, &got) != nil || len(got.Queues) != 1 {
			t.Fatalf("invocation %d: %s %s", n, a.raw, a.failure)
		}
		if late := time.Since(ev.deadline); late > 0 {
			t.Errorf("invocation %d: %s after the deadline", n, late)
		}
		rep := got.Queues[0]
		restored += rep.Restored
		if rep.Pass.Restored != restored {
			t.Errorf("invocation %d does not go on: %+v after %d", n, rep, restored)
		}
		if rep.Complete {
			if n == 1 {
				t.Error("it was not cut short")
			}
			break
		}
		if n > 60 {
			t.Fatalf("no end: %+v", got)
		}
	}
	if restored != tasks {
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

// Two invocations at once share a pool that gives each transaction another session.
func TestFunctionsBehindAPoolByTransaction(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, pool := newLedgerBench(t, server, "DELAYQ_IDLE_EXIT=1s")
	bouncer := servers.NewPgBouncer(t, servers.SharedPostgres(t), 2)
	b.vars = append(b.vars, "DELAYQ_DATABASE_URL="+bouncer.URL(pool.Config().ConnConfig.Database), "DELAYQ_RUNNERS=2")
	b.enqueueMany(1500)
	if err := b.rdb.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	if got := reconcile(t, b.reconciler(), 30*time.Second); got.Queues[0].Restored != 1500 || !got.Queues[0].Complete {
		t.Errorf("%+v", got)
	}
	one, two := b.environment(), b.environment()
	one.start(30 * time.Second)
	two.start(30 * time.Second)
	x, y := one.answer(), two.answer()
	if x.failure != "" || y.failure != "" || x.Succeeded+y.Succeeded != 1500 || x.LeaseLost+y.LeaseLost+x.Refused+y.Refused != 0 {
		t.Errorf("%+v\n%+v", x, y)
	}
}

// A database that does not answer fails an invocation before its deadline, and the same process works
// again when it answers. A worker that is warm goes on asking, and says so.
func TestADatabaseGoneAndBack(t *testing.T) {
	t.Parallel()
	b, pool := newLedgerBench(t, servers.SharedRedis(t))
	proxy := servers.NewProxy(t, servers.SharedPostgres(t).Addr())
	conn := pool.Config().ConnConfig
	url := "DELAYQ_DATABASE_URL=postgres://" + conn.User + "@" + proxy.Addr() + "/" + conn.Database + "?sslmode=disable"
	worker, reconciler := b.environment(url, "DELAYQ_IDLE_EXIT=2s"), b.reconciler(url)
	const budget = 7 * time.Second
	for n := range 2 { // cold and warm
		proxy.BlackHole(true)
		b.enqueue(fmt.Sprint("task-", n), "quick", nil)
		for _, e := range []*environment{worker, reconciler} {
			ev := e.start(budget)
			a := e.answer()
			failed := a.failure != "" || e == worker && n == 1 && a.Leased == 0 && strings.Contains(e.log.String(), "cannot lease, will keep trying")
			if !failed || !time.Now().Before(ev.deadline) {
				t.Errorf("round %d: %s, %s before the deadline", n, a.raw, time.Until(ev.deadline))
			}
		}
		proxy.BlackHole(false)
		eventually(t, "the task runs once its lease has ended", func() bool {
			worker.start(budget)
			worker.answer()
			return b.get(fmt.Sprint("task-", n)).State == delayq.StateDone
		})
		if got := reconcile(t, reconciler, budget); !got.Queues[0].Complete {
			t.Errorf("round %d: %+v", n, got)
		}
	}
}

// A Redis that does not answer fails the reconciler before its deadline.
func TestTheReconcilerWithoutRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server)
	b.enqueueMany(10)
	proxy := servers.NewProxy(t, server.Addr())
	e := b.reconciler("DELAYQ_REDIS_URL=redis://" + proxy.Addr())
	proxy.BlackHole(true)
	ev := e.start(6 * time.Second)
	if a := e.answer(); !strings.Contains(a.failure, b.name) || !time.Now().Before(ev.deadline) {
		t.Errorf("failure %q, %s before the deadline", a.failure, time.Until(ev.deadline))
	}
	proxy.BlackHole(false)
	if got := reconcile(t, e, 20*time.Second); !got.Queues[0].Complete || got.Queues[0].Drift != 0 {
		t.Errorf("%+v", got)
	}
}

// Outside Lambda a function runs one invocation and ends.
func TestOneInvocationOutsideLambda(t *testing.T) {
	t.Parallel()
	b, _ := newLedgerBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=100ms")
	b.enqueue("x", "example.echo", nil)
	run := func(bin func() (string, error), vars []string, args ...string) (out string, code int) {
		t.Helper()
		cmd := exec.Command(program(t, bin), args...)
		cmd.Env = vars
		var log strings.Builder
		cmd.Stderr = &log
		text, err := cmd.Output()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(text) + log.String(), cmd.ProcessState.ExitCode()
	}
	if out, code := run(workerBin, b.vars, "-for", "20s"); code != 0 || !strings.Contains(out, `"succeeded":1`) {
		t.Errorf("worker: %d\n%s", code, out)
	}
	if out, code := run(reconcilerBin, b.vars, "-for", "20s"); code != 0 || !strings.Contains(out, `"complete":true`) {
		t.Errorf("reconciler: %d\n%s", code, out)
	}
	if out, code := run(monitorBin, b.vars, "-for", "20s"); code != 0 || !strings.Contains(out, `"SucceededTotal":1`) || !strings.Contains(out, `"queues":1`) {
		t.Errorf("monitor: %d\n%s", code, out)
	}
	if out, code := run(reconcilerBin, nil, "-for", "20s"); code != 1 || !strings.Contains(out, "DELAYQ_DATABASE_URL: is not set") {
		t.Errorf("without variables: %d\n%s", code, out)
	}
	if out, code := run(reconcilerBin, b.vars); code != 2 || !strings.Contains(out, "-for 55s") {
		t.Errorf("without arguments: %d\n%s", code, out)
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
		"no such user": {strings.Replace(empty, "postgres@", "nobody:"+secret+"@", 1), secret, "nobody"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			vars := []string{"DELAYQ_DATABASE_URL=" + row.url, "DELAYQ_DATABASE_PASSWORD=" + row.password}
			for kind, e := range map[string]*environment{"reconciler": b.reconciler(vars...), "worker": b.environment(vars...)} {
				if kind == "worker" && row.url == "" {
					continue // it works without a ledger, and then says delayq.ErrLedger of this queue
				}
				for range 2 { // and again: it does not crash, it fails
					e.start(8 * time.Second)
					a := e.answer()
					if !strings.Contains(a.failure, row.want) {
						t.Errorf("%s: failure %q, want %q in it", kind, a.failure, row.want)
					}
					if seen := a.failure + string(a.raw) + e.log.String(); strings.Contains(seen, secret) {
						t.Errorf("%s: a secret got out: %s", kind, seen)
					}
				}
			}
		})
	}
}

func TestPoolOfADatabase(t *testing.T) {
	t.Parallel()
	if pool, bad := (&Config{DatabaseURL: "postgresql://host/shop"}).database(); bad != nil || pool.MaxConns != databasePool {
		t.Errorf("%+v %v", pool, bad)
	}
	cfg := Config{DatabaseURL: "postgres://u:old@host:5432/shop?pool_max_conns=2", DatabasePassword: "p@ss/word"}
	pool, bad := cfg.database()
	if bad != nil {
		t.Fatal(bad)
	}
	if pool.MaxConns != 2 || pool.ConnConfig.Password != "p@ss/word" || pool.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeCacheDescribe ||
		pool.ConnConfig.ConnectTimeout != databaseConnect || pool.MaxConnIdleTime != idleConn || pool.PingTimeout != databasePing || pool.MinConns != 0 {
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
