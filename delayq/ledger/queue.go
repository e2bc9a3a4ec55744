package ledger

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// A queue is one queue of the ledger. Its statements share a few rules, see batchOf too. Parameters come as arrays, sorted by id, and
// meet their rows one by one, so that rows are locked in the order of ids and overlapping calls wait for each other instead of
// deadlocking. Conditions on a row stand where PostgreSQL checks them again after it has waited for a lock. What an update did
// not match is read afterwards, by a statement of its own that sees what the wait was for.
type queue struct {
	l         *Ledger
	name      string
	id        int32
	keepEnded time.Duration
}

var _ delayq.LedgerQueue = (*queue)(nil)

// maxBatch is how many tasks one call has at most.
const maxBatch = 500

// querier is what a caller's transaction must have; that of pgx does.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// A place is where the statements of one call go.
type place struct {
	db   querier
	own  bool // each in a transaction of its own
	held bool // a row was locked by another transaction, so the call leaves out those that are
}

// in is the caller's transaction, or the pool when there is none.
func (q *queue) in(tx delayq.Tx) (*place, error) {
	if tx == nil {
		return q.alone(), nil
	}
	db, ok := tx.(querier)
	if !ok {
		return nil, &delayq.InputError{Field: "tx", Limit: "a pgx.Tx", Got: fmt.Sprintf("%T", tx)}
	}
	return &place{db: db}, nil
}

func (q *queue) alone() *place { return &place{db: q.l.db, own: true} }

// fetch runs a statement and reads its rows. One of our own that PostgreSQL undid is repeated; in a transaction of the caller that
// is the caller's to do.
func fetch[T any](ctx context.Context, q *queue, p *place, sql string, args []any, scan func(pgx.Rows) (T, error)) ([]T, error) {
	if !keptPlan[sql] {
		args = q.l.args(args...)
	}
	for try := 1; ; try++ {
		how := patient
		switch {
		case p.own && hasty[sql] && p.held && sql != insertSQL:
			how = skipping
		case p.own && hasty[sql]:
			how = hurried
		}
		got, err := fetchOnce(ctx, p.db, sql, how, args, scan)
		if how == hurried && isLocked(err) {
			if p.held = true; sql != insertSQL {
				continue
			}
		}
		if err == nil || !p.own || !again(err) || try == 5 {
			return got, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(rand.N(time.Duration(try) * 20 * time.Millisecond)):
		}
	}
}

// A manner is what a statement made by batchOf does about rows that other transactions have locked. Those of the application stay open
// for as long as it likes, with a task cancelled or completed in them, and must not hold up all the others of a batch.
type manner int

const (
	patient  manner = iota // waits: in the caller's own transaction
	hurried                // waits a moment, then fails as a whole
	skipping               // leaves them out, which costs a lock a row and is for when hurried has failed
	brief                  // as hurried, for one row after the other
)

// hasty are the statements that all tasks of a worker share, or all who enqueue at the same time.
var hasty = map[string]bool{insertSQL: true, claimSQL: true, heartbeatSQL: true, succeedSQL: true, finishSQL: true, reviveSQL: true}

// lockWait is how long a hurried statement waits for each lock: a few of them fit into a third of the shortest lease.
var lockWait = "100ms"

const (
	batchLimit = `LIMIT (SELECT 500)`
	batchEnd   = batchLimit + `) u`
	lockRows   = `FOR NO KEY UPDATE`
)

// in is a statement in a manner. The setting lasts as long as the statement's own transaction, and the limit is evaluated first.
func (m manner) in(sql string) string {
	switch m {
	case hurried:
		return strings.Replace(sql, batchLimit, `LIMIT (SELECT 500 FROM set_config('lock_timeout', '`+lockWait+`', true))`, 1)
	case brief:
		return strings.Replace(sql, batchLimit, `LIMIT (SELECT 500 FROM set_config('lock_timeout', '10ms', true))`, 1)
	case skipping:
		if strings.Contains(sql, lockRows) { // it locks them by itself
			return strings.Replace(sql, lockRows, lockRows+` SKIP LOCKED`, 1)
		}
		return strings.Replace(sql, batchEnd, batchEnd+` CROSS JOIN LATERAL (
	SELECT FROM delayq.task f WHERE f.queue = u.queue AND f.id = u.id `+lockRows+` SKIP LOCKED) f`, 1)
	default:
		return sql
	}
}

func fetchOnce[T any](ctx context.Context, db querier, sql string, how manner, args []any, scan func(pgx.Rows) (T, error)) ([]T, error) {
	if sabotage != "" {
		sql = seeded(sql)
	}
	rows, err := db.Query(ctx, how.in(sql), args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	got := make([]T, 0, answers(args))
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		got = append(got, v)
	}
	return got, rows.Err()
}

// answers is how many rows a statement with these arguments has at most, as far as they say: one for each id.
func answers(args []any) int {
	for _, a := range args {
		if ids, ok := a.([][]byte); ok {
			return len(ids)
		}
	}
	return 0
}

// batchOf is the table u of a batch in SQL, made of arrays: queue, id and further columns.
//
// It is made so that the plan can only be a nested loop, from u to the primary key of the tasks. The limit lets the planner expect one
// row, whatever the arrays have; and since the queue is a column of u, not a constant, there is no way into the tasks but by both
// columns of the key. It would else read all of a queue, or of a table that it takes to be small, whenever statistics are old.
func batchOf(columns string, params ...string) string {
	for i, p := range params {
		params[i] = "(SELECT " + p + ")"
	}
	return "(SELECT $1::int AS queue, a.* FROM unnest(" + strings.Join(params, ", ") + ") AS a(" + columns + ") " + batchEnd
}

