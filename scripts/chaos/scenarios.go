package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// lease is what consumers ask for. Everything that takes long takes a few of them.
const lease = 2 * time.Second

// farHorizon lets Redis hold parked tasks, so that it can be compared with the ledger; nearHorizon makes most tasks cross it.
const (
	farHorizon  = 3 * time.Hour
	nearHorizon = 2 * time.Second
)

// A size is how much of a scenario is played.
type size struct {
	tasks int
	lasts time.Duration // of enqueueing, faults and calm
	calm  time.Duration // without faults, at its end
}

// A scenario is a workload and the faults that go with it.
type scenario struct {
	name, letter, about string
	full, quick         size
	nemesis             func(ctx context.Context, s *stage) error // until ctx ends; it leaves all servers well
	demands             func(s *stage, h *history, v *verdict)    // what must have happened, or the scenario has shown nothing
	alone               func(ctx context.Context, s *stage) error // instead of workload and nemesis

	mix        func(m *mix)
	rules      rules
	redisArgs  []string
	horizon    time.Duration
	maxSkew    time.Duration
	most       int  // lost leases, 0 = as usual
	consumers  int  // 0 = as usual
	proxied    bool // one proxy in front of each server
	ownProxies bool // one for each consumer in front of the database
	clocks     bool
}

func (sc *scenario) maxLost() int {
	if sc.most > 0 {
		return sc.most
	}
	return 5
}

func (sc *scenario) consumerCount() int {
	if sc.consumers > 0 {
		return sc.consumers
	}
	return 4
}

