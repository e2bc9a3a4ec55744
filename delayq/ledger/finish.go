package ledger

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// succeedSQL is finishSQL where all succeed, as most do.
var succeedSQL = `
UPDATE delayq.task t SET status = 'succeeded', rev = nextval('delayq.rev'), finished_at = clock_timestamp(), locked_until = NULL
FROM ` + batchOf("id, token", "$2::bytea[]", "$3::text[]::uuid[]") + `
WHERE t.queue = u.queue AND t.id = u.id AND t.status = 'running' AND t.token = u.token
RETURNING t.id, t.rev`

// The numbers of the verbs are those of delayq.LedgerVerb. A task that goes back unstarted keeps its revision, so that the lease in
// Redis can be given back too.
var finishSQL = `
UPDATE delayq.task t SET
	status = CASE o.fate WHEN 'succeed' THEN 'succeeded' WHEN 'cancel' THEN 'cancelled' WHEN 'bury' THEN 'dead'
		WHEN 'retry' THEN 'retry' ELSE 'pending' END::delayq.status,
	rev = CASE o.fate WHEN 'back' THEN t.rev ELSE nextval('delayq.rev') END,
	failed = t.failed + o.fails,
	run_at = CASE WHEN o.fate IN ('retry', 'snooze') THEN clock_timestamp() + o.delay * interval '1 microsecond' ELSE t.run_at END,
	locked_until = NULL,
	finished_at = CASE WHEN o.fate IN ('succeed', 'cancel') THEN clock_timestamp() END,
	dead_at = CASE o.fate WHEN 'bury' THEN clock_timestamp() END,
	reason = coalesce(o.reason, t.reason),
	last_error = coalesce(o.error, t.last_error),
	payload = coalesce(o.payload, t.payload),
	events = CASE WHEN o.fate IN ('succeed', 'back') THEN t.events ELSE delayq.add_event(t.events,
		CASE o.fate WHEN 'cancel' THEN 'cancelled' WHEN 'bury' THEN 'dead' ELSE o.fate END, t.locked_by, t.failed + t.lost + 1, o.reason, o.error) END
FROM (
	SELECT u.*, (u.verb IN (1, 4))::int AS fails, CASE
		WHEN u.verb = 0 THEN 'succeed'
		WHEN l.cancel_requested THEN 'cancel'
		WHEN u.verb IN (4, 5) OR u.verb = 1 AND u.max_failed > 0 AND l.failed + 1 >= u.max_failed THEN 'bury'
		WHEN u.verb = 1 THEN 'retry'
		WHEN u.verb = 3 THEN 'snooze'
		ELSE 'back' END AS fate
	FROM ` + batchOf("id, token, verb, delay, max_failed, reason, error, payload", "$2::bytea[]", "$3::text[]::uuid[]", "$4::int[]",
	"$5::bigint[]", "$6::int[]", "$7::text[]", "$8::text[]", "$9::bytea[]") + ` CROSS JOIN LATERAL (
		SELECT t.cancel_requested, t.failed FROM delayq.task t
		WHERE t.queue = u.queue AND t.id = u.id AND t.status = 'running' AND t.token = u.token
		FOR NO KEY UPDATE
	) l
) o
WHERE t.queue = o.queue AND t.id = o.id
RETURNING ` + rowColumns + `, ` + payloadIfWaiting + `, 'running'`

func (q *queue) Finish(ctx context.Context, tx delayq.Tx, ends []delayq.LedgerEnd) ([]delayq.LedgerChange, error) {
	changes, err := q.finish(ctx, tx, ends)
	return changes, wrap("finish", q.name, err)
}

