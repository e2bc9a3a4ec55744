package ledger

import (
	"context"

	"github.com/delayq/toolkit/delayq"
)

// locked is the table o of the ids ($2) whose rows are of a condition, with their status before; the rows are locked.
func locked(condition, columns string) string {
	return `(
	SELECT u.queue, u.id, l.* FROM ` + batchOf("id", "$2::bytea[]") + ` CROSS JOIN LATERAL (
		SELECT t.status AS was, ` + columns + ` FROM delayq.task t WHERE t.queue = u.queue AND t.id = u.id AND (` + condition + `)
		FOR NO KEY UPDATE
	) l
) o`
}

// A cancelled task ends, a running one is told to; but one whose lease has run out ends too: its late finish is then refused.
var cancelSQL = `
UPDATE delayq.task t SET
	status = CASE WHEN o.ends THEN 'cancelled' ELSE t.status END,
	rev = CASE WHEN o.ends THEN nextval('delayq.rev') ELSE t.rev END,
	cancel_requested = t.cancel_requested OR NOT o.ends,
	locked_until = CASE WHEN o.ends THEN NULL ELSE t.locked_until END,
	finished_at = CASE WHEN o.ends THEN clock_timestamp() END,
	events = delayq.add_event(t.events, CASE WHEN o.ends THEN 'cancelled' ELSE 'cancel requested' END, NULL, NULL, NULL, NULL)
FROM ` + locked(
	`t.status IN ('pending', 'retry') OR t.status = 'running' AND (NOT t.cancel_requested OR t.locked_until < clock_timestamp())`,
	`t.status <> 'running' OR t.locked_until < clock_timestamp() AS ends`) + `
WHERE t.queue = o.queue AND t.id = o.id
RETURNING ` + rowColumns + `, NULL::bytea, o.was::text`

func (q *queue) Cancel(ctx context.Context, tx delayq.Tx, ids []string) ([]delayq.LedgerChange, error) {
	changes, err := q.changeIDs(ctx, tx, ids, cancelSQL, func(row *delayq.LedgerRow) bool {
		return row.Status.Waiting() || row.Status == delayq.LedgerRunning && !row.CancelRequested
	})
	return changes, wrap("cancel", q.name, err)
}

var rescheduleSQL = `
UPDATE delayq.task t SET run_at = ` + dueExpr + `, rev = nextval('delayq.rev'),
	events = delayq.add_event(t.events, 'rescheduled', NULL, NULL, NULL, NULL)
FROM ` + clock + `, ` + batchOf("id, due, relative", "$2::bytea[]", "$3::bigint[]", "$4::bool[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.status IN ('pending', 'retry')
RETURNING ` + rowColumns + `, t.payload, t.status::text`

func (q *queue) Reschedule(ctx context.Context, tx delayq.Tx, ids []string, dues []delayq.LedgerDue) ([]delayq.LedgerChange, error) {
	changes, err := q.reschedule(ctx, tx, ids, dues)
	return changes, wrap("reschedule", q.name, err)
}

func (q *queue) reschedule(ctx context.Context, tx delayq.Tx, ids []string, dues []delayq.LedgerDue) ([]delayq.LedgerChange, error) {
	if len(dues) != len(ids) {
		return nil, &delayq.InputError{Field: "dues", Limit: "as many as ids", Got: "another number"}
	}
	for _, d := range dues {
		if err := validDue(d); err != nil {
			return nil, err
		}
	}
	b, err := newBatch(len(ids), func(i int) string { return ids[i] })
	if err != nil {
		return nil, err
	}
	return q.change(ctx, tx, b, rescheduleSQL, func(b *batch) []any {
		return []any{
			q.id, b.ids,
			column(b, func(i int) int64 { return dueMicros(dues[i], i) }),
			column(b, func(i int) bool { return dues[i].At.IsZero() }),
		}
	}, func(_ int, row *delayq.LedgerRow) bool { return row.Status.Waiting() })
}

// Replayed tasks are due in the order of the call.
var replaySQL = `
UPDATE delayq.task t SET status = 'pending', run_at = c.now + u.place * interval '1 microsecond', rev = nextval('delayq.rev'),
	failed = 0, lost = 0, deliveries = 0, cancel_requested = false, dead_at = NULL, token = NULL, reason = NULL, last_error = NULL,
	events = delayq.add_event(t.events, 'replayed', NULL, NULL, NULL, NULL)
FROM ` + clock + `, ` + batchOf("id, place", "$2::bytea[]", "$3::bigint[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.status = 'dead'
RETURNING ` + rowColumns + `, t.payload, 'dead'`

func isDead(row *delayq.LedgerRow) bool { return row.Status == delayq.LedgerDead }

func (q *queue) Replay(ctx context.Context, tx delayq.Tx, ids []string) ([]delayq.LedgerChange, error) {
	b, err := newBatch(len(ids), func(i int) string { return ids[i] })
	if err != nil {
		return nil, wrap("replay", q.name, err)
	}
	changes, err := q.change(ctx, tx, b, replaySQL, func(b *batch) []any {
		return []any{q.id, b.ids, column(b, func(i int) int64 { return int64(i) })}
	}, func(_ int, row *delayq.LedgerRow) bool { return isDead(row) })
	return changes, wrap("replay", q.name, err)
}

var purgeSQL = `
DELETE FROM delayq.task t USING ` + batchOf("id", "$2::bytea[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.status = 'dead'
RETURNING ` + rowColumns + `, NULL::bytea, 'dead'`

func (q *queue) Purge(ctx context.Context, tx delayq.Tx, ids []string) ([]delayq.LedgerChange, error) {
	changes, err := q.changeIDs(ctx, tx, ids, purgeSQL, isDead)
	for i := range changes {
		if changes[i].Applied {
			changes[i].Row = nil
		}
	}
	return changes, wrap("purge", q.name, err)
}

// changeIDs is change for updates that need nothing but ids.
func (q *queue) changeIDs(ctx context.Context, tx delayq.Tx, ids []string, sql string, applies func(*delayq.LedgerRow) bool) ([]delayq.LedgerChange, error) {
	b, err := newBatch(len(ids), func(i int) string { return ids[i] })
	if err != nil {
		return nil, err
	}
	return q.change(ctx, tx, b, sql, func(b *batch) []any { return []any{q.id, b.ids} },
		func(_ int, row *delayq.LedgerRow) bool { return applies(row) })
}
