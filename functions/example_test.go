package functions_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/functions"
)

type cancelOrder struct {
	Order int `json:"order"`
}

// In a function, the handler goes to functions.Start and the options to the environment. Here it is
// called as Lambda would call it.
func ExampleWorker() {
	mux := delayq.NewMux()
	delayq.Handle(mux, "order.cancel", func(_ context.Context, c cancelOrder) error {
		fmt.Println("cancel order", c.Order)
		return nil
	})

	server, err := miniredis.Run()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	defer rdb.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	orders, err := delayq.Open(ctx, rdb, "orders", delayq.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	task, err := delayq.NewTask("cancel-order:42", "order.cancel", cancelOrder{Order: 42})
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := orders.Enqueue(ctx, task, delayq.In(20*time.Millisecond)); err != nil {
		fmt.Println(err)
		return
	}

	handler := functions.Worker(mux,
		functions.WithRedis(rdb),
		functions.WithConfig(functions.Config{Queues: []string{"orders"}, IdleExit: time.Second}),
		functions.WithLogger(slog.New(slog.DiscardHandler)),
	)
	summary, err := handler(ctx, nil)
	fmt.Println(summary.Succeeded, summary.Stop, err)
	// Output:
	// cancel order 42
	// 1 idle <nil>
}

// Handlers that end their tasks inside their own transactions need the queue and a pool: they are made
// once a process, and the function shares them. The reconciler beside it is
// functions.Start(functions.Reconciler()), with nothing of its own.
func ExampleWithLedger() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("SHOP_DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	led, err := ledger.Open(ctx, pool)
	if err != nil {
		log.Fatal(err) // the platform starts another process
	}
	rdb := redis.NewClient(&redis.Options{Addr: os.Getenv("SHOP_REDIS"), ContextTimeoutEnabled: true})
	orders, err := delayq.Open(ctx, rdb, "orders", delayq.Config{Ledger: led})
	if err != nil {
		log.Fatal(err)
	}
	mux := delayq.NewMux()
	delayq.Handle(mux, "order.cancel", func(ctx context.Context, c cancelOrder) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			const cancel = "update orders set status = 'cancelled' where id = $1 and status = 'unpaid'"
			if _, err := tx.Exec(ctx, cancel, c.Order); err != nil {
				return err
			}
			return orders.CompleteTx(ctx, tx, delayq.TaskFrom(ctx))
		})
	})
	functions.Start(functions.Worker(mux, functions.WithRedis(rdb), functions.WithLedger(led)))
}
