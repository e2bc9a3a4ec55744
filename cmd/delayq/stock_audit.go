package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// What the shop's tables must say, whatever order things happened in. Each statement finds what breaks a rule.
const (
	// Of each product as much is gone as the orders hold that are not expired, and the journal says the same.
	unevenProducts = `
SELECT format('product %s: %s gone from the stock, %s taken by the journal, %s held by orders',
	p.id, p.initial - p.stock, coalesce(m.qty, 0), coalesce(o.qty, 0))
FROM shop.product p
LEFT JOIN (SELECT product, sum(qty) AS qty FROM shop.movement GROUP BY product) m ON m.product = p.id
LEFT JOIN (SELECT product, sum(qty) AS qty FROM shop.orders WHERE status <> 'expired' GROUP BY product) o ON o.product = p.id
WHERE p.initial - p.stock <> coalesce(o.qty, 0) OR coalesce(m.qty, 0) <> coalesce(o.qty, 0)`

	// Each order took its stock once and an expired one put it back once.
	unevenOrders = `
SELECT format('order %s is %s: took %s and put back %s of product %s',
	coalesce(o.id, m.order_id), coalesce(o.status, 'not there'), m.taken, m.back, m.product)
FROM shop.orders o
FULL JOIN (
	SELECT order_id, product, sum(qty) FILTER (WHERE qty > 0) AS taken, -sum(qty) FILTER (WHERE qty < 0) AS back, count(*) AS n
	FROM shop.movement GROUP BY order_id, product
) m ON m.order_id = o.id AND m.product = o.product
WHERE (m.taken, coalesce(m.back, 0), m.n) IS DISTINCT FROM
	(o.qty::bigint, CASE o.status WHEN 'expired' THEN o.qty ELSE 0 END::bigint, CASE o.status WHEN 'expired' THEN 2 ELSE 1 END::bigint)`
)

// audit compares the stock, the journal and the orders with each other, and the orders with the books. It returns a line for each
// product and order that is wrong.
func (s *stockroom) audit(ctx context.Context) (wrong []string, err error) {
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = persist(ctx, func() error {
		wrong = nil
		return pgx.BeginTxFunc(ctx, s.pool, snapshot, func(tx pgx.Tx) error {
			for _, text := range []string{unevenProducts, unevenOrders} {
				rows, err := tx.Query(ctx, s.sql(text))
				if err != nil {
					return err
				}
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				if err != nil {
					return err
				}
				wrong = append(wrong, lines...)
			}
			there, err := s.statuses(ctx, tx, nil)
			if err != nil {
				return err
			}
			wrong = append(wrong, s.against(there)...)
			return nil
		})
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(wrong, s.phantoms...), err
}

// against compares the orders of the table with what the customers and the handlers were told.
func (s *stockroom) against(there map[string]string) (wrong []string) {
	for id, want := range s.books.statuses() {
		if got := there[id]; got != want {
			wrong = append(wrong, fmt.Sprintf("order %s is %q in the table, and the shop was told %q", id, got, want))
		}
	}
	return wrong
}
