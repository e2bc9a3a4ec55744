package ledger

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// slice is how many rows one statement of Retain deletes: some milliseconds.
const slice = 1000

// The inner select goes by an index and leaves out what another Retain, or an enqueue that starts a cancelled task afresh, is at.
var retainSQL = [...]string{
	`DELETE FROM delayq.task t USING (
	SELECT t.id FROM delayq.task t
	WHERE t.queue = $1::int AND t.finished_at IS NOT NULL AND t.finished_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
	ORDER BY t.finished_at LIMIT $4::int FOR UPDATE SKIP LOCKED
) o WHERE t.queue = $1::int AND t.id = o.id AND $3::bigint IS NOT NULL`,
	`DELETE FROM delayq.task t USING (
	SELECT t.id FROM delayq.task t
	WHERE t.queue = $1::int AND t.dead_at IS NOT NULL AND t.dead_at < statement_timestamp() - $3::bigint * interval '1 microsecond'
	ORDER BY t.dead_at, t.id LIMIT $4::int FOR UPDATE SKIP LOCKED
) o WHERE t.queue = $1::int AND t.id = o.id AND $2::bigint IS NOT NULL`,
	`DELETE FROM delayq.once o USING (
	SELECT o.hash FROM delayq.once o WHERE o.expires_at <= statement_timestamp() ORDER BY o.expires_at LIMIT $4::int FOR UPDATE SKIP LOCKED
) e WHERE o.hash = e.hash AND ($1::int, $2::bigint, $3::bigint) IS NOT NULL`,
}

// Retain deletes markers of Once too whose time is over, whatever the queue. Several at once share the work.
func (q *queue) Retain(ctx context.Context, budget time.Duration) (deleted int64, all bool, err error) {
	end := time.Now().Add(budget)
	args := q.l.args(q.id, q.keepEnded.Microseconds(), q.l.keepDead.Microseconds(), slice)
	for _, sql := range retainSQL {
		for n := int64(slice); n == slice; {
			if !time.Now().Before(end) {
				return deleted, false, nil
			}
			tag, err := q.l.db.Exec(ctx, sql, args...)
			if err != nil {
				return deleted, false, wrap("retain", q.name, err)
			}
			n = tag.RowsAffected()
			deleted += n
		}
	}
	return deleted, true, nil
}

// Retain is LedgerQueue.Retain over all queues, those too that no program opens any more: it deletes what has ended longer ago than is
// kept, for at most budget, and says how many tasks and markers and whether that is all.
func (l *Ledger) Retain(ctx context.Context, budget time.Duration) (deleted int64, all bool, err error) {
	end := time.Now().Add(budget)
	queues, err := fetchOnce(ctx, l.db, `SELECT id, name, retention_ms FROM delayq.queue ORDER BY id`, l.args(), func(rows pgx.Rows) (*queue, error) {
		q := &queue{l: l}
		var retention int64
		err := rows.Scan(&q.id, &q.name, &retention)
		q.keepEnded = max(l.keepEnded, time.Duration(retention)*time.Millisecond)
		return q, err
	})
	if err != nil {
		return 0, false, wrap("retain", "all queues", err)
	}
	for _, q := range queues {
		n, done, err := q.Retain(ctx, time.Until(end))
		deleted += n
		if err != nil || !done {
			return deleted, false, err
		}
	}
	return deleted, true, nil
}
