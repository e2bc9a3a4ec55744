package functions

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-lambda-go/lambdacontext"
	"github.com/caarlos0/env/v11"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// An Option changes what a function takes from its surroundings.
type Option func(*process)

// WithConfig sets the configuration, and the environment is not read.
func WithConfig(cfg Config) Option {
	return func(p *process) { p.cfg, p.explicit = cfg, true }
}

// WithRedis sets the client, and no RedisURL is needed. It is how a function logs in with
// short-lived credentials. The function does not close it. Its ContextTimeoutEnabled should be
// true: without, a Redis that does not answer can hold an invocation past its deadline.
func WithRedis(rdb redis.UniversalClient) Option {
	return func(p *process) { p.rdb = rdb }
}

// WithLedger sets the ledger, and no DatabaseURL is needed. It is how a function shares the pool
// of its handlers, or logs in to the database with short-lived credentials.
func WithLedger(led delayq.Ledger) Option {
	return func(p *process) { p.led = led }
}

// WithLogger sets where the function logs. By default it writes JSON to standard error, which
// Lambda collects.
func WithLogger(log *slog.Logger) Option {
	return func(p *process) { p.log = log }
}

// A process is what one environment keeps from one invocation to the next.
type process struct {
	cfg      Config
	explicit bool  // cfg was given, not read
	err      error // why cfg cannot be used: the answer to every invocation
	rdb      redis.UniversalClient
	database *pgxpool.Config // nil where led was given, or there is to be none
	log      *slog.Logger
	metrics  io.Writer // the monitor's
	warm     atomic.Bool

	mu     sync.Mutex
	pool   *pgxpool.Pool
	led    delayq.Ledger            // nil until an invocation has seen its schema, or without one
	queues map[string]*delayq.Queue // opened so far
}

// newProcess settles what the process works with, and in its err everything that is wrong with it.
func newProcess(opts []Option, needLedger bool) *process {
	p := &process{queues: map[string]*delayq.Queue{}}
	for _, opt := range opts {
		opt(p)
	}
	var wrong []problem
	if p.explicit {
		wrong = p.cfg.problems()
	} else {
		p.cfg, wrong = configFrom(env.ToMap(os.Environ()))
	}
	note := func(bad *problem) {
		if bad != nil {
			wrong = append(wrong, *bad)
		}
	}
	var bad *problem
	if p.rdb == nil {
		p.rdb, bad = p.cfg.client()
		note(bad)
	}
	if p.led == nil {
		p.database, bad = p.cfg.database()
		note(bad)
		if p.cfg.DatabaseURL == "" {
			wrong = append(wrong, p.cfg.withoutLedger(needLedger)...)
		}
	}
	p.err = asError(wrong)
	if p.log == nil {
		p.log = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: p.cfg.LogLevel}))
	}
	return p
}

// margin is Config.Margin or its default.
func (p *process) margin() time.Duration { return p.cfg.worker().Margin }

// enoughTime refuses an invocation that would have to stop before it started.
func (p *process) enoughTime(ctx context.Context) error {
	need := 2 * p.margin()
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= need {
		return fmt.Errorf("functions: %w: %s, need more than %s, twice the margin: raise the function's timeout or lower %sMARGIN",
			delayq.ErrNoTime, time.Until(deadline).Round(time.Millisecond), need, envPrefix)
	}
	return nil
}

// open returns a queue, opened by this invocation or by an earlier one.
func (p *process) open(ctx context.Context, name string) (*delayq.Queue, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.queues[name]; q != nil {
		return q, nil
	}
	if err := p.openLedger(ctx); err != nil {
		return nil, err
	}
	q, err := delayq.Open(ctx, p.rdb, name, delayq.Config{
		Shards:        p.cfg.Shards,
		Ledger:        p.led,
		Horizon:       p.cfg.Horizon,
		AllowEviction: p.cfg.AllowEviction,
		ScriptHeader:  p.cfg.ScriptHeader,
		Logger:        p.log,
	})
	if err != nil {
		return nil, err
	}
	p.queues[name] = q
	return q, nil
}

// ledger returns the ledger, opened by this invocation or by an earlier one.
func (p *process) ledger(ctx context.Context) (delayq.Ledger, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.openLedger(ctx); err != nil {
		return nil, err
	}
	return p.led, nil
}

// openLedger looks at the database's schema, once. Its caller holds mu.
func (p *process) openLedger(ctx context.Context) error {
	if p.led != nil || p.database == nil {
		return nil
	}
	if p.pool == nil {
		pool, err := pgxpool.NewWithConfig(ctx, p.database)
		if err != nil {
			return err
		}
		p.pool = pool
	}
	led, err := ledger.Open(ctx, p.pool)
	if err != nil {
		return err
	}
	p.led = led
	return nil
}

// requestID is Lambda's, or one of our own where the handler is called by something else.
func requestID(ctx context.Context) string {
	if lc, ok := lambdacontext.FromContext(ctx); ok && lc.AwsRequestID != "" {
		return lc.AwsRequestID
	}
	return uuid.NewString()
}