// keptPlan has the statements that may keep a plan, prepared where the pool prepares. An insert reads no rows, so there is but one plan
// for it; planning is most of what a small one costs. The others must not: a plan made while the table was tiny reads the whole
// of it, and would still when it has grown by millions.
var keptPlan = map[string]bool{insertSQL: true}

// A batch is the ids of one call in the order in which their rows are locked.
type batch struct {
	ids   [][]byte       // sorted
	order []int          // place in ids -> place in the call
	at    map[string]int // id -> place in the call
}

// newBatch checks and sorts the ids of a call.
func newBatch(n int, id func(int) string) (*batch, error) {
	if n > maxBatch {
		return nil, &delayq.InputError{Field: "tasks of one call", Limit: fmt.Sprintf("at most %d", maxBatch), Got: fmt.Sprint(n)}
	}
	b := &batch{ids: make([][]byte, n), order: make([]int, n), at: make(map[string]int, n)}
	for i := range n {
		s := id(i)
		if len(s) == 0 || len(s) > 256 {
			return nil, &delayq.InputError{Field: "ID", Limit: "1 to 256 bytes", Got: fmt.Sprintf("%d bytes", len(s))}
		}
		b.order[i], b.at[s] = i, i
	}
	if len(b.at) != n {
		return nil, &delayq.InputError{Field: "ids of one call", Limit: "distinct", Got: fmt.Sprintf("%d of %d", len(b.at), n)}
	}
	slices.SortFunc(b.order, func(i, j int) int { return cmp.Compare(id(i), id(j)) })
	for place, i := range b.order {
		b.ids[place] = []byte(id(i))
	}
	return b, nil
}

// left is the part of a batch that has no answer yet.
func (b *batch) left(answered func(i int) bool) *batch {
	rest := &batch{at: b.at}
	for place, i := range b.order {
		if !answered(i) {
			rest.ids, rest.order = append(rest.ids, b.ids[place]), append(rest.order, i)
		}
	}
	return rest
}

// column collects a parameter of a batch.
func column[T any](b *batch, f func(i int) T) []T {
	values := make([]T, len(b.order))
	for place, i := range b.order {
		values[place] = f(i)
	}
	return values
}

// tries is how often a change is tried on a row that goes on changing.
const tries = 5

// change runs an update over a batch and answers for each id: what the update returns was applied, the rest is read. A row that
// reads as if the update applied to it has changed in between and is tried again, if it was not left out because it is locked.
func (q *queue) change(ctx context.Context, tx delayq.Tx, b *batch, sql string, args func(*batch) []any,
	applies func(i int, row *delayq.LedgerRow) bool,
) ([]delayq.LedgerChange, error) {
	if len(b.order) == 0 {
		return make([]delayq.LedgerChange, len(b.at)), nil
	}
	p, err := q.in(tx)
	if err != nil {
		return nil, err
	}
	return q.changeAt(ctx, p, b, sql, args, applies)
}

func (q *queue) changeAt(ctx context.Context, p *place, b *batch, sql string, args func(*batch) []any,
	applies func(i int, row *delayq.LedgerRow) bool,
) ([]delayq.LedgerChange, error) {
	changes := make([]delayq.LedgerChange, len(b.at))
	for try := 1; ; try++ {
		done, err := fetch(ctx, q, p, sql, args(b), scanChange)
		if err != nil {
			return nil, err
		}
		for _, c := range done {
			changes[b.at[c.Row.ID]] = c
		}
		b = b.left(func(i int) bool { return changes[i].Applied })
		if len(b.ids) == 0 {
			return changes, nil
		}
		rows, err := fetch(ctx, q, p, rowsSQL, []any{q.id, b.ids, true}, scanRow)
		if err != nil {
			return nil, err
		}
		moved := map[int]bool{}
		for i := range b.order {
			changes[b.order[i]] = delayq.LedgerChange{}
		}
		for i := range rows {
			row, at := &rows[i], b.at[rows[i].ID]
			if !row.Status.Waiting() {
				row.Payload = nil
			}
			changes[at] = delayq.LedgerChange{Was: row.Status, Row: row}
			moved[at] = applies(at, row)
		}
		b = b.left(func(i int) bool { return !moved[i] })
		if len(b.ids) == 0 || try == tries || p.held {
			return changes, nil
		}
	}
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

// tokenText is a token as PostgreSQL reads a uuid.
func tokenText(token string) (string, error) {
	if len(token) != 16 {
		return "", &delayq.InputError{Field: "Token", Limit: "16 bytes", Got: fmt.Sprintf("%d bytes", len(token))}
	}
	return hex.EncodeToString([]byte(token)), nil
}

// longest bounds leases and delays.
const longest = 100 * 365 * 24 * time.Hour

func micros(field string, d, least time.Duration) (int64, error) {
	if d < least || d > longest {
		return 0, &delayq.InputError{Field: field, Limit: fmt.Sprintf("%s to 100 years", least), Got: d.String()}
	}
	return int64((d + time.Microsecond - 1) / time.Microsecond), nil
}
