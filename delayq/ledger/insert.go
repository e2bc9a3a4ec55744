package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// Due times come as microseconds, of the epoch or from the database's clock.
const (
	clock   = `(SELECT statement_timestamp() AS now) c`
	dueExpr = `CASE WHEN u.relative THEN c.now ELSE 'epoch'::timestamptz END + u.due * interval '1 microsecond'`
)

var newRows = batchOf("id, type, key, payload, stamp, due, relative",
	"$2::bytea[]", "$3::text[]", "$4::text[]", "$5::bytea[]", "$6::bytea[]", "$7::bigint[]", "$8::bool[]")

var insertSQL = `
INSERT INTO delayq.task AS t (queue, id, type, key, payload, stamp, status, run_at, rev, created_at)
SELECT u.queue, u.id, u.type, u.key, u.payload, u.stamp, 'pending', ` + dueExpr + `, nextval('delayq.rev'), c.now
FROM ` + clock + `, ` + newRows + `
ON CONFLICT (queue, id) DO NOTHING
RETURNING t.id, t.rev, t.run_at, t.created_at`

// reviveSQL is about known ids: those that start afresh, and with replace ($9) those that wait.
var reviveSQL = `
UPDATE delayq.task t SET type = o.type, key = o.key, payload = o.payload, stamp = o.stamp, status = 'pending', run_at = o.run_at,
	rev = nextval('delayq.rev'), failed = 0, lost = 0, deliveries = 0, cancel_requested = false, finished_at = NULL,
	reason = NULL, last_error = NULL, started_at = NULL,
	created_at = CASE WHEN o.revived THEN o.now ELSE t.created_at END,
	token = NULL, locked_by = NULL, -- an earlier lease has nothing to say of it
	events = delayq.add_event(t.events, CASE WHEN o.revived THEN 'revived' ELSE 'replaced' END, NULL, NULL, NULL, NULL)
FROM (
	SELECT u.*, ` + dueExpr + ` AS run_at, c.now, l.status AS was, l.status = 'cancelled' AS revived
	FROM ` + clock + `, ` + newRows + ` CROSS JOIN LATERAL (
		SELECT t.status FROM delayq.task t
		WHERE t.queue = u.queue AND t.id = u.id AND t.stamp <> u.stamp
			AND (t.status = 'cancelled' OR $9::bool AND t.status IN ('pending', 'retry'))
		FOR NO KEY UPDATE
	) l
) o
WHERE t.queue = o.queue AND t.id = o.id
RETURNING ` + rowColumns + `, NULL::bytea, o.was::text`

func (q *queue) Insert(ctx context.Context, tx delayq.Tx, tasks []delayq.LedgerTask, replace bool) ([]delayq.LedgerChange, error) {
	changes, err := q.insert(ctx, tx, tasks, replace)
	return changes, wrap("insert", q.name, err)
}

func (q *queue) insert(ctx context.Context, tx delayq.Tx, tasks []delayq.LedgerTask, replace bool) ([]delayq.LedgerChange, error) {
	changes := make([]delayq.LedgerChange, len(tasks))
	if len(tasks) == 0 {
		return changes, nil
	}
	b, err := newBatch(len(tasks), func(i int) string { return tasks[i].ID })
	if err != nil {
		return nil, err
	}
	for i := range tasks {
		if err := validTask(&tasks[i]); err != nil {
			return nil, err
		}
	}
	p, err := q.in(tx)
	if err != nil {
		return nil, err
	}
	args := func(b *batch) []any {
		return []any{
			q.id, b.ids,
			column(b, func(i int) string { return tasks[i].Type }),
			column(b, func(i int) string { return tasks[i].Key }),
			column(b, func(i int) []byte { return notNil(tasks[i].Payload) }),
			column(b, func(i int) []byte { return tasks[i].Stamp }),
			column(b, func(i int) int64 { return dueMicros(tasks[i].Due, i) }),
			column(b, func(i int) bool { return tasks[i].Due.At.IsZero() }),
		}
	}
	// A row that is in the way of the insert may be gone when it is read, by retention.
	for try := 0; try < tries && len(b.ids) > 0; try++ {
		made, err := fetch(ctx, q, p, insertSQL, args(b), scanInserted)
		if p.own && isLocked(err) {
			made, b, err = q.insertEach(ctx, p.db, b, args)
		}
		if err != nil {
			return nil, err
		}
		for _, row := range made {
			i := b.at[row.ID]
			t := &tasks[i]
			row.Type, row.Key, row.Payload, row.Stamp = t.Type, t.Key, notNil(t.Payload), t.Stamp
			changes[i] = delayq.LedgerChange{Applied: true, Row: row}
		}
		b = b.left(func(i int) bool { return changes[i].Row != nil })
		busy, err := q.insertKnown(ctx, tx, b, args, tasks, replace, changes)
		if err != nil {
			return nil, err
		}
		b = b.left(func(i int) bool { return changes[i].Row != nil || busy[i] })
	}
	if len(b.ids) > 0 {
		return nil, fmt.Errorf("%d rows vanished again and again", len(b.ids))
	}
	return changes, nil
}

