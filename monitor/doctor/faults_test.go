package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/doctor"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) {
	logging.Disable() // a line for each failed dial
	servers.Main(m)
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A ward is a queue on servers of its own, and who looks after it.
type ward struct {
	*testing.T
	redis *servers.Redis
	rdb   *redis.Client
	cfg   delayq.Config
	q     *delayq.Queue
	m     *monitor.Monitor
	o     doctor.Options
}

func newWard(t *testing.T, cfg delayq.Config, mcfg monitor.Config) *ward {
	t.Parallel()
	w := &ward{T: t, redis: servers.NewRedis(t), cfg: cfg}
	w.rdb = redis.NewClient(&redis.Options{Addr: w.redis.Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { w.rdb.Close() })
	w.cfg.Logger, w.cfg.OnWarning = slog.New(slog.DiscardHandler), func(delayq.Warning) {}
	var err error
	w.q, err = delayq.Open(t.Context(), w.rdb, "orders", w.cfg)
	ok(t, err)
	mcfg.Redis, mcfg.Queues, mcfg.Ledger, mcfg.Timeout = w.rdb, []string{"orders"}, cfg.Ledger, 2*time.Second
	w.m, err = monitor.New(mcfg)
	ok(t, err)
	w.o = doctor.Options{Redis: w.rdb, StuckAfter: mcfg.StuckAfter, Timeout: 2 * time.Second}
	return w
}

func (w *ward) add(n int, typ string) {
	w.Helper()
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = delayq.Task{ID: fmt.Sprintf("%s-%d-%d", typ, time.Now().UnixNano(), i), Type: typ}
	}
	_, err := w.q.EnqueueMany(w.Context(), tasks)
	ok(w.T, err)
}

// work runs a worker until the returned function is called, or the test ends.
func (w *ward) work(h delayq.HandlerFunc, attempts int) (stop func()) {
	mux := delayq.NewMux()
	mux.HandleFunc("mail", h)
	worker := delayq.NewWorker(mux, w.q)
	worker.Concurrency, worker.MaxAttempts, worker.Grace, worker.Logger = 1, attempts, 100*time.Millisecond, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan struct{})
	go func() { defer close(done); _, _ = worker.Run(ctx) }() // what it reports is not of interest
	stop = sync.OnceFunc(func() { cancel(); <-done })
	w.Cleanup(stop)
	return stop
}

func (w *ward) visit() *doctor.Report { return doctor.Diagnose(w.Context(), w.m, w.o) }

// finds wants a finding.
func (w *ward) finds(r *doctor.Report, severity doctor.Severity, code doctor.Code, says string) {
	w.Helper()
	var all strings.Builder
	for _, f := range r.Findings {
		if f.Severity == severity && f.Code == code && strings.Contains(f.What, says) {
			return
		}
		fmt.Fprintf(&all, "%s %s %s %s\n", f.Stage, f.Severity, f.Code, f.What)
	}
	w.Errorf("no %s %s that says %q in\n%s", severity, code, says, all.String())
}

