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
	q     *delayq.Queue
	books *books
	run   string // makes the ids of this run its own
	guest bool   // the Redis is somebody else's
	// now is the clock of Redis, which the due times are judged by. It is asked on a connection that is not counted.
	now func(context.Context) (time.Time, error)
	log *slog.Logger

	lastDue atomic.Int64 // Unix ms of the latest due time, by the local clock
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
	at, err := s.now(ctx)
	if err != nil {
		at = time.Now()
	}
	if !s.books.pay(id, at) {
		return
	}
	var answer delayq.Cancellation
	err = s.persist(ctx, func() (err error) {
		answer, err = s.q.Cancel(ctx, id)
		return err
	})
	if err != nil {
		s.log.Warn("order paid but its task not cancelled", "id", id, "error", err) // its task will find the order paid
		return
	}
	s.books.cancelled(id, answer)
}

func (s *shop) place(ctx context.Context, n int, id string, delay time.Duration) bool {
	before, err := s.now(ctx)
	if err != nil {
		s.log.Warn("no order placed", "error", err)
		return false
	}
	s.books.place(id, before.Add(delay))
	task, err := delayq.NewTask(id, orderCancel, cancelOrder{Order: n})
	if err == nil {
		err = s.persist(ctx, func() error {
			_, err := s.q.Enqueue(ctx, task, delayq.In(delay))
			return err
		})
	}
	if err != nil {
		s.books.void(id)
		s.log.Warn("order not placed", "id", id, "error", err)
		return false
	}
	due := time.Now().Add(delay).UnixMilli()
	for last := s.lastDue.Load(); due > last && !s.lastDue.CompareAndSwap(last, due); last = s.lastDue.Load() {
	}
	return true
}

// persist tries a call again after a failure. Both calls the shop makes may be repeated: the id is the order's.
func (s *shop) persist(ctx context.Context, call func() error) error {
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
	for s.books.unpaid() > 0 && time.Now().Before(time.UnixMilli(s.lastDue.Load()).Add(drainLimit)) && sleep(ctx, 50*time.Millisecond) {
	}
}

// expire is the handler: it ends an order that is still unpaid.
func (s *shop) expire(ctx context.Context, _ cancelOrder) error {
	task := delayq.TaskFrom(ctx)
	began, err := s.now(ctx)
	if err != nil {
		return err
	}
	_, known := s.books.expire(task.ID, task.Due, began, task.Lost > 0)
	switch {
	case known:
	case s.guest: // it may be meant for another worker
		s.log.Warn("no order of this shop; its task is put off", "id", task.ID)
		return delayq.Snooze(time.Minute)
	default:
		s.log.Warn("no order of this shop; its task is done", "id", task.ID)
	}
	return nil
}

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