// insertEach inserts a batch one by one, since another transaction is about to insert one of the ids; which, shows when it is waited for.
// It returns the batch without those.
func (q *queue) insertEach(ctx context.Context, db querier, b *batch, args func(*batch) []any) (made []*delayq.LedgerRow, rest *batch, err error) {
	waiting := map[int]bool{}
	for place, i := range b.order {
		if len(b.order) == 1 {
			waiting[i] = true // it has been waited for
			break
		}
		one := &batch{ids: b.ids[place : place+1], order: b.order[place : place+1], at: b.at}
		row, err := fetchOnce(ctx, db, insertSQL, brief, args(one), scanInserted)
		switch {
		case isLocked(err):
			waiting[i] = true
		case err != nil:
			return nil, nil, err
		default:
			made = append(made, row...)
		}
	}
	return made, b.left(func(i int) bool { return waiting[i] }), nil
}

// insertKnown goes on with tasks whose ids are known. Those that another transaction has locked, and that it might revive, are busy.
func (q *queue) insertKnown(ctx context.Context, tx delayq.Tx, b *batch, args func(*batch) []any, tasks []delayq.LedgerTask,
	replace bool, changes []delayq.LedgerChange,
) (busy map[int]bool, err error) {
	applies := func(i int, row *delayq.LedgerRow) bool {
		return string(row.Stamp) != string(tasks[i].Stamp) &&
			(row.Status == delayq.LedgerCancelled || replace && row.Status.Waiting())
	}
	if len(b.order) == 0 {
		return nil, nil
	}
	p, err := q.in(tx)
	if err != nil {
		return nil, err
	}
	known, err := q.changeAt(ctx, p, b, reviveSQL, func(b *batch) []any { return append(args(b), replace) }, applies)
	if err != nil {
		return nil, err
	}
	busy = map[int]bool{}
	for _, i := range b.order {
		c := known[i]
		if p.held && !c.Applied && c.Row != nil && applies(i, c.Row) {
			busy[i] = true
			continue
		}
		if c.Applied {
			c.Row.Payload = notNil(tasks[i].Payload)
		}
		changes[i] = c
	}
	return busy, nil
}

func scanInserted(rows pgx.Rows) (*delayq.LedgerRow, error) {
	row := &delayq.LedgerRow{Status: delayq.LedgerPending}
	var id []byte
	err := rows.Scan(&id, &row.Rev, &row.RunAt, &row.CreatedAt)
	row.ID = string(id)
	return row, err
}

func validTask(t *delayq.LedgerTask) error {
	switch {
	case t.Type == "" || !isText(t.Type):
		return &delayq.InputError{Field: "Type", Limit: "UTF-8 without NUL, at least 1 byte", Got: fmt.Sprintf("%d bytes", len(t.Type))}
	case !isText(t.Key):
		return &delayq.InputError{Field: "Key", Limit: "UTF-8 without NUL", Got: fmt.Sprintf("%d bytes", len(t.Key))}
	case len(t.Stamp) != 12:
		return &delayq.InputError{Field: "Stamp", Limit: "12 bytes", Got: fmt.Sprintf("%d bytes", len(t.Stamp))}
	}
	return validDue(t.Due)
}

func validDue(d delayq.LedgerDue) error {
	switch {
	case d.At.IsZero() && d.In > longest:
		return &delayq.InputError{Field: "Due", Limit: "within 100 years", Got: d.In.String()}
	case !d.At.IsZero() && (d.At.Year() < 1970 || d.At.Year() > 2200):
		return &delayq.InputError{Field: "Due", Limit: "in the years 1970 to 2200", Got: d.At.UTC().Format(time.RFC3339)}
	}
	return nil
}

// dueMicros is a due time for dueExpr: of tasks that are due in equally long the order of the call is kept.
func dueMicros(d delayq.LedgerDue, place int) int64 {
	if d.At.IsZero() {
		return max(d.In, 0).Microseconds() + int64(place) // overdue means now
	}
	return d.At.UnixMicro()
}

func notNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
