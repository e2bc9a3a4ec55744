package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

const (
	isOpen = `t.finished_at IS NULL AND t.dead_at IS NULL`

	pageSelect = `
SELECT ` + rowColumns + `, NULL::bytea FROM delayq.task t WHERE t.queue = $1::int AND `
	openOrder = ` AND (t.run_at, t.id) > ($2::text::timestamptz, $3::bytea) AND t.run_at <= $4::text::timestamptz
ORDER BY t.run_at, t.id LIMIT $5::int`
)

// A running task was due before it was leased, but for the distance of the clocks of Redis and the database: without that bound its page
// would read the whole future to find nothing.
var pageSQL = map[delayq.LedgerKind]string{
	delayq.LedgerOpenRows:    pageSelect + isOpen + openOrder,
	delayq.LedgerWaitingRows: pageSelect + isOpen + ` AND t.status IN ('pending', 'retry')` + openOrder,
	delayq.LedgerRunningRows: pageSelect + isOpen + ` AND t.status = 'running' AND t.run_at <= statement_timestamp() + interval '1 hour'` + openOrder,
	delayq.LedgerDeadRows: pageSelect + `t.dead_at IS NOT NULL AND (t.dead_at, t.id) > ($2::text::timestamptz, $3::bytea)
	AND t.dead_at <= $4::text::timestamptz ORDER BY t.dead_at, t.id LIMIT $5::int`,
}

const newestSQL = pageSelect + `t.dead_at IS NOT NULL AND (t.dead_at, t.id) < ($2::text::timestamptz, $3::bytea)
	AND t.dead_at <= $4::text::timestamptz ORDER BY t.dead_at DESC, t.id DESC LIMIT $5::int`

func (q *queue) Page(ctx context.Context, p delayq.LedgerPage) ([]delayq.LedgerRow, error) {
	sql, ok := pageSQL[p.Kind]
	switch {
	case !ok:
		return nil, wrap("page", q.name, &delayq.InputError{Field: "Kind", Limit: "a LedgerKind", Got: fmt.Sprint(int(p.Kind))})
	case p.Limit < 1 || p.Limit > 1000:
		return nil, wrap("page", q.name, &delayq.InputError{Field: "Limit", Limit: "1 to 1000", Got: fmt.Sprint(p.Limit)})
	case p.Newest && p.Kind != delayq.LedgerDeadRows:
		return nil, wrap("page", q.name, &delayq.InputError{Field: "Newest", Limit: "false unless Kind is LedgerDeadRows", Got: "true"})
	}
	after, until := "-infinity", "infinity"
	if p.Newest {
		sql, after = newestSQL, "infinity"
	}
	if !p.After.At.IsZero() {
		after = instant(p.After.At)
	}
	if p.Kind != delayq.LedgerRunningRows && p.Kind != delayq.LedgerDeadRows && !p.Until.IsZero() {
		until = instant(p.Until)
	}
	rows, err := fetch(ctx, q, q.alone(), sql, []any{q.id, after, []byte(p.After.ID), until, p.Limit}, scanRow)
	return rows, wrap("page", q.name, err)
}

// Each is a range of one index, which the order names, read up to a limit.
const countsSQL = `
SELECT (SELECT count(*) FROM (
		SELECT FROM delayq.task t WHERE t.queue = $1::int AND ` + isOpen + ` ORDER BY t.run_at, t.id LIMIT $2::int) o),
	(SELECT count(*) FROM (
		SELECT FROM delayq.task t WHERE $3::bigint > 0 AND t.queue = $1::int AND ` + isOpen + `
			AND t.run_at > statement_timestamp() + $3::bigint * interval '1 microsecond' ORDER BY t.run_at, t.id LIMIT $2::int) l),
	(SELECT count(*) FROM (
		SELECT FROM delayq.task t WHERE t.queue = $1::int AND t.dead_at IS NOT NULL ORDER BY t.dead_at, t.id LIMIT $2::int) d)`

func (q *queue) Counts(ctx context.Context, most int, horizon time.Duration) (delayq.LedgerCounts, error) {
	if most < 1 || most > 1<<30 {
		return delayq.LedgerCounts{}, wrap("count", q.name, &delayq.InputError{Field: "most", Limit: "1 to 2^30", Got: fmt.Sprint(most)})
	}
	got, err := fetch(ctx, q, q.alone(), countsSQL, []any{q.id, most, horizon.Microseconds()}, func(rows pgx.Rows) (c delayq.LedgerCounts, err error) {
		err = rows.Scan(&c.Open, &c.Later, &c.Dead)
		return c, err
	})
	if err != nil {
		return delayq.LedgerCounts{}, wrap("count", q.name, err)
	}
	return got[0], nil
}

// instant is a time as PostgreSQL reads it, exact to the microsecond, in any query mode.
func instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.999999Z07:00") }
