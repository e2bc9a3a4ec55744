package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// measureLedgerDepth compares what the statements of a task's run cost PostgreSQL in a deep table with a table of 10 thousand
// open rows: the claim of tasks that Redis has leased, the lease straight from the ledger, and the finish. Redis has no part
// in it; "depth" is its own. As there, due tasks of the deep table lie scattered among the others, the worst case: each
// row is on a page that nothing else has touched of late. The rows named together have them side by side, as where every
// task has the same delay.
func measureLedgerDepth(ctx context.Context, b *bench) ([]Row, error) {
	what := depthName(b.ledgerDepth) + " open rows against 10 k, us"
	small, err := b.deepTable(ctx, "shallow", 10_000, 0)
	if err != nil {
		return noPostgres(err, "ledger/depth", "PostgreSQL CPU of a claim, "+what)
	}
	defer small.close()
	big, err := b.deepTable(ctx, "deep", b.ledgerDepth, 2*b.ledgerDepthTasks*b.ledgerDepthTurns)
	if err != nil {
		return nil, err
	}
	defer big.close()
	var rows []Row
	for _, c := range []struct {
		name, metric string
		together     bool
		bar          bar
	}{{"ledger/depth", "", false, bar{}}, {"ledger/depth/together", "side by side: ", true, atMost(1.5)}} {
		claim, lease, finish, err := b.againstShallowTable(ctx, big, small, c.together)
		if err != nil {
			return rows, err
		}
		rows = append(rows,
			compare(c.name, c.metric+"PostgreSQL CPU of a claim, "+what, claim, c.bar),
			compare(c.name+"/lease", c.metric+"of a lease from the ledger, us", lease, c.bar),
			compare(c.name+"/finish", c.metric+"of a finish, us", finish, bar{}))
	}
	return rows, nil
}

// A deepTable is a queue whose table has been filled behind its back.
type deepTable struct {
	*database
	queue  string
	ledger delayq.LedgerQueue
	made   int
}

func (b *bench) deepTable(ctx context.Context, name string, waiting, due int) (*deepTable, error) {
	db, err := b.database(ctx, name, 1)
	if err != nil {
		return nil, err
	}
	q, err := b.openLedger(ctx, db)
	if err != nil {
		db.close()
		return nil, err
	}
	t := &deepTable{database: db, queue: q.Name(), ledger: q.LedgerQueue()}
	start := time.Now()
	if err = t.fill(ctx, b, waiting, due); err == nil {
		_, err = db.pool.Exec(ctx, "VACUUM ANALYZE delayq.task") // as autovacuum does a minute later
	}
	if err != nil {
		db.close()
		return nil, err
	}
	b.progress("  %d rows in %s", waiting+due, time.Since(start).Round(time.Second))
	return t, nil
}

// fill inserts tasks that wait between an hour and a day, and evenly among them ones that fell due in the last hour.
func (t *deepTable) fill(ctx context.Context, b *bench, waiting, due int) error {
	const chunk = 500_000
	total := waiting + due
	for from := 0; from < total; from += chunk {
		n := min(chunk, total-from)
		_, err := t.pool.Exec(ctx, `
INSERT INTO delayq.task (rev, run_at, created_at, queue, status, id, type, stamp, payload)
SELECT nextval('delayq.rev'), now() + CASE WHEN (i + 1) * $4::bigint / $5 > i * $4::bigint / $5
		THEN - random() * interval '1 hour' ELSE interval '1 hour' + random() * interval '23 hours' END,
	now(), q.id, 'pending', convert_to('cancel-order-' || lpad(i::text, 10, '0'), 'UTF8'), 'bench', '\x000102030405060708090a0b', $6
FROM generate_series($2::bigint, $3::bigint) i, delayq.queue q WHERE q.name = $1`,
			t.queue, t.made, t.made+n-1, due, total, b.payload)
		if err != nil {
			return err
		}
		t.made += n
	}
	return nil
}

// runCosts are microseconds of PostgreSQL's CPU a task.
type runCosts struct{ claim, lease, finish float64 }

