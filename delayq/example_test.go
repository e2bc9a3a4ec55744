package delayq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// exampleQueue opens a queue on a Redis inside the process.
func exampleQueue() (q *delayq.Queue, done func()) {
	server, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	q, err = delayq.Open(context.Background(), rdb, "orders", delayq.Config{OnWarning: func(delayq.Warning) {}})
	if err != nil {
		panic(err)
	}
	return q, func() { rdb.Close(); server.Close() }
}

// runDue works off what is due now.
func runDue(h delayq.Handler, q *delayq.Queue) delayq.RunStats {
	w := delayq.NewWorker(h, q)
	w.IdleExit = time.Millisecond
	w.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	stats, err := w.Run(context.Background())
	if err != nil {
		panic(err)
	}
	return stats
}

func ExampleQueue_Enqueue() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	task := delayq.Task{ID: "cancel-order:42", Type: "order.cancel", Payload: []byte(`{"order":42}`)}

	res, err := q.Enqueue(ctx, task, delayq.In(30*time.Minute))
	fmt.Println(res.Outcome, err)
	res, err = q.Enqueue(ctx, task, delayq.In(30*time.Minute)) // the id is known
	fmt.Println(res.Outcome, res.Outcome.Duplicate(), err)
	res, err = q.Enqueue(ctx, task, delayq.In(time.Hour), delayq.OnConflict(delayq.Replace))
	fmt.Println(res.Outcome, err)
	_, err = q.Enqueue(ctx, task, delayq.OnConflict(delayq.Reject))
	fmt.Println(errors.Is(err, delayq.ErrConflict))
	// Output:
	// created <nil>
	// pending true <nil>
	// replaced <nil>
	// true
}

func ExampleQueue_EnqueueMany() {
	q, done := exampleQueue()
	defer done()
	results, err := q.EnqueueMany(context.Background(), []delayq.Task{
		{ID: "remind:1", Type: "remind", Delay: time.Hour},
		{ID: "remind:2", Type: ""}, // wrong
		{ID: "remind:3", Type: "remind", RunAt: time.Now().Add(time.Hour)},
	})
	for _, r := range results {
		fmt.Println(r.ID, r.Outcome, errors.Is(r.Err, delayq.ErrInvalid))
	}
	fmt.Println(err)
	// Output:
	// remind:1 created false
	// remind:2 none true
	// remind:3 created false
	// delayq: enqueue: 1 of 3 failed, the first with: delayq: enqueue orders/remind:2: Type must be 1 to 128 bytes, got none
}

func ExampleQueue_Cancel() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.Enqueue(ctx, delayq.Task{ID: "cancel-order:42", Type: "order.cancel"}, delayq.In(time.Hour))
	for range 2 {
		got, err := q.Cancel(ctx, "cancel-order:42")
		fmt.Println(got, err)
	}
	got, err := q.Cancel(ctx, "cancel-order:43")
	fmt.Println(got, err)
	// Output:
	// cancelled <nil>
	// already cancelled <nil>
	// unknown <nil>
}

func ExampleQueue_Reschedule() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.Enqueue(ctx, delayq.Task{ID: "remind:7", Type: "remind"}, delayq.In(time.Hour))
	at := time.Date(2150, 5, 1, 9, 0, 0, 0, time.UTC)
	fmt.Println(q.Reschedule(ctx, "remind:7", at))
	info, err := q.Get(ctx, "remind:7")
	fmt.Println(info.State, info.At.UTC(), err)
	fmt.Println(errors.Is(q.Reschedule(ctx, "remind:8", at), delayq.ErrNotFound))
	// Output:
	// <nil>
	// pending 2150-05-01 09:00:00 +0000 UTC <nil>
	// true
}

func ExampleHandle() {
	q, done := exampleQueue()
	defer done()
	type cancelOrder struct{ Order int }
	task, _ := delayq.NewTask("cancel-order:42", "order.cancel", cancelOrder{42})
	_, _ = q.Enqueue(context.Background(), task)

	mux := delayq.NewMux()
	delayq.Handle(mux, "order.cancel", func(ctx context.Context, c cancelOrder) error {
		fmt.Println("cancel", c.Order, "attempt", delayq.TaskFrom(ctx).Attempt)
		return nil
	})
	fmt.Println(runDue(mux, q).Succeeded)
	// Output:
	// cancel 42 attempt 1
	// 1
}

