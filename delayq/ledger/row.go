package ledger

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// rowColumns are a row of the table t as scanRow reads it, but for the payload.
const rowColumns = `t.id, t.status::text, t.run_at, t.rev, uuid_send(t.token), t.locked_by, t.locked_until, t.cancel_requested,
	t.failed, t.lost, t.deliveries, t.reason, t.last_error, t.created_at, t.started_at, coalesce(t.finished_at, t.dead_at),
	t.type, t.key, t.stamp`

// payloadIfWaiting is the payload where Redis needs it.
const payloadIfWaiting = `CASE WHEN t.status IN ('pending', 'retry') THEN t.payload END`

type scanned struct {
	id, token                          []byte
	status                             string
	lockedBy, reason, lastError        *string
	lockedUntil, startedAt, finishedAt *time.Time
}

func (s *scanned) into(row *delayq.LedgerRow) []any {
	return []any{
		&s.id, &s.status, &row.RunAt, &row.Rev, &s.token, &s.lockedBy, &s.lockedUntil, &row.CancelRequested,
		&row.Failed, &row.Lost, &row.Deliveries, &s.reason, &s.lastError, &row.CreatedAt, &s.startedAt, &s.finishedAt,
		&row.Type, &row.Key, &row.Stamp, &row.Payload,
	}
}

func (s *scanned) finish(row *delayq.LedgerRow) {
	row.ID, row.Token, row.Status = string(s.id), string(s.token), delayq.LedgerStatus(s.status)
	row.LockedBy, row.Reason, row.LastError = orZero(s.lockedBy), orZero(s.reason), orZero(s.lastError)
	row.LockedUntil, row.StartedAt, row.EndedAt = orZero(s.lockedUntil), orZero(s.startedAt), orZero(s.finishedAt)
}

func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// scanRow reads rowColumns and a payload.
func scanRow(rows pgx.Rows) (row delayq.LedgerRow, err error) {
	var s scanned
	err = rows.Scan(s.into(&row)...)
	s.finish(&row)
	return row, err
}

// scanChange reads rowColumns, a payload and the status before.
func scanChange(rows pgx.Rows) (delayq.LedgerChange, error) {
	var s scanned
	row := new(delayq.LedgerRow)
	var was string
	err := rows.Scan(append(s.into(row), &was)...)
	s.finish(row)
	return delayq.LedgerChange{Applied: true, Was: delayq.LedgerStatus(was), Row: row}, err
}

var rowsSQL = `
SELECT ` + rowColumns + `, CASE WHEN $3::bool THEN t.payload END
FROM ` + batchOf("id", "$2::bytea[]") + ` JOIN delayq.task t ON t.queue = u.queue AND t.id = u.id`

var shortRowsSQL = `
SELECT t.id, t.status::text, t.run_at, t.rev, t.locked_until
FROM ` + batchOf("id", "$2::bytea[]") + ` JOIN delayq.task t ON t.queue = u.queue AND t.id = u.id`

func (q *queue) Rows(ctx context.Context, ids []string, whole bool) ([]delayq.LedgerRow, error) {
	b, err := newBatch(len(ids), func(i int) string { return ids[i] })
	if err != nil || len(ids) == 0 {
		return nil, wrap("read", q.name, err)
	}
	if whole {
		rows, err := fetch(ctx, q, q.alone(), rowsSQL, []any{q.id, b.ids, true}, scanRow)
		return rows, wrap("read", q.name, err)
	}
	rows, err := fetch(ctx, q, q.alone(), shortRowsSQL, []any{q.id, b.ids}, func(rows pgx.Rows) (row delayq.LedgerRow, err error) {
		var id []byte
		var status string
		var until *time.Time
		err = rows.Scan(&id, &status, &row.RunAt, &row.Rev, &until)
		row.ID, row.Status, row.LockedUntil = string(id), delayq.LedgerStatus(status), orZero(until)
		return row, err
	})
	return rows, wrap("read", q.name, err)
}
