package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

// runs counts how often each task ran.
type runs struct {
	mu sync.Mutex
	n  map[string]int
}

func (r *runs) add(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == nil {
		r.n = map[string]int{}
	}
	r.n[id]++
}

func (r *runs) different() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.n)
}

// start runs a worker until the test ends or stop is called, which answers its counts.
func (b *booked) start(h delayq.HandlerFunc, set func(*delayq.Worker)) (stop func() delayq.RunStats) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w := delayq.NewWorker(h, b.q)
	w.Lease, w.Logger = 2*time.Second, quiet()
	if set != nil {
		set(w)
	}
	done := make(chan delayq.RunStats, 1)
	go func() {
		stats, err := w.Run(ctx)
		if err != nil {
			b.Error(err)
		}
		done <- stats
	}()
	var once sync.Once
	var stats delayq.RunStats
	stop = func() delayq.RunStats {
		once.Do(func() { cancel(); stats = <-done })
		return stats
	}
	b.Cleanup(func() { stop() })
	return stop
}

func (b *booked) until(what string, most time.Duration, ok func() bool) {
	b.Helper()
	for end := time.Now().Add(most); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("not within %s: %s", most, what)
		}
	}
}

// A Redis that hangs costs a caller a second at most, workers turn to the ledger, and turn back by themselves.
func TestLedgerRedisHangs(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBooked(t, realClient(t, server.Addr()), delayq.Config{})
	var ran runs
	stop := b.start(func(_ context.Context, t *delayq.Task) error { ran.add(t.ID); return nil }, nil)
	_, err := b.q.Enqueue(t.Context(), task("before"))
	b.ok(err)
	b.until("a task runs", 5*time.Second, func() bool { return ran.different() == 1 })

	b.ok(server.Pause())
	began := time.Now()
	for i := range 20 {
		_, err := b.q.Enqueue(t.Context(), task(fmt.Sprint(i)))
		b.ok(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("20 enqueues took %s", took)
	}
	b.until("tasks run from the ledger", 15*time.Second, func() bool { return ran.different() == 21 })
	if _, err := delayq.Open(t.Context(), b.rdb, b.q.Name(), delayq.Config{Ledger: b.led, Logger: quiet()}); err != nil {
		t.Error("open:", err)
	}
	b.ok(server.Resume())
	time.Sleep(6 * time.Second) // the worker asks Redis again, at most 5 s later
	_, err = b.q.Enqueue(t.Context(), task("after"))
	b.ok(err)
	b.until("a task runs again", 3*time.Second, func() bool { return ran.different() == 22 })
	stats := stop()
	if stats.FromLedger != 20 || stats.Succeeded != 22 {
		t.Errorf("%+v", stats)
	}
	for id, n := range ran.n {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
}

// A task that was committed and that Redis never heard of runs within seconds, beside a Redis that works.
func TestLedgerFindsWhatRedisNeverHeardOf(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
	b.ok(pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		_, err := b.q.EnqueueTx(t.Context(), tx, task("x"))
		return err
	}))
	var ran runs
	stop := b.start(func(_ context.Context, t *delayq.Task) error { ran.add(t.ID); return nil }, nil)
	b.until("it runs", 12*time.Second, func() bool { return ran.different() == 1 })
	b.until("and ends", 3*time.Second, func() bool { return b.status("x") == delayq.LedgerSucceeded })
	if stats := stop(); stats.FromLedger != 1 {
		t.Errorf("%+v", stats)
	}
}

