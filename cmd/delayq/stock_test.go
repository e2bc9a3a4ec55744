//go:build unix

package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// newStockroom is a shop with a database of its own and a worker for its tasks.
func newStockroom(t *testing.T) (*stockroom, *shop) {
	t.Helper()
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, servers.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := migrations.Up(ctx, pool); err != nil {
		t.Fatal(err)
	}
	led, err := ledger.Open(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	q, err := delayq.Open(ctx, rdb, "orders", delayq.Config{Ledger: led, OnWarning: func(delayq.Warning) {}})
	if err != nil {
		t.Fatal(err)
	}
	s := &stockroom{pool: pool, schema: "shop_test", q: q, books: newBooks(), log: slog.New(slog.DiscardHandler), doubts: map[string]bool{}}
	if err := s.build(ctx); err != nil {
		t.Fatal(err)
	}
	return s, &shop{till: s, books: s.books, run: "test", now: (&bookkeeping{forView: pool}).now, log: s.log}
}

func (s *shop) orderID(n int) string { return fmt.Sprintf("cancel-order:%s-%d", s.run, n) }

// placeAll places orders that expire at once.
func placeAll(t *testing.T, s *shop, numbers ...int) {
	t.Helper()
	for _, n := range numbers {
		if !s.place(t.Context(), n, s.orderID(n), 0) {
			t.Fatalf("order %d was not placed", n)
		}
	}
}

// runDue works off what is due.
func runDue(t *testing.T, q *delayq.Queue, s *shop) delayq.RunStats {
	t.Helper()
	mux := delayq.NewMux()
	delayq.Handle(mux, orderCancel, s.expire)
	worker := delayq.NewWorker(mux, q)
	worker.IdleExit, worker.Logger = 50*time.Millisecond, s.log
	stats, err := worker.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return stats
}

func audit(t *testing.T, s *stockroom) []string {
	t.Helper()
	wrong, err := s.audit(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return wrong
}

func TestStockIsTakenAndReleasedOnce(t *testing.T) {
	t.Parallel()
	s, shop := newStockroom(t)
	ctx := t.Context()
	placeAll(t, shop, 1, 2, 3, 4)
	placeAll(t, shop, 4) // again, as after a commit whose answer was lost
	for _, n := range []int{1, 2} {
		if err := s.pay(ctx, shop.orderID(n)); err != nil {
			t.Fatal(err)
		}
	}
	if stats := runDue(t, s.q, shop); stats.Succeeded != 2 {
		t.Errorf("%d tasks ran, want those of the 2 unpaid orders", stats.Succeeded)
	}
	if err := s.pay(ctx, shop.orderID(3)); err != nil { // too late
		t.Fatal(err)
	}
	if got := s.books.account(); got.Placed != 4 || got.Paid != 2 || got.Expired != 2 || got.Cancelled != 2 || got.DuplicateEffects != 0 {
		t.Errorf("the books say %+v", got)
	}
	var stock, moved int64
	err := s.pool.QueryRow(ctx, s.sql(`SELECT (SELECT sum(initial - stock) FROM shop.product)::bigint, (SELECT sum(qty) FROM shop.movement)::bigint`)).Scan(&stock, &moved)
	if want := int64(1 + 1%3 + 1 + 2%3); err != nil || stock != want || moved != want {
		t.Errorf("%d gone from the stock, %d by the journal, want the %d of the paid orders (%v)", stock, moved, want, err)
	}
	if wrong := audit(t, s); len(wrong) > 0 {
		t.Errorf("the audit finds %q", wrong)
	}
}

func TestSoldOutOrdersAreNotPlaced(t *testing.T) {
	t.Parallel()
	s, shop := newStockroom(t)
	if _, err := s.pool.Exec(t.Context(), s.sql(`UPDATE shop.product SET initial = 1, stock = 1`)); err != nil {
		t.Fatal(err)
	}
	if shop.place(t.Context(), 2, shop.orderID(2), 0) { // wants 3
		t.Error("an order beyond the stock was placed")
	}
	if got := s.books.account(); got.Lost != 1 {
		t.Errorf("before anybody has looked: %+v", got)
	}
	s.settleDoubts(t.Context())
	if got := s.books.account(); got.Placed != 0 || got.Lost != 0 {
		t.Errorf("the books say %+v", got)
	}
	if stats := runDue(t, s.q, shop); stats.Leased != 0 {
		t.Errorf("%d tasks of an order that was rolled back", stats.Leased)
	}
	if wrong := audit(t, s); len(wrong) > 0 {
		t.Errorf("the audit finds %q", wrong)
	}
}

// The commit went through and nobody was told: the order itself knows.
func TestDoubtsAreSettledFromTheOrders(t *testing.T) {
	t.Parallel()
	s, shop := newStockroom(t)
	placeAll(t, shop, 1, 2, 3)
	for n, status := range map[int]string{1: paid, 2: expired} {
		if _, err := s.pool.Exec(t.Context(), s.sql(`UPDATE shop.orders SET status = $2 WHERE id = $1`), shop.orderID(n), status); err != nil {
			t.Fatal(err)
		}
	}
	s.settleDoubts(t.Context())
	s.books.settled(shop.orderID(1), paid, time.Now()) // the answer comes after all
	if got := s.books.account(); got.Paid != 1 || got.Expired != 1 || got.Lost != 1 || got.DuplicateEffects != 0 {
		t.Errorf("the books say %+v", got)
	}
}

// What the audit is for: each of these is one thing gone wrong, put right again afterwards.
func TestStockAuditFindsWhatIsBroken(t *testing.T) {
	t.Parallel()
	s, shop := newStockroom(t)
	placeAll(t, shop, 1, 2, 3)
	if err := s.pay(t.Context(), shop.orderID(1)); err != nil {
		t.Fatal(err)
	}
	runDue(t, s.q, shop)
	placeAll(t, shop, 4) // the fourth stays open
	if wrong := audit(t, s); len(wrong) > 0 {
		t.Fatalf("the audit finds %q before anything is broken", wrong)
	}
	for _, tt := range []struct {
		name, breaks, mends string
		finds               []string // in this order
	}{
		{
			"stock put back twice",
			`UPDATE shop.product SET stock = stock + 1 WHERE id = 3`, `UPDATE shop.product SET stock = stock - 1 WHERE id = 3`,
			[]string{"product 3: -1 gone from the stock, 0 taken by the journal, 0 held by orders"},
		},
		{
			"stock never put back",
			`UPDATE shop.product SET stock = stock - 1 WHERE id = 9`, `UPDATE shop.product SET stock = stock + 1 WHERE id = 9`,
			[]string{"product 9: 1 gone from the stock"},
		},
		{
			"released twice by the journal too",
			`WITH p AS (UPDATE shop.product SET stock = stock + 3 WHERE id = 2) INSERT INTO shop.movement VALUES ('cancel-order:test-2', 2, -3, 'epoch')`,
			`WITH p AS (UPDATE shop.product SET stock = stock - 3 WHERE id = 2) DELETE FROM shop.movement WHERE at = 'epoch'`,
			[]string{"product 2: -3 gone", "order cancel-order:test-2 is expired: took 3 and put back 6 of product 2"},
		},
		{
			"a movement without an order",
			`INSERT INTO shop.movement VALUES ('stranger', 7, 1, 'epoch'), ('stranger', 7, -1, 'epoch')`, `DELETE FROM shop.movement WHERE at = 'epoch'`,
			[]string{"order stranger is not there: took 1 and put back 1 of product 7"},
		},
		{
			"an order that took nothing",
			`INSERT INTO shop.orders (id, product, qty) VALUES ('greedy', 5, 2)`, `DELETE FROM shop.orders WHERE id = 'greedy'`,
			[]string{"product 5: 0 gone from the stock, 0 taken by the journal, 2 held by orders", "order greedy is open: took  and put back"},
		},
		{
			"a paid order that expired nevertheless",
			`UPDATE shop.orders SET status = 'expired' WHERE id = 'cancel-order:test-1'`, `UPDATE shop.orders SET status = 'paid' WHERE id = 'cancel-order:test-1'`,
			[]string{"product 1: 2 gone", "order cancel-order:test-1 is expired: took 2", `order cancel-order:test-1 is "expired" in the table, and the shop was told "paid"`},
		},
		{
			"an order that is gone, with all it moved",
			`WITH o AS (DELETE FROM shop.orders WHERE id = 'cancel-order:test-3'), m AS (DELETE FROM shop.movement WHERE order_id = 'cancel-order:test-3') SELECT`,
			`WITH o AS (INSERT INTO shop.orders VALUES ('cancel-order:test-3', 3, 1, 'expired')) INSERT INTO shop.movement VALUES ('cancel-order:test-3', 3, 1), ('cancel-order:test-3', 3, -1)`,
			[]string{`order cancel-order:test-3 is "" in the table, and the shop was told "expired"`},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run := func(text string) {
				t.Helper()
				if _, err := s.pool.Exec(t.Context(), s.sql(text)); err != nil {
					t.Fatal(err)
				}
			}
			run(tt.breaks)
			got := audit(t, s)
			same := slices.EqualFunc(got, tt.finds, strings.HasPrefix)
			if !same {
				t.Errorf("finds %q\nwant  %q", got, tt.finds)
			}
			run(tt.mends)
			if wrong := audit(t, s); len(wrong) > 0 {
				t.Errorf("finds %q when it is mended", wrong)
			}
		})
	}
}

// A task of an order that was rolled back must not be, and is told of when it runs.
func TestStockAuditTellsOfPhantoms(t *testing.T) {
	t.Parallel()
	s, shop := newStockroom(t)
	id := shop.orderID(1)
	s.books.place(id, time.Now())
	task, _ := delayq.NewTask(id, orderCancel, cancelOrder{1})
	if _, err := s.q.Enqueue(t.Context(), task); err != nil {
		t.Fatal(err)
	}
	s.books.void(id)
	runDue(t, s.q, shop)
	if wrong := audit(t, s); len(wrong) != 1 || !strings.Contains(wrong[0], "and yet its task ran") {
		t.Errorf("the audit finds %q", wrong)
	}
}
