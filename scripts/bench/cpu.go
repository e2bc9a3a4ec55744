package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// measureCPU is what a task costs Redis over its whole life: enqueue, lease, ack, in batches of 100. asynq has no
// batches; it enqueues from 20 goroutines and runs 50 workers, on a fifth of the backlog, as it takes its time.
func measureCPU(ctx context.Context, b *bench) ([]Row, error) {
	const metric = "Redis CPU a task, whole life, us"
	var againstFloor, againstPipelined, againstAsynq turns
	a := b.asynq(20)
	defer a.close()
	tasks := ids(b.cpuTasks)

	err := takeTurns(ctx, b.budget, func() error {
		ours, err := b.delayqLife(ctx, tasks)
		if err != nil {
			return err
		}
		plain, err := b.floorLife(ctx, tasks, false)
		if err != nil {
			return err
		}
		pipelined, err := b.floorLife(ctx, tasks, true)
		if err != nil {
			return err
		}
		theirs, err := b.asynqLife(ctx, a, tasks[:len(tasks)/5])
		if err != nil {
			return err
		}
		againstFloor.add(ours, plain)
		againstPipelined.add(ours, pipelined)
		againstAsynq.add(ours, theirs)
		b.progress("  delayq %.1f, floor %.1f (pipelined %.1f), asynq %.1f us", ours, plain, pipelined, theirs)
		return nil
	})
	return []Row{
		compare("cpu/floor", metric, againstFloor, atMost(1.6)),
		compare("cpu/floor-pipelined", metric, againstPipelined, bar{}),
		compare("cpu/asynq", metric, againstAsynq, atMost(0.2)),
	}, err
}

func (b *bench) delayqLife(ctx context.Context, tasks []string) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	q, err := b.open(ctx, b.rdb)
	if err != nil {
		return 0, err
	}
	return b.cpu(ctx, len(tasks), func() error {
		for chunk := range slices.Chunk(tasks, batch) {
			if err := b.enqueueMany(ctx, q, chunk, delayq.Task{}); err != nil {
				return err
			}
		}
		return leaseAndAck(ctx, q, len(tasks))
	})
}

func (b *bench) floorLife(ctx context.Context, tasks []string, pipelined bool) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	f := floor{b.rdb, pipelined}
	return b.cpu(ctx, len(tasks), func() error {
		for chunk := range slices.Chunk(tasks, batch) {
			if err := f.enqueue(ctx, chunk, b.payload); err != nil {
				return err
			}
		}
		for left := len(tasks); left > 0; {
			leased, err := f.lease(ctx, batch)
			if err != nil {
				return err
			}
			if len(leased) == 0 {
				return fmt.Errorf("floor: %d tasks are not due", left)
			}
			if err := f.ack(ctx, leased); err != nil {
				return err
			}
			left -= len(leased)
		}
		return nil
	})
}

func (b *bench) asynqLife(ctx context.Context, a asynqPeer, tasks []string) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	return b.cpu(ctx, len(tasks), func() error {
		err := spread(len(tasks), 20, func(i int) error { return a.enqueue(ctx, tasks[i]) })
		if err != nil {
			return err
		}
		_, err = a.drain(ctx, len(tasks))
		return err
	})
}

// enqueueMany enqueues tasks like the given one in one call.
func (b *bench) enqueueMany(ctx context.Context, q *delayq.Queue, ids []string, like delayq.Task) error {
	tasks := make([]delayq.Task, len(ids))
	like.Type, like.Payload = "bench", b.payload
	for i, id := range ids {
		tasks[i] = like
		tasks[i].ID = id
	}
	_, err := q.EnqueueMany(ctx, tasks)
	return err
}

// leaseAndAck takes n tasks through the loop that a user without handlers writes.
func leaseAndAck(ctx context.Context, q *delayq.Queue, n int) error {
	for n > 0 {
		leases, err := q.Lease(ctx, delayq.LeaseOptions{Max: min(batch, n), Lease: 30 * time.Second, Consumer: "bench"})
		if err != nil {
			return err
		}
		if len(leases) == 0 {
			return fmt.Errorf("delayq: %d tasks are not due", n)
		}
		if err := q.Ack(ctx, leases...); err != nil {
			return err
		}
		n -= len(leases)
	}
	return nil
}
