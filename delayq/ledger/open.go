package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/delayq/toolkit/delayq"
)

// DB is what the ledger needs of a connection pool; *pgxpool.Pool is one. It must lead to the primary.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// A Ledger keeps the tasks of queues in PostgreSQL, for delayq.Config.Ledger. It is safe for concurrent use.
type Ledger struct {
	db        DB
	keepEnded time.Duration
	keepDead  time.Duration
	planned   bool // see args
}

var _ delayq.Ledger = (*Ledger)(nil)

// An Option sets something of a Ledger.
type Option func(*Ledger)

// KeepEnded is how long succeeded and cancelled tasks stay: the ids of a time in which no second enqueue of them makes a task, and
// in which history can tell of them. It must be longer than any caller repeats an enqueue. A queue's own Retention counts
// where it is longer.
//
// Defaults to 7 days. 1 minute to 10 years.
func KeepEnded(d time.Duration) Option { return func(l *Ledger) { l.keepEnded = d } }

// KeepDead is how long dead letters stay. Defaults to 30 days. 1 minute to 10 years.
func KeepDead(d time.Duration) Option { return func(l *Ledger) { l.keepDead = d } }

const decade = 10 * 365 * 24 * time.Hour

// Open checks the server, the version of the schema and the rights of the database user. It writes nothing; `delayq migrate`, or Up of
// package migrations, makes the schema.
//
// Errors: delayq.ErrSchema, ErrRights, ErrStandby, delayq.ErrServerVersion (before PostgreSQL 14), delayq.ErrInvalid, the
// connection's.
func Open(ctx context.Context, db DB, opts ...Option) (*Ledger, error) {
	l := &Ledger{db: db, keepEnded: 7 * 24 * time.Hour, keepDead: 30 * 24 * time.Hour}
	for _, o := range opts {
		o(l)
	}
	for _, d := range []time.Duration{l.keepEnded, l.keepDead} {
		if d < time.Minute || d > decade {
			return nil, wrap("open", "schema", &delayq.InputError{Field: "KeepEnded and KeepDead", Limit: "1 minute to 10 years", Got: d.String()})
		}
	}
	tx, err := db.Begin(ctx)
	if err != nil {
		return nil, wrap("open", "schema", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	if err := check(ctx, tx); err != nil {
		return nil, wrap("open", "schema", err)
	}
	if conn := tx.Conn(); conn != nil {
		l.planned = conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	}
	return l, nil
}

// args are the arguments of one statement. Where pgx would prepare it for good, PostgreSQL would keep a plan made while a table was
// small, perhaps one that reads the whole of it, until it next analyzes a table that has grown by millions. So statements
// are described once and planned each time, which is cheap beside what they do.
func (l *Ledger) args(args ...any) []any {
	if l.planned {
		return append([]any{pgx.QueryExecModeCacheDescribe}, args...)
	}
	return args
}

// What a new queue has where nothing is given, as delayq.Config says.
const (
	defaultShards     = 1
	defaultRetention  = 2 * time.Minute
	defaultMaxPayload = 64 << 10
)

const selectQueue = `
SELECT id, shards, retention_ms, max_payload, created_at, clock_timestamp() FROM delayq.queue WHERE name = $1::text`

// OpenQueue is for delayq.Open.
func (l *Ledger) OpenQueue(ctx context.Context, name string, want delayq.LedgerConfig, create bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	q := &queue{l: l, name: name}
	have, err := q.open(ctx, want, create)
	if err != nil {
		return nil, delayq.LedgerConfig{}, wrap("open", name, err)
	}
	return q, have, nil
}

func (q *queue) open(ctx context.Context, want delayq.LedgerConfig, create bool) (delayq.LedgerConfig, error) {
	if err := validQueue(q.name, want); err != nil {
		return want, err
	}
	have, err := q.read(ctx)
	if errors.Is(err, delayq.ErrNoQueue) && create {
		_, err = q.l.db.Exec(ctx, `
INSERT INTO delayq.queue (name, shards, retention_ms, max_payload) VALUES ($1::text, $2::int, $3::bigint, $4::int)
ON CONFLICT (name) DO NOTHING`, q.l.args(q.name, cmp.Or(want.Shards, defaultShards),
			cmp.Or(want.Retention, defaultRetention).Milliseconds(), cmp.Or(want.MaxPayload, defaultMaxPayload))...)
		if err != nil {
			return want, err
		}
		have, err = q.read(ctx)
	}
	switch {
	case err != nil:
		return want, err
	case want.Shards != 0 && want.Shards != have.Shards:
		return want, fmt.Errorf("%w: the queue has %d, Config.Shards says %d", delayq.ErrShards, have.Shards, want.Shards)
	}
	before := have
	have.Retention = cmp.Or(want.Retention, have.Retention)
	have.MaxPayload = cmp.Or(want.MaxPayload, have.MaxPayload)
	if have != before {
		_, err = q.l.db.Exec(ctx, `UPDATE delayq.queue SET retention_ms = $2::bigint, max_payload = $3::int WHERE id = $1::int`,
			q.l.args(q.id, have.Retention.Milliseconds(), have.MaxPayload)...)
	}
	q.keepEnded = max(q.l.keepEnded, have.Retention)
	return have, err
}

func (q *queue) read(ctx context.Context) (have delayq.LedgerConfig, err error) {
	var retention int64
	err = q.l.db.QueryRow(ctx, selectQueue, q.l.args(q.name)...).Scan(
		&q.id, &have.Shards, &retention, &have.MaxPayload, &have.Since, &have.Now)
	if errors.Is(err, pgx.ErrNoRows) {
		err = delayq.ErrNoQueue
	}
	have.Retention = time.Duration(retention) * time.Millisecond
	return have, err
}

func validQueue(name string, want delayq.LedgerConfig) error {
	switch {
	case len(name) == 0 || len(name) > 128 || !isText(name):
		return &delayq.InputError{Field: "queue name", Limit: "1 to 128 bytes of UTF-8 without NUL", Got: fmt.Sprintf("%.140q", name)}
	case want.Shards < 0 || want.Shards > 256:
		return &delayq.InputError{Field: "Shards", Limit: "0 to 256", Got: strconv.Itoa(want.Shards)}
	case want.Retention != 0 && want.Retention < time.Millisecond:
		return &delayq.InputError{Field: "Retention", Limit: "0, or at least 1 ms", Got: want.Retention.String()}
	case want.MaxPayload < 0 || want.MaxPayload > 1<<30:
		return &delayq.InputError{Field: "MaxPayload", Limit: "0 to 1 GiB", Got: strconv.Itoa(want.MaxPayload)}
	}
	return nil
}
