package ledger

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// An expired marker counts as absent. The update looks at it only where the insert found one, after waiting for whoever is at it.
const onceSQL = `
WITH first AS (
	INSERT INTO delayq.once (hash, key, created_at, expires_at)
	VALUES ($1::bytea, $2::bytea, clock_timestamp(), clock_timestamp() + $3::bigint * interval '1 microsecond')
	ON CONFLICT (hash) DO NOTHING
	RETURNING 1
), renewed AS (
	UPDATE delayq.once SET created_at = clock_timestamp(), expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
	WHERE hash = $1::bytea AND expires_at <= clock_timestamp() AND NOT EXISTS (SELECT FROM first)
	RETURNING 1
)
SELECT EXISTS (SELECT FROM first) OR EXISTS (SELECT FROM renewed)`

// Once reports whether this is the first transaction that asks with the key, and marks it: for effects that must not happen again
// when a handler runs again. The marker goes with a rollback. Of two transactions at once the second waits for the first to end. A
// false answer says that another has committed: skip the effect, and commit the rest.
//
// key is 1 to 4096 bytes of any kind, and is shared by all queues: put what it is about in front, such as "mail:42". The marker is kept
// for 30 days, or for keep, 1 second to 10 years; a handler must not come back later than that.
//
// Errors: delayq.ErrInvalid, the database's, after which the transaction can only be rolled back.
func Once(ctx context.Context, tx pgx.Tx, key string, keep ...time.Duration) (first bool, err error) {
	d := 30 * 24 * time.Hour
	if len(keep) > 0 {
		d = keep[0]
	}
	switch {
	case len(key) == 0 || len(key) > 4096:
		err = &delayq.InputError{Field: "key", Limit: "1 to 4096 bytes", Got: fmt.Sprintf("%d bytes", len(key))}
	case len(keep) > 1 || d < time.Second || d > decade:
		err = &delayq.InputError{Field: "keep", Limit: "one time of 1 s to 10 years", Got: fmt.Sprint(keep)}
	default:
		hash := sha256.Sum256([]byte(key))
		for there := false; err == nil && !first && !there; {
			err = tx.QueryRow(ctx, onceSQL, hash[:], []byte(key), d.Microseconds()).Scan(&first)
			if err == nil && !first { // not by a marker that retention deleted just now
				err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM delayq.once WHERE hash = $1::bytea)`, hash[:]).Scan(&there)
			}
		}
	}
	if err != nil {
		return false, fmt.Errorf("delayq: once: %w", err)
	}
	return first, nil
}