// PostgreSQL restarts under load: what was committed ends once, errors are errors, and the worker goes on.
func TestLedgerPostgresRestarts(t *testing.T) {
	t.Parallel()
	pg := servers.NewPostgres(t)
	pool, err := pgxpool.New(t.Context(), pg.URL(""))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	b := newBookedOn(t, pool, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
	_, err = pool.Exec(t.Context(), "create table effect (id text)")
	b.ok(err)
	stop := b.start(func(ctx context.Context, task *delayq.Task) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into effect values ($1)", task.ID); err != nil {
				return err
			}
			return b.q.CompleteTx(ctx, tx, task)
		})
	}, func(w *delayq.Worker) {
		w.Retry = func(int) time.Duration { return 50 * time.Millisecond }
		w.MaxAttempts = 1000
	})
	var committed []string
	failed := 0
	restarted := make(chan error, 1)
	for i := range 400 {
		if i == 100 {
			go func() {
				err := pg.Immediate()
				time.Sleep(300 * time.Millisecond)
				restarted <- errors.Join(err, pg.Restart())
			}()
		}
		id := fmt.Sprint(i)
		if _, err := b.q.Enqueue(t.Context(), task(id)); err == nil {
			committed = append(committed, id)
		} else {
			failed++
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.ok(<-restarted)
	if failed == 0 {
		t.Error("no enqueue met the restart, so this shows nothing")
	}
	b.until("all have ended", 30*time.Second, func() bool {
		var open int
		return pool.QueryRow(t.Context(), "select count(*) from delayq.task where finished_at is null").Scan(&open) == nil && open == 0
	})
	stop()
	var effects, twice int
	b.ok(pool.QueryRow(t.Context(), "select count(distinct id), count(*) - count(distinct id) from effect").Scan(&effects, &twice))
	if effects < len(committed) || twice != 0 {
		t.Errorf("%d committed, %d effects, %d of them twice", len(committed), effects, twice)
	}
}

// Through a pooler by transaction, which keeps no session: the whole way, in the query modes that such poolers bear.
func TestLedgerThroughPgBouncer(t *testing.T) {
	t.Parallel()
	pg := servers.NewPostgres(t)
	bouncer := servers.NewPgBouncer(t, pg, 3)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			name := "m" + mode.String()[:4]
			direct, err := pgx.Connect(t.Context(), pg.URL(""))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = direct.Close(context.Background()) }()
			if _, err := direct.Exec(t.Context(), "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
				t.Fatal(err)
			}
			cfg, err := pgxpool.ParseConfig(bouncer.URL(name))
			if err != nil {
				t.Fatal(err)
			}
			cfg.ConnConfig.DefaultQueryExecMode = mode
			cfg.MaxConns = 10 // more than the pooler has
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			b := newBookedOn(t, pool, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{Horizon: time.Hour})
			ctx := t.Context()
			odd := []byte("{\"json\": \"\x00\xff\\u0000\"}") // bytes, not text
			for i := range 50 {
				b.ok(ledger.BeginFunc(ctx, pool, func(tx *ledger.Tx) error {
					_, err := b.q.EnqueueTx(ctx, tx, delayq.Task{ID: fmt.Sprintf("\xfe%d", i), Type: "t", Payload: odd})
					return err
				}))
			}
			if got, err := b.q.Cancel(ctx, "\xfe0"); err != nil || got != delayq.Cancelled {
				t.Error(got, err)
			}
			b.ok(b.q.RescheduleIn(ctx, "\xfe1", 2*time.Hour))
			b.ok(b.q.RescheduleIn(ctx, "\xfe1", 0))
			var ran runs
			var calls atomic.Int64
			b.work(func(ctx context.Context, task *delayq.Task) error {
				if string(task.Payload) != string(odd) {
					t.Errorf("payload %q", task.Payload)
				}
				if calls.Add(1)%5 == 0 && task.Attempt == 1 {
					return delayq.RetryAfter(time.Millisecond, errBoom)
				}
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					if _, err := ledger.Once(ctx, tx, task.ID); err != nil {
						return err
					}
					return b.q.CompleteTx(ctx, tx, task)
				})
				if err == nil {
					ran.add(task.ID)
				}
				return err
			}, func() bool { return ran.different() == 49 })
			rec, err := reconciler.New(b.q, reconciler.Config{Logger: quiet()})
			b.ok(err)
			if rep, err := rec.Pass(ctx); err != nil || !rep.Complete {
				t.Error(rep, err)
			}
			page, err := b.q.List(ctx, delayq.ListOptions{State: delayq.StatePending})
			if err != nil || len(page.Tasks) != 0 {
				t.Error(page, err)
			}
		})
	}
}

