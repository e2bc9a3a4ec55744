package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// TestPictures makes the pictures of docs/img in the folder that DELAYQ_CONSOLE_SHOTS names. It takes minutes, so that charts have a past.
func TestPictures(t *testing.T) {
	if os.Getenv(shotsVar) == "" {
		t.Skip(shotsVar + " names no folder")
	}
	chromium(t)
	r, led, _ := booked(t, Config{ShowPayloads: true})
	r.zone = "Europe/Berlin"
	orders := r.queue("orders", delayq.Config{Ledger: led, Shards: 2})
	mail := r.queue("mail/eu", delayq.Config{})
	bills := r.queue("billing:invoices", delayq.Config{})
	quiet := slog.New(slog.DiscardHandler)
	work := func(q *delayq.Queue, name string, h func(context.Context, *delayq.Task) error) {
		w := delayq.NewWorker(delayq.HandlerFunc(h), q)
		w.WorkerConfig = delayq.WorkerConfig{
			Consumer: name, Concurrency: 8, MaxPoll: 100 * time.Millisecond, Logger: quiet, MaxAttempts: 3,
			Retry: func(int) time.Duration { return 3 * time.Second },
		}
		ctx, stop := context.WithCancel(r.Context())
		done := make(chan struct{})
		go func() { defer close(done); _, _ = w.Run(ctx) }()
		r.Cleanup(func() { stop(); <-done })
	}
	shopOf := func(_ context.Context, t *delayq.Task) error {
		time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
		switch {
		case t.ID == "cancel-order:41023" || rand.IntN(60) == 0:
			return errors.New("payment provider: 503 Service Unavailable")
		case rand.IntN(200) == 0:
			return delayq.Permanent(errors.New("order is archived"))
		}
		return nil
	}
	work(orders, "worker-7f9c4-a", shopOf)
	work(orders, "worker-7f9c4-b", shopOf)
	work(bills, "worker-b2d81-a", func(context.Context, *delayq.Task) error { return nil })
	put := func(q *delayq.Queue, id, typ string, at time.Time) {
		_, _ = q.Enqueue(r.Context(), delayq.Task{ID: id, Type: typ, Key: id, RunAt: at, Payload: []byte(`{"order":41023,"total":"59.90","currency":"EUR"}`)})
	}
	for i := range 40 {
		put(mail, fmt.Sprintf("welcome:%d", 300+i), "mail.welcome", time.Now().Add(time.Duration(i)*3*time.Second))
		put(bills, fmt.Sprintf("invoice:%d", 7000+i), "invoice.send", time.Now().Add(time.Duration(i*20)*time.Second))
	}
	put(orders, "cancel-order:41023", "order.cancel", time.Now())
	ctx, stop := context.WithTimeout(r.Context(), 5*time.Minute)
	defer stop()
	go r.c.Run(r.Context())
	for i := 0; ctx.Err() == nil; i++ {
		typ := []string{"order.cancel", "order.cancel", "stock.release"}[i%3]
		put(orders, fmt.Sprintf("%s:%d", map[string]string{"order.cancel": "cancel-order", "stock.release": "release-stock"}[typ], 42000+i), typ, time.Now().Add(time.Duration(10+rand.IntN(50))*time.Second))
		time.Sleep(time.Duration(20+15*(i/400%3)) * time.Millisecond)
	}
	b := r.browse(true)
	b.open("/")
	b.until(`document.querySelector(".charts").dataset.points > 20`)
	b.shot("overview-light")
	b.scheme("dark")
	b.open("/queue/orders?state=pending")
	b.until(`document.querySelector(".charts").dataset.points > 20`)
	b.shot("queue-dark")
	b.scheme("light")
	b.open("/queue/orders/dead")
	b.tap("#dead-form tbody tr:nth-child(2) input")
	b.tap("#dead-form tbody tr:nth-child(4) input")
	b.shot("dead-letters")
	b.open("/queue/orders/task/cancel-order:41023")
	b.shot("task")
	b.narrow()
	b.open("/")
	b.shot("phone")
}
