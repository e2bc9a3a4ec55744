package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
)

// asynqWorkers is enough: with 20 to 400 of them asynq drained equally fast on two cores.
const asynqWorkers = 50

type asynqPeer struct {
	addr    string
	client  *asynq.Client
	payload []byte
}

func (b *bench) asynq(callers int) asynqPeer {
	opt := asynq.RedisClientOpt{Addr: b.server.Addr(), PoolSize: callers}
	return asynqPeer{addr: b.server.Addr(), client: asynq.NewClient(opt), payload: b.payload}
}

func (a asynqPeer) close() {
	_ = a.client.Close() // there is no answer to a failure
}

// enqueue adds a task; without an id asynq makes one.
func (a asynqPeer) enqueue(ctx context.Context, id string, opts ...asynq.Option) error {
	if id != "" {
		opts = append(opts, asynq.TaskID(id))
	}
	_, err := a.client.EnqueueContext(ctx, asynq.NewTask("bench", a.payload), opts...)
	return err
}

// drain runs a server until it has handled n tasks, and returns how long that took. Starting and stopping it are
// not counted.
func (a asynqPeer) drain(ctx context.Context, n int) (time.Duration, error) {
	srv := asynq.NewServer(
		asynq.RedisClientOpt{Addr: a.addr, PoolSize: asynqWorkers},
		// The interval is for an empty queue: a short one only lets Shutdown return sooner.
		asynq.Config{Concurrency: asynqWorkers, TaskCheckInterval: 200 * time.Millisecond, LogLevel: asynq.FatalLevel},
	)
	var handled atomic.Int64
	done := make(chan struct{})
	start := time.Now()
	err := srv.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
		if handled.Add(1) == int64(n) {
			close(done)
		}
		return nil
	}))
	if err != nil {
		return 0, err
	}
	defer srv.Shutdown()
	select {
	case <-done:
		return time.Since(start), nil
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(time.Minute):
		return 0, fmt.Errorf("asynq handled %d of %d tasks in a minute", handled.Load(), n)
	}
}