// until visits until there is a finding of this code that is not well.
func (w *ward) until(code doctor.Code) *doctor.Report {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		r := w.visit()
		for _, f := range r.Findings {
			if f.Code == code && f.Severity > doctor.OK {
				return r
			}
		}
		if time.Now().After(end) {
			w.finds(r, doctor.Warning, code, "")
			return r
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestWorkerStops(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	w.add(3, "mail")
	r := w.visit()
	w.finds(r, doctor.Critical, doctor.NoConsumer, "3 tasks are due")
	stop := w.work(func(context.Context, *delayq.Task) error { return nil }, 5)
	for n := int64(0); n < 3; {
		s, err := w.q.Stats(t.Context())
		ok(t, err)
		n = s.Succeeded
	}
	r = w.visit()
	w.finds(r, doctor.OK, doctor.NoConsumer, "1 consumer is healthy")
	if r.Worst > doctor.Info {
		w.finds(r, doctor.OK, "anything", "")
	}
	stop()
	if r = w.visit(); r.Worst > doctor.Info { // it has said goodbye
		w.finds(r, doctor.OK, "anything", "")
	}
}

// Where nothing can be seen nothing is well.
func TestQueuesThatMayNotBeListed(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	ok(t, w.rdb.Do(t.Context(), "ACL", "SETUSER", "default", "-scan").Err())
	m, err := monitor.New(monitor.Config{Redis: w.rdb})
	ok(t, err)
	r := doctor.Diagnose(t.Context(), m, w.o)
	w.finds(r, doctor.Critical, doctor.NotListed, "none was looked at")
}

func TestDeadlockedHandlers(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{StuckAfter: time.Second})
	never := make(chan struct{})
	w.work(func(context.Context, *delayq.Task) error { <-never; return nil }, 5)
	t.Cleanup(func() { close(never) }) // before the worker is waited for
	w.add(3, "mail")
	r := w.until(doctor.StuckConsumers)
	w.finds(r, doctor.Critical, doctor.StuckConsumers, "all consumers that live (1) are stuck")
}

func TestTypeThatNobodyHandles(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	w.work(func(context.Context, *delayq.Task) error { return nil }, 1)
	w.add(1, "mail")
	w.add(6, "pay")
	r := w.until(doctor.NoHandler)
	w.finds(r, doctor.Warning, doctor.NoHandler, "pay")
	w.finds(r, doctor.Warning, doctor.DeadRising, "by type")
}

func TestTypeThatNobodyHasYet(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	hold := make(chan struct{})
	w.work(func(context.Context, *delayq.Task) error { <-hold; return nil }, 1)
	t.Cleanup(func() { close(hold) })
	w.add(1, "mail")
	for s := (&delayq.Stats{}); s.Processing == 0; {
		var err error
		s, err = w.q.Stats(t.Context())
		ok(t, err)
	}
	w.add(2, "pay")
	w.finds(w.until(doctor.NoTypeHandler), doctor.Warning, doctor.NoTypeHandler, "2 pay")
}

func TestFailuresWhileWatched(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	w.work(func(context.Context, *delayq.Task) error { return delayq.Permanent(errors.New("card refused")) }, 1)
	w.o.Watch = 2 * time.Second
	time.AfterFunc(500*time.Millisecond, func() { w.add(20, "mail") })
	r := w.visit()
	w.finds(r, doctor.Critical, doctor.FailureRate, "100 % of the attempts")
	w.finds(r, doctor.Warning, doctor.DeadRising, "20 of its 20 dead letters died")
	for _, f := range r.Findings {
		if strings.Contains(f.What, "card refused") { // what a handler says may be private
			t.Error(f.What)
		}
	}
}

func TestBacklogGrows(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	w.work(func(ctx context.Context, _ *delayq.Task) error { time.Sleep(100 * time.Millisecond); return nil }, 5)
	w.add(1, "mail")
	w.o.Watch = time.Second
	time.AfterFunc(300*time.Millisecond, func() { w.add(200, "mail") })
	w.finds(w.visit(), doctor.Warning, doctor.BacklogGrowing, "1 consumer is healthy")
}

func TestServerFaults(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	ctx := t.Context()
	ok(t, w.rdb.ConfigSet(ctx, "maxmemory-policy", "allkeys-lru").Err())
	ok(t, w.rdb.ConfigSet(ctx, "maxmemory", "900kb").Err())
	r := w.visit()
	w.finds(r, doctor.Critical, doctor.Eviction, "allkeys-lru")
	w.finds(r, doctor.Critical, doctor.Memory, "when full it refuses")
	ok(t, w.rdb.ConfigSet(ctx, "maxmemory", "0").Err())
	ok(t, w.rdb.ConfigSet(ctx, "maxmemory-policy", "noeviction").Err())
	w.finds(w.visit(), doctor.OK, doctor.Eviction, "noeviction")

	ok(t, os.RemoveAll(w.redis.Dir())) // a disk that takes no more
	ok(t, w.rdb.BgSave(ctx).Err())
	w.finds(w.until(doctor.SaveFailed), doctor.Critical, doctor.SaveFailed, "could not save")

	ok(t, w.redis.Pause())
	r = w.visit()
	ok(t, w.redis.Resume())
	w.finds(r, doctor.Critical, doctor.RedisDown, "does not answer in time")
	w.redis.Kill()
	w.finds(w.visit(), doctor.Critical, doctor.RedisDown, "refused")
}

func TestQueueThatIsNotThere(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	m, err := monitor.New(monitor.Config{Redis: w.rdb, Queues: []string{"ordres"}})
	ok(t, err)
	w.finds(doctor.Diagnose(t.Context(), m, w.o), doctor.Critical, doctor.QueueMissing, "there is orders")
	names, err := delayq.Queues(t.Context(), w.rdb)
	if ok(t, err); len(names) != 1 {
		t.Errorf("queues %v: a look makes none", names)
	}
}

func TestLedgerFaults(t *testing.T) {
	postgres := servers.NewPostgres(t)
	pool, err := pgxpool.New(t.Context(), postgres.URL("postgres"))
	ok(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	ok(t, err)
	led, err := ledger.Open(t.Context(), pool)
	ok(t, err)
	w := newWard(t, delayq.Config{Ledger: led}, monitor.Config{})
	w.o.Database = func(ctx context.Context) (now time.Time, err error) {
		err = pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
		return now, err
	}
	w.o.Audit = true
	for range 3 {
		w.add(50, "mail")
	}
	r := w.visit()
	w.finds(r, doctor.OK, doctor.DatabaseDown, "answers")
	w.finds(r, doctor.OK, doctor.Drift, "150 open tasks")
	w.finds(r, doctor.OK, doctor.AuditViolations, "agree")
	w.finds(r, doctor.Warning, doctor.NoReconcile, "no reconciler has ever")

	ok(t, w.rdb.FlushAll(t.Context()).Err())
	r = w.visit()
	w.finds(r, doctor.Critical, doctor.DataLost, "1 of 1 shards")
	w.finds(r, doctor.Warning, doctor.Drift, "150 open tasks for Redis to hold, and Redis has 0")

	rec, err := reconciler.New(w.q, reconciler.Config{Logger: slog.New(slog.DiscardHandler)})
	ok(t, err)
	_, err = rec.Pass(t.Context())
	ok(t, err)
	r = w.visit()
	w.finds(r, doctor.OK, doctor.Drift, "150 open tasks")
	w.finds(r, doctor.OK, doctor.NoReconcile, "ended")

	// A task that the ledger does not know.
	_, err = pool.Exec(t.Context(), `DELETE FROM delayq.task WHERE ctid = (SELECT ctid FROM delayq.task LIMIT 1)`)
	ok(t, err)
	_, err = rec.Pass(t.Context())
	ok(t, err)
	w.finds(w.visit(), doctor.Warning, doctor.Quarantined, "1 task is set aside")

	// Redis away: the ledger tells that its tasks are safe.
	ok(t, w.redis.Pause())
	r = w.visit()
	ok(t, w.redis.Resume())
	w.finds(r, doctor.Critical, doctor.RedisDown, "")
	w.finds(r, doctor.Info, doctor.Drift, "149 open tasks: they are safe")

	// Without the ledger it says that there is one.
	alone, err := monitor.New(monitor.Config{Redis: w.rdb, Queues: []string{"orders"}})
	ok(t, err)
	w.finds(doctor.Diagnose(t.Context(), alone, doctor.Options{}), doctor.Warning, doctor.NeedsLedger, "none was given")

	ok(t, postgres.Shutdown())
	r = w.visit()
	w.finds(r, doctor.Critical, doctor.DatabaseDown, "")
	w.finds(r, doctor.Info, doctor.QueueUnread, "Redis alone")
}
