package main

import (
	"context"
	"fmt"

	"github.com/delayq/toolkit/delayq"
)

// measureEnqueue is how many single-task enqueue calls go through when many goroutines call at once, as in a service.
func measureEnqueue(ctx context.Context, b *bench) ([]Row, error) {
	var rows []Row
	for _, c := range []struct {
		callers int
		bar     bar
	}{{200, atLeast(3)}, {20, atLeast(1.3)}} {
		t, err := b.enqueueFrom(ctx, c.callers)
		if err != nil {
			return rows, err
		}
		name := fmt.Sprintf("enqueue/%d", c.callers)
		rows = append(rows, compare(name, fmt.Sprintf("single enqueue calls from %d goroutines, tasks/s", c.callers), t, c.bar))
	}
	return rows, nil
}

func (b *bench) enqueueFrom(ctx context.Context, callers int) (turns, error) {
	var t turns
	tasks := ids(b.enqueueTasks)
	a := b.asynq(callers)
	defer a.close()
	err := takeTurns(ctx, b.budget/2, func() error {
		if err := b.wipe(ctx); err != nil {
			return err
		}
		q, err := b.open(ctx, b.rdb)
		if err != nil {
			return err
		}
		ours, err := rate(len(tasks), func() error {
			return spread(len(tasks), callers, func(i int) error {
				_, err := q.Enqueue(ctx, delayq.Task{ID: tasks[i], Type: "bench", Payload: b.payload})
				return err
			})
		})
		if err != nil {
			return err
		}
		if err := b.wipe(ctx); err != nil {
			return err
		}
		theirs, err := rate(len(tasks), func() error {
			return spread(len(tasks), callers, func(i int) error { return a.enqueue(ctx, tasks[i]) })
		})
		if err != nil {
			return err
		}
		t.add(ours, theirs)
		b.progress("  %d callers: delayq %.0f, asynq %.0f tasks/s", callers, ours, theirs)
		return nil
	})
	return t, err
}
