package ledger

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
)

func (q *queue) State(ctx context.Context) ([]byte, error) {
	var state []byte
	err := q.l.db.QueryRow(ctx, `SELECT state FROM delayq.reconcile WHERE queue = $1::int`, q.l.args(q.id)...).Scan(&state)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return state, wrap("read state of", q.name, err)
}

func (q *queue) SetState(ctx context.Context, state []byte) error {
	_, err := q.l.db.Exec(ctx, `
INSERT INTO delayq.reconcile (queue, state, updated_at) VALUES ($1::int, $2::bytea, clock_timestamp())
ON CONFLICT (queue) DO UPDATE SET state = excluded.state, updated_at = excluded.updated_at`, q.l.args(q.id, notNil(state))...)
	return wrap("store state of", q.name, err)
}
