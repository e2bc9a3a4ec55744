package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// What a claim does with a row, the same for Claim and Lease: it runs, or the lease is renewed that the caller has already, or one that
// ran out is taken over, or the task is ended instead. $2 is the token, $3 the lease, $4 the consumer, $5 MaxLost, $6 MaxFailed.
const (
	claimable = `(t.status IN ('pending', 'retry') OR t.status = 'running' AND (t.token = $2::text::uuid OR t.locked_until < clock_timestamp()))`

	mine  = `(t.status = 'running' AND t.token = $2::text::uuid)`
	taken = `(t.status = 'running' AND t.token <> $2::text::uuid)`
	spent = `($5::int > 0 AND t.lost + 1 >= $5::int)`
	ended = `(` + taken + ` AND (t.cancel_requested OR ` + spent + `))`

	claimUpdate = `
UPDATE delayq.task t SET
	status = CASE WHEN NOT ` + ended + ` THEN 'running' WHEN t.cancel_requested THEN 'cancelled' ELSE 'dead' END::delayq.status,
	rev = CASE WHEN ` + ended + ` THEN nextval('delayq.rev') ELSE t.rev END,
	token = CASE WHEN ` + ended + ` THEN t.token ELSE $2::text::uuid END,
	locked_by = CASE WHEN ` + ended + ` THEN t.locked_by ELSE $4::text END,
	locked_until = CASE WHEN ` + ended + ` THEN NULL ELSE clock_timestamp() + $3::bigint * interval '1 microsecond' END,
	started_at = CASE WHEN ` + ended + ` OR ` + mine + ` THEN t.started_at ELSE clock_timestamp() END,
	deliveries = t.deliveries + (NOT (` + ended + ` OR ` + mine + `))::int,
	lost = t.lost + ` + taken + `::int,
	finished_at = CASE WHEN ` + ended + ` AND t.cancel_requested THEN clock_timestamp() END,
	dead_at = CASE WHEN ` + ended + ` AND NOT t.cancel_requested THEN clock_timestamp() END,
	reason = CASE WHEN ` + ended + ` AND NOT t.cancel_requested THEN 'lost' ELSE t.reason END,
	max_failed = $6::int, max_lost = $5::int,
	events = CASE WHEN NOT ` + taken + ` THEN t.events ELSE delayq.add_event(t.events,
		CASE WHEN NOT ` + ended + ` THEN 'lost' WHEN t.cancel_requested THEN 'lost and cancelled' ELSE 'lost and dead' END,
		t.locked_by, t.failed + t.lost + 1, NULL, NULL) END`
)

