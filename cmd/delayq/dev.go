package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/functions"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/console"
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
	database   database
	guestRedis bool // the Redis is somebody else's
	private    bool // the database is our own
	queue      string
	rate       float64
	every      time.Duration
	shards     int
	runFor     time.Duration
	json       bool
	console    bool
	page       net.Listener // of the console; nil without
}

func newDev() *cobra.Command {
	var d dev
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run the whole system in one process: a sample shop, a queue, the worker function on a schedule",
		Long: `dev runs a sample shop on an embedded Redis, or on --redis. Orders come in; each enqueues "cancel if unpaid" a few seconds ahead.
Most are paid and cancel that task; the others are expired by the worker function, which is invoked on a schedule and with a
deadline, as a cloud would do it. Join in from another terminal with the URLs it prints.

With a ledger the shop keeps its orders and stock in PostgreSQL, and each change is one transaction with what the queue is told of
it; the reconciler function runs on the schedule too. Then Redis may lose its data, or be away, and no task is lost. By default dev
starts a PostgreSQL of its own, if the machine has its programs. On --database URL it makes the schema of the ledger if that is not
there, and keeps the shop's tables in a schema of their own, which it drops at the end.

The summary comes from the shop's own books: lost are orders that were neither paid nor expired, early are runs before their due
time, duplicate_effects are effects beyond one an order, stale_refused are runs that found their order settled and left it alone.
With a ledger, stock_errors are products and orders for which the stock, a journal of its movements, the orders and the books do not
say the same. Lateness runs from the due time to the start of the handler, by the clock of Redis, or of PostgreSQL with a ledger.

The first Ctrl-C or TERM stops placing orders, drains and prints the summary; a second one ends delayq at once.
Exit status: 0 all is well, 1 something was lost, early, done twice or wrong in stock, or a server failed, 2 wrong usage.`,
		Example: `  delayq dev
  delayq dev --for 20s --json
  delayq dev --database off
  delayq dev --redis redis://127.0.0.1:6379 --queue try --shards 4 --rate 500`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return d.run(cmd) },
	}
	// Not from the environment: what it names may be in production, and dev runs every task it finds.
	d.flags(cmd, "an embedded one")
	f := cmd.Flags()
	f.StringVar(&d.database.url, "database", autoDatabase,
		"PostgreSQL `URL` of the ledger; auto for one of its own if the machine has the programs, off for none")
	f.StringVar(&d.queue, "queue", "orders", "`name` of the queue")
	f.Float64Var(&d.rate, "rate", 20, "orders a second")
	f.DurationVar(&d.every, "every", time.Minute, "interval of the schedule")
	f.IntVar(&d.shards, "shards", 0, "shards of a new queue; for an existing one 0 or what it has")
	f.DurationVar(&d.runFor, "for", 0, "stop placing orders after this time; 0 goes on until Ctrl-C")
	f.BoolVar(&d.console, "console", true, "serve the web console on a free port of this machine")
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
	case d.database.url == "":
		return usagef("--database: want a PostgreSQL URL, auto or off")
	}
	return nil
}