func (b *bench) againstShallowTable(ctx context.Context, big, small *deepTable, together bool) (claim, lease, finish turns, err error) {
	for range b.ledgerDepthTurns {
		if err := small.fill(ctx, b, 0, 2*b.ledgerDepthTasks); err != nil {
			return claim, lease, finish, err
		}
		if together {
			if err := big.fill(ctx, b, 0, 2*b.ledgerDepthTasks); err != nil {
				return claim, lease, finish, err
			}
		}
		deep, err := big.run(ctx, b.ledgerDepthTasks)
		if err != nil {
			return claim, lease, finish, err
		}
		shallow, err := small.run(ctx, b.ledgerDepthTasks)
		if err != nil {
			return claim, lease, finish, err
		}
		claim.add(deep.claim, shallow.claim)
		lease.add(deep.lease, shallow.lease)
		finish.add(deep.finish, shallow.finish)
		b.progress("  deep %.1f, shallow %.1f us", deep, shallow)
	}
	return claim, lease, finish, nil
}

// run takes twice as many due tasks, most overdue first, through claim and finish, and through lease and finish.
func (t *deepTable) run(ctx context.Context, tasks int) (runCosts, error) {
	var c runCosts
	rows, err := t.pool.Query(ctx, `
SELECT t.id, t.rev FROM delayq.task t JOIN delayq.queue q ON q.id = t.queue
WHERE q.name = $1 AND t.finished_at IS NULL AND t.dead_at IS NULL AND t.run_at < now() ORDER BY t.run_at LIMIT $2`, t.queue, tasks)
	if err != nil {
		return c, err
	}
	want, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (w delayq.LedgerWant, err error) {
		var id []byte
		err = row.Scan(&id, &w.Rev)
		w.ID = string(id)
		return w, err
	})
	if err != nil || len(want) < tasks {
		return c, fmt.Errorf("%d of %d tasks are due: %w", len(want), tasks, err)
	}
	claim := delayq.LedgerClaim{Token: "a token of 16 B.", Lease: time.Minute, Consumer: "bench"}
	var held []string
	c.claim, err = t.cpu(ctx, tasks, func() error {
		for chunk := range slices.Chunk(want, 500) {
			got, err := t.ledger.Claim(ctx, claim, chunk)
			if err != nil || len(got) != len(chunk) {
				return fmt.Errorf("claimed %d of %d: %w", len(got), len(chunk), err)
			}
			for _, row := range got {
				held = append(held, row.ID)
			}
		}
		return nil
	})
	if err != nil {
		return c, err
	}
	if c.finish, err = t.cpu(ctx, tasks, func() error { return t.finish(ctx, claim.Token, held) }); err != nil {
		return c, err
	}
	leased := map[string][]string{}
	c.lease, err = t.cpu(ctx, tasks, func() error {
		for i := range tasks / 500 {
			claim.Token = fmt.Sprintf("%016d", i) // a call with the same would be a repeat
			got, err := t.ledger.Lease(ctx, claim, 500)
			if err != nil || len(got) != 500 {
				return fmt.Errorf("leased %d of 500: %w", len(got), err)
			}
			for _, row := range got {
				leased[claim.Token] = append(leased[claim.Token], row.ID)
			}
		}
		return nil
	})
	for token, ids := range leased {
		if err == nil {
			err = t.finish(ctx, token, ids)
		}
	}
	return c, err
}

func (t *deepTable) finish(ctx context.Context, token string, ids []string) error {
	for chunk := range slices.Chunk(ids, 500) {
		ends := make([]delayq.LedgerEnd, len(chunk))
		for i, id := range chunk {
			ends[i] = delayq.LedgerEnd{LedgerHeld: delayq.LedgerHeld{ID: id, Token: token}, Verb: delayq.LedgerSucceed}
		}
		changes, err := t.ledger.Finish(ctx, nil, ends)
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(changes, func(c delayq.LedgerChange) bool { return !c.Applied }); i >= 0 {
			return fmt.Errorf("finish of %s was not applied", chunk[i])
		}
	}
	return nil
}

// cpu is what f costs the one server process behind the pool, in microseconds of its CPU a task. It is Linux's /proc.
func (t *deepTable) cpu(ctx context.Context, tasks int, f func() error) (float64, error) {
	before, err := t.usedCPU(ctx)
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := t.usedCPU(ctx)
	return (after - before).Seconds() * 1e6 / float64(tasks), err
}

func (t *deepTable) usedCPU(ctx context.Context) (time.Duration, error) {
	var pid int
	if err := t.pool.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return 0, err
	}
	var ns int64
	_, err = fmt.Sscan(strings.Fields(string(text))[0], &ns)
	return time.Duration(ns), err
}
