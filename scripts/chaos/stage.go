package main

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

//go:embed oracle.sql
var oracle string

// A stage is what one scenario plays on: servers, processes, and the harness' own connections, which no fault touches.
type stage struct {
	*scenario
	size
	seed uint64
	rng  *rand.Rand // the nemesis' own: one goroutine uses it
	dir  string
	j    *journal
	pg   *servers.Postgres

	redis      *servers.Redis
	pool       *pgxpool.Pool
	rdb        *redis.Client
	q          *delayq.Queue
	led        *ledger.Ledger
	cfg        roleConfig // of all processes
	toRedis    *servers.Proxy
	toPostgres *servers.Proxy
	clockFile  string
	database   string
	calls      int64     // of the harness, as a producer
	met        []meeting // of pairs

	mu        sync.Mutex
	consumers []*process
	others    []*process
	failed    []error // what processes that ended have had to say
	spawned   int
	closers   []func()
}

// setUp starts a scenario's servers and opens its queue.
func setUp(ctx context.Context, sc *scenario, z size, seed uint64, dir string, pg *servers.Postgres) (*stage, error) {
	s := &stage{
		scenario: sc, size: z, seed: seed, dir: dir, pg: pg,
		rng: rand.New(rand.NewPCG(seed, 0x6e656d65)), //nolint:gosec // a schedule is to be repeatable
	}
	ok := false
	defer func() {
		if !ok {
			s.tearDown()
		}
	}()
	var err error
	if s.j, err = openJournal(dir, "nemesis"); err != nil {
		return nil, err
	}
	s.closers = append(s.closers, s.j.close)
	opts := servers.Options{Args: sc.redisArgs, Dir: filepath.Join(dir, "redis")}
	if err := os.Mkdir(opts.Dir, 0o700); err != nil {
		return nil, err
	}
	if sc.clocks {
		if s.clockFile, opts.Env, err = buildClock(ctx, dir); err != nil {
			return nil, err
		}
	}
	if s.redis, err = servers.StartRedis(opts); err != nil {
		return nil, err
	}
	s.closers = append(s.closers, s.redis.Stop)
	if err := s.openDatabase(ctx); err != nil {
		return nil, err
	}
	if err := s.connect(ctx); err != nil {
		return nil, err
	}
	ok = true
	return s, nil
}

// openDatabase makes a fresh database with the ledger's schema and the oracle.
func (s *stage) openDatabase(ctx context.Context) error {
	name := fmt.Sprintf("chaos_%s_%d", strings.ReplaceAll(s.name, "-", "_"), time.Now().UnixNano())
	if err := execOnce(ctx, s.pg.URL(""), fmt.Sprintf("create database %q", name)); err != nil {
		return err
	}
	s.database, s.cfg.Database = name, s.pg.URL(name)
	s.closers = append(s.closers, func() {
		_ = execOnce(context.Background(), s.pg.URL(""), fmt.Sprintf("drop database if exists %q with (force)", name)) // else it goes with the server
	})
	cfg, err := pgxpool.ParseConfig(s.cfg.Database)
	if err != nil {
		return err
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "harness"
	if s.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return err
	}
	s.closers = append(s.closers, s.pool.Close)
	if _, err := migrations.Up(ctx, s.pool); err != nil {
		return err
	}
	_, err = s.pool.Exec(ctx, oracle)
	return err
}

// nextCall numbers a call that the harness makes itself.
func (s *stage) nextCall() int64 {
	s.calls++
	return s.calls
}

func execOnce(ctx context.Context, url, sql string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, sql)
	return err
}

// connect opens the queue for the harness and puts proxies in front of the servers for everybody else.
func (s *stage) connect(ctx context.Context) error {
	s.rdb = redis.NewClient(&redis.Options{Addr: s.redis.Addr(), ContextTimeoutEnabled: true, ClientName: "harness"})
	s.closers = append(s.closers, func() { _ = s.rdb.Close() })
	led, err := ledger.Open(ctx, s.pool)
	if err != nil {
		return err
	}
	s.led = led
	s.cfg.Queue, s.cfg.Shards, s.cfg.Dir, s.cfg.Redis, s.cfg.Seed = "chaos/"+s.name, 2, s.dir, s.redis.Addr(), s.seed
	s.cfg.Horizon, s.cfg.Lease, s.cfg.MaxLost, s.cfg.MaxSkew = s.horizon, lease, s.maxLost(), s.maxSkew
	s.cfg.Concurrency, s.cfg.Clocks, s.cfg.Every = 16, s.clocks, time.Second
	logger := slog.New(slog.DiscardHandler)
	s.q, err = delayq.Open(ctx, s.rdb, s.cfg.Queue, delayq.Config{
		Shards: s.cfg.Shards, Horizon: s.horizon, MaxSkew: s.maxSkew, Retention: time.Hour, Ledger: led, Logger: logger,
	})
	if err != nil || !s.proxied {
		return err
	}
	if s.toRedis, err = servers.StartProxy(s.redis.Addr()); err != nil {
		return err
	}
	s.closers = append(s.closers, s.toRedis.Close)
	if s.toPostgres, err = servers.StartProxy(s.pg.Addr()); err != nil {
		return err
	}
	s.closers = append(s.closers, s.toPostgres.Close)
	s.cfg.Redis = s.toRedis.Addr()
	s.cfg.Database = strings.Replace(s.cfg.Database, s.pg.Addr(), s.toPostgres.Addr(), 1)
	return nil
}

