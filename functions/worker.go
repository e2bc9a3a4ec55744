package functions

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-lambda-go/lambdacontext"
	"github.com/caarlos0/env/v11"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// An Option changes what Worker takes from its surroundings.
type Option func(*worker)

// WithConfig sets the configuration, and the environment is not read.
func WithConfig(cfg Config) Option {
	return func(w *worker) { w.cfg, w.explicit = cfg, true }
}

// WithRedis sets the client, and no RedisURL is needed. It is how a function logs in with
// short-lived credentials. Worker does not close it. Its ContextTimeoutEnabled should be true:
// without, a Redis that does not answer can hold an invocation past its deadline.
func WithRedis(rdb redis.UniversalClient) Option {
	return func(w *worker) { w.rdb = rdb }
}

// WithLogger sets where the worker logs. By default it writes JSON to standard error, which
// Lambda collects.
func WithLogger(log *slog.Logger) Option {
	return func(w *worker) { w.log = log }
}

// Summary is a worker invocation's answer, and what it logs. Tasks that failed are counted in
// it; they do not make the invocation a failed one.
type Summary struct {
	RequestID string   `json:"request_id"`
	Queues    []string `json:"queues"`
	ColdStart bool     `json:"cold_start"` // the first invocation of this process
	ElapsedMS int64    `json:"elapsed_ms"` // the whole invocation, with the opening of the queues

	delayq.RunStats

	// Error says why the run ended early, after it had leased tasks.
	Error string `json:"error,omitempty"`
}

// A worker is what one environment keeps from one invocation to the next.
type worker struct {
	mux      *delayq.Mux
	cfg      Config
	explicit bool  // cfg was given, not read
	err      error // why cfg cannot be used: the answer to every invocation
	rdb      redis.UniversalClient
	log      *slog.Logger
	warm     atomic.Bool

	mu     sync.Mutex
	queues []*delayq.Queue // nil until an invocation could open all of them
}

// Worker returns the handler of a function that runs due tasks with the handlers of mux, to be
// given to lambda.Start. It takes any event and does not look at it.
//
// An invocation works until its deadline is near, until a younger one of its group relieves it,
// or until there is nothing to do, as [Config] says; then it has given back what it had not
// started, and answers with a [Summary].
//
// It returns an error only when it could not work at all: the configuration is wrong, Redis or a
// queue could not be opened (the errors of delayq.Open), less than twice the margin is left
// (delayq.ErrNoTime), or nothing could be leased.
// Whatever is wrong with the configuration is one error, which every invocation returns, so that
// it shows where failed functions show. The client and the queues are made once and kept for the
// next invocations of the same process; queues that could not be opened are tried again.
//
// The handler may be called from several goroutines at once.
func Worker(mux *delayq.Mux, opts ...Option) func(context.Context, json.RawMessage) (Summary, error) {
	w := &worker{mux: mux}
	for _, opt := range opts {
		opt(w)
	}
	w.configure()
	return func(ctx context.Context, _ json.RawMessage) (Summary, error) { return w.invoke(ctx) }
}

// configure settles what the process works with, and in w.err everything that is wrong with it.
func (w *worker) configure() {
	var wrong []problem
	if w.explicit {
		wrong = w.cfg.problems()
	} else {
		w.cfg, wrong = configFrom(env.ToMap(os.Environ()))
	}
	if w.rdb == nil {
		var bad *problem
		if w.rdb, bad = w.cfg.client(); bad != nil {
			wrong = append(wrong, *bad)
		}
	}
	w.err = asError(wrong)
	if w.log == nil {
		w.log = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: w.cfg.LogLevel}))
	}
}

func (w *worker) invoke(ctx context.Context) (Summary, error) {
	start := time.Now()
	s := Summary{RequestID: requestID(ctx), Queues: w.cfg.Queues, ColdStart: !w.warm.Swap(true)}
	err := w.run(ctx, &s)
	s.ElapsedMS = time.Since(start).Milliseconds()

	log := w.log.With("request_id", s.RequestID)
	if err != nil {
		log.ErrorContext(ctx, "worker could not work", "error", err.Error(), "cold_start", s.ColdStart, "elapsed_ms", s.ElapsedMS)
		return s, err
	}
	log.InfoContext(ctx, "worker run", "summary", s)
	return s, nil
}

func (w *worker) run(ctx context.Context, s *Summary) error {
	if w.err != nil {
		return w.err
	}
	if err := w.enoughTime(ctx); err != nil {
		return err
	}
	queues, err := w.open(ctx)
	if err != nil {
		return err
	}
	runner := delayq.NewWorker(w.mux, queues...)
	runner.WorkerConfig = w.cfg.worker()
	runner.Logger = w.log
	// An event can be delivered twice, to two environments, under one request id: the id
	// alone would make one consumer of two runners.
	runner.Consumer = s.RequestID + "/" + uuid.NewString()[:8]

	s.RunStats, err = runner.Run(ctx)
	if err != nil && s.Leased == 0 {
		return fmt.Errorf("functions: nothing could be leased: %w", err)
	}
	if err != nil {
		s.Error = err.Error()
	}
	return nil
}

// enoughTime refuses an invocation that would have to stop before it started.
func (w *worker) enoughTime(ctx context.Context) error {
	need := 2 * w.cfg.worker().Margin
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= need {
		return fmt.Errorf("functions: %w: %s, need more than %s, twice the margin: raise the function's timeout or lower %sMARGIN",
			delayq.ErrNoTime, time.Until(deadline).Round(time.Millisecond), need, envPrefix)
	}
	return nil
}

// openWithin bounds the wait for a Redis that does not answer: the next tick tries again, and the
// rest of this invocation would be paid for nothing.
const openWithin = 15 * time.Second

// open returns the queues, opened by this invocation or by an earlier one.
func (w *worker) open(ctx context.Context) ([]*delayq.Queue, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queues != nil {
		return w.queues, nil
	}
	within := openWithin
	if deadline, ok := ctx.Deadline(); ok {
		within = min(within, time.Until(deadline)-w.cfg.worker().Margin) // the error must still get out
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var queues []*delayq.Queue
	for _, name := range w.cfg.Queues {
		q, err := delayq.Open(ctx, w.rdb, name, delayq.Config{
			Shards:        w.cfg.Shards,
			AllowEviction: w.cfg.AllowEviction,
			ScriptHeader:  w.cfg.ScriptHeader,
			Logger:        w.log,
		})
		if err != nil {
			return nil, fmt.Errorf("functions: %w", err)
		}
		queues = append(queues, q)
	}
	w.queues = queues
	return queues, nil
}

// requestID is Lambda's, or one of our own where the handler is called by something else.
func requestID(ctx context.Context) string {
	if lc, ok := lambdacontext.FromContext(ctx); ok && lc.AwsRequestID != "" {
		return lc.AwsRequestID
	}
	return uuid.NewString()
}
