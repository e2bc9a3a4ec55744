package ledger

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// slice is how many rows one statement deletes: some milliseconds.
const slice = 500

// expired deletes the tasks of $1 that ended longer than $2 ago, the longest first. What another Retain is at, or an enqueue that starts a
// cancelled task afresh, it leaves out.
func expired(column, order string) string {
	past := `t.` + column + ` < statement_timestamp() - $2::bigint * interval '1 microsecond'`
	return `
DELETE FROM delayq.task t USING ` + batchOf("id", `ARRAY(
	SELECT t.id FROM delayq.task t WHERE t.queue = $1::int AND t.`+column+` IS NOT NULL AND `+past+`
	ORDER BY `+order+` LIMIT $3::int FOR UPDATE SKIP LOCKED
)`) + `
WHERE t.queue = u.queue AND t.id = u.id AND ` + past
}

var (
	expiredFinished = expired("finished_at", "t.finished_at")
	expiredDead     = expired("dead_at", "t.dead_at, t.id")
)

const expiredOnce = `
DELETE FROM delayq.once o WHERE o.hash = ANY (ARRAY(
	SELECT o.hash FROM delayq.once o WHERE o.expires_at <= statement_timestamp() ORDER BY o.expires_at LIMIT $1::int FOR UPDATE SKIP LOCKED
))`

// Retain deletes markers of Once too whose time is over, whatever the queue. Several at once share the work.
func (q *queue) Retain(ctx context.Context, budget time.Duration) (deleted int64, all bool, err error) {
	end := time.Now().Add(budget)
	for _, step := range []struct {
		sql  string
		args []any
	}{
		{expiredFinished, []any{q.id, q.keepEnded.Microseconds(), slice}},
		{expiredDead, []any{q.id, q.l.keepDead.Microseconds(), slice}},
		{expiredOnce, []any{slice}},
	} {
		for n := int64(slice); n == slice; {
			if !time.Now().Before(end) {
				return deleted, false, nil
			}
			tag, err := q.l.db.Exec(ctx, step.sql, q.l.args(step.args...)...)
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
	queues, err := fetchOnce(ctx, l.db, `SELECT id, name, retention_ms FROM delayq.queue ORDER BY id`, patient, l.args(), func(rows pgx.Rows) (*queue, error) {
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
