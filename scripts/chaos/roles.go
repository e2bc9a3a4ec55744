package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/reconciler"
)

// roleEnv names the file with a process's part. The program is started again by itself with it; it is an environment
// variable and not an argument so that a test binary can do the same.
const roleEnv = "DELAYQ_CHAOS_ROLE"

// A roleConfig is the part that a process plays.
type roleConfig struct {
	Role     string // "consumer", "producer" or "reconciler"
	Name     string
	Dir      string
	Queue    string
	Redis    string // host:port
	Database string // URL

	Shards      int
	Horizon     time.Duration
	Lease       time.Duration
	MaxSkew     time.Duration
	Concurrency int
	MaxLost     int
	Clocks      bool // consumers read the servers' clocks at each start
	Every       time.Duration

	Seed  uint64
	Tasks int
	Over  time.Duration
	Mix   mix
}

// hear is a context that ends with SIGTERM. The file of the part goes when the signal is caught, which tells the harness.
func (c *roleConfig) hear() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	_ = os.Remove(c.file()) // the harness waits a while for it
	return ctx, stop
}

func (c *roleConfig) file() string { return filepath.Join(c.Dir, c.Name+".json") }

// playRole plays the part that the environment names and ends the process, or returns when it names none.
func playRole() {
	file := os.Getenv(roleEnv)
	if file == "" {
		return
	}
	raw, err := os.ReadFile(file)
	var c roleConfig
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err == nil {
		switch c.Role {
		case "consumer":
			err = consume(&c)
		case "producer":
			err = produce(&c)
		case "reconciler":
			err = reconcile(&c)
		default:
			err = fmt.Errorf("no such role: %q", c.Role)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "chaos: %s: %v\n", c.Name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A link is a queue and its connections.
type link struct {
	q    *delayq.Queue
	pool *pgxpool.Pool
	rdb  *redis.Client
}

func (l *link) close() {
	l.pool.Close()
	_ = l.rdb.Close()
}

func (c *roleConfig) redis() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: c.Redis, ContextTimeoutEnabled: true, DialTimeout: time.Second, ReadTimeout: 2 * time.Second, WriteTimeout: 2 * time.Second,
		ClientName: "chaos",
	})
}

func (c *roleConfig) pool(ctx context.Context, most int) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(c.Database)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = int32(most) //nolint:gosec // a small number
	cfg.ConnConfig.ConnectTimeout = 2 * time.Second
	cfg.ConnConfig.RuntimeParams["application_name"] = "chaos " + c.Role
	return pgxpool.NewWithConfig(ctx, cfg)
}

// open opens the queue, and tries again while the servers are away.
func (c *roleConfig) open(ctx context.Context) (*link, error) {
	pool, err := c.pool(ctx, 4)
	if err != nil {
		return nil, err
	}
	l := &link{pool: pool, rdb: c.redis()}
	for until := time.Now().Add(20 * time.Second); ; {
		var led *ledger.Ledger
		if led, err = ledger.Open(ctx, pool); err == nil {
			l.q, err = delayq.Open(ctx, l.rdb, c.Queue, delayq.Config{
				Shards: c.Shards, Horizon: c.Horizon, MaxSkew: c.MaxSkew, Ledger: led, Logger: slog.Default(),
			})
		}
		if err == nil {
			return l, nil
		}
		if time.Now().After(until) || !pause(ctx, 200*time.Millisecond) {
			l.close()
			return nil, err
		}
	}
}

func reconcile(c *roleConfig) error {
	ctx, stop := c.hear()
	defer stop()
	j, err := openJournal(c.Dir, c.Name)
	if err != nil {
		return err
	}
	defer j.close()
	l, err := c.open(ctx)
	if err != nil {
		return unless(ctx, err)
	}
	defer l.close()
	r, err := reconciler.New(l.q, reconciler.Config{Logger: slog.New(&repairs{slog.Default().Handler(), j})})
	if err != nil {
		return err
	}
	if err := r.Run(ctx, c.Every); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// repairs writes what a reconciler logs of its repairs into the journal too.
type repairs struct {
	slog.Handler
	j *journal
}

// Handle is called by slog.
func (r *repairs) Handle(ctx context.Context, rec slog.Record) error {
	e := event{Kind: evPass}
	rec.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "drift":
			e.Count = a.Value.Int64()
		case "mended":
			e.Mended = a.Value.Int64()
		}
		return true
	})
	if e.Count > 0 || e.Mended > 0 {
		r.j.write(e)
	}
	return r.Handler.Handle(ctx, rec)
}
