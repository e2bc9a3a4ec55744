package ledger_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// modes are the query modes of pgx that people run, the last behind old poolers.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// A rig is a queue of a test.
type rig struct {
	*testing.T
	name string
	pool *pgxpool.Pool
	led  *ledger.Ledger
	q    delayq.LedgerQueue
}

// eachMode runs a test in every query mode, each with a queue of its own in one database.
func eachMode(t *testing.T, f func(r *rig)) {
	t.Helper()
	t.Parallel()
	url := servers.NewDatabase(t)
	first := newPool(t, url, pgx.QueryExecModeExec)
	if _, err := migrations.Up(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) { f(openRig(t, newPool(t, url, mode), mode.String())) })
	}
}

// newRig is a queue in a database of its own.
func newRig(t *testing.T, mode pgx.QueryExecMode) *rig {
	t.Helper()
	pool := newPool(t, servers.NewDatabase(t), mode)
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return openRig(t, pool, "orders")
}

func openRig(t *testing.T, pool *pgxpool.Pool, name string, opts ...ledger.Option) *rig {
	t.Helper()
	r := &rig{T: t, name: name, pool: pool}
	var err error
	r.led, err = ledger.Open(t.Context(), r.pool, opts...)
	r.ok(err)
	r.q, _, err = r.led.OpenQueue(t.Context(), name, delayq.LedgerConfig{}, true)
	r.ok(err)
	return r
}

func newPool(t *testing.T, url string, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DefaultQueryExecMode = mode
	cfg.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// exec runs SQL that a test needs to arrange something.
func (r *rig) exec(sql string, args ...any) {
	r.Helper()
	_, err := r.pool.Exec(r.Context(), sql, args...)
	r.ok(err)
}

func newToken() string {
	var b [16]byte
	rand.Read(b[:])
	return string(b[:])
}

func newTask(id string) delayq.LedgerTask {
	return delayq.LedgerTask{ID: id, Type: "mail", Key: "k-" + id, Payload: []byte("payload of " + id), Stamp: []byte(newToken()[:12])}
}

func (r *rig) insert(tasks ...delayq.LedgerTask) []*delayq.LedgerRow {
	r.Helper()
	changes, err := r.q.Insert(r.Context(), nil, tasks, false)
	r.ok(err)
	rows := make([]*delayq.LedgerRow, len(tasks))
	for i, c := range changes {
		if !c.Applied {
			r.Fatalf("insert %s: %+v", tasks[i].ID, c.Row)
		}
		rows[i] = c.Row
	}
	return rows
}

func (r *rig) insertIDs(ids ...string) []*delayq.LedgerRow {
	r.Helper()
	tasks := make([]delayq.LedgerTask, len(ids))
	for i, id := range ids {
		tasks[i] = newTask(id)
	}
	return r.insert(tasks...)
}

func claimOf(token string) delayq.LedgerClaim {
	return delayq.LedgerClaim{Token: token, Lease: time.Minute, Consumer: "test", MaxLost: 3, MaxFailed: 5}
}

// claim claims rows as they are and returns the rows that the answer has, by id.
func (r *rig) claim(c delayq.LedgerClaim, want ...*delayq.LedgerRow) map[string]delayq.LedgerRow {
	r.Helper()
	wants := make([]delayq.LedgerWant, len(want))
	for i, row := range want {
		wants[i] = delayq.LedgerWant{ID: row.ID, Rev: row.Rev}
	}
	rows, err := r.q.Claim(r.Context(), c, wants)
	r.ok(err)
	return byID(rows)
}

func byID(rows []delayq.LedgerRow) map[string]delayq.LedgerRow {
	m := make(map[string]delayq.LedgerRow, len(rows))
	for _, row := range rows {
		m[row.ID] = row
	}
	return m
}

// row reads one row, which must be there.
func (r *rig) row(id string) *delayq.LedgerRow {
	r.Helper()
	rows, err := r.q.Rows(r.Context(), []string{id}, true)
	r.ok(err)
	if len(rows) != 1 {
		r.Fatalf("%s: %d rows", id, len(rows))
	}
	return &rows[0]
}

// running makes new tasks that run under one token.
func (r *rig) running(ids ...string) (token string) {
	r.Helper()
	token = newToken()
	if got := r.claim(claimOf(token), r.insertIDs(ids...)...); len(got) != len(ids) {
		r.Fatalf("%d of %d claimed", len(got), len(ids))
	}
	return token
}

// expire lets leases run out.
func (r *rig) expire(ids ...string) {
	r.Helper()
	for _, id := range ids {
		r.exec(`UPDATE delayq.task SET locked_until = clock_timestamp() - interval '1 second'
WHERE id = $1::bytea AND queue = (SELECT id FROM delayq.queue WHERE name = $2::text)`, []byte(id), r.name)
	}
}

func (r *rig) finish(ends ...delayq.LedgerEnd) []delayq.LedgerChange {
	r.Helper()
	changes, err := r.q.Finish(r.Context(), nil, ends)
	r.ok(err)
	return changes
}

func end(id, token string, verb delayq.LedgerVerb) delayq.LedgerEnd {
	return delayq.LedgerEnd{LedgerHeld: delayq.LedgerHeld{ID: id, Token: token}, Verb: verb}
}

func ids(prefix string, n int) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = fmt.Sprintf("%s%06d", prefix, i)
	}
	return s
}

// inTx runs f in a transaction and rolls that back.
func (r *rig) inTx(f func(ctx context.Context, tx pgx.Tx)) {
	r.Helper()
	tx, err := r.pool.Begin(r.Context())
	r.ok(err)
	defer tx.Rollback(context.WithoutCancel(r.Context()))
	f(r.Context(), tx)
}

// brief is a row in a line, for comparisons.
func brief(row *delayq.LedgerRow) string {
	if row == nil {
		return "none"
	}
	s := fmt.Sprintf("%s failed %d lost %d deliveries %d", row.Status, row.Failed, row.Lost, row.Deliveries)
	if row.CancelRequested {
		s += " stop"
	}
	if row.Reason != "" {
		s += " " + row.Reason
	}
	if row.EndedAt.IsZero() == (row.Status == delayq.LedgerDead || row.Status == delayq.LedgerCancelled || row.Status == delayq.LedgerSucceeded) ||
		row.LockedUntil.IsZero() == (row.Status == delayq.LedgerRunning) {
		s += " with the wrong times"
	}
	return s
}

func (r *rig) want(id, want string) {
	r.Helper()
	if got := brief(r.row(id)); got != want {
		r.Errorf("%s is %q, want %q", id, got, want)
	}
}

func (r *rig) is(err, want error) {
	r.Helper()
	if !errors.Is(err, want) {
		r.Errorf("%v, want %v", err, want)
	}
}
