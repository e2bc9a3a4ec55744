package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// measureLateness runs a worker with default settings while 1,000 tasks a second fall due, one each millisecond, and
// takes each handler's start minus its task's due time. Server and worker share a clock here, so a negative value
// would be a task that ran early. The best of several turns counts, as a neighbour's burst makes everything late; for
// tasks that ran early all of them do. The peer is a bare timer beside it: where that is late too, it was the machine.
func measureLateness(ctx context.Context, b *bench) ([]Row, error) {
	var best, timer []float64
	earliest := math.Inf(1)
	for range b.lateTurns {
		late, bare, err := b.letFallDue(ctx, b.lateTasks)
		if err != nil {
			return nil, err
		}
		earliest = min(earliest, late[0])
		if best == nil || percentile(late, 99) < percentile(best, 99) {
			best, timer = late, bare
		}
		b.progress("  p99 %.2f ms, bare timer %.2f ms", percentile(late, 99), percentile(bare, 99))
	}
	row := func(p float64, limit bar) Row {
		r := single(fmt.Sprintf("lateness/p%v", p), fmt.Sprintf("late at 1,000 tasks/s, p%v, beside a bare timer, ms", p), percentile(best, p), limit)
		r.Peer = new(percentile(timer, p))
		return r
	}
	return []Row{
		single("lateness/min", "late at 1,000 tasks/s, earliest, ms", earliest, atLeast(0)),
		row(50, bar{}), row(99, atMost(20)), row(99.9, bar{}),
	}, nil
}

// letFallDue lets n tasks fall due, one each millisecond, and returns how late their handlers started and how late a
// timer for the same instants was, in ms, sorted.
func (b *bench) letFallDue(ctx context.Context, n int) (late, bare []float64, err error) {
	if err := b.wipe(ctx); err != nil {
		return nil, nil, err
	}
	q, err := b.open(ctx, b.rdb)
	if err != nil {
		return nil, nil, err
	}
	var mu sync.Mutex
	since := func(t time.Time) float64 { return float64(time.Since(t).Microseconds()) / 1_000 }
	workCtx, stop := context.WithCancel(ctx)
	defer stop()
	w := delayq.NewWorker(delayq.HandlerFunc(func(_ context.Context, t *delayq.Task) error {
		by := since(t.Due)
		mu.Lock()
		defer mu.Unlock()
		if late = append(late, by); len(late) == n {
			stop()
		}
		return nil
	}), q)
	ran := make(chan error, 1)
	go func() { _, err := w.Run(workCtx); ran <- err }()

	const lead, group = time.Second, 50
	begin := time.Now().Truncate(time.Millisecond).Add(lead)
	dueAt := func(i int) time.Time { return begin.Add(time.Duration(i) * time.Millisecond) }
	var timer sync.WaitGroup
	timer.Go(func() {
		for i := range n {
			time.Sleep(time.Until(dueAt(i)))
			bare = append(bare, since(dueAt(i)))
		}
	})

	// Tasks go in a second before they are due, in small batches, as a service would enqueue them.
	for i := 0; i < n; i += group {
		time.Sleep(time.Until(dueAt(i).Add(-lead)))
		tasks := make([]delayq.Task, min(group, n-i))
		for j := range tasks {
			tasks[j] = delayq.Task{ID: fmt.Sprintf("late-%d", i+j), Type: "bench", Payload: b.payload, RunAt: dueAt(i + j)}
		}
		if _, err := q.EnqueueMany(ctx, tasks); err != nil {
			return nil, nil, err
		}
	}
	select {
	case err = <-ran:
	case <-time.After(lead + 10*time.Second):
		stop()
		err = <-ran
	}
	timer.Wait()
	if err == nil && len(late) < n {
		err = fmt.Errorf("%d of %d tasks ran", len(late), n)
	}
	slices.Sort(late)
	slices.Sort(bare)
	return late, bare, err
}

// measureIdle counts the calls of a worker with nothing to do, as its client sends them: a script is one call, each
// command of a pipeline is one.
func measureIdle(ctx context.Context, b *bench) ([]Row, error) {
	if err := b.wipe(ctx); err != nil {
		return nil, err
	}
	rdb := redis.NewClient(&redis.Options{Addr: b.server.Addr()})
	defer rdb.Close()
	calls := &callLog{}
	rdb.AddHook(calls)
	q, err := b.open(ctx, rdb)
	if err != nil {
		return nil, err
	}
	w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), q)
	workCtx, stop := context.WithCancel(ctx)
	defer stop()
	end := time.Now().Add(time.Second + b.idle)
	time.AfterFunc(time.Until(end), stop) // not a deadline, before which Run would stop to poll
	if _, err := w.Run(workCtx); err != nil {
		return nil, err
	}
	perSecond, err := calls.rate(end.Add(-b.idle), end) // without the last beat, once a run
	return []Row{single("idle", "Redis calls a second of an idle worker, one shard", perSecond, atMost(2))}, err
}
