package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// measureDepth compares what lease and ack cost Redis in a deep queue with a queue of 10 thousand waiting tasks, one
// shard each. The tasks that it leases from the deep queue lie scattered among the others in memory, the worst case:
// a queue of many different delays that has grown for hours. The second row, without a bar, leases tasks that were
// enqueued together, as where every task has the same delay.
func measureDepth(ctx context.Context, b *bench) ([]Row, error) {
	if err := b.wipe(ctx); err != nil {
		return nil, err
	}
	small, err := b.open(ctx, b.rdb)
	if err != nil {
		return nil, err
	}
	if err := b.fill(ctx, small, 10_000, 0); err != nil {
		return nil, err
	}
	big, err := b.open(ctx, b.rdb)
	if err != nil {
		return nil, err
	}
	if err := b.fill(ctx, big, b.depth, b.depthTurns*b.depthTasks); err != nil {
		return nil, err
	}
	scattered, err := b.againstShallow(ctx, big, small, false)
	if err != nil {
		return nil, err
	}
	together, err := b.againstShallow(ctx, big, small, true)
	if err != nil {
		return nil, err
	}
	scrape, err := b.scrape(ctx, func() error {
		_, err := big.Stats(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	look, err := b.look(ctx, big)
	if err != nil {
		return nil, err
	}
	waiting := depthName(b.depth) + " waiting"
	return []Row{
		compare("depth", "Redis CPU of lease + ack, "+waiting+" against 10 k, us", scattered, atMost(1.5)),
		compare("depth/together", "the same for tasks that were enqueued together, us", together, bar{}),
		single("depth/scrape", "Redis time of Stats with "+waiting+", ms", scrape, atMost(2)),
		single("depth/look", "Redis time of a monitor's look at it and at 1,000 consumers, ms", look, atMost(2)),
	}, nil
}

// againstShallow leases and acks in both queues by turns. The small one, and with refill the big one too, gets its due
// tasks right before.
func (b *bench) againstShallow(ctx context.Context, big, small *delayq.Queue, refill bool) (turns, error) {
	var t turns
	for i := range b.depthTurns {
		due := make([]delayq.Task, b.depthTasks)
		for j := range due {
			due[j] = b.dueTask(fmt.Sprintf("turn-%t-%d-%d", refill, i, j))
		}
		if _, err := small.EnqueueMany(ctx, due); err != nil {
			return t, err
		}
		if refill {
			if _, err := big.EnqueueMany(ctx, due); err != nil {
				return t, err
			}
		}
		deep, err := b.cpu(ctx, b.depthTasks, func() error { return leaseAndAck(ctx, big, b.depthTasks) })
		if err != nil {
			return t, err
		}
		shallow, err := b.cpu(ctx, b.depthTasks, func() error { return leaseAndAck(ctx, small, b.depthTasks) })
		if err != nil {
			return t, err
		}
		t.add(deep, shallow)
		b.progress("  %.1f us deep, %.1f us shallow", deep, shallow)
	}
	return t, nil
}

// fill puts n tasks that wait between an hour and a day into q, and some due ones evenly among them.
func (b *bench) fill(ctx context.Context, q *delayq.Queue, n, due int) error {
	const chunk = 5_000 // EnqueueMany splits it into calls
	total, now := n+due, time.Now()
	for from := 0; from < total; from += chunk {
		tasks := make([]delayq.Task, min(chunk, total-from))
		for j := range tasks {
			i := from + j
			id := fmt.Sprintf("cancel-order-%08d", i)
			if (i+1)*due/total > i*due/total {
				tasks[j] = b.dueTask(id)
				continue
			}
			later := now.Add(time.Hour + time.Duration(b.random.Int64N(int64(23*time.Hour))))
			tasks[j] = delayq.Task{ID: id, Type: "bench", Payload: b.payload, RunAt: later}
		}
		if _, err := q.EnqueueMany(ctx, tasks); err != nil {
			return err
		}
		if from > 0 && from%1_000_000 == 0 {
			b.progress("  %d of %d enqueued", from, total)
		}
	}
	return nil
}

// dueTask fell due some time in the last hour, so that tasks are leased in another order than they were enqueued in.
func (b *bench) dueTask(id string) delayq.Task {
	due := time.Now().Add(-time.Duration(b.random.Int64N(int64(time.Hour))))
	return delayq.Task{ID: id, Type: "bench", Payload: b.payload, RunAt: due}
}

func depthName(n int) string {
	if n >= 1_000_000 {
		return fmt.Sprintf("%d M", n/1_000_000)
	}
	return fmt.Sprintf("%d k", n/1_000)
}

// look is the Redis time of all that a scrape of delayq monitor costs, with as many consumers as it ever reads.
func (b *bench) look(ctx context.Context, q *delayq.Queue) (float64, error) {
	const consumers = 1_000
	for i := range consumers {
		leases, err := q.Lease(ctx, delayq.LeaseOptions{Max: 1, Lease: time.Minute, Consumer: fmt.Sprintf("consumer-%d", i)})
		if err == nil && len(leases) > 0 {
			err = q.Ack(ctx, leases...)
		}
		if err != nil {
			return 0, err
		}
	}
	m, err := monitor.New(monitor.Config{Redis: b.rdb, Queues: []string{q.Name()}})
	if err != nil {
		return 0, err
	}
	see := func() error {
		v := m.Look(ctx)
		if err := errors.Join(v.Err, v.Queues[0].Err); err != nil {
			return err
		}
		if n := len(v.Queues[0].Consumers); n != consumers {
			return fmt.Errorf("the look has seen %d consumers of %d", n, consumers)
		}
		return nil
	}
	if err := see(); err != nil { // which opens the queue
		return 0, err
	}
	return b.scrape(ctx, see)
}

// scrape is the Redis time of one call in milliseconds, by the server's own count. The scripts' time includes that of the commands they
// call, so only calls from outside are added up.
func (b *bench) scrape(ctx context.Context, call func() error) (float64, error) {
	const calls = 50
	if err := b.rdb.ConfigResetStat(ctx).Err(); err != nil {
		return 0, err
	}
	for range calls {
		if err := call(); err != nil {
			return 0, err
		}
	}
	scripts, err := b.commandTime(ctx, "evalsha", "evalsha_ro")
	if err != nil {
		return 0, err
	}
	if scripts == 0 {
		return 0, errors.New("no script was called: the row measures nothing")
	}
	others, err := b.commandTime(ctx, "info", "time") // TIME inside a script is counted twice: a microsecond
	return (scripts + others) / calls / 1_000, err
}

// commandTime is the microseconds that the server has spent in commands since the last reset, 0 for none.
func (b *bench) commandTime(ctx context.Context, commands ...string) (float64, error) {
	text, err := b.rdb.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, err
	}
	total := 0.0
	for line := range strings.Lines(text) {
		for _, command := range commands {
			fields, ok := strings.CutPrefix(line, "cmdstat_"+command+":")
			if !ok {
				continue
			}
			_, usec, _ := strings.Cut(fields, "usec=")
			usec, _, _ = strings.Cut(usec, ",")
			n, err := strconv.ParseFloat(usec, 64)
			if err != nil {
				return 0, err
			}
			total += n
		}
	}
	return total, nil
}
