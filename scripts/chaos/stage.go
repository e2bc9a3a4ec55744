package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/reconciler"
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

// rest waits until every task that is due has ended.
func (s *stage) rest(ctx context.Context) error {
	for until := time.Now().Add(s.restTime()); ; {
		if err := s.replaceDead(); err != nil {
			return err
		}
		var open int
		err := s.pool.QueryRow(ctx, `select count(*) from delayq.task
			where queue > 0 and status in ('pending', 'retry', 'running') and run_at < clock_timestamp() + interval '30 minutes'`).Scan(&open)
		switch {
		case err == nil && open == 0:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(until):
			return errors.Join(fmt.Errorf("%d tasks are open %s after the faults: %w", open, s.restTime(), errNoTime), err)
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// finish looks at what is left when all has come to rest.
func (s *stage) finish(ctx context.Context) (problems []problem) {
	bad := func(rule, format string, args ...any) {
		problems = append(problems, problem{rule, "", fmt.Sprintf(format, args...)})
	}
	// The reconcilers have some periods to make the two agree on what still waits.
	var differ []problem
	for until := time.Now().Add(10 * time.Second); ; {
		var err error
		if differ, err = s.compare(ctx); err != nil {
			bad("I9", "%v", err)
			return problems
		}
		if len(differ) == 0 || time.Now().After(until) {
			break
		}
		pause(ctx, 100*time.Millisecond)
	}
	problems = append(problems, differ[:min(len(differ), 20)]...)
	s.stopAll(bad)
	s.quiet(ctx, bad)
	s.cancelParked(ctx, bad)
	if differ, err := s.compare(ctx); err != nil || len(differ) > 0 {
		bad("I10", "after the last cancel: %v %v", err, differ[:min(len(differ), 3)])
	}
	s.connections(ctx, bad)
	return problems
}

// compare reads both sides and says where they differ.
func (s *stage) compare(ctx context.Context) ([]problem, error) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		return nil, err
	}
	entries, err := dumpRedis(ctx, s.rdb, s.cfg.Queue, s.cfg.Shards)
	if err != nil {
		return nil, err
	}
	return disagree(rows, entries, s.horizon, time.Now()), nil
}

// stopAll ends every process in order (I13).
func (s *stage) stopAll(bad func(rule, format string, args ...any)) {
	s.mu.Lock()
	all := append(append([]*process{}, s.consumers...), s.others...)
	failed := s.failed
	s.mu.Unlock()
	ends := make(chan error, len(all))
	for _, p := range all {
		go func() { ends <- p.terminate(lease + 3*time.Second) }()
	}
	for range all {
		if err := <-ends; err != nil {
			failed = append(failed, err)
		}
	}
	for _, err := range failed {
		bad("I13", "%v", err)
	}
}

// quiet: the audit is clean, a pass of the reconciler finds nothing, and the next one writes nothing (I9, I11).
func (s *stage) quiet(ctx context.Context, bad func(rule, format string, args ...any)) {
	audit, err := s.q.Audit(ctx, delayq.AuditOptions{})
	if err == nil && s.rules.vandal { // nobody knows what was counted in a key that somebody deleted
		audit.Violations = slices.DeleteFunc(audit.Violations, func(v delayq.Violation) bool { return v.Invariant == "I5" && v.ID == "" })
	}
	if err != nil {
		bad("I9", "audit: %v", err)
	} else if n := len(audit.Violations); n > 0 {
		bad("I9", "audit: %d violations, such as %+v", n, audit.Violations[0])
	}
	r, err := reconciler.New(s.q, reconciler.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	for _, which := range []string{"first", "second"} {
		before, _ := s.rdb.Do(ctx, "DEBUG", "DIGEST").Text() // an empty one differs from what follows
		rep, err := r.Pass(ctx)
		after, _ := s.rdb.Do(ctx, "DEBUG", "DIGEST").Text()
		if err != nil || rep.Drift > 0 || !rep.Complete {
			bad("I9", "%s pass after all has come to rest: %+v %v", which, rep.Counts, err)
		}
		if which == "second" && (before == "" || before != after) {
			bad("I11", "the second pass over a healthy state writes to redis")
		}
	}
	s.gauges(ctx, bad)
}

// gauges equal what can be counted.
func (s *stage) gauges(ctx context.Context, bad func(rule, format string, args ...any)) {
	stats, err := s.q.Stats(ctx)
	if err != nil {
		bad("I9", "stats: %v", err)
		return
	}
	var waiting, dead int64
	if err := s.pool.QueryRow(ctx, `select count(*) filter (where status in ('pending', 'retry')), count(*) filter (where status = 'dead')
		from delayq.task where queue > 0`).Scan(&waiting, &dead); err != nil {
		bad("I9", "%v", err)
	}
	if stats.Pending != waiting || stats.Due != 0 || stats.Processing != 0 || stats.Dead != dead {
		bad("I9", "stats say %d wait, %d are due, %d run and %d are dead; counted are %d, 0, 0 and %d",
			stats.Pending, stats.Due, stats.Processing, stats.Dead, waiting, dead)
	}
}

// cancelParked ends the tasks that were only there to be compared.
func (s *stage) cancelParked(ctx context.Context, bad func(rule, format string, args ...any)) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	var ids []string
	for id, r := range rows {
		if r.open() {
			ids = append(ids, id)
		}
	}
	first := s.calls
	for _, id := range ids {
		s.j.write(event{Kind: evCall, Call: s.nextCall(), Task: id, Op: opCancel})
	}
	got, err := s.q.CancelMany(ctx, ids)
	for i, id := range ids {
		s.j.write(event{Kind: evRet, Call: first + int64(i) + 1, Task: id, Outcome: outcomeOf(err), Answer: got[i].String()})
		if err != nil || got[i] != delayq.Cancelled {
			bad("I8", "cancel of %s, which waits: %s %v", id, got[i], err)
		}
	}
}

// connections: no process has left one behind (I13).
func (s *stage) connections(ctx context.Context, bad func(rule, format string, args ...any)) {
	var left int
	var list string
	for until := time.Now().Add(2 * time.Second); ; pause(ctx, 20*time.Millisecond) {
		err := s.pool.QueryRow(ctx, `select count(*) from pg_stat_activity
			where application_name like 'chaos %' and datname = current_database()`).Scan(&left)
		if err != nil {
			bad("I13", "%v", err)
			return
		}
		list, _ = s.rdb.ClientList(ctx).Result() // empty is fine
		if left == 0 && !strings.Contains(list, "name=chaos") {
			return
		}
		if time.Now().After(until) {
			bad("I13", "%d connections to the database and %d to redis are left", left, strings.Count(list, "name=chaos"))
			return
		}
	}
}

// collect joins all that was left behind.
func (s *stage) collect(ctx context.Context) (*history, error) {
	events, err := readJournals(s.dir)
	if err != nil {
		return nil, err
	}
	h := join(events)
	h.lease, h.maxFailed, h.maxLost = lease, maxFailed, s.maxLost()
	return h, dumpLedger(ctx, s.pool, h)
}