func (q *queue) finish(ctx context.Context, tx delayq.Tx, ends []delayq.LedgerEnd) ([]delayq.LedgerChange, error) {
	b, err := newBatch(len(ends), func(i int) string { return ends[i].ID })
	if err != nil {
		return nil, err
	}
	if _, err := tokensOf(b, func(i int) string { return ends[i].Token }); err != nil {
		return nil, err
	}
	plain := true
	for i := range ends {
		if err := validEnd(&ends[i]); err != nil {
			return nil, err
		}
		plain = plain && ends[i].Verb == delayq.LedgerSucceed && ends[i].Error == ""
	}
	if plain {
		return q.succeed(ctx, tx, b, ends)
	}
	if len(ends) == 0 {
		return nil, nil
	}
	p, err := q.in(tx)
	if err != nil {
		return nil, err
	}
	return q.finishAny(ctx, p, b, ends)
}

// succeed is finish where all succeed. What it does not match, which is rare, goes the long way.
func (q *queue) succeed(ctx context.Context, tx delayq.Tx, b *batch, ends []delayq.LedgerEnd) ([]delayq.LedgerChange, error) {
	changes := make([]delayq.LedgerChange, len(ends))
	if len(ends) == 0 {
		return changes, nil
	}
	p, err := q.in(tx)
	if err != nil {
		return nil, err
	}
	tokens, err := tokensOf(b, func(i int) string { return ends[i].Token })
	if err != nil {
		return nil, err
	}
	done, err := fetch(ctx, q, p, succeedSQL, []any{q.id, b.ids, tokens}, func(rows pgx.Rows) (*delayq.LedgerRow, error) {
		row := &delayq.LedgerRow{Status: delayq.LedgerSucceeded}
		var id []byte
		err := rows.Scan(&id, &row.Rev)
		row.ID = string(id)
		return row, err
	})
	if err != nil {
		return nil, err
	}
	for _, row := range done {
		i := b.at[row.ID]
		row.Token = ends[i].Token
		changes[i] = delayq.LedgerChange{Applied: true, Was: delayq.LedgerRunning, Row: row}
	}
	if len(done) == len(ends) {
		return changes, nil
	}
	rest := b.left(func(i int) bool { return changes[i].Applied })
	others, err := q.finishAny(ctx, p, rest, ends)
	if err != nil {
		return nil, err
	}
	for _, i := range rest.order {
		changes[i] = others[i]
	}
	return changes, nil
}

func (q *queue) finishAny(ctx context.Context, p *place, b *batch, ends []delayq.LedgerEnd) ([]delayq.LedgerChange, error) {
	return q.changeAt(ctx, p, b, finishSQL, func(b *batch) []any {
		tokens, _ := tokensOf(b, func(i int) string { return ends[i].Token }) // checked by finish
		return []any{
			q.id, b.ids, tokens,
			column(b, func(i int) int32 { return int32(ends[i].Verb) }),
			column(b, func(i int) int64 { return ends[i].Delay.Microseconds() }),
			column(b, func(i int) int32 { return int32(min(ends[i].MaxFailed, 1<<30)) }),
			column(b, func(i int) *string { return textOrNil(ends[i].Reason) }),
			column(b, func(i int) *string { return textOrNil(ends[i].Error) }),
			column(b, func(i int) []byte {
				if ends[i].Verb != delayq.LedgerFail {
					return nil
				}
				return ends[i].Payload
			}),
		}
	}, func(i int, row *delayq.LedgerRow) bool {
		return row.Status == delayq.LedgerRunning && row.Token == ends[i].Token
	})
}

func validEnd(e *delayq.LedgerEnd) error {
	switch {
	case e.Verb < delayq.LedgerSucceed || e.Verb > delayq.LedgerBuryUnrun:
		return &delayq.InputError{Field: "Verb", Limit: "a LedgerVerb", Got: fmt.Sprint(int(e.Verb))}
	case e.Delay < 0 || e.Delay > longest:
		return &delayq.InputError{Field: "Delay", Limit: "0 to 100 years", Got: e.Delay.String()}
	}
	return nil
}

func textOrNil(s string) *string {
	if s == "" {
		return nil
	}
	s = clean(s)
	return &s
}
