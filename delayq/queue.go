package delayq

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Queue is one named delay queue, safe for concurrent use. Most callers need only Enqueue, Cancel and Reschedule; workers
// use NewWorker rather than Lease and Ack. It owns no connection and no goroutine, so there is nothing to close.
type Queue struct {
	rdb        redis.UniversalClient
	name       string
	cfg        Config
	maxPayload int           // as stored with the queue
	retention  time.Duration // as stored with the queue
	scripts    *scripts
	shards     []*shard
	turn       turn
	clock      func() string // the clock override of scripts; tests alone set it

	lq     LedgerQueue // nil without Config.Ledger
	since  time.Time   // when the ledger first knew the queue
	teller teller
	warned atomic.Int64 // when the log was last told that Redis was not (Unix ns)
	quiet  atomic.Int64 // until then (Unix ns) nobody tells Redis anything: it did not answer
}

// A shard is one part of a queue: a set of keys in one slot, and the callers that enqueue to it together.
type shard struct {
	q     *Queue
	index int
	keys  []string
	group committer

	patience patience
}

// turn hands out starting points, so that shards are served fairly.
type turn struct {
	mu sync.Mutex
	n  int
}

func (t *turn) next(of int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n++
	return t.n % of
}

// Open opens a queue, and creates it when it is new. rdb is any go-redis client (single, Sentinel, Cluster, Ring) and stays
// the caller's; set ContextTimeoutEnabled on it, or deadlines of contexts do not reach reads already under way.
//
// Open checks what it can without special rights and fails with ErrEviction, ErrServerVersion, ErrClockSkew, ErrShards,
// ErrSchema, ErrNoQueue (with Config.NoCreate), ErrLedger or ErrInvalid; what it cannot check it tells Config.OnWarning.
//
// With Config.Ledger the ledger must answer. Redis need not: it is warned of, and what Redis should know is brought over later.
func Open(ctx context.Context, rdb redis.UniversalClient, name string, cfg Config) (*Queue, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(validQueue(name), cfg.validate()); err != nil {
		return nil, fmt.Errorf("delayq: open: %w", err)
	}
	q := &Queue{rdb: rdb, name: name, cfg: cfg, scripts: newScripts(cfg.ScriptHeader), clock: func() string { return "0" }}
	if cfg.Ledger != nil {
		if err := q.openBooked(ctx); err != nil {
			return nil, err
		}
		return q, nil
	}
	if err := q.checkServer(ctx); err != nil {
		return nil, err
	}
	q.maxPayload, q.retention = cfg.MaxPayload, cfg.Retention
	first := &shard{q: q, keys: keysOf(name, 0)}
	if cfg.Shards == 0 && !cfg.NoCreate {
		if err := first.alone(ctx); err != nil {
			return nil, err
		}
	}
	sent := time.Now()
	stored, err := first.init(ctx, cfg.Shards, !cfg.NoCreate)
	if err != nil {
		return nil, err
	}
	if q.clock() == "0" {
		if err := q.checkSkew(stored.now, sent); err != nil {
			return nil, err
		}
	}
	q.maxPayload, q.retention = stored.maxPayload, stored.retention
	q.shards = append(q.shards, first)
	for i := 1; i < stored.shards; i++ {
		sh := &shard{q: q, index: i, keys: keysOf(name, i)}
		if _, err := sh.init(ctx, stored.shards, !cfg.NoCreate); err != nil {
			return nil, err
		}
		q.shards = append(q.shards, sh)
	}
	return q, nil
}

// alone refuses to make a queue of one shard where shard 0 is missing and another is there: on a cluster, a lost node. Only who
// knows the count can make it again.
func (sh *shard) alone(ctx context.Context) error {
	if _, err := sh.init(ctx, 0, false); !errors.Is(err, ErrNoQueue) {
		return nil // it is there, or the next call meets the error
	}
	second := &shard{q: sh.q, index: 1, keys: keysOf(sh.q.name, 1)}
	if _, err := second.init(ctx, 0, false); errors.Is(err, ErrNoQueue) {
		return nil
	}
	return fmt.Errorf("delayq: open %s: %w: shard 0 is missing but shard 1 is there; set Config.Shards", sh.q.name, ErrShards)
}

// Name is the queue's name.
func (q *Queue) Name() string { return q.name }

// Shards is how many shards the queue has.
func (q *Queue) Shards() int { return len(q.shards) }

// MaxPayload is the most bytes a payload may have.
func (q *Queue) MaxPayload() int { return q.maxPayload }

func (q *Queue) shard(id string) *shard { return q.shards[shardOf(id, len(q.shards))] }

// mode is what the queue stores as its mode: "ledger" when it has one, else empty.
func (q *Queue) mode() string {
	if q.lq != nil || q.cfg.Ledger != nil { // the latter while it is opened
		return "ledger"
	}
	return ""
}

// storedConfig is what a queue keeps of its configuration, and its clock.
type storedConfig struct {
	shards     int
	retention  time.Duration
	maxPayload int
	now        time.Time
}