// A handler that outlives its lease many times keeps it, also when Redis loses everything meanwhile.
func TestLedgerHeartbeatsKeepATask(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBooked(t, realClient(t, server.Addr()), delayq.Config{})
	rec, err := reconciler.New(b.q, reconciler.Config{Logger: quiet()})
	b.ok(err)
	_, err = b.q.Enqueue(t.Context(), task("x"))
	b.ok(err)
	var ran runs
	h := func(ctx context.Context, task *delayq.Task) error {
		ran.add(task.ID)
		select {
		case <-time.After(4 * time.Second):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	set := func(w *delayq.Worker) { w.Lease = time.Second }
	one, two := b.start(h, set), b.start(h, set)
	b.until("it runs", 5*time.Second, func() bool { return ran.different() == 1 })
	b.ok(b.rdb.FlushAll(t.Context()).Err())
	if _, err := rec.Pass(t.Context()); err != nil {
		t.Error(err)
	}
	b.until("it ends", 10*time.Second, func() bool { return b.status("x") == delayq.LedgerSucceeded })
	a, c := one(), two()
	if ran.n["x"] != 1 || a.Succeeded+c.Succeeded != 1 {
		t.Errorf("ran %d times: %+v %+v", ran.n["x"], a, c)
	}
}

// A running task that is cancelled hears of it within a poll, not within a third of its lease.
func TestLedgerCancelIsHeardSoon(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
	_, err := b.q.Enqueue(t.Context(), task("x"))
	b.ok(err)
	running, stopped := make(chan bool), make(chan error, 1)
	b.start(func(ctx context.Context, _ *delayq.Task) error {
		close(running)
		<-ctx.Done()
		stopped <- context.Cause(ctx)
		return ctx.Err()
	}, func(w *delayq.Worker) { w.Lease = time.Minute })
	<-running
	if got, err := b.q.Cancel(t.Context(), "x"); err != nil || got != delayq.Running {
		t.Fatal(got, err)
	}
	select {
	case cause := <-stopped:
		if !errors.Is(cause, delayq.ErrCancelled) {
			t.Error(cause)
		}
	case <-time.After(5 * time.Second):
		t.Error("not heard within 5 s")
	}
	b.until("it ends as cancelled", 5*time.Second, func() bool { return b.status("x") == delayq.LedgerCancelled })
}

// What the ledger refuses is refused before anything is written.
func TestLedgerBadInput(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{MaxPayload: 10})
	ctx := t.Context()
	var in *delayq.InputError
	for name, bad := range map[string]delayq.Task{
		"Payload": {ID: "a", Type: "t", Payload: make([]byte, 11)}, "Type": {ID: "a", Type: "\xff"}, "Key": {ID: "a", Type: "t", Key: "\x00"},
	} {
		if _, err := b.q.Enqueue(ctx, bad); !errors.As(err, &in) || in.Field != name {
			t.Errorf("%s: %v", name, err)
		}
		tx, err := b.pool.Begin(ctx)
		b.ok(err)
		if _, err := b.q.EnqueueManyTx(ctx, tx, []delayq.Task{task("fine"), bad}); !errors.As(err, &in) || in.Field != name {
			t.Errorf("%s: %v", name, err)
		}
		b.ok(tx.Commit(ctx))
		if res, err := b.q.EnqueueMany(ctx, []delayq.Task{{ID: "fine-" + name, Type: "t"}, bad}); err == nil || res[0].Err != nil {
			t.Errorf("one bad task spoils a good one: %v, %v", res, err)
		}
	}
	if b.status("fine") != "absent" {
		t.Error("a part of a refused call was written")
	}
	if _, err := b.q.EnqueueTx(ctx, nil, task("a")); !errors.As(err, &in) || in.Field != "tx" {
		t.Error(err)
	}
	if _, err := b.q.EnqueueTx(ctx, notATx{}, task("a")); !errors.As(err, &in) || in.Field != "tx" {
		t.Error(err)
	}
	if err := b.q.CompleteTx(ctx, notATx{}, &delayq.Task{ID: "a"}); !errors.As(err, &in) {
		t.Error(err)
	}
	if _, err := delayq.Open(ctx, b.rdb, servers.QueueName(t), delayq.Config{Ledger: b.led, NoCreate: true}); !errors.Is(err, delayq.ErrNoQueue) {
		t.Error(err)
	}
	if _, err := delayq.Open(ctx, b.rdb, b.q.Name(), delayq.Config{}); !errors.Is(err, delayq.ErrLedger) {
		t.Error(err)
	}
	if _, err := delayq.Open(ctx, b.rdb, b.q.Name(), delayq.Config{Ledger: b.led, Shards: 7}); !errors.Is(err, delayq.ErrShards) {
		t.Error(err)
	}
	plain, err := delayq.Open(ctx, b.rdb, servers.QueueName(t), delayq.Config{})
	b.ok(err)
	if _, err := plain.EnqueueTx(ctx, notATx{}, task("a")); !errors.Is(err, delayq.ErrNoLedger) {
		t.Error(err)
	}
}

type notATx struct{}

func (notATx) Commit(context.Context) error   { return nil }
func (notATx) Rollback(context.Context) error { return nil }

// A worker can hold a task twice, lost and leased again: one call about both answers for each.
func TestLedgerOneTaskTwiceInACall(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		old := r.bring("x", "expired")
		now := r.lease1()
		other := r.bring("y", "leased")
		for _, leases := range [][]*delayq.Lease{{old, now, other}, {now, other, old}} {
			var all *delayq.BatchError
			if err := r.q.Extend(r.Context(), time.Minute, leases...); !errors.As(err, &all) {
				r.Fatal(err)
			}
			for i, l := range leases {
				want := error(nil)
				if l == old {
					want = delayq.ErrLeaseLost
				}
				r.is(all.Errs[i], want, "extend")
			}
		}
		r.is(r.q.Ack(r.Context(), now, other), nil)
	})
}
