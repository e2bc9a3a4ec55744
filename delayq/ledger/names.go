package ledger

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Queues lists the names of all queues of the ledger.
func (l *Ledger) Queues(ctx context.Context) ([]string, error) {
	rows, err := l.db.Query(ctx, `SELECT name FROM delayq.queue ORDER BY name`, l.args()...)
	if err != nil {
		return nil, wrap("list queues of", "the ledger", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return names, wrap("list queues of", "the ledger", err)
}
