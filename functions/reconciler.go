package functions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/delayq/toolkit/reconciler"
)

// Reconciled is a reconciler invocation's answer, and what it logs.
type Reconciled struct {
	RequestID string `json:"request_id"`
	ColdStart bool   `json:"cold_start"` // the first invocation of this process
	ElapsedMS int64  `json:"elapsed_ms"`

	// Queues has a report for each slice, in the order of the turns: one for each queue that could
	// be opened, and more for one that went on in the time that the others did not need.
	Queues []reconciler.Report `json:"queues"`
	// Errors says what went wrong, by queue.
	Errors map[string]string `json:"errors,omitempty"`
}

const (
	// withoutDeadline is the budget of an invocation that has no deadline.
	withoutDeadline = 50 * time.Second
	// shortest is the least rest of the time that is worth another slice.
	shortest = 200 * time.Millisecond
)

// A reconciling is a process that repairs queues.
type reconciling struct{ *process }

// Reconciler returns the handler of a function that repairs Redis from the ledger, to be given to
// lambda.Start and invoked every minute. It takes any event and does not look at it.
//
// Each queue gets a slice of a pass, within an even share of the time until twice the margin before
// the invocation's deadline; what one does not need goes to those after it and then to those that
// are not through with their pass, and each minute another queue begins. Where a slice stops, the
// next invocation goes on. Two invocations at once are safe.
//
// It returns an error when no queue could be worked on: the configuration is wrong, the database
// or Redis does not answer, the schema is not that of this program (delayq.ErrSchema), less than
// twice the margin is left (delayq.ErrNoTime). A context that is cancelled is no error.
//
// The handler may be called from several goroutines at once.
func Reconciler(opts ...Option) func(context.Context, json.RawMessage) (Reconciled, error) {
	r := &reconciling{newProcess(opts, true)}
	return func(ctx context.Context, _ json.RawMessage) (Reconciled, error) { return r.invoke(ctx) }
}

func (r *reconciling) invoke(ctx context.Context) (Reconciled, error) {
	start := time.Now()
	s := Reconciled{RequestID: requestID(ctx), ColdStart: !r.warm.Swap(true), Queues: []reconciler.Report{}}
	log := r.log.With("request_id", s.RequestID)
	err := r.err
	if err == nil {
		err = r.enoughTime(ctx)
	}
	if err == nil {
		err = r.run(ctx, start, &s, log)
	}
	s.ElapsedMS = time.Since(start).Milliseconds()
	switch {
	case err != nil:
		log.ErrorContext(ctx, "reconciler could not work", "error", err.Error(), "errors", s.Errors, "cold_start", s.ColdStart,
			"elapsed_ms", s.ElapsedMS)
		return s, err
	case len(s.Errors) > 0:
		log.WarnContext(ctx, "reconciler run, not of every queue", "summary", s)
	default:
		log.InfoContext(ctx, "reconciler run", "summary", s)
	}
	return s, nil
}

// run gives every queue a turn, and those with more to do others while there is time.
func (r *reconciling) run(ctx context.Context, start time.Time, s *Reconciled, log *slog.Logger) error {
	end := start.Add(withoutDeadline)
	if deadline, ok := ctx.Deadline(); ok {
		end = deadline.Add(-2 * r.margin())
	}
	var first error
	var done bool
	for left := inTurn(r.cfg.Queues, start); len(left) > 0; {
		var more []string
		for i, name := range left {
			rep, err := r.slice(ctx, name, time.Until(end)/time.Duration(len(left)-i), log)
			if rep.Queue != "" {
				s.Queues = append(s.Queues, rep)
			}
			switch {
			case err == nil:
				done = true
				if !rep.Complete {
					more = append(more, name)
				}
			case errors.Is(ctx.Err(), context.Canceled): // sent home
				return nil
			default:
				if first == nil {
					first = fmt.Errorf("functions: no queue could be reconciled; %s: %w", name, err)
				}
				s.fail(name, err)
			}
		}
		if left = more; time.Until(end) < shortest {
			break
		}
	}
	if done {
		return nil
	}
	return first
}

func (s *Reconciled) fail(queue string, err error) {
	if s.Errors == nil {
		s.Errors = map[string]string{}
	}
	s.Errors[queue] = err.Error()
}

// inTurn begins with another queue each minute: what a slow one takes from those after it, it does
// not take from the same ones for ever.
func inTurn(queues []string, at time.Time) []string {
	first := int(at.Unix() / 60 % int64(len(queues)))
	return slices.Concat(queues[first:], queues[:first])
}

// slice works on one queue within its share of the time. One that is a little late is not cut off, and
// one that hangs ends a margin after its share, which leaves the last one another margin to answer.
func (r *reconciling) slice(ctx context.Context, name string, share time.Duration, log *slog.Logger) (reconciler.Report, error) {
	if share <= 0 {
		return reconciler.Report{}, errors.New("the queues before it left it no time")
	}
	end := time.Now().Add(share)
	ctx, cancel := context.WithDeadline(ctx, end.Add(r.margin()))
	defer cancel()
	q, err := r.open(ctx, name)
	if err != nil {
		return reconciler.Report{}, err
	}
	rec, err := reconciler.New(q, reconciler.Config{Logger: log})
	if err != nil {
		return reconciler.Report{}, err
	}
	return rec.Slice(ctx, time.Until(end))
}