// init creates or checks the shard.
func (sh *shard) init(ctx context.Context, shards int, create bool) (storedConfig, error) {
	q := sh.q
	reply, err := sh.run(ctx, q.scripts.init, []any{
		q.clock(), bit(create), schemaVersion, strconv.Itoa(shards), ms(q.retention), q.maxPayload, randomHex(), q.mode(),
	}, nil)
	if err != nil {
		return storedConfig{}, err
	}
	f, ok := reply.([]any)
	if !ok || len(f) != 7 {
		return storedConfig{}, errReply
	}
	n := make([]int64, len(f))
	for _, i := range []int{0, 2, 3, 4, 5, 6} {
		if n[i], err = number(f[i]); err != nil {
			return storedConfig{}, err
		}
	}
	switch n[0] {
	case codeNoQueue:
		err = ErrNoQueue
	case codeMode:
		err = ErrLedger
	case codeShards:
		err = fmt.Errorf("%w: the queue has %d, Config.Shards says %d", ErrShards, n[3], shards)
	case codeSchema:
		err = fmt.Errorf("%w: the data has %d, this package reads %s", ErrSchema, n[2], schemaVersion)
	}
	if err != nil {
		return storedConfig{}, fmt.Errorf("delayq: open %s: %w", q.name, err)
	}
	return storedConfig{int(n[3]), time.Duration(n[4]) * time.Millisecond, int(n[5]), time.UnixMicro(n[6])}, nil
}

// checkSkew compares clocks; the call's own duration is the error of the comparison.
func (q *Queue) checkSkew(server, sent time.Time) error {
	skew := server.Sub(sent)
	if slack := time.Since(sent); skew > 0 {
		skew = max(0, skew-slack)
	}
	if skew.Abs() > q.cfg.MaxSkew {
		return fmt.Errorf("delayq: open %s: %w: redis is %s ahead of this machine, Config.MaxSkew is %s", q.name, ErrClockSkew, skew.Round(time.Millisecond), q.cfg.MaxSkew)
	}
	if skew.Abs() > time.Second {
		q.cfg.OnWarning(Warning{"skew", fmt.Sprintf("redis' clock is %s ahead of this machine's", skew.Round(time.Millisecond))})
	}
	return nil
}

// checkServer looks at what INFO tells without CONFIG rights, on every master of a cluster. A server that does not answer INFO
// is warned of, not refused.
func (q *Queue) checkServer(ctx context.Context) error {
	var mu sync.Mutex
	infos := map[string]bool{}
	ask := func(ctx context.Context, rdb redis.Cmdable) error {
		info, err := rdb.Info(ctx).Result()
		var reply redis.Error
		if err != nil && !errors.As(err, &reply) {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		infos[infoField(info, "redis_version")+" "+infoField(info, "maxmemory_policy")] = true
		return nil
	}
	var err error
	switch rdb := q.rdb.(type) {
	case *redis.ClusterClient:
		err = rdb.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return ask(ctx, c) })
	case *redis.Ring:
		err = rdb.ForEachShard(ctx, func(ctx context.Context, c *redis.Client) error { return ask(ctx, c) })
	default:
		err = ask(ctx, rdb)
	}
	if err != nil {
		return fmt.Errorf("delayq: open %s: %w", q.name, err)
	}
	for info := range infos {
		version, policy, _ := strings.Cut(info, " ")
		if err := q.judge(version, policy); err != nil {
			return err
		}
	}
	return nil
}

func (q *Queue) judge(version, policy string) error {
	if version != "" && older(version, 6, 2) {
		return fmt.Errorf("delayq: open %s: %w: redis %s, need 6.2", q.name, ErrServerVersion, version)
	}
	switch {
	case policy == "":
		q.cfg.OnWarning(Warning{"unchecked", "the server does not tell its eviction policy: it must be noeviction"})
	case policy == "noeviction":
	case strings.HasPrefix(policy, "volatile-"): // evicts only keys with a time to live, and these have none
		q.cfg.OnWarning(Warning{"eviction", "maxmemory-policy is " + policy + ": safe for this queue, noeviction is better"})
	case q.cfg.AllowEviction:
		q.cfg.OnWarning(Warning{"eviction", "maxmemory-policy is " + policy + ": tasks can vanish"})
	default:
		return fmt.Errorf("delayq: open %s: %w: maxmemory-policy is %s, set noeviction (or a volatile one, or Config.AllowEviction)", q.name, ErrEviction, policy)
	}
	return nil
}

func infoField(info, field string) string {
	_, rest, ok := strings.Cut(info, field+":")
	if !ok {
		return ""
	}
	value, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(value)
}

func older(version string, major, minor int) bool {
	a, rest, _ := strings.Cut(version, ".")
	b, _, _ := strings.Cut(rest, ".")
	x, err1 := strconv.Atoi(a)
	y, err2 := strconv.Atoi(b)
	if err1 != nil || err2 != nil {
		return false
	}
	return x < major || x == major && y < minor
}

// withEpoch repeats call after making the shard again, when Redis has lost it (FLUSHALL, a restart without data). It may
// lose it again in between, but not for ever.
func (sh *shard) withEpoch(ctx context.Context, call func() error) error {
	for try := 0; ; try++ {
		err := call()
		if !errors.Is(err, errNoEpoch) || try == 3 {
			return err
		}
		if err := sh.restore(ctx); err != nil {
			return err
		}
	}
}

func (sh *shard) restore(ctx context.Context) error {
	q := sh.q
	q.cfg.OnWarning(Warning{"data_lost", fmt.Sprintf("redis has lost shard %d of queue %s; it is made again, empty", sh.index, q.name)})
	// Shard 0 first: it tells the count to whoever opens the queue next. If somebody has made it with another meanwhile, that is
	// an error here, and not tasks in shards that nobody serves.
	if _, err := q.shards[0].init(ctx, len(q.shards), true); err != nil {
		return err
	}
	_, err := sh.init(ctx, len(q.shards), true)
	return err
}

func randomHex() string { return hex.EncodeToString(randomToken()) }

// randomToken is 128 random bits: the name of one lease call. Never a counter, which would restart when Redis loses data.
func randomToken() []byte {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	if sabotage == "token-per-process" {
		copy(b, processToken)
	}
	return b
}
