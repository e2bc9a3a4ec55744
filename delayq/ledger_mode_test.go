package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

// A booked is a queue with a ledger, on real servers.
type booked struct {
	*testing.T
	pool *pgxpool.Pool
	led  *ledger.Ledger
	rdb  *redis.Client
	q    *delayq.Queue
}

func newBooked(t *testing.T, rdb *redis.Client, cfg delayq.Config) *booked {
	t.Helper()
	return newBookedOn(t, newLedgerPool(t), rdb, cfg)
}

// newBookedOn is newBooked on a database of the test's own, which gets the schema.
func newBookedOn(t *testing.T, pool *pgxpool.Pool, rdb *redis.Client, cfg delayq.Config) *booked {
	t.Helper()
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	b := &booked{T: t, rdb: rdb, pool: pool}
	var err error
	b.led, err = ledger.Open(t.Context(), b.pool)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Ledger = b.led
	cfg.OnWarning = func(w delayq.Warning) { t.Log(w) }
	cfg.Logger = quiet()
	b.q, err = delayq.Open(t.Context(), rdb, servers.QueueName(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// newLedgerPool is a pool on a fresh database with the schema.
func newLedgerPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), servers.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return pool
}

func (b *booked) ok(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// work runs a worker until done says so, at most 10 s.
func (b *booked) work(h delayq.HandlerFunc, done func() bool) delayq.RunStats {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 15*time.Second)
	defer cancel()
	go func() {
		for !done() && ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	}()
	w := delayq.NewWorker(h, b.q)
	w.Lease = 2 * time.Second
	w.Logger = quiet()
	stats, err := w.Run(ctx)
	b.ok(err)
	if !done() {
		b.Fatalf("not done in time: %+v", stats)
	}
	return stats
}

func (b *booked) status(id string) delayq.LedgerStatus {
	b.Helper()
	rows, err := b.q.LedgerQueue().Rows(b.Context(), []string{id}, false)
	b.ok(err)
	if len(rows) == 0 {
		return "absent"
	}
	return rows[0].Status
}

func TestLedgerEnqueueTx(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
	ctx := t.Context()
	var ran atomic.Int64
	for i, commit := range []bool{true, false} {
		tx, err := b.pool.Begin(ctx)
		b.ok(err)
		_, err = b.q.EnqueueTx(ctx, tx, task(fmt.Sprint(i)))
		b.ok(err)
		if b.status(fmt.Sprint(i)) != "absent" {
			t.Fatal("visible before the commit")
		}
		if commit {
			b.ok(tx.Commit(ctx))
			b.ok(b.q.Sync(ctx, fmt.Sprint(i)))
		} else {
			b.ok(tx.Rollback(ctx))
		}
	}
	b.ok(ledger.BeginFunc(ctx, b.pool, func(tx *ledger.Tx) error {
		_, err := b.q.EnqueueTx(ctx, tx, task("2"))
		return err
	}))
	began := time.Now()
	stats := b.work(func(_ context.Context, task *delayq.Task) error {
		if task.ID == "1" {
			t.Error("a task that was rolled back ran")
		}
		ran.Add(1)
		return nil
	}, func() bool { return ran.Load() == 2 })
	if time.Since(began) > 2*time.Second || stats.FromLedger != 0 {
		t.Errorf("Redis was not told of a commit: %s, %+v", time.Since(began), stats)
	}
	if got := b.status("0") + b.status("1") + b.status("2"); got != "succeededabsentsucceeded" {
		t.Error(got)
	}
}

func TestLedgerOutlivesRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBooked(t, realClient(t, server.Addr()), delayq.Config{})
	ctx := t.Context()
	server.Stop()
	for i := range 20 {
		_, err := b.q.Enqueue(ctx, task(fmt.Sprint(i)))
		b.ok(err)
	}
	var ran atomic.Int64
	stats := b.work(func(context.Context, *delayq.Task) error { ran.Add(1); return nil }, func() bool { return ran.Load() == 20 })
	if stats.FromLedger != 20 {
		t.Errorf("%+v", stats)
	}
	q, err := delayq.Open(ctx, b.rdb, b.q.Name(), delayq.Config{Ledger: b.led, Logger: quiet()})
	b.ok(err)
	if _, err := q.Enqueue(ctx, task("late")); err != nil {
		t.Error("enqueue on a queue opened without Redis:", err)
	}
}

func TestLedgerCompleteTx(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
	ctx := t.Context()
	_, err := b.pool.Exec(ctx, "create table effect (id text)")
	b.ok(err)
	_, err = b.q.Enqueue(ctx, task("x"))
	b.ok(err)
	var ran atomic.Int64
	stats := b.work(func(ctx context.Context, task *delayq.Task) error {
		err := pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into effect values ($1)", task.ID); err != nil {
				return err
			}
			return b.q.CompleteTx(ctx, tx, task)
		})
		if err != nil {
			return err
		}
		again := pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return b.q.CompleteTx(ctx, tx, task) })
		if !errors.Is(again, delayq.ErrLeaseLost) || !errors.Is(again, delayq.ErrFinished) {
			t.Error("completed twice:", again)
		}
		ran.Add(1)
		return errors.New("what the handler returns no longer matters")
	}, func() bool { return ran.Load() == 1 })
	if stats.Succeeded != 1 || stats.Retried != 0 || b.status("x") != delayq.LedgerSucceeded {
		t.Errorf("%+v %s", stats, b.status("x"))
	}
}

func TestLedgerRestoresRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBooked(t, realClient(t, server.Addr()), delayq.Config{Horizon: time.Hour})
	ctx := t.Context()
	for i := range 50 {
		_, err := b.q.Enqueue(ctx, task(fmt.Sprint(i)), delayq.In(time.Duration(i%5)*2*time.Hour+100*time.Millisecond))
		b.ok(err)
	}
	_, err := b.q.Cancel(ctx, "5")
	b.ok(err)
	b.ok(b.rdb.FlushAll(ctx).Err())
	r, err := reconciler.New(b.q, reconciler.Config{Logger: quiet()})
	b.ok(err)
	rep, err := r.Pass(ctx)
	b.ok(err)
	if rep.Restored != 9 || rep.Repaired != 9 || !rep.Complete {
		t.Errorf("first pass: %+v", rep)
	}
	if rep, err = r.Pass(ctx); err != nil || rep.Drift != 0 {
		t.Errorf("second pass: %+v %v", rep, err)
	}
	var ran atomic.Int64
	b.work(func(context.Context, *delayq.Task) error { ran.Add(1); return nil }, func() bool { return ran.Load() == 9 })
}
