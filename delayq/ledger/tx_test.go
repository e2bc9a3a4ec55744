package ledger_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

func TestAfterCommit(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	var called []string
	note := func(s string) func(context.Context) { return func(context.Context) { called = append(called, s) } }
	errNo := errors.New("no")

	r.ok(ledger.BeginFunc(ctx, r.pool, func(tx *ledger.Tx) error {
		tx.AfterCommit(note("a"))
		tx.AfterCommit(func(ctx context.Context) {
			note("b")(ctx)
			var n int // it is committed by now
			r.ok(r.pool.QueryRow(ctx, "SELECT count(*) FROM delayq.once").Scan(&n))
			if n != 1 {
				t.Error("called before the commit")
			}
		})
		_, err := ledger.Once(ctx, tx, "k")
		return err
	}))
	r.same(called, "a", "b")

	called = nil
	r.is(ledger.BeginFunc(ctx, r.pool, func(tx *ledger.Tx) error { tx.AfterCommit(note("rolled back")); return errNo }), errNo)
	tx, err := ledger.Begin(ctx, r.pool)
	r.ok(err)
	tx.AfterCommit(note("failed"))
	if _, err := tx.Exec(ctx, "SELECT 1/0"); err == nil {
		t.Fatal("no error")
	}
	if tx.Commit(ctx) == nil {
		t.Error("a commit of a failed transaction")
	}
	r.same(called)

	// Savepoints: what is inside counts when both are committed.
	for _, inner := range []error{nil, errNo} {
		called = nil
		r.ok(ledger.BeginFunc(ctx, r.pool, func(tx *ledger.Tx) error {
			err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
				sub.(*ledger.Tx).AfterCommit(note("inner"))
				return inner
			})
			if !errors.Is(err, inner) {
				t.Error(err)
			}
			err = ledger.BeginFunc(ctx, tx, func(sub *ledger.Tx) error { sub.AfterCommit(note("inner too")); return inner })
			if !errors.Is(err, inner) {
				t.Error(err)
			}
			if len(called) > 0 {
				t.Error("called before the outer commit")
			}
			tx.AfterCommit(note("outer"))
			return nil
		}))
		want := []string{"inner", "inner too", "outer"}
		if inner != nil {
			want = want[2:]
		}
		if !slices.Equal(called, want) {
			t.Errorf("%q, want %q", called, want)
		}
	}
}

func TestOnce(t *testing.T) {
	eachMode(t, func(r *rig) {
		ctx := r.Context()
		key := r.name + "\x00\xff" + strings.Repeat("k", 4000)
		ask := func(key string, commit bool, keep ...time.Duration) (first bool) {
			r.Helper()
			tx, err := r.pool.Begin(ctx)
			r.ok(err)
			first, err = ledger.Once(ctx, tx, key, keep...)
			r.ok(err)
			if commit {
				r.ok(tx.Commit(ctx))
			} else {
				r.ok(tx.Rollback(ctx))
			}
			return first
		}
		for i, c := range []struct{ commit, want bool }{{false, true}, {true, true}, {true, false}, {false, false}, {true, false}} {
			if got := ask(key, c.commit); got != c.want {
				r.Errorf("call %d: %v", i, got)
			}
		}
		if !ask(key+"k", true, time.Second) {
			r.Error("another key, one byte longer, is not the same")
		}
		var stored []byte
		r.ok(r.pool.QueryRow(ctx, "SELECT key FROM delayq.once WHERE hash = sha256($1::bytea)", []byte(key)).Scan(&stored))
		if string(stored) != key {
			r.Error("the key is not kept")
		}
		r.exec("UPDATE delayq.once SET expires_at = clock_timestamp() WHERE hash = sha256($1::bytea)", []byte(key))
		if !ask(key, true) || ask(key, true) {
			r.Error("an expired marker counts as absent, once")
		}
		r.inTx(func(ctx context.Context, tx pgx.Tx) {
			for _, bad := range []string{"", strings.Repeat("k", 4097)} {
				_, err := ledger.Once(ctx, tx, bad)
				r.invalid("key", err)
			}
			_, err := ledger.Once(ctx, tx, "k", time.Millisecond)
			r.invalid("keep", err)
		})
	})
}

