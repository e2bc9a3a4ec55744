package main

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// callLog is a go-redis hook that notes when each call was made, and the last one's arguments.
type callLog struct {
	mu   sync.Mutex
	at   []time.Time
	last []any
}

func (c *callLog) note(cmds ...redis.Cmder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cmd := range cmds {
		c.at = append(c.at, time.Now())
		c.last = cmd.Args()
	}
}

// rate is calls a second from the first call after a moment to the last one before another: whole intervals, so that where the
// window happens to end makes no difference.
func (c *callLog) rate(after, before time.Time) (float64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.DeleteFunc(slices.Clone(c.at), func(t time.Time) bool { return t.Before(after) || t.After(before) })
	if len(at) < 2 {
		return 0, fmt.Errorf("%d calls seen: the worker did not poll", len(at))
	}
	return float64(len(at)-1) / at[len(at)-1].Sub(at[0]).Seconds(), nil
}

func (c *callLog) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (c *callLog) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.note(cmd)
		return next(ctx, cmd)
	}
}

func (c *callLog) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.note(cmds...)
		return next(ctx, cmds)
	}
}
