package ledger

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// A Tx is a transaction that can say what to do after its commit; delayq.Queue uses that to tell Redis. Like every pgx.Tx it is for
// one goroutine at a time.
type Tx struct {
	pgx.Tx
	outer *Tx // of a savepoint
	after []func(context.Context)
}

// Begin starts a transaction. db is a pool, a connection, or a transaction, for one inside it.
func Begin(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
},
) (*Tx, error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if inner, ok := tx.(*Tx); ok { // db is a Tx itself
		return inner, nil
	}
	return &Tx{Tx: tx}, nil
}

// BeginFunc runs fn in a transaction: it is committed when fn returns nil, else rolled back, as by pgx.BeginFunc.
func BeginFunc(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, fn func(tx *Tx) error,
) error {
	tx, err := Begin(ctx, db)
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, begun{tx}, func(pgx.Tx) error { return fn(tx) })
}

// begun lets pgx.BeginFunc end a transaction that is there already.
type begun struct{ tx *Tx }

func (b begun) Begin(context.Context) (pgx.Tx, error) { return b.tx, nil }

// Begin starts a transaction inside this one, by a savepoint. What is to be done after its commit waits for the outer commit.
func (t *Tx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &Tx{Tx: tx, outer: t}, nil
}

// AfterCommit has f called once the transaction has been committed, in the order of the calls, with the context of Commit. It is not
// called when that failed, not even when nobody knows whether it did: f must be something that may be left out.
func (t *Tx) AfterCommit(f func(ctx context.Context)) { t.after = append(t.after, f) }

// Commit commits, then calls what AfterCommit was given.
func (t *Tx) Commit(ctx context.Context) error {
	if err := t.Tx.Commit(ctx); err != nil {
		return err
	}
	after := t.after
	t.after = nil
	if t.outer != nil {
		t.outer.after = append(t.outer.after, after...)
		return nil
	}
	for _, f := range after {
		f(ctx)
	}
	return nil
}