// Of two at once the second waits for the first, and is the first itself when that rolls back. So it is with a marker that has expired.
func TestOnceWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	for _, expired := range []bool{false, true} {
		for _, commit := range []bool{false, true} {
			r.exec("DELETE FROM delayq.once")
			if expired {
				r.exec("INSERT INTO delayq.once VALUES (sha256('k'), 'k', now(), now() - interval '1 second')")
			}
			tx, err := r.pool.Begin(ctx)
			r.ok(err)
			defer tx.Rollback(ctx)
			if first, err := ledger.Once(ctx, tx, "k"); err != nil || !first {
				t.Fatal(first, err)
			}
			second := make(chan bool, 1)
			go func() {
				var first bool
				err := ledger.BeginFunc(ctx, r.pool, func(tx *ledger.Tx) (err error) {
					first, err = ledger.Once(ctx, tx, "k")
					return err
				})
				if err != nil {
					t.Error(err)
				}
				second <- first
			}()
			r.waitForLock()
			if commit {
				r.ok(tx.Commit(ctx))
			} else {
				r.ok(tx.Rollback(ctx))
			}
			if got := <-second; got == commit {
				t.Errorf("expired %v, commit %v: the second is told %v", expired, commit, got)
			}
		}
	}
}

func TestRetain(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	r.states()
	many := ids("old", 1200)
	for part := range slices.Chunk(many, 400) {
		r.insertIDs(part...)
		_, err := r.q.Cancel(ctx, nil, part)
		r.ok(err)
	}
	r.insertIDs("young")
	_, err := r.q.Cancel(ctx, nil, []string{"young"})
	r.ok(err)
	r.exec("UPDATE delayq.task SET finished_at = now() - interval '169 hours' WHERE finished_at IS NOT NULL AND queue > 0 AND id <> 'young'")
	r.exec("UPDATE delayq.task SET dead_at = now() - interval '31 days', run_at = now() - interval '1 year' WHERE dead_at IS NOT NULL")
	r.exec("INSERT INTO delayq.once SELECT sha256(i::text::bytea), '', now(), now() + (i - 700) * interval '1 hour' FROM generate_series(1, 1000) i")
	if n, all, err := r.led.Retain(ctx, 0); n != 0 || all || err != nil {
		t.Error(n, all, err)
	}
	total := make(chan int64, 2)
	for range 2 { // the reconcilers of two machines
		go func() {
			n, _, err := r.led.Retain(ctx, time.Minute)
			if err != nil {
				t.Error(err)
			}
			total <- n
		}()
	}
	if n := <-total + <-total; n != 1200+2+1+700 {
		t.Errorf("%d deleted", n)
	}
	for _, id := range []string{"young", "pending", "retry", "running", "expired"} {
		r.row(id)
	}
	if n, all, err := r.led.Retain(ctx, time.Minute); n != 0 || !all || err != nil {
		t.Error(n, all, err)
	}
	// A queue that remembers longer than the ledger keeps.
	led, err := ledger.Open(ctx, r.pool, ledger.KeepEnded(time.Minute), ledger.KeepDead(time.Minute))
	r.ok(err)
	q, _, err := led.OpenQueue(ctx, "orders", delayq.LedgerConfig{Retention: 24 * time.Hour}, false)
	r.ok(err)
	r.exec("UPDATE delayq.task SET finished_at = now() - interval '1 hour' WHERE id = 'young'")
	if n, _, err := q.Retain(ctx, time.Minute); n != 0 || err != nil {
		t.Error(n, err)
	}
	_, err = ledger.Open(ctx, r.pool, ledger.KeepDead(time.Second))
	r.invalid("KeepEnded and KeepDead", err)
}

// After the database has lost commits every revision must be above those that Redis may have seen.
func TestRaiseEpoch(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	token := r.states()
	r.insertIDs(ids("x", 500)...)
	r.insertIDs(ids("y", 500)...)
	var lost int64
	r.ok(r.pool.QueryRow(ctx, "SELECT nextval('delayq.rev') + 1000").Scan(&lost)) // handed out and lost
	before := r.row("running")
	for _, above := range []int64{0, 5 << 40} {
		n, err := r.led.RaiseEpoch(ctx, above)
		if err != nil || n != 1009 {
			t.Fatal(n, err)
		}
		lost = max(lost, above)
		var least, distinct, count int64
		r.ok(r.pool.QueryRow(ctx, "SELECT min(rev), count(distinct rev), count(*) FROM delayq.task WHERE queue > 0").Scan(&least, &distinct, &count))
		if least <= lost || distinct != count || least > 1<<53 {
			t.Errorf("least revision %d, lost %d; %d of %d distinct", least, lost, distinct, count)
		}
	}
	if row := r.insertIDs("new")[0]; row.Rev <= 6<<40 {
		t.Error(row.Rev)
	}
	row := r.row("running")
	if row.Rev == before.Rev || brief(row) != brief(before) {
		t.Errorf("%+v", row)
	}
	if c := r.finish(end("running", token, delayq.LedgerSucceed))[0]; !c.Applied {
		t.Error("a worker in the middle of it lost its lease")
	}
}
