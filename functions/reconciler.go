package functions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/delayq/toolkit/reconciler"
)

// Reconciled is a reconciler invocation's answer, and what it logs.
type Reconciled struct {
	RequestID string `json:"request_id"`
	ColdStart bool   `json:"cold_start"` // the first invocation of this process
	ElapsedMS int64  `json:"elapsed_ms"`

	// Queues has a report for each queue that had its turn, in the order of the turns.
	Queues []reconciler.Report `json:"queues"`
	// Errors says what went wrong, by queue.
	Errors map[string]string `json:"errors,omitempty"`
}

// withoutDeadline is the budget of an invocation that has no deadline.
const withoutDeadline = 50 * time.Second

type reconciling struct{ *process }

// Reconciler returns the handler of a function that repairs Redis from the ledger, to be given to
// lambda.Start and invoked every minute. It takes any event and does not look at it.
//
// Each queue gets a slice of a pass, within an even share of the time until the invocation's
// deadline less the margin; what one does not need goes to those after it, and each minute
// another queue begins. Where a slice stops, the next invocation goes on. Two invocations at once
// are safe.
//
// It returns an error when no queue could be worked on: the configuration is wrong, the database
// or Redis does not answer, the schema is not that of this program (delayq.ErrSchema), less than
// twice the margin is left (delayq.ErrNoTime).
func Reconciler(opts ...Option) func(context.Context, json.RawMessage) (Reconciled, error) {
	r := &reconciling{newProcess(opts, true)}
	return func(ctx context.Context, _ json.RawMessage) (Reconciled, error) { return r.invoke(ctx) }
}

func (r *reconciling) invoke(ctx context.Context) (Reconciled, error) {
	start := time.Now()
	s := Reconciled{RequestID: requestID(ctx), ColdStart: !r.warm.Swap(true), Queues: []reconciler.Report{}}
	err := r.err
	if err == nil {
		err = r.enoughTime(ctx)
	}
	if err == nil {
		err = r.run(ctx, start, &s)
	}
	s.ElapsedMS = time.Since(start).Milliseconds()
	log := r.log.With("request_id", s.RequestID)
	if err != nil {
		log.ErrorContext(ctx, "reconciler could not work", "error", err.Error(), "cold_start", s.ColdStart, "elapsed_ms", s.ElapsedMS)
		return s, err
	}
	log.InfoContext(ctx, "reconciler run", "summary", s)
	return s, nil
}

func (r *reconciling) run(ctx context.Context, start time.Time, s *Reconciled) error {
	end := start.Add(withoutDeadline)
	if deadline, ok := ctx.Deadline(); ok {
		end = deadline.Add(-r.margin())
	}
	names := r.cfg.Queues
	first := int(start.Unix()/60) % len(names)
	var errs []error
	for i := range names {
		name := names[(first+i)%len(names)]
		rep, err := r.slice(ctx, name, time.Until(end)/time.Duration(len(names)-i))
		if err != nil {
			errs = append(errs, err)
			if s.Errors == nil {
				s.Errors = map[string]string{}
			}
			s.Errors[name] = err.Error()
		}
		if rep.Queue != "" {
			s.Queues = append(s.Queues, rep)
		}
	}
	if len(errs) == len(names) {
		return fmt.Errorf("functions: no queue could be reconciled: %w", errors.Join(errs...))
	}
	return nil
}

// slice works on one queue within its share of the time. The context ends a call that hangs.
func (r *reconciling) slice(ctx context.Context, name string, share time.Duration) (reconciler.Report, error) {
	if share <= 0 {
		return reconciler.Report{}, errors.New("no time was left for it")
	}
	ctx, cancel := context.WithTimeout(ctx, share+r.margin()/2)
	defer cancel()
	end := time.Now().Add(share)
	q, err := r.open(ctx, name)
	if err != nil {
		return reconciler.Report{}, err
	}
	rec, err := reconciler.New(q, reconciler.Config{Logger: r.log})
	if err != nil {
		return reconciler.Report{}, err
	}
	return rec.Slice(ctx, time.Until(end))
}
