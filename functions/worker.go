package functions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/delayq/toolkit/delayq"
)

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

// A worker is a process that runs tasks.
type worker struct {
	*process
	mux *delayq.Mux
}

// Worker returns the handler of a function that runs due tasks with the handlers of mux, to be
// given to lambda.Start. It takes any event and does not look at it.
//
// An invocation works until its deadline is near, until a younger one of its group relieves it,
// or until there is nothing to do, as [Config] says; then it has given back what it had not
// started, and answers with a [Summary].
//
// It returns an error only when it could not work at all: the configuration is wrong, a queue could
// not be opened (the errors of delayq.Open, and with a ledger those of ledger.Open), less than twice
// the margin is left (delayq.ErrNoTime), or nothing could be leased. With a ledger it works although
// Redis is away.
// Whatever is wrong with the configuration is one error, which every invocation returns, so that
// it shows where failed functions show. The client and the queues are made once and kept for the
// next invocations of the same process; queues that could not be opened are tried again.
//
// The handler may be called from several goroutines at once.
func Worker(mux *delayq.Mux, opts ...Option) func(context.Context, json.RawMessage) (Summary, error) {
	w := &worker{newProcess(opts, false), mux}
	return func(ctx context.Context, _ json.RawMessage) (Summary, error) { return w.invoke(ctx) }
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
	queues, err := w.openAll(ctx)
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

// openWithin bounds the wait for a Redis that does not answer: the next tick tries again, and the
// rest of this invocation would be paid for nothing.
const openWithin = 15 * time.Second

// openAll returns all of the queues.
func (w *worker) openAll(ctx context.Context) ([]*delayq.Queue, error) {
	within := openWithin
	if deadline, ok := ctx.Deadline(); ok {
		within = min(within, time.Until(deadline)-w.margin()) // the error must still get out
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	queues := make([]*delayq.Queue, len(w.cfg.Queues))
	for i, name := range w.cfg.Queues {
		var err error
		if queues[i], err = w.open(ctx, name); err != nil {
			return nil, fmt.Errorf("functions: %w", err)
		}
	}
	return queues, nil
}
