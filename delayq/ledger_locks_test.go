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

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

// Rows that an application has locked in a transaction of its own concern nobody but their tasks.

func newShared(t *testing.T) *booked {
	t.Helper()
	t.Parallel()
	return newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{})
}

func (b *booked) enqueue(n int, prefix string) {
	b.Helper()
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = task(fmt.Sprint(prefix, i))
	}
	_, err := b.q.EnqueueMany(b.Context(), tasks)
	b.ok(err)
}

// A handler that completes its task and takes its time to commit does not cost its neighbours their leases.
func TestAnOpenCompleteTxHoldsUpNobody(t *testing.T) {
	b := newShared(t)
	b.enqueue(4, "t")
	var ran runs
	var done atomic.Int64
	stop := b.start(func(ctx context.Context, task *delayq.Task) error {
		ran.add(task.ID)
		defer done.Add(1)
		if task.ID != "t0" {
			time.Sleep(5 * time.Second)
			return context.Cause(ctx)
		}
		return pgx.BeginFunc(context.WithoutCancel(ctx), b.pool, func(tx pgx.Tx) error {
			if err := b.q.CompleteTx(context.WithoutCancel(ctx), tx, task); err != nil {
				return err
			}
			time.Sleep(4 * time.Second)
			return nil
		})
	}, func(w *delayq.Worker) { w.Concurrency = 4 })
	b.until("all have run", 20*time.Second, func() bool { return done.Load() == 4 })
	stats := stop()
	if stats.Succeeded != 4 || stats.LeaseLost != 0 {
		t.Errorf("%+v", stats)
	}
	for id, n := range ran.n {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
}

// A cancel that is not committed yet holds up its own task alone.
func TestAnOpenCancelTxHoldsUpNobody(t *testing.T) {
	b := newShared(t)
	b.enqueue(100, "t")
	tx, err := b.pool.Begin(t.Context())
	b.ok(err)
	if got, err := b.q.CancelTx(t.Context(), tx, "t0"); err != nil || got != delayq.Cancelled {
		t.Fatal(got, err)
	}
	var ran runs
	b.start(func(_ context.Context, task *delayq.Task) error { ran.add(task.ID); return nil }, func(w *delayq.Worker) { w.Concurrency = 10 })
	b.until("the others run", 8*time.Second, func() bool { return ran.different() == 99 })
	b.ok(tx.Rollback(t.Context()))
	b.until("it runs after the rollback", 8*time.Second, func() bool { return ran.different() == 100 })
	for id, n := range ran.n {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
}

// A finished task whose row is locked is reported when it is free, the others at once.
func TestALockedRowHoldsUpNoOthersReport(t *testing.T) {
	b := newShared(t)
	b.enqueue(20, "t")
	locked := make(chan bool)
	var once sync.Once
	release := make(chan bool)
	stop := b.start(func(ctx context.Context, task *delayq.Task) error {
		once.Do(func() {
			tx, err := b.pool.Begin(context.Background())
			b.ok(err)
			_, err = tx.Exec(ctx, "select from delayq.task where id = 't0' for update")
			b.ok(err)
			close(locked)
			go func() { <-release; b.ok(tx.Rollback(context.Background())) }()
		})
		<-locked
		return nil
	}, func(w *delayq.Worker) { w.Concurrency = 20 })
	b.until("the others are done", 8*time.Second, func() bool {
		var n int
		b.ok(b.pool.QueryRow(context.Background(), "select count(*) from delayq.task where status = 'succeeded'").Scan(&n))
		return n == 19
	})
	close(release)
	b.until("it is done", 5*time.Second, func() bool { return b.status("t0") == delayq.LedgerSucceeded })
	if stats := stop(); stats.Succeeded != 20 || stats.Unreported != 0 {
		t.Errorf("%+v", stats)
	}
}

// Who enqueues an id that another transaction is about to insert waits for it; nobody waits with them.
func TestAnOpenEnqueueTxHoldsUpItsIDAlone(t *testing.T) {
	b := newShared(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	tx, err := b.pool.Begin(ctx)
	b.ok(err)
	_, err = b.q.EnqueueTx(ctx, tx, task("x"))
	b.ok(err)
	outcomes := make(chan delayq.Outcome, 3)
	for range 2 {
		go func() {
			res, err := b.q.Enqueue(ctx, task("x"))
			b.ok(err)
			outcomes <- res.Outcome
		}()
	}
	go func() {
		res, err := b.q.EnqueueMany(ctx, []delayq.Task{task("y"), task("x"), task("z")})
		b.ok(err)
		outcomes <- res[1].Outcome
	}()
	time.Sleep(300 * time.Millisecond)
	began := time.Now()
	for i := range 20 { // such as by the goroutine that has the transaction
		_, err := b.q.Enqueue(ctx, task(fmt.Sprint("unrelated", i)))
		b.ok(err)
	}
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("unrelated enqueues took %s", took)
	}
	if len(outcomes) != 0 {
		t.Error("an enqueue of the id did not wait")
	}
	b.ok(tx.Commit(ctx))
	for range 3 {
		if o := <-outcomes; o != delayq.DuplicatePending {
			t.Error(o)
		}
	}
}

// A backlog is Redis' to deliver as long as it answers: the ledger is not asked for it.
func TestABacklogIsLeftToRedis(t *testing.T) {
	b := newShared(t)
	tasks := make([]delayq.Task, 3000)
	for i := range tasks {
		tasks[i] = task(fmt.Sprint(i))
		tasks[i].RunAt = time.Now().Add(-time.Minute)
	}
	_, err := b.q.EnqueueMany(t.Context(), tasks)
	b.ok(err)
	var ran runs
	stop := b.start(func(_ context.Context, task *delayq.Task) error {
		ran.add(task.ID)
		time.Sleep(20 * time.Millisecond)
		return nil
	}, func(w *delayq.Worker) { w.Concurrency = 8 })
	b.until("most have run", 30*time.Second, func() bool { return ran.different() > 2500 })
	if stats := stop(); stats.FromLedger != 0 || stats.Refused != 0 {
		t.Errorf("%+v", stats)
	}
}

// Many who wait for one id leave the database to the others.
func TestManyWaitersLeaveThePoolAlone(t *testing.T) {
	b := newShared(t)
	ctx := t.Context()
	tx, err := b.pool.Begin(ctx)
	b.ok(err)
	_, err = b.q.EnqueueTx(ctx, tx, task("x"))
	b.ok(err)
	var waiters sync.WaitGroup
	var made atomic.Int64
	for range 200 {
		waiters.Go(func() {
			res, err := b.q.Enqueue(ctx, task("x"))
			b.ok(err)
			if res.Outcome == delayq.Created {
				made.Add(1)
			}
		})
	}
	time.Sleep(300 * time.Millisecond)
	within, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for i := range 10 {
		_, err := b.q.Enqueue(within, task(fmt.Sprint("other", i)))
		b.ok(err)
	}
	b.ok(tx.Rollback(ctx))
	waiters.Wait()
	if made.Load() != 1 {
		t.Errorf("%d were created", made.Load())
	}
}

// One whose row is locked is told so within a moment, and what has no lease any more is not given out at once again.
func TestALockedRowIsNoHotLoop(t *testing.T) {
	b := newShared(t)
	ctx := t.Context()
	b.enqueue(2, "t")
	leases, err := b.q.Lease(ctx, delayq.LeaseOptions{Max: 2, Lease: time.Second, Consumer: "c"})
	b.ok(err)
	tx, err := b.pool.Begin(ctx)
	b.ok(err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, "select from delayq.task where id = 't0' for update")
	b.ok(err)
	within, cancel := context.WithTimeout(ctx, 660*time.Millisecond) // a third of a short lease
	defer cancel()
	for _, l := range leases {
		if l.ID == "t0" {
			if err := b.q.Ack(within, l); !errors.Is(err, delayq.ErrBusy) {
				t.Error("ack:", err)
			}
		}
	}
	time.Sleep(1100 * time.Millisecond) // both leases have run out

	for until := time.Now().Add(3 * time.Second); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		got, err := b.q.Lease(ctx, delayq.LeaseOptions{Max: 1, Lease: time.Minute, Consumer: "c"})
		b.ok(err)
		if len(got) == 1 && got[0].ID == "t1" {
			b.ok(b.q.Ack(ctx, got...))
		}

	}
	stats, err := b.q.Stats(ctx)
	b.ok(err)
	if stats.Leased > 10 {
		t.Errorf("leased %d times in Redis", stats.Leased)
	}
}

// What of a call is in the ledger is in Redis too, while another of its tasks waits.
func TestOneThatWaitsKeepsNoneFromRedis(t *testing.T) {
	b := newShared(t)
	ctx := t.Context()
	tx, err := b.pool.Begin(ctx)
	b.ok(err)
	_, err = b.q.EnqueueTx(ctx, tx, task("x"))
	b.ok(err)
	done := make(chan error, 1)
	go func() {
		_, err := b.q.EnqueueMany(ctx, []delayq.Task{task("x"), task("y"), task("z")})
		done <- err
	}()
	b.until("the others are in Redis", 5*time.Second, func() bool {
		stats, err := b.q.Stats(context.Background())
		b.ok(err)
		return stats.Shards[0].Tasks == 2
	})
	b.ok(tx.Rollback(ctx))
	b.ok(<-done)
}