var claimSQL = claimUpdate + `
FROM ` + batchOf("id, rev", "$7::bytea[]", "$8::bigint[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.rev = u.rev AND ` + claimable + `
RETURNING t.id, t.status::text, t.rev, t.failed, t.lost, t.deliveries` // no more than is needed, since it is read for every task

func (q *queue) Claim(ctx context.Context, c delayq.LedgerClaim, want []delayq.LedgerWant) ([]delayq.LedgerRow, error) {
	rows, err := q.claim(ctx, c, want)
	return rows, wrap("claim", q.name, err)
}

func (q *queue) claim(ctx context.Context, c delayq.LedgerClaim, want []delayq.LedgerWant) ([]delayq.LedgerRow, error) {
	b, err := newBatch(len(want), func(i int) string { return want[i].ID })
	if err != nil || len(want) == 0 {
		return nil, err
	}
	args, err := q.claimArgs(c)
	if err != nil {
		return nil, err
	}
	args = append(args, b.ids, column(b, func(i int) int64 { return want[i].Rev }))
	return fetch(ctx, q, q.alone(), claimSQL, args, func(rows pgx.Rows) (row delayq.LedgerRow, err error) {
		var id []byte
		var status string
		err = rows.Scan(&id, &status, &row.Rev, &row.Failed, &row.Lost, &row.Deliveries)
		row.ID, row.Status = string(id), delayq.LedgerStatus(status)
		if row.Status == delayq.LedgerRunning {
			row.Token = c.Token
		}
		return row, err
	})
}

func (q *queue) claimArgs(c delayq.LedgerClaim) ([]any, error) {
	token, err := tokenText(c.Token)
	if err != nil {
		return nil, err
	}
	lease, err := micros("Lease", c.Lease, time.Millisecond)
	if err != nil {
		return nil, err
	}
	if !isText(c.Consumer) {
		return nil, &delayq.InputError{Field: "Consumer", Limit: "UTF-8 without NUL", Got: fmt.Sprintf("%d bytes", len(c.Consumer))}
	}
	return []any{q.id, token, lease, c.Consumer, max(c.MaxLost, 0), max(c.MaxFailed, 0)}, nil
}

// A running task was due before it was leased, so the due time bounds all that can be leased here, and the index of open tasks gives it
// in order. What the call's first try has leased is among the most overdue when it is repeated.
var leaseSQL = claimUpdate + `
FROM ` + batchOf("id", `ARRAY(
	SELECT t.id FROM delayq.task t
	WHERE t.queue = $1::int AND `+isOpen+` AND t.run_at <= statement_timestamp() AND (
		t.status IN ('pending', 'retry') AND t.run_at <= statement_timestamp() - $7::bigint * interval '1 microsecond'
		OR t.status = 'running' AND (t.token = $2::text::uuid OR t.locked_until < clock_timestamp() - $7::bigint * interval '1 microsecond'))
	ORDER BY t.run_at, t.id LIMIT $8::int
	FOR NO KEY UPDATE SKIP LOCKED
)`) + `
WHERE t.queue = u.queue AND t.id = u.id AND ` + claimable + `
RETURNING ` + rowColumns + `, CASE t.status WHEN 'running' THEN t.payload END`

func (q *queue) Lease(ctx context.Context, c delayq.LedgerClaim, most int) ([]delayq.LedgerRow, error) {
	rows, err := q.lease(ctx, c, most)
	return rows, wrap("lease", q.name, err)
}

func (q *queue) lease(ctx context.Context, c delayq.LedgerClaim, most int) ([]delayq.LedgerRow, error) {
	if most < 1 || most > maxBatch {
		return nil, &delayq.InputError{Field: "max", Limit: fmt.Sprintf("1 to %d", maxBatch), Got: fmt.Sprint(most)}
	}
	args, err := q.claimArgs(c)
	if err != nil {
		return nil, err
	}
	overdue, err := micros("Overdue", c.Overdue, 0)
	if err != nil {
		return nil, err
	}
	return fetch(ctx, q, q.alone(), leaseSQL, append(args, overdue, most), scanRow)
}

// A beat renews only what still runs under the token, but also after the lease has run out: nobody has taken it over.
var heartbeatSQL = `
UPDATE delayq.task t SET locked_until = clock_timestamp() + $4::bigint * interval '1 microsecond'
FROM ` + batchOf("id, token", "$2::bytea[]", "$3::text[]::uuid[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.status = 'running' AND t.token = u.token
RETURNING t.id, t.cancel_requested`

func (q *queue) Heartbeat(ctx context.Context, lease time.Duration, held []delayq.LedgerHeld) ([]delayq.LedgerBeat, error) {
	beats, err := q.heartbeat(ctx, lease, held)
	return beats, wrap("heartbeat", q.name, err)
}

func (q *queue) heartbeat(ctx context.Context, lease time.Duration, held []delayq.LedgerHeld) ([]delayq.LedgerBeat, error) {
	beats := make([]delayq.LedgerBeat, len(held))
	b, err := newBatch(len(held), func(i int) string { return held[i].ID })
	if err != nil || len(held) == 0 {
		return beats, err
	}
	tokens, err := tokensOf(b, func(i int) string { return held[i].Token })
	if err != nil {
		return nil, err
	}
	d, err := micros("Lease", lease, time.Millisecond)
	if err != nil {
		return nil, err
	}
	answered := make(map[int]bool, len(held))
	_, err = fetch(ctx, q, q.alone(), heartbeatSQL, []any{q.id, b.ids, tokens, d}, func(rows pgx.Rows) (struct{}, error) {
		var id []byte
		var stop bool
		err := rows.Scan(&id, &stop)
		answered[b.at[string(id)]] = true
		if beat := &beats[b.at[string(id)]]; stop {
			*beat = delayq.LedgerStop
		} else {
			*beat = delayq.LedgerRenewed
		}
		return struct{}{}, err
	})
	if err != nil {
		return nil, err
	}
	if len(answered) == len(held) {
		return beats, nil
	}
	// Lost, or left out since another transaction has the row locked.
	rest := b.left(func(i int) bool { return answered[i] })
	rows, err := fetch(ctx, q, q.alone(), rowsSQL, []any{q.id, rest.ids, false}, scanRow)
	for _, row := range rows {
		if i := b.at[row.ID]; row.Status == delayq.LedgerRunning && row.Token == held[i].Token {
			beats[i] = delayq.LedgerBusy
		}
	}
	return beats, err
}

func tokensOf(b *batch, token func(i int) string) ([]string, error) {
	var bad error
	tokens := column(b, func(i int) string {
		text, err := tokenText(token(i))
		if err != nil {
			bad = err
		}
		return text
	})
	return tokens, bad
}
