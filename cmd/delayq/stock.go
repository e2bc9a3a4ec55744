package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// stockroom is a till in PostgreSQL: each change of an order and its stock is one transaction with what the queue is told of it.
type stockroom struct {
	pool   *pgxpool.Pool
	schema string // of the shop's tables, of this run alone
	q      *delayq.Queue
	books  *books
	log    *slog.Logger

	mu       sync.Mutex
	doubts   map[string]bool // ids of orders of which nobody knows whether they were placed
	phantoms []string
}

// The stock is more than any run can sell. The fill factor leaves room for the many updates of few rows.
const shopTables = `CREATE TABLE shop.product (
	id int PRIMARY KEY, initial bigint NOT NULL, stock bigint NOT NULL CHECK (stock >= 0)
) WITH (fillfactor = 20);
CREATE TABLE shop.orders (
	id text PRIMARY KEY, product int NOT NULL, qty int NOT NULL, status text NOT NULL DEFAULT 'open',
	placed_at timestamptz NOT NULL DEFAULT clock_timestamp(), settled_at timestamptz
) WITH (fillfactor = 80);
CREATE TABLE shop.movement ( -- the journal: what was taken, and below zero what was put back
	order_id text NOT NULL, product int NOT NULL, qty int NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO shop.product SELECT n, 1000000000000, 1000000000000 FROM generate_series(0, 255) n`

const products = 256

// sql is a statement with the schema of this run.
func (s *stockroom) sql(text string) string { return strings.ReplaceAll(text, "shop.", s.schema+".") }

// build makes the tables.
func (s *stockroom) build(ctx context.Context) error {
	return ledger.BeginFunc(ctx, s.pool, func(tx *ledger.Tx) error {
		for _, statement := range append([]string{"CREATE SCHEMA " + s.schema}, strings.Split(s.sql(shopTables), ";\n")...) {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return fmt.Errorf("tables of the sample shop: %w", err)
			}
		}
		return nil
	})
}

func (s *stockroom) place(ctx context.Context, o newOrder) error {
	s.books.place(o.id, o.notBefore)
	number := o.number
	product, qty := number%products, 1+number%3
	err := persist(ctx, func() error {
		return ledger.BeginFunc(ctx, s.pool, func(tx *ledger.Tx) error {
			n, err := s.exec(ctx, tx, `INSERT INTO shop.orders (id, product, qty) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`, o.id, product, qty)
			if n == 0 {
				return err // without one: an earlier try had gone through, and only its answer was lost
			}
			switch n, err := s.exec(ctx, tx, `UPDATE shop.product SET stock = stock - $2 WHERE id = $1 AND stock >= $2`, product, qty); {
			case err != nil:
				return err
			case n == 0:
				return errSoldOut
			}
			if _, err := s.exec(ctx, tx, `INSERT INTO shop.movement (order_id, product, qty) VALUES ($1, $2, $3)`, o.id, product, qty); err != nil {
				return err
			}
			_, err = s.q.EnqueueTx(ctx, tx, o.task, delayq.In(o.delay))
			return err
		})
	})
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.doubts[o.id] = true
	}
	return err
}

var errSoldOut = errors.New("sold out")

func (s *stockroom) exec(ctx context.Context, tx *ledger.Tx, text string, args ...any) (int64, error) {
	tag, err := tx.Exec(ctx, s.sql(text), args...)
	return tag.RowsAffected(), err
}

func (s *stockroom) pay(ctx context.Context, id string) error {
	var answer delayq.Cancellation
	var won bool
	err := persist(ctx, func() error {
		return ledger.BeginFunc(ctx, s.pool, func(tx *ledger.Tx) error {
			n, err := s.exec(ctx, tx, `UPDATE shop.orders SET status = 'paid', settled_at = clock_timestamp() WHERE id = $1 AND status = 'open'`, id)
			if err != nil {
				return err
			}
			if n == 0 { // expired, or paid by an earlier try whose answer was lost
				status, err := s.status(ctx, tx, id)
				won = status == paid
				return err
			}
			won = true
			answer, err = s.q.CancelTx(ctx, tx, id)
			return err
		})
	})
	if err != nil {
		return err // settleDoubts finds out what became of it
	}
	if won {
		s.books.settled(id, paid, time.Now())
		s.books.cancelled(id, answer)
	}
	return nil
}

