package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const orderCancel = "order.cancel"

// cancelOrder is the payload of "cancel this order if it is still unpaid".
type cancelOrder struct {
	Order int `json:"order"`
}

// shop is the sample application of dev. Each order enqueues its own expiry; a customer who pays cancels that task.
type shop struct {
	till  till
	books *books
	run   string // makes the ids of this run its own
	guest bool   // the Redis or the database is somebody else's
	// now is the clock that the due times are judged by. It is asked on a connection that is not counted.
	now func(context.Context) (time.Time, error)
	log *slog.Logger

	patience time.Duration // how long past the last due time drain waits
	lastDue  atomic.Int64  // Unix ms of the latest due time, by the local clock
}

// till is where the shop keeps its orders. Each call is safe to repeat, and enters in the books what it has done.
type till interface {
	// place opens an order and enqueues its expiry. Unless it did both it voids the order.
	place(ctx context.Context, o newOrder) error
	// pay settles an order if it is still unpaid and cancels its expiry.
	pay(ctx context.Context, id string) error
	// expire ends an order that is still unpaid. known is false for a task that is none of the shop's.
	expire(ctx context.Context, t *delayq.Task, began time.Time) (known bool, err error)
	// settleDoubts learns what became of orders when a call's answer was lost.
	settleDoubts(ctx context.Context)
}

// newOrder is an order on its way in. Its id is the one of the task that cancels it.
type newOrder struct {
	id        string
	number    int
	task      delayq.Task
	delay     time.Duration
	notBefore time.Time
}

// sell places rate orders a second until placing ends, and returns when every customer has decided. life ends it all.
func (s *shop) sell(life, placing context.Context, rate float64) {
	var customers sync.WaitGroup
	defer customers.Wait()
	start := time.Now()
	for n := 1; ; n++ {
		next := start.Add(time.Duration(float64(n-1) / rate * float64(time.Second)))
		if !sleep(placing, time.Until(next)) {
			return
		}
		customers.Go(func() { s.serve(life, n) })
	}
}

// serve is one order from the basket to its end, as far as the customer is concerned.
func (s *shop) serve(ctx context.Context, n int) {
	id := fmt.Sprintf("cancel-order:%s-%d", s.run, n)
	delay := 2*time.Second + rand.N(3*time.Second)
	if !s.place(ctx, n, id, delay) {
		return
	}
	var patience time.Duration
	switch dice := rand.Float64(); {
	case dice < 0.75:
		patience = rand.N(delay * 9 / 10)
	case dice < 0.80: // pays at the last moment, which is the race worth watching
		patience = delay + rand.N(40*time.Millisecond) - 20*time.Millisecond
	default:
		return // never pays
	}
	if !sleep(ctx, patience) {
		return
	}
	if err := s.till.pay(ctx, id); err != nil {
		s.log.Warn("trouble with a payment", "id", id, "error", err)
	}
}

func (s *shop) place(ctx context.Context, n int, id string, delay time.Duration) bool {
	before, err := s.now(ctx)
	if err != nil {
		s.log.Warn("no order placed", "error", err)
		return false
	}
	task, err := delayq.NewTask(id, orderCancel, cancelOrder{Order: n})
	if err == nil {
		err = s.till.place(ctx, newOrder{id: id, number: n, task: task, delay: delay, notBefore: before.Add(delay)})
	}
	if err != nil {
		s.log.Warn("order not placed", "id", id, "error", err)
		return false
	}
	due := time.Now().Add(delay).UnixMilli()
	for last := s.lastDue.Load(); due > last && !s.lastDue.CompareAndSwap(last, due); last = s.lastDue.Load() {
	}
	return true
}

// persist tries a call again after a failure: all that the shop makes may be repeated.
func persist(ctx context.Context, call func() error) error {
	var err error
	for try := range 4 {
		if err = call(); err == nil || !sleep(ctx, time.Duration(try+1)*100*time.Millisecond) {
			break
		}
	}
	return err
}

// drain waits until every order is settled, for a while: what is not settled by then is lost.
func (s *shop) drain(ctx context.Context) {
	end := time.UnixMilli(s.lastDue.Load()).Add(s.patience)
	for looks := 1; s.books.unpaid() > 0 && time.Now().Before(end) && sleep(ctx, 50*time.Millisecond); looks++ {
		if looks%20 == 0 {
			s.till.settleDoubts(ctx)
		}
	}
	s.till.settleDoubts(ctx)
}

// expire is the handler: it ends an order that is still unpaid.
func (s *shop) expire(ctx context.Context, _ cancelOrder) error {
	task := delayq.TaskFrom(ctx)
	began, err := s.now(ctx)
	if err != nil {
		return err
	}
	known, err := s.till.expire(ctx, task, began)
	switch {
	case err != nil:
		return err
	case known:
	case s.guest: // it may be meant for another worker
		s.log.Warn("no order of this shop; its task is put off", "id", task.ID)
		return delayq.Snooze(time.Minute)
	default:
		s.log.Warn("no order of this shop; its task is done", "id", task.ID)
	}
	return nil
}

// bookTill keeps the orders in the books alone, as a shop without a database would.
type bookTill struct {
	q     *delayq.Queue
	books *books
	now   func(context.Context) (time.Time, error)
}

func (t *bookTill) place(ctx context.Context, o newOrder) error {
	t.books.place(o.id, o.notBefore)
	err := persist(ctx, func() error {
		_, err := t.q.Enqueue(ctx, o.task, delayq.In(o.delay))
		return err
	})
	if err != nil {
		t.books.void(o.id)
	}
	return err
}

func (t *bookTill) pay(ctx context.Context, id string) error {
	at, err := t.now(ctx)
	if err != nil {
		at = time.Now()
	}
	if !t.books.pay(id, at) {
		return nil
	}
	var answer delayq.Cancellation
	err = persist(ctx, func() (err error) {
		answer, err = t.q.Cancel(ctx, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("paid, but the task is not cancelled: %w", err) // it will find the order paid
	}
	t.books.cancelled(id, answer)
	return nil
}

func (t *bookTill) expire(_ context.Context, task *delayq.Task, began time.Time) (bool, error) {
	_, known := t.books.expire(task.ID, task.Due, began, task.Lost > 0)
	return known, nil
}

func (t *bookTill) settleDoubts(context.Context) {}

// sleep waits for d and tells whether ctx let it.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
