package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// delayqWorkers bounds what one worker has leased. A no-op handler never fills it; what helps is that each lease
// call takes many tasks.
const delayqWorkers = 512

// measureDrain is how fast one process gets through a backlog that is already due, with a handler that does nothing.
// delayq's time ends when Run returns, so it includes the last ack; the peers' ends with the last handler.
func measureDrain(ctx context.Context, b *bench) ([]Row, error) {
	const metric = "drain of a due backlog, tasks/s"
	bullmq, noBullMQ := b.installBullMQ(ctx)
	var againstAsynq, againstBullMQ, bulk turns
	a := b.asynq(20)
	defer a.close()
	tasks := ids(b.drainTasks)

	err := takeTurns(ctx, b.budget, func() error {
		enqueue, drain, err := b.delayqDrain(ctx, tasks)
		if err != nil {
			return err
		}
		theirs, err := b.asynqDrain(ctx, a, tasks)
		if err != nil {
			return err
		}
		var node bullmqRates
		if noBullMQ == nil {
			if err := b.wipe(ctx); err != nil {
				return err
			}
			if node, err = bullmq.run(ctx, b.server.Addr(), len(tasks), b.payload); err != nil {
				return err
			}
		}
		againstAsynq.add(drain, theirs)
		againstBullMQ.add(drain, node.Drain)
		bulk.add(enqueue, node.Enqueue)
		b.progress("  delayq %.0f, asynq %.0f, BullMQ %.0f tasks/s", drain, theirs, node.Drain)
		return nil
	})
	rows := []Row{compare("drain/asynq", metric, againstAsynq, atLeast(6))}
	if noBullMQ != nil {
		return append(rows, leftOut("drain/bullmq", metric, noBullMQ.Error())), err
	}
	return append(rows,
		compare("drain/bullmq", metric, againstBullMQ, atLeast(4)),
		compare("drain/bulk", "enqueue 500 a call, against BullMQ, tasks/s", bulk, bar{}),
	), err
}

func (b *bench) delayqDrain(ctx context.Context, tasks []string) (enqueue, drain float64, err error) {
	if err := b.wipe(ctx); err != nil {
		return 0, 0, err
	}
	q, err := b.open(ctx, b.rdb)
	if err != nil {
		return 0, 0, err
	}
	enqueue, err = rate(len(tasks), func() error {
		for chunk := range slices.Chunk(tasks, 500) {
			if err := b.enqueueMany(ctx, q, chunk, delayq.Task{}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), q)
	w.Concurrency = delayqWorkers
	w.IdleExit = time.Millisecond
	drain, err = rate(len(tasks), func() error {
		stats, err := w.Run(ctx)
		if err == nil && stats.Succeeded != int64(len(tasks)) {
			err = fmt.Errorf("delayq: %d of %d tasks ran: %+v", stats.Succeeded, len(tasks), stats)
		}
		return err
	})
	return enqueue, drain, err
}

func (b *bench) asynqDrain(ctx context.Context, a asynqPeer, tasks []string) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	if err := spread(len(tasks), 20, func(i int) error { return a.enqueue(ctx, tasks[i]) }); err != nil {
		return 0, err
	}
	took, err := a.drain(ctx, len(tasks))
	return float64(len(tasks)) / took.Seconds(), err
}
