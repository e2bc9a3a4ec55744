package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/functions"
)

// drainLimit is how long past the last due time dev waits for tasks before it calls them lost.
const drainLimit = 30 * time.Second

// The invocation deadline is so many ticks, as in template.yaml, and no more than Lambda allows.
const (
	ticksPerInvocation = 5
	maxInvocation      = 15 * time.Minute
)

type dev struct {
	server
	queue  string
	rate   float64
	every  time.Duration
	shards int
	runFor time.Duration
	json   bool
}

func newDev() *cobra.Command {
	var d dev
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run the whole system in one process: a sample shop, a queue, the worker function on a schedule",
		Long: `dev runs a sample shop on an embedded Redis, or on --redis. Orders come in; each enqueues "cancel if unpaid" a few seconds ahead.
Most are paid and cancel that task; the others are expired by the worker function, which is invoked on a schedule and with a
deadline, as a cloud would do it. Join in from another terminal with the URL it prints.

The summary comes from the shop's own books: lost are orders that were neither paid nor expired, early are runs before their due
time, duplicate_effects are effects beyond one an order, stale_refused are runs that found their order settled and left it alone.
Lateness runs from the due time to the start of the handler, by the clock of Redis.

The first Ctrl-C or TERM stops placing orders, drains and prints the summary; a second one ends delayq at once.
Exit status: 0 all is well, 1 something was lost, early or done twice, or Redis failed, 2 wrong usage.`,
		Example: `  delayq dev
  delayq dev --for 20s --json
  delayq dev --redis redis://127.0.0.1:6379 --queue try --shards 4 --rate 500`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return d.run(cmd) },
	}
	// Not from the environment: what it names may be in production, and dev runs every task it finds.
	d.flags(cmd, "an embedded one")
	f := cmd.Flags()
	f.StringVar(&d.queue, "queue", "orders", "`name` of the queue")
	f.Float64Var(&d.rate, "rate", 20, "orders a second")
	f.DurationVar(&d.every, "every", time.Minute, "interval of the schedule")
	f.IntVar(&d.shards, "shards", 0, "shards of a new queue; for an existing one 0 or what it has")
	f.DurationVar(&d.runFor, "for", 0, "stop placing orders after this time; 0 goes on until Ctrl-C")
	f.BoolVar(&d.json, "json", false, "print the summary as one JSON object")
	return cmd
}

func (d *dev) check() error {
	switch {
	case d.rate <= 0 || d.rate > 10_000:
		return usagef("--rate: want more than 0 and at most 10000 orders a second")
	case d.every < time.Second:
		return usagef("--every: want at least 1s")
	case d.runFor < 0:
		return usagef("--for: want a positive duration")
	}
	return nil
}

func (d *dev) run(cmd *cobra.Command) error {
	if err := d.check(); err != nil {
		return err
	}
	guest := d.url != ""
	if !guest {
		embedded := miniredis.NewMiniRedis()
		if err := embedded.StartAddr("127.0.0.1:0"); err != nil {
			return fmt.Errorf("embedded redis: %w", err)
		}
		defer embedded.Close()
		d.url = "redis://" + embedded.Addr()
	}
	placing, stop := drainOnSignal(cmd.Context(), func() {})
	defer stop()
	sys, err := d.build(placing, cmd, guest)
	if err != nil {
		return err
	}
	defer sys.close()
	if d.runFor > 0 {
		defer time.AfterFunc(d.runFor, stop).Stop()
	}
	sum := sys.run(cmd.Context(), placing, d.rate)
	if err := sys.view.end(cmd.OutOrStdout(), &sum, d.json); err != nil {
		return err
	}
	if !sum.ok() {
		return errReported
	}
	return nil
}

// system is everything that dev runs.
type system struct {
	shop  *shop
	cloud *platform
	calls callCount
	view  *view
	// aside is for the clock and the display: they are no part of the system, and what they ask Redis is not counted.
	counted, aside redis.UniversalClient
}

func (s *system) close() {
	_ = s.counted.Close()
	_ = s.aside.Close()
}

// build wires the system up.
func (d *dev) build(ctx context.Context, cmd *cobra.Command, guest bool) (*system, error) {
	sys := &system{view: newView(cmd.ErrOrStderr(), d)}
	var err error
	if sys.counted, err = d.connect(); err != nil {
		return nil, err
	}
	if sys.aside, err = d.connect(); err != nil {
		return nil, err
	}
	sys.counted.AddHook(&sys.calls)
	log := slog.New(slog.NewTextHandler(sys.view, &slog.HandlerOptions{Level: slog.LevelWarn}))
	watched, err := delayq.Open(ctx, sys.aside, d.queue, delayq.Config{Shards: d.shards, Logger: log})
	if err != nil {
		return nil, err
	}
	stats, err := watched.Stats(ctx)
	if err != nil {
		return nil, err
	}
	if n := stats.Pending + stats.Due + stats.Processing; n > 0 {
		return nil, usagef("--queue: %s holds %d tasks already, and dev would run them all; name another queue", d.queue, n)
	}
	q, err := delayq.Open(ctx, sys.counted, d.queue, delayq.Config{OnWarning: func(delayq.Warning) {}}) // they are said
	if err != nil {
		return nil, err
	}
	sys.view.q = watched
	sys.shop = &shop{
		q:     q,
		books: newBooks(),
		run:   uuid.NewString()[:8],
		guest: guest,
		now:   func(ctx context.Context) (time.Time, error) { return sys.aside.Time(ctx).Result() },
		log:   log,
	}
	timeout := min(ticksPerInvocation*d.every, maxInvocation)
	sys.cloud = &platform{
		every:   d.every,
		timeout: timeout,
		log:     log,
		cold: func() invoke {
			mux := delayq.NewMux()
			delayq.Handle(mux, orderCancel, sys.shop.expire)
			cfg := functions.Config{Queues: []string{d.queue}, Margin: min(2*time.Second, timeout/10)}
			return functions.Worker(mux, functions.WithConfig(cfg), functions.WithRedis(sys.counted), functions.WithLogger(log))
		},
	}
	sys.view.sys = sys
	return sys, nil
}

// run lets the shop sell until placing ends, drains, and adds up.
func (s *system) run(life, placing context.Context, rate float64) summary {
	began := time.Now()
	invoking, home := context.WithCancel(life)
	ended := make(chan struct{})
	go func() { defer close(ended); s.cloud.run(invoking) }()
	watching, blind := context.WithCancel(life)
	seen := make(chan struct{})
	go func() { defer close(seen); s.view.run(watching, placing) }()

	s.shop.sell(life, placing, rate)
	s.shop.drain(life)
	home()
	<-ended
	blind()
	<-seen
	return summary{
		account:     s.shop.books.account(),
		Invocations: s.cloud.started.Load(),
		RedisCalls:  s.calls.n.Load(),
		ElapsedS:    float64(time.Since(began).Milliseconds()) / 1000,
	}
}

// callCount counts the commands sent to Redis, each of a pipeline for itself.
type callCount struct{ n atomic.Int64 }

func (c *callCount) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *callCount) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmd)
	}
}

func (c *callCount) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}
