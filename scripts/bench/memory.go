package main

import (
	"context"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/delayq/toolkit/delayq"
)

// measureMemory is what a task that waits for its hour takes in Redis. Memory is counted, not sampled, so one turn does.
// Ids are a good part of it: the first row has those of usual use, business ids in delayq and asynq's own UUIDs; the
// second, without a bar, has the same business ids in both.
func measureMemory(ctx context.Context, b *bench) ([]Row, error) {
	tasks := ids(b.memoryTasks)
	ours, err := b.delayqMemory(ctx, tasks)
	if err != nil {
		return nil, err
	}
	var usual, same turns
	theirs, err := b.asynqMemory(ctx, make([]string, len(tasks)))
	if err != nil {
		return nil, err
	}
	usual.add(ours, theirs)
	if theirs, err = b.asynqMemory(ctx, tasks); err != nil {
		return nil, err
	}
	same.add(ours, theirs)
	return []Row{
		compare("memory", "memory of a waiting task, against asynq, bytes", usual, atMost(0.6)),
		compare("memory/same-ids", "the same with business ids in asynq too, bytes", same, bar{}),
	}, nil
}

func (b *bench) delayqMemory(ctx context.Context, tasks []string) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	q, err := b.open(ctx, b.rdb)
	if err != nil {
		return 0, err
	}
	return b.memory(ctx, len(tasks), func() error {
		for chunk := range slices.Chunk(tasks, 500) {
			if err := b.enqueueMany(ctx, q, chunk, delayq.Task{Delay: time.Hour}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *bench) asynqMemory(ctx context.Context, tasks []string) (float64, error) {
	if err := b.wipe(ctx); err != nil {
		return 0, err
	}
	a := b.asynq(20)
	defer a.close()
	return b.memory(ctx, len(tasks), func() error {
		return spread(len(tasks), 20, func(i int) error {
			return a.enqueue(ctx, tasks[i], asynq.ProcessIn(time.Hour))
		})
	})
}

// memory is how much f makes the server grow, in bytes a task.
func (b *bench) memory(ctx context.Context, tasks int, f func() error) (float64, error) {
	before, err := b.info(ctx, "memory", "used_memory")
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := b.info(ctx, "memory", "used_memory")
	return (after - before) / float64(tasks), err
}
