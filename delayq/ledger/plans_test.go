package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// reads counts the tuples of table task that statements have looked at.
func (r *rig) reads() (n int64) {
	r.Helper()
	if _, err := r.pool.Exec(r.Context(), "SELECT pg_stat_force_next_flush()"); err != nil { // before PostgreSQL 15
		time.Sleep(1100 * time.Millisecond)
	}
	r.ok(r.pool.QueryRow(r.Context(), "SELECT 1").Scan(&n))
	r.ok(r.pool.QueryRow(r.Context(), `
SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE schemaname = 'delayq' AND relname = 'task'`).Scan(&n))
	return n
}

// fill adds tasks that wait to a queue, behind the planner's back.
func (r *rig) fill(queue string, from, to int) {
	r.Helper()
	r.exec(`
INSERT INTO delayq.task (queue, id, type, stamp, payload, status, run_at, rev, created_at)
SELECT q.id, convert_to('bulk-' || lpad(i::text, 8, '0'), 'UTF8'), 'mail', '\x000102030405060708090a0b', 'x', 'pending',
	now() + i * interval '1 second' - interval '1 hour', nextval('delayq.rev'), now()
FROM generate_series($2::int, $3::int) i, delayq.queue q WHERE q.name = $1::text`, queue, from, to)
}

// verbs runs every method over n tasks of a queue, some in the past of due times and some in the future, and calls after behind each.
func (r *rig) verbs(round string, n int, after func(verb string)) {
	r.Helper()
	ctx := r.Context()
	step := func(verb string, err error) {
		r.Helper()
		r.ok(err)
		after(verb)
	}
	fresh := ids("new-"+round+"-", n)
	rows := r.insertIDs(fresh...)
	step("insert", nil)
	_, err := r.q.Insert(ctx, nil, []delayq.LedgerTask{newTask(fresh[0])}, true)
	step("replace", err)
	changes, err := r.q.Reschedule(ctx, nil, fresh, make([]delayq.LedgerDue, n))
	step("reschedule", err)
	for i, c := range changes {
		rows[i] = c.Row
	}
	token := newToken()
	got := r.claim(claimOf(token), rows...)
	if len(got) != n {
		r.Fatalf("%d of %d claimed", len(got), n)
	}
	step("claim", nil)
	held, ends := make([]delayq.LedgerHeld, n), make([]delayq.LedgerEnd, n)
	for i, id := range fresh {
		held[i] = delayq.LedgerHeld{ID: id, Token: token}
		ends[i] = end(id, token, delayq.LedgerVerb(i%6))
		ends[i].MaxFailed = 1
	}
	_, err = r.q.Heartbeat(ctx, time.Minute, held)
	step("heartbeat", err)
	r.finish(ends...)
	step("finish", nil)
	_, err = r.q.Replay(ctx, nil, fresh)
	step("replay", err)
	_, err = r.q.Cancel(ctx, nil, fresh)
	step("cancel", err)
	token = newToken()
	leased, err := r.q.Lease(ctx, claimOf(token), n)
	step("lease", err)
	ends = ends[:0]
	for _, row := range leased {
		ends = append(ends, end(row.ID, token, delayq.LedgerSucceed))
	}
	r.finish(ends...)
	step("succeed", nil)
	_, err = r.q.Purge(ctx, nil, fresh)
	step("purge", err)
	_, err = r.q.Rows(ctx, fresh, true)
	step("rows", err)
	for kind := range delayq.LedgerDeadRows + 1 {
		if kind == delayq.LedgerRunningRows {
			continue // that looks at all that is due
		}
		_, err = r.q.Page(ctx, delayq.LedgerPage{Kind: kind, Limit: n})
		step(fmt.Sprint("page ", kind), err)
		_, err = r.q.Page(ctx, delayq.LedgerPage{Kind: kind, Limit: n, After: delayq.LedgerMark{At: time.Now(), ID: "x"}, Until: time.Now().Add(time.Hour)})
		step(fmt.Sprint("next page ", kind), err)
	}
	newest := delayq.LedgerPage{Kind: delayq.LedgerDeadRows, Limit: n, Newest: true}
	_, err = r.q.Page(ctx, newest)
	step("newest page", err)
	newest.After = delayq.LedgerMark{At: time.Now(), ID: "x"}
	_, err = r.q.Page(ctx, newest)
	step("next newest page", err)
	_, err = r.q.Counts(ctx, n, time.Hour)
	step("counts", err)
	_, _, err = r.q.Retain(ctx, time.Second)
	step("retain", err)
	_, err = r.led.History(ctx, "orders", fresh[0])
	step("history", err)
}

// A call reads about as many rows as it is about, with statistics of another time, and with plans that were made while the table was empty.
func TestPlansWithOldStatistics(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
		for _, start := range []string{"never analyzed", "empty", "small", "other queue"} {
			t.Run(fmt.Sprint(mode, " ", start), func(t *testing.T) {
				t.Parallel()
				r := oneConn(t, mode)
				r.exec("ALTER TABLE delayq.task SET (autovacuum_enabled = off)")
				switch start {
				case "small":
					r.fill("orders", 0, 100)
					fallthrough
				case "empty":
					r.exec("VACUUM ANALYZE delayq.task")
				case "other queue":
					_, _, err := r.led.OpenQueue(t.Context(), "other", delayq.LedgerConfig{}, true)
					r.ok(err)
					r.fill("other", 0, 50_000)
					r.exec("VACUUM ANALYZE delayq.task")
				}
				for i := range 8 { // more often than PostgreSQL wants before it keeps a plan
					r.verbs(fmt.Sprint("warm", i), 3, func(string) {})
				}
				r.fill("orders", 1000, 51_000)
				const n = 100
				before := r.reads()
				r.verbs("full", n, func(verb string) {
					after := r.reads()
					if after-before > 10*n {
						t.Errorf("%s of %d tasks read %d rows", verb, n, after-before)
					}
					before = after
				})
			})
		}
	}
}

// oneConn is a rig with one connection, so that statements meet the plans that they have kept.
func oneConn(t *testing.T, mode pgx.QueryExecMode) *rig {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(servers.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DefaultQueryExecMode = mode
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return openRig(t, pool, "orders")
}