// restTime is how long after the faults everything that is due must have ended: 10 s at a lease of 2 s, and more where poison
// must take its last consumer down.
func (sc *scenario) restTime() time.Duration {
	return 5*lease + time.Duration(sc.most)*2*lease
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

var appendOnly = []string{"--appendonly", "yes", "--appendfsync", "everysec"}

// scenarios in the order of their letters.
var scenarios = []*scenario{
	{
		name: "ambiguous", letter: "B", about: "replies of enqueue, lease, claim, finish and COMMIT are dropped, pipelines cut in half",
		full: size{3000, seconds(35), seconds(5)}, quick: size{900, seconds(8), seconds(2)},
		nemesis: dropReplies, proxied: true, horizon: farHorizon,
		mix: func(m *mix) { m.Moved, m.Replaced = 200, 100 },
		demands: func(s *stage, h *history, v *verdict) {
			v.demand(h.inDoubt() > 0, "no producer was left in doubt")
			v.demand(s.toRedis.Hits() > 0 && s.toPostgres.Hits() > 0, "no reply was dropped")
		},
	},
	{
		name: "kill-redis", letter: "C", about: "redis-server is killed and restarted with its AOF, and is away for up to one and a half leases",
		full: size{20000, seconds(60), seconds(5)}, quick: size{1500, seconds(9), seconds(2)},
		nemesis: killRedis, redisArgs: appendOnly, horizon: farHorizon, rules: rules{blameless: true},
		mix: func(m *mix) { m.Slow, m.SlowWork = 12, 3*lease },
		demands: func(_ *stage, h *history, v *verdict) {
			v.demand(h.sum(func(s *delayq.RunStats) int64 { return s.FromLedger }) > 0, "no worker leased from the ledger while redis was away")
		},
	},
	{
		name: "power-loss", letter: "D", about: "redis-server loses the end of its AOF, then all of it",
		full: size{5000, seconds(20), seconds(5)}, quick: size{1500, seconds(8), seconds(2)},
		nemesis: losePower, redisArgs: appendOnly, horizon: farHorizon, rules: rules{blameless: true, vandal: true},
		demands: func(_ *stage, h *history, v *verdict) {
			refused := h.sum(func(s *delayq.RunStats) int64 { return s.Refused })
			v.demand(refused > 0, "no claim was refused, although redis came back with what had ended")
		},
	},
	{
		name: "vandal", letter: "E", about: "FLUSHALL, FLUSHDB, SWAPDB, structural keys and records deleted, SCRIPT FLUSH",
		full: size{5000, seconds(40), seconds(5)}, quick: size{1500, seconds(10), seconds(2)},
		nemesis: vandalize, horizon: farHorizon, rules: rules{blameless: true, vandal: true},
		mix: func(m *mix) { m.Slow = 40 },
		demands: func(_ *stage, h *history, v *verdict) {
			v.demand(h.drift > 0, "the reconcilers found nothing to repair")
		},
	},
	{
		name: "stale-consumer", letter: "F", about: "consumers are stopped past their leases, before and after the claim, and go on then",
		full: size{500, seconds(25), seconds(5)}, quick: size{250, seconds(9), seconds(2)},
		nemesis: stallConsumers, horizon: farHorizon, ownProxies: true,
		mix: func(m *mix) { m.Work, m.Slow, m.Ahead = lease, 150, lease },
		demands: func(_ *stage, h *history, v *verdict) {
			v.demand(h.stale > 0, "no stale report was refused")
		},
	},
	{
		name: "massacre", letter: "G", about: "a consumer is killed every half second, some end by SIGTERM, and one task in a hundred kills its own",
		full: size{5000, seconds(45), seconds(5)}, quick: size{1200, seconds(8), seconds(2)},
		nemesis: massacre, horizon: nearHorizon, most: 3, rules: rules{blameless: true},
		mix: func(m *mix) { m.Poison, m.Slow = 10, 20 },
		demands: func(_ *stage, h *history, v *verdict) {
			v.demand(len(h.deaths) > 0, "nobody died")
		},
	},
	{
		name: "postgres", letter: "J", about: "PostgreSQL restarts, in order or not, backends are terminated, transactions dawdle",
		full: size{5000, seconds(60), seconds(5)}, quick: size{1200, seconds(10), seconds(2)},
		nemesis: breakPostgres, horizon: farHorizon,
		mix: func(m *mix) { m.Dawdling, m.DawdleFor = 20, 3*time.Second },
	},
	{
		name: "clocks", letter: "K", about: "redis' clock steps by ten minutes both ways, and a server that is 30 s ahead takes over",
		full: size{1000, seconds(30), seconds(5)}, quick: size{600, seconds(8), seconds(2)},
		nemesis: moveClocks, clocks: true, maxSkew: time.Hour, horizon: farHorizon, rules: rules{blameless: true, redisClock: true},
		redisArgs: appendOnly,
		mix:       func(m *mix) { m.Slow = 60 },
	},
	{
		name: "errors", letter: "L", about: "each error that a server answers: what must go on meanwhile, and that all is well afterwards",
		full: size{400, seconds(40), seconds(5)}, quick: size{200, seconds(12), seconds(2)},
		nemesis: errorMatrix, horizon: farHorizon, proxied: false,
	},
	{
		name: "pairs", letter: "M", about: "two transitions of one task at once, many times, in both orders and in between",
		full: size{350, seconds(20), 0}, quick: size{70, seconds(5), 0},
		alone: transitionPairs, horizon: farHorizon,
	},
}

func scenarioNamed(name string) *scenario {
	for _, sc := range scenarios {
		if sc.name == name || sc.letter == name {
			return sc
		}
	}
	return nil
}

// demand is broken when a scenario has not done what it is there for.
func (v *verdict) demand(ok bool, what string) {
	if !ok {
		v.problem("bite", "", what)
	}
}

// dropReplies arms one fault after another at both proxies.
func dropReplies(ctx context.Context, s *stage) error {
	for s.sleep(ctx, 15*time.Millisecond, 50*time.Millisecond) {
		switch s.rng.IntN(8) {
		case 0, 1:
			s.toRedis.DropReply("evalsha")
		case 2:
			s.toRedis.CutReply("evalsha", 4)
		case 3:
			s.toRedis.DropRequest("evalsha")
		case 4, 5:
			s.toPostgres.DropReply("commit")
		case 6:
			s.toPostgres.DropReply("stmtcache") // a prepared statement: lease, claim, finish, insert
		default:
			s.toPostgres.CutReply("stmtcache", 4)
		}
	}
	s.toRedis.DropReply("\x00 nothing contains this") // disarm
	s.toPostgres.DropReply("\x00 nothing contains this")
	s.j.write(event{Kind: evFault, Count: int64(s.toRedis.Hits() + s.toPostgres.Hits()), Note: "replies and requests were dropped"})
	return nil
}

// killRedis keeps the server away for a moment, then for so long that workers must do without, in turn.
func killRedis(ctx context.Context, s *stage) error {
	for round := 0; s.sleep(ctx, 200*time.Millisecond, 1500*time.Millisecond); round++ {
		s.fault("kill redis")
		s.redis.Kill()
		if round%2 == 0 {
			s.sleep(ctx, lease, lease*3/2)
		} else {
			s.sleep(ctx, 50*time.Millisecond, 200*time.Millisecond)
		}
		if err := s.redis.Restart(); err != nil {
			return err
		}
	}
	return nil
}

// losePower cuts the end off the AOF of a stopped server, and once all of it. A cut within a command leaves half a transaction in
// the file (seen with Redis 7.0.15: "Truncating the AOF" keeps its MULTI), which the next start runs together with what was
// appended since: so here, too, tasks may be found in pieces, and counters that do not add up.
func losePower(ctx context.Context, s *stage) error {
	for round := 0; s.sleep(ctx, 800*time.Millisecond, 1500*time.Millisecond); round++ {
		s.redis.Kill()
		dir := filepath.Join(s.redis.Dir(), "appendonlydir")
		if round%3 == 2 {
			s.fault("the AOF is gone")
			if err := removeAll(dir); err != nil {
				return err
			}
		} else {
			s.fault("the AOF has lost its end")
			if err := truncateLast(dir, 64<<10); err != nil {
				return err
			}
		}
		if err := s.redis.Restart(); err != nil {
			return fmt.Errorf("after a truncation: %w", err)
		}
	}
	return nil
}

// vandalize deletes what Redis holds, in turn by every means, in an order of the seed.
func vandalize(ctx context.Context, s *stage) error {
	ways := s.vandalism()
	var order []int
	for s.sleep(ctx, 400*time.Millisecond, 1000*time.Millisecond) {
		if len(order) == 0 {
			order = s.rng.Perm(len(ways))
		}
		way := ways[order[0]]
		order = order[1:]
		s.fault("%s", way.name)
		if err := way.do(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	return nil
}

// stallConsumers stops two processes at a time for longer than their leases, or keeps what they say from the database: claims and
// reports then arrive when others have the task.
func stallConsumers(ctx context.Context, s *stage) error {
	for s.sleep(ctx, 50*time.Millisecond, 200*time.Millisecond) {
		way := s.rng.IntN(4)
		var victims []*process
		for range 2 {
			p := s.consumer()
			if p == nil || len(victims) > 0 && p == victims[0] {
				continue
			}
			victims = append(victims, p)
			if way < 2 {
				s.fault("the database is silent for %s", p.Name)
				p.toPostgres.BlackHole(true)
			} else {
				s.fault("stop %s", p.Name)
				p.pause()
			}
		}
		if way == 3 { // and Redis forgets the leases meanwhile
			s.sleep(ctx, 100*time.Millisecond, lease/2)
			if err := s.rdb.FlushAll(context.WithoutCancel(ctx)).Err(); err != nil {
				return err
			}
		}
		s.sleep(ctx, lease*17/16, lease*5/4)
		for _, p := range victims {
			p.toPostgres.BlackHole(false)
			p.resume()
			s.sleep(ctx, 0, lease/4)
		}
	}
	return nil
}

// massacre kills and replaces consumers; every third ends in order.
func massacre(ctx context.Context, s *stage) error {
	for s.sleep(ctx, 300*time.Millisecond, 700*time.Millisecond) {
		p := s.consumer()
		switch {
		case p == nil:
		case s.rng.IntN(3) == 0:
			s.fault("end %s", p.Name)
			if err := p.terminate(lease + 3*time.Second); err != nil {
				return err
			}
		default:
			s.fault("kill %s", p.Name)
			p.kill()
		}
		if err := s.replaceDead(); err != nil {
			return err
		}
	}
	return nil
}

// breakPostgres restarts the server and cuts its clients off.
func breakPostgres(ctx context.Context, s *stage) error {
	terminate := func(role string) error {
		_, err := s.pool.Exec(context.WithoutCancel(ctx), `select pg_terminate_backend(pid) from pg_stat_activity
			where datname = current_database() and application_name like 'chaos ' || $1`, role)
		return err
	}
	restart := func(end func() error, down time.Duration) error {
		if err := end(); err != nil {
			return err
		}
		s.sleep(ctx, 0, down)
		return s.pg.Restart()
	}
	ways := []struct {
		name string
		do   func() error
	}{
		{"postgres restarts in order", func() error { return restart(s.pg.Shutdown, lease/4) }},
		{"postgres crashes", func() error { return restart(s.pg.Immediate, lease/2) }},
		{"postgres is killed, and away for longer than a lease", func() error {
			return restart(func() error { s.pg.Kill(); return nil }, lease*5/4)
		}},
		{"backends of consumers are terminated", func() error { return terminate("consumer") }},
		{"backends of reconcilers are terminated", func() error { return terminate("reconciler") }},
		{"backends of producers are terminated", func() error { return terminate("producer") }},
		{"all backends are terminated", func() error { return terminate("%") }},
		{"postgres is silent", func() error {
			defer func() { _ = s.pg.Resume() }() // it runs, so it can be signalled
			err := s.pg.Pause()
			s.sleep(ctx, lease/4, lease*5/4)
			return err
		}},
	}
	var order []int
	for s.sleep(ctx, 200*time.Millisecond, 800*time.Millisecond) {
		if len(order) == 0 {
			order = s.rng.Perm(len(ways))
		}
		way := ways[order[0]]
		order = order[1:]
		s.fault("%s", way.name)
		if err := way.do(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	return nil
}