func (d *dev) run(cmd *cobra.Command) error {
	if err := d.check(); err != nil {
		return err
	}
	v := newView(cmd.ErrOrStderr(), d)
	var left leftovers
	defer left.clear()
	placing, stop := drainOnSignal(cmd.Context(), func() {
		v.mute() // or all complain that the servers go
		left.clear()
	})
	defer stop()
	d.guestRedis = d.url != ""
	if !d.guestRedis {
		embedded := miniredis.NewMiniRedis()
		if err := embedded.StartAddr("127.0.0.1:0"); err != nil {
			return fmt.Errorf("embedded redis: %w", err)
		}
		defer embedded.Close()
		d.url = "redis://" + embedded.Addr()
	}
	err := d.chooseDatabase(placing, v, &left)
	if d.console && err == nil {
		var lc net.ListenConfig
		if d.page, err = lc.Listen(placing, "tcp", "127.0.0.1:0"); err == nil {
			defer d.page.Close()
		}
	}
	v.show(d)
	sys := &system{view: v}
	if err == nil {
		defer sys.close()
		err = d.build(placing, sys, &left)
	}
	if err == nil && d.page != nil {
		var stop func()
		if stop, err = d.openPage(cmd.Context(), sys); err == nil {
			defer stop()
		}
	}
	if placing.Err() != nil {
		return failf("stopped before the first order")
	}
	if err != nil {
		return err
	}
	if d.runFor > 0 {
		defer time.AfterFunc(d.runFor, stop).Stop()
	}
	sum := sys.run(cmd.Context(), placing, d.rate)
	if err := v.end(cmd.OutOrStdout(), &sum, d.json); err != nil {
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
	kept  *bookkeeping // nil without a ledger
	cloud *platform    // invokes the worker
	mends *platform    // invokes the reconciler; nil without a ledger
	calls callCount
	view  *view
	// aside is for the clock and the display: they are no part of the system, and what they ask Redis is not counted.
	counted, aside redis.UniversalClient
	mended         mending
}

func (s *system) close() {
	for _, rdb := range []redis.UniversalClient{s.counted, s.aside} {
		if rdb != nil {
			_ = rdb.Close()
		}
	}
	if s.kept != nil {
		s.kept.close()
	}
}

// build wires the system up.
func (d *dev) build(ctx context.Context, sys *system, left *leftovers) (err error) {
	v := sys.view
	if sys.counted, err = d.connect(); err != nil {
		return err
	}
	if sys.aside, err = d.connect(); err != nil {
		return err
	}
	sys.counted.AddHook(&sys.calls)
	log := slog.New(slog.NewTextHandler(v, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var shopLedger, cloudLedger, viewLedger delayq.Ledger // each nil without a database
	if d.database.url != "" {
		sys.kept = &bookkeeping{}
		if err := d.openDatabase(ctx, v, sys.kept); err != nil {
			return err
		}
		shopLedger, cloudLedger, viewLedger = sys.kept.ledgers[0], sys.kept.ledgers[1], sys.kept.ledgers[2]
	}
	watched, err := delayq.Open(ctx, sys.aside, d.queue, delayq.Config{Shards: d.shards, Ledger: viewLedger, Logger: log})
	if err != nil {
		return err
	}
	if d.guestRedis && d.private {
		_ = left.make(func() (func(), error) { return d.removeQueue(watched.Shards()), nil })
	}
	switch n, err := openTasks(ctx, watched); {
	case err != nil:
		return err
	case n > 0:
		return usagef("--queue: %s holds %d tasks already, and dev would run them all; name another queue", d.queue, n)
	}
	quiet := delayq.Config{Ledger: shopLedger, OnWarning: func(delayq.Warning) {}, Logger: log} // the warnings are said
	q, err := delayq.Open(ctx, sys.counted, d.queue, quiet)
	if err != nil {
		return err
	}
	v.sys, v.q = sys, watched
	sys.shop = &shop{
		books:    newBooks(),
		run:      uuid.NewString()[:8],
		guest:    d.guestRedis || sys.kept != nil && !d.private,
		now:      func(ctx context.Context) (time.Time, error) { return sys.aside.Time(ctx).Result() },
		log:      log,
		patience: drainLimit,
	}
	sys.shop.till = &bookTill{q: q, books: sys.shop.books, now: sys.shop.now}
	sys.cloud = d.platform(log, func() invoke { return d.worker(sys, cloudLedger, log) })
	if sys.kept == nil {
		return nil
	}
	if err := d.openShop(ctx, sys, q, left); err != nil {
		return err
	}
	sys.shop.books.slack = sys.kept.ahead(ctx, sys.aside)
	sys.shop.patience += d.every // a reconciler's period, at worst
	sys.mends = d.platform(log, func() invoke { return d.reconciler(sys, cloudLedger) })
	return nil
}

// openPage serves the console. On a Redis that is somebody else's it shows this queue alone, and no payloads.
func (d *dev) openPage(ctx context.Context, sys *system) (stop func(), err error) {
	watch := monitor.Config{Redis: sys.aside}
	cfg := console.Config{ShowPayloads: !d.guestRedis, Logger: slog.New(slog.NewTextHandler(sys.view, &slog.HandlerOptions{Level: slog.LevelError}))}
	if d.guestRedis {
		watch.Queues = []string{d.queue}
	}
	if sys.kept != nil {
		led := sys.kept.ledgers[2]
		watch.Ledger = led
		cfg.History = historyOf(func(context.Context) (*ledger.Ledger, error) { return led, nil })
	}
	m, err := monitor.New(watch)
	if err != nil {
		return nil, err
	}
	return serveConsole(ctx, d.page, m, cfg)
}

// mostCounted bounds what the ledger counts, which takes its time.
const mostCounted = 10_000

// openTasks counts those in Redis, or in the ledger if there are more.
func openTasks(ctx context.Context, q *delayq.Queue) (int64, error) {
	stats, err := q.Stats(ctx)
	if err != nil {
		return 0, err
	}
	n := stats.Pending + stats.Due + stats.Processing
	if lq := q.LedgerQueue(); lq != nil {
		counts, err := lq.Counts(ctx, mostCounted, 0)
		if err != nil {
			return 0, err
		}
		n = max(n, counts.Open)
	}
	return n, nil
}

func (d *dev) timeout() time.Duration { return min(ticksPerInvocation*d.every, maxInvocation) }

func (d *dev) platform(log *slog.Logger, cold func() invoke) *platform {
	return &platform{every: d.every, timeout: d.timeout(), log: log, cold: cold}
}

// function is what both functions are given in place of an environment.
func (d *dev) function(sys *system, led delayq.Ledger, log *slog.Logger) []functions.Option {
	cfg := functions.Config{Queues: []string{d.queue}, Margin: min(2*time.Second, d.timeout()/10)}
	opts := []functions.Option{functions.WithConfig(cfg), functions.WithRedis(sys.counted), functions.WithLogger(log)}
	if led != nil {
		opts = append(opts, functions.WithLedger(led))
	}
	return opts
}

// worker is a new environment of the worker function.
func (d *dev) worker(sys *system, led delayq.Ledger, log *slog.Logger) invoke {
	mux := delayq.NewMux()
	delayq.Handle(mux, orderCancel, sys.shop.expire)
	fn := functions.Worker(mux, d.function(sys, led, log)...)
	return func(ctx context.Context) error {
		_, err := fn(ctx, json.RawMessage(`{}`))
		return err
	}
}

// run lets the shop sell until placing ends, drains, and adds up.
func (s *system) run(life, placing context.Context, rate float64) summary {
	began := time.Now()
	invoking, home := context.WithCancel(life)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var both sync.WaitGroup
		both.Go(func() { s.cloud.run(invoking) })
		if s.mends != nil {
			both.Go(func() { s.mends.run(invoking) })
		}
		both.Wait()
	}()
	watching, blind := context.WithCancel(life)
	seen := make(chan struct{})
	go func() { defer close(seen); s.view.run(watching, placing) }()

	s.shop.sell(life, placing, rate)
	s.shop.drain(life)
	home()
	<-ended
	blind()
	<-seen
	sum := summary{
		account:     s.shop.books.account(),
		Invocations: s.cloud.started.Load(),
		RedisCalls:  s.calls.n.Load(),
		ElapsedS:    float64(time.Since(began).Milliseconds()) / 1000,
	}
	if s.kept != nil {
		sum.Booked = s.kept.account(life, s)
	}
	return sum
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
