package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// measureLedgerEnqueue is one business row and one task in one transaction, from one caller and from many. Much of it is the
// transaction, which both sides pay, so a second row shows what a queue adds to one that only writes the business row, and
// how far the first row's ratio could go. delayq has told Redis when it returns.
func measureLedgerEnqueue(ctx context.Context, b *bench) ([]Row, error) {
	const metric = "business row and task in one transaction, against River"
	db, err := b.database(ctx, "enqueue", connections)
	if err != nil {
		return noPostgres(err, "ledger/enqueue", metric)
	}
	defer db.close()
	_, err = db.pool.Exec(ctx, `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		customer text NOT NULL, cents bigint NOT NULL, at timestamptz NOT NULL DEFAULT now())`)
	if err != nil {
		return nil, err
	}
	r, err := b.river(ctx, db.pool)
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, callers := range []int{1, 20} {
		whole, added, bare, err := b.transactions(ctx, db, r, callers)
		if err != nil {
			return rows, err
		}
		name := fmt.Sprintf("ledger/enqueue/%d", callers)
		share := compare(name+"/added", "what the queue adds to the bare transaction, us", added, bar{})
		share.Note = fmt.Sprintf("bare %.0f us: a queue that costs nothing would reach %.1f", bare, 1e6/median(whole.peer)/bare)
		rows = append(rows,
			compare(name, fmt.Sprintf("%s, %d at once, transactions/s", metric, callers), whole, atLeast(2)), share)
	}
	return rows, nil
}

// transactions takes turns of the three kinds of transaction. added and bare are microseconds a transaction.
func (b *bench) transactions(ctx context.Context, db *database, r riverPeer, callers int) (whole, added turns, bare float64, err error) {
	q, err := b.openLedger(ctx, db)
	if err != nil {
		return whole, added, 0, err
	}
	insert, err := r.inserter()
	if err != nil {
		return whole, added, 0, err
	}
	order := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO orders (customer, cents) VALUES ($1, $2)", "customer-4711", 4_999)
		return err
	}
	kinds := [3]func(id string) error{
		func(string) error {
			return pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error { return order(ctx, tx) })
		},
		func(id string) error {
			return ledger.BeginFunc(ctx, db.pool, func(tx *ledger.Tx) error {
				if err := order(ctx, tx); err != nil {
					return err
				}
				_, err := q.EnqueueTx(ctx, tx, delayq.Task{ID: id, Type: "bench", Payload: b.payload})
				return err
			})
		},
		func(string) error {
			return pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
				if err := order(ctx, tx); err != nil {
					return err
				}
				return insert(ctx, tx)
			})
		},
	}
	var plain []float64
	const parts = 10
	n := b.transactionTasks * min(callers, 4)
	turn := 0
	err = takeTurns(ctx, b.ledgerBudget/3, func() error {
		turn++
		if err := calm(ctx, db.pool); err != nil {
			return err
		}
		runtime.GC()
		var us [3]float64         // a transaction
		for part := range parts { // small parts, so that all kinds see the same neighbours
			for kind := range kinds {
				perSecond, err := rate(n/parts, func() error {
					return spread(n/parts, callers, func(i int) error {
						return kinds[kind](fmt.Sprintf("cancel-order-%d-%02d-%08d", turn, part, i))
					})
				})
				if err != nil {
					return err
				}
				us[kind] += 1e6 / perSecond / parts
			}
		}
		whole.add(1e6/us[1], 1e6/us[2])
		added.add(us[1]-us[0], us[2]-us[0])
		plain = append(plain, us[0])
		b.progress("  %d callers: bare %.0f, delayq %.0f, River %.0f us", callers, us[0], us[1], us[2])
		return nil
	})
	return whole, added, median(plain), err
}