func (s *stockroom) status(ctx context.Context, tx *ledger.Tx, id string) (status string, err error) {
	err = tx.QueryRow(ctx, s.sql(`SELECT status FROM shop.orders WHERE id = $1`), id).Scan(&status)
	return status, err
}

// expire locks the order before the task, as pay does.
func (s *stockroom) expire(ctx context.Context, t *delayq.Task, began time.Time) (bool, error) {
	var won bool
	var status string
	var final error // an answer that another try would not change
	err := persist(ctx, func() error {
		won, final = false, nil
		err := ledger.BeginFunc(ctx, s.pool, func(tx *ledger.Tx) (err error) {
			if won, err = s.release(ctx, tx, t.ID); err != nil {
				return err
			}
			if status, err = s.status(ctx, tx, t.ID); err != nil {
				return err
			}
			return s.q.CompleteTx(ctx, tx, t)
		})
		if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, delayq.ErrLeaseLost) {
			final, err = err, nil
		}
		return err
	})
	switch {
	case err != nil:
		return true, err
	case errors.Is(final, pgx.ErrNoRows):
		return s.phantom(t.ID), nil
	case errors.Is(final, delayq.ErrFinished): // by an earlier try whose answer was lost; settleDoubts finds out what it did
		s.books.delivered(t.ID, t.Due, began, false)
		return true, nil
	case final != nil: // another run has it: nothing was done
		s.books.delivered(t.ID, t.Due, began, true)
		return true, final
	}
	s.books.delivered(t.ID, t.Due, began, !won)
	// A task that completes twice is the effect a second time, which a shop that asks its orders less closely would have had.
	if won || status == expired {
		s.books.settled(t.ID, expired, began)
	}
	return true, nil
}

// phantom notes a task of an order that this shop has rolled back, which must not be.
func (s *stockroom) phantom(id string) bool {
	if !s.books.has(id) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phantoms = append(s.phantoms, fmt.Sprintf("order %s is not in the table, and yet its task ran", id))
	return true
}

// release expires an order that is still unpaid, and puts its stock back.
func (s *stockroom) release(ctx context.Context, tx *ledger.Tx, id string) (bool, error) {
	var product, qty int
	err := tx.QueryRow(ctx, s.sql(`UPDATE shop.orders SET status = 'expired', settled_at = clock_timestamp() WHERE id = $1 AND status = 'open'
		RETURNING product, qty`), id).Scan(&product, &qty)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if _, err := s.exec(ctx, tx, `UPDATE shop.product SET stock = stock + $2 WHERE id = $1`, product, qty); err != nil {
		return false, err
	}
	_, err = s.exec(ctx, tx, `INSERT INTO shop.movement (order_id, product, qty) VALUES ($1, $2, $3)`, id, product, -qty)
	return err == nil, err
}

// settleDoubts asks the table about the orders that the books have as unpaid.
func (s *stockroom) settleDoubts(ctx context.Context) {
	open := s.books.open()
	if len(open) == 0 {
		return
	}
	found, err := s.statuses(ctx, s.pool, open)
	if err != nil {
		s.log.Warn("cannot look orders up", "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range open {
		switch status, there := found[id]; {
		case status == paid || status == expired:
			s.books.learn(id, status)
		case !there && s.doubts[id]:
			s.books.void(id)
		}
	}
}

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// statuses are those of the orders that are there, of all orders if none is named.
func (s *stockroom) statuses(ctx context.Context, db querier, ids []string) (map[string]string, error) {
	rows, err := db.Query(ctx, s.sql(`SELECT id, status FROM shop.orders WHERE $1::text[] IS NULL OR id = ANY($1)`), ids)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	var id, status string
	_, err = pgx.ForEachRow(rows, []any{&id, &status}, func() error {
		found[id] = status
		return nil
	})
	return found, err
}
