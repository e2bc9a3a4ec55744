package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/delayq/toolkit/delayq"
)

// handlers are the task types this function knows. Replace them with your own; everything else
// can stay as it is.
func handlers() *delayq.Mux {
	mux := delayq.NewMux()
	delayq.Handle(mux, "order.cancel", cancelOrder)
	mux.HandleFunc("example.echo", echo)
	return mux
}

// order is the payload of order.cancel.
type order struct {
	Order int64 `json:"order"`
}

// cancelOrder is where a shop would cancel the order if it is still unpaid. Do it in one statement
// ("... where id = $1 and status = 'unpaid'"), so that a second run changes nothing.
func cancelOrder(ctx context.Context, o order) error {
	if o.Order == 0 {
		return delayq.Permanent(errors.New("no order in the payload"))
	}
	slog.InfoContext(ctx, "order cancelled", "order", o.Order)
	return nil
}

// echo logs that a task came, and how large it was: payloads may be private.
func echo(ctx context.Context, t *delayq.Task) error {
	slog.InfoContext(ctx, "echo", "task_id", t.ID, "bytes", len(t.Payload), "attempt", t.Attempt)
	return nil
}