func ExampleMux_Use() {
	q, done := exampleQueue()
	defer done()
	_, _ = q.Enqueue(context.Background(), delayq.Task{ID: "1", Type: "greet"})
	mux := delayq.NewMux()
	mux.Use(func(next delayq.Handler) delayq.Handler {
		return delayq.HandlerFunc(func(ctx context.Context, t *delayq.Task) error {
			fmt.Println("before", t.Type)
			err := next.HandleTask(ctx, t)
			fmt.Println("after", t.Type, err)
			return err
		})
	})
	mux.HandleFunc("greet", func(context.Context, *delayq.Task) error {
		fmt.Println("hello")
		return nil
	})
	runDue(mux, q)
	// Output:
	// before greet
	// hello
	// after greet <nil>
}

func ExamplePermanent() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.Enqueue(ctx, delayq.Task{ID: "mail:1", Type: "mail"})
	mux := delayq.NewMux()
	mux.HandleFunc("mail", func(context.Context, *delayq.Task) error {
		return delayq.Permanent(errors.New("no such address"))
	})
	runDue(mux, q)
	page, err := q.List(ctx, delayq.ListOptions{State: delayq.StateDead})
	for _, t := range page.Tasks {
		fmt.Println(t.ID, t.Reason, t.LastError, err)
	}
	fmt.Println(q.Replay(ctx, "mail:1"))
	info, _ := q.Get(ctx, "mail:1")
	fmt.Println(info.State, info.Failed)
	// Output:
	// mail:1 permanent no such address <nil>
	// <nil>
	// due 0
}

func ExampleSnooze() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.Enqueue(ctx, delayq.Task{ID: "import:1", Type: "import"})
	mux := delayq.NewMux()
	mux.HandleFunc("import", func(context.Context, *delayq.Task) error { return delayq.Snooze(time.Hour) })
	stats := runDue(mux, q)
	info, _ := q.Get(ctx, "import:1")
	fmt.Println(stats.Released, info.State, info.Failed)
	// Output: 1 pending 0
}

func ExampleRemaining() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.Enqueue(ctx, delayq.Task{ID: "notify", Type: "notify", Payload: []byte(`["ann","bob","eve"]`)})
	mux := delayq.NewMux()
	mux.HandleFunc("notify", func(_ context.Context, t *delayq.Task) error {
		var who []string
		if err := json.Unmarshal(t.Payload, &who); err != nil {
			return delayq.Permanent(err)
		}
		rest, _ := json.Marshal(who[1:]) // ann got hers, the others did not
		return delayq.Remaining(rest, errors.New("bob: mailbox full"))
	})
	runDue(mux, q)
	info, _ := q.Get(ctx, "notify")
	fmt.Println(string(info.Payload), info.Reason, info.Failed)
	// Output: ["bob","eve"] partial 1
}

func ExampleProgress() {
	mux := delayq.NewMux()
	mux.HandleFunc("export", func(ctx context.Context, _ *delayq.Task) error {
		for range 1000 {
			// ... a part of the work ...
			if err := delayq.Progress(ctx); err != nil { // alive; and should it go on?
				return err
			}
		}
		return nil
	}, delayq.TypeConfig{Timeout: time.Hour, Stall: time.Minute}) // an hour in all, never silent for a minute
}

func ExampleQueue_Lease() {
	q, done := exampleQueue()
	defer done()
	ctx := context.Background()
	_, _ = q.EnqueueMany(ctx, []delayq.Task{{ID: "a", Type: "t"}, {ID: "b", Type: "t"}, {ID: "c", Type: "t"}})

	leases, err := q.Lease(ctx, delayq.LeaseOptions{Max: 10, Lease: time.Minute, Consumer: "my-loop"})
	fmt.Println(len(leases), err)
	fmt.Println(q.Extend(ctx, 2*time.Minute, leases...))
	fmt.Println(q.Ack(ctx, leases[0]))
	fmt.Println(q.Retry(ctx, leases[1], time.Minute, errors.New("no answer")))
	fmt.Println(q.Release(ctx, 0, leases[2]))
	err = q.Ack(ctx, leases[2])
	fmt.Println(errors.Is(err, delayq.ErrLeaseLost), err)
	// Output:
	// 3 <nil>
	// <nil>
	// <nil>
	// <nil>
	// <nil>
	// true delayq: ack orders/c: lease lost
}

// A worker for one invocation of a function: it leaves before the deadline, and the next one takes the baton.
func ExampleWorker() {
	q, done := exampleQueue()
	defer done()
	mux := delayq.NewMux()
	w := delayq.NewWorker(mux, q)
	w.Concurrency = 100
	w.Margin = 100 * time.Millisecond
	w.Group = "every-minute"

	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond) // the invocation's
	defer cancel()
	stats, err := w.Run(ctx)
	fmt.Println(stats.Stop, err)
	// Output: deadline <nil>
}