func (s *stage) tearDown() {
	s.mu.Lock()
	all := append(append([]*process{}, s.consumers...), s.others...)
	s.mu.Unlock()
	for _, p := range all {
		p.kill()
	}
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
	s.closers = nil
}

// spawn starts a process of a role.
func (s *stage) spawn(role string, change func(*roleConfig)) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spawned++
	c := s.cfg
	c.Role, c.Name = role, fmt.Sprintf("%s-%d", role, s.spawned)
	if change != nil {
		change(&c)
	}
	var proxy *servers.Proxy
	if s.ownProxies && role == "consumer" {
		var err error
		if proxy, err = servers.StartProxy(s.pg.Addr()); err != nil {
			return nil, err
		}
		s.closers = append(s.closers, proxy.Close)
		c.Database = strings.Replace(c.Database, s.pg.Addr(), proxy.Addr(), 1)
	}
	p, err := spawn(c, s.j)
	if err != nil {
		return nil, err
	}
	p.toPostgres = proxy
	if role == "consumer" {
		s.consumers = append(s.consumers, p)
	} else {
		s.others = append(s.others, p)
	}
	return p, nil
}

// consumer is a random one that runs, nil when none does.
func (s *stage) consumer() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	var alive []*process
	for _, p := range s.consumers {
		if p.running() && !p.paused {
			alive = append(alive, p)
		}
	}
	if len(alive) == 0 {
		return nil
	}
	return alive[s.rng.IntN(len(alive))]
}

// replaceDead starts consumers for those that have ended.
func (s *stage) replaceDead() error {
	s.mu.Lock()
	var alive []*process
	for _, p := range s.consumers {
		if p.running() {
			alive = append(alive, p)
			continue
		}
		if err := p.how(); err != nil {
			s.failed = append(s.failed, err)
		}
	}
	missing := len(s.consumers) - len(alive)
	s.consumers = alive
	s.mu.Unlock()
	for range missing {
		if _, err := s.spawn("consumer", nil); err != nil {
			return err
		}
	}
	return nil
}

// fault writes down that one begins.
func (s *stage) fault(format string, args ...any) {
	s.j.write(event{Kind: evFault, Note: fmt.Sprintf(format, args...)})
}

// sleep reports whether the faults still go on after a random time.
func (s *stage) sleep(ctx context.Context, least, most time.Duration) bool {
	return pause(ctx, least+time.Duration(s.rng.Int64N(int64(most-least)+1)))
}

// play runs the scenario: processes and faults for its time, then rest.
func (s *stage) play(ctx context.Context) error {
	for range 2 {
		if _, err := s.spawn("reconciler", nil); err != nil {
			return err
		}
	}
	for range s.consumerCount() {
		if _, err := s.spawn("consumer", nil); err != nil {
			return err
		}
	}
	over := s.lasts - s.calm
	m := usual(lease)
	if s.mix != nil {
		s.mix(&m)
	}
	producer, err := s.spawn("producer", func(c *roleConfig) {
		c.Tasks, c.Over, c.Mix = s.tasks, over, m
	})
	if err != nil {
		return err
	}
	faults, cancel := context.WithTimeout(ctx, over)
	defer cancel()
	nemesis := make(chan error, 1)
	go func() { nemesis <- s.nemesis(faults, s) }()
	err = <-nemesis
	if ctx.Err() != nil {
		return ctx.Err()
	}
	<-faults.Done()
	s.j.write(event{Kind: evCalm})
	if err != nil {
		return fmt.Errorf("nemesis: %w", err)
	}
	select {
	case <-producer.exited:
	case <-time.After(s.calm + 20*time.Second):
		return fmt.Errorf("the producer: %w", errNoTime)
	case <-ctx.Done():
		return ctx.Err()
	}
	return producer.how()
}
