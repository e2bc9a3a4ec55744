package main

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// invoke is a function as its platform sees it.
type invoke = func(context.Context) error

// platform is a cloud in miniature: it invokes a function on a schedule, and like a cloud it does not wait for the one
// before, gives each invocation a deadline, and keeps a warm environment for the next.
type platform struct {
	every   time.Duration
	timeout time.Duration
	cold    func() invoke // makes a new environment
	log     *slog.Logger

	started atomic.Int64
	running atomic.Int64

	mu   sync.Mutex
	warm []invoke
}

// run invokes at once and then on every tick. When ctx ends it waits for those under way, which drain by then.
func (p *platform) run(ctx context.Context) {
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	var under sync.WaitGroup
	defer under.Wait()
	for {
		under.Go(func() { p.invoke(ctx) })
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (p *platform) invoke(ctx context.Context) {
	p.started.Add(1)
	p.running.Add(1)
	defer p.running.Add(-1)
	fn := p.environment()
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	if err := fn(ctx); err != nil {
		p.log.Warn("invocation failed", "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.warm = append(p.warm, fn)
}

// environment is a warm one if one is idle: an environment runs one invocation at a time.
func (p *platform) environment() invoke {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.warm); n > 0 {
		fn := p.warm[n-1]
		p.warm = p.warm[:n-1]
		return fn
	}
	return p.cold()
}
