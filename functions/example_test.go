package functions_test

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/functions"
)

type cancelOrder struct {
	Order int `json:"order"`
}

// In a function, the handler goes to lambda.Start and the options to the environment. Here it is
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
