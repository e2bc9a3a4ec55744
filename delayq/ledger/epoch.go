package ledger

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// epochBit is where the epoch begins in a revision.
const epochBit = 40

// RaiseEpoch makes all revisions newer than any that was ever handed out. Run it when the database has lost commits, by a failover to a
// replica that lagged or by a restore, since it would hand out revisions again that Redis has, and Redis would take the truth
// for old news; then run the reconciler. above is the highest revision that Redis has, 0 when unknown: then the epochs
// raised before the loss, if any, must be in what was restored.
//
// It stamps every task anew, in steps, also those that have ended, since Redis may have them at a lost revision. Workers may go on
// meanwhile; transactions of producers that were open before it began should have ended, or run it again, as after an error. It returns how many tasks it stamped. The database user needs UPDATE on the sequence
// delayq.rev.
func (l *Ledger) RaiseEpoch(ctx context.Context, above int64) (stamped int64, err error) {
	var first int64
	err = l.db.QueryRow(ctx, `
SELECT setval('delayq.rev', ((greatest(last_value, $1::bigint) >> $2::int) + 1) << $2::int) FROM delayq.rev`, l.args(above, epochBit)...).Scan(&first)
	if err != nil {
		return 0, wrap("raise epoch of", "all queues", err)
	}
	// Until there was nothing to stamp: a transaction that was open may have committed a revision from before behind the scan.
	for {
		n, err := l.stamp(ctx, first)
		stamped += n
		if err != nil || n == 0 {
			return stamped, wrap("raise epoch of", "all queues", err)
		}
	}
}

// stamp goes once over all tasks.
func (l *Ledger) stamp(ctx context.Context, first int64) (stamped int64, err error) {
	queue, id := int32(0), []byte{}
	for {
		var n int64
		for try := 1; ; try++ {
			err = l.db.QueryRow(ctx, stampSQL, l.args(queue, id, first, slice)...).Scan(&queue, &id, &n)
			if err == nil || !again(err) || try == tries {
				break
			}
			time.Sleep(time.Duration(try) * 10 * time.Millisecond)
		}
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return stamped, nil
		case err != nil:
			return stamped, err
		}
		stamped += n
	}
}

// stampSQL stamps the next rows of the primary key and returns the last of them.
const stampSQL = `
WITH page AS MATERIALIZED (
	SELECT t.queue, t.id FROM delayq.task t WHERE (t.queue, t.id) > ($1::int, $2::bytea) ORDER BY t.queue, t.id LIMIT $4::int FOR NO KEY UPDATE
), stamp AS (
	UPDATE delayq.task t SET rev = nextval('delayq.rev') FROM page p WHERE t.queue = p.queue AND t.id = p.id AND t.rev < $3::bigint RETURNING 1
)
SELECT p.queue, p.id, (SELECT count(*) FROM stamp) FROM page p ORDER BY p.queue DESC, p.id DESC LIMIT 1`
