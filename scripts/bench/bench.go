package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

const (
	payloadSize = 200
	batch       = 100
)

// bench is one run: private servers, a connection to look at it with, and the sizes.
type bench struct {
	size
	server  *servers.Redis
	pg      *servers.Postgres // nil until it is asked for, see postgres
	rdb     *redis.Client     // looks at the server and serves delayq and the floor alike
	random  *rand.Rand
	payload []byte
	verbose bool
	queues  int // opened so far: each turn has a queue of its own
}

// size is how much each family does.
type size struct {
	cpuTasks, drainTasks, enqueueTasks, memoryTasks, aloneCalls int
	lateTasks, lateTurns                                        int
	depth, depthTasks, depthTurns                               int
	batchTasks, transactionTasks                                int
	ledgerDepth, ledgerDepthTasks, ledgerDepthTurns             int
	reconcileRows, reconcileTurns                               int
	idle                                                        time.Duration
	budget, ledgerBudget                                        time.Duration // of a family whose turns have no fixed number
}

var (
	quickSize = size{
		cpuTasks: 12_000, drainTasks: 3_000, enqueueTasks: 10_000, memoryTasks: 25_000, aloneCalls: 3_000,
		lateTasks: 1_500, lateTurns: 2, depth: 1_000_000, depthTasks: 2_000, depthTurns: 4,
		batchTasks: 20_000, transactionTasks: 400, reconcileRows: 50_000, reconcileTurns: 2,
		ledgerDepth: 200_000, ledgerDepthTasks: 2_000, ledgerDepthTurns: 3,
		idle: 10 * time.Second, budget: 4 * time.Second, ledgerBudget: 12 * time.Second,
	}
	fullSize = size{
		cpuTasks: 50_000, drainTasks: 30_000, enqueueTasks: 50_000, memoryTasks: 200_000, aloneCalls: 20_000,
		lateTasks: 10_000, lateTurns: 6, depth: 10_000_000, depthTasks: 5_000, depthTurns: 11,
		batchTasks: 100_000, transactionTasks: 2_000, reconcileRows: 1_000_000, reconcileTurns: 2,
		ledgerDepth: 10_000_000, ledgerDepthTasks: 5_000, ledgerDepthTurns: 7,
		idle: 20 * time.Second, budget: time.Minute, ledgerBudget: 3 * time.Minute,
	}
)

func newBench(quick bool, seed uint64) (*bench, error) {
	server, err := servers.StartRedis(servers.Options{})
	if err != nil {
		return nil, err
	}
	b := &bench{
		size: fullSize, server: server,
		rdb:    redis.NewClient(&redis.Options{Addr: server.Addr(), ReadTimeout: time.Minute}), // to wipe takes long
		random: rand.New(rand.NewPCG(seed, 0)),
	}
	if quick {
		b.size = quickSize
	}
	b.payload = make([]byte, payloadSize)
	for i := range b.payload {
		b.payload[i] = byte('a' + b.random.IntN(26)) // text: BullMQ carries it as JSON
	}
	if info, err := os.Stderr.Stat(); err == nil {
		b.verbose = info.Mode()&os.ModeCharDevice != 0
	}
	return b, nil
}

func (b *bench) close() {
	b.rdb.Close()
	b.server.Stop()
	if b.pg != nil {
		b.pg.Stop()
	}
}

func (b *bench) progress(format string, args ...any) {
	if b.verbose {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}
}

// takeTurns calls turn until the budget is spent, but three times at least.
func takeTurns(ctx context.Context, budget time.Duration, turn func() error) error {
	start := time.Now()
	for i := 0; i < 3 || time.Since(start) < budget; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := turn(); err != nil {
			return err
		}
	}
	return nil
}

// wipe empties the server before what follows is measured.
func (b *bench) wipe(ctx context.Context) error { return b.rdb.FlushAll(ctx).Err() }

// open makes a new, empty queue of one shard on rdb.
func (b *bench) open(ctx context.Context, rdb redis.UniversalClient) (*delayq.Queue, error) {
	b.queues++
	return delayq.Open(ctx, rdb, fmt.Sprintf("bench-%d", b.queues), delayq.Config{
		Shards: 1, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
}

// ids gives every side the same ids, of the length that a business key has.
func ids(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("cancel-order-%08d", i)
	}
	return out
}

// cpu is what f costs Redis, in microseconds of its CPU a task.
func (b *bench) cpu(ctx context.Context, tasks int, f func() error) (float64, error) {
	before, err := b.usedCPU(ctx)
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := b.usedCPU(ctx)
	return (after - before) * 1e6 / float64(tasks), err
}

// usedCPU is the CPU time of the server's process in seconds.
func (b *bench) usedCPU(ctx context.Context) (float64, error) {
	user, err := b.info(ctx, "cpu", "used_cpu_user")
	if err != nil {
		return 0, err
	}
	sys, err := b.info(ctx, "cpu", "used_cpu_sys")
	return user + sys, err
}

// info reads one number of the server's INFO.
func (b *bench) info(ctx context.Context, section, field string) (float64, error) {
	text, err := b.rdb.Info(ctx, section).Result()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("INFO %s has no %s", section, field)
}

// spread calls f with 0 to n-1 from some goroutines, and returns the first error.
func spread(n, goroutines int, f func(i int) error) error {
	var (
		next  atomic.Int64
		group sync.WaitGroup
		once  sync.Once
		first error
	)
	for range goroutines {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := f(i); err != nil {
					once.Do(func() { first = err })
					return
				}
			}
		})
	}
	group.Wait()
	return first
}

// rate is how many tasks a second f gets through.
func rate(tasks int, f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return float64(tasks) / time.Since(start).Seconds(), err
}
