package delayq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// A handler's verdict is its error: nil means done, any error another attempt by the retry curve, and the ones made here
// something else. They may be wrapped.

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent says that another attempt would fail too: the task goes to the dead letters at once. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type retryAfterError struct {
	after time.Duration
	err   error
}

func (e *retryAfterError) Error() string { return fmt.Sprintf("retry after %s: %v", e.after, e.err) }
func (e *retryAfterError) Unwrap() error { return e.err }

// RetryAfter asks for the next attempt after d instead of the curve's delay; never earlier. The attempt counts.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		err = errors.New("retry requested")
	}
	return &retryAfterError{d, err}
}

type snoozeError struct{ d time.Duration }

func (e *snoozeError) Error() string { return "snoozed for " + e.d.String() }

// Snooze puts the task off by d without counting an attempt, for work that is not ready yet or a downstream that is ill.
func Snooze(d time.Duration) error { return &snoozeError{d} }

type remainingError struct {
	payload []byte
	err     error
}

func (e *remainingError) Error() string { return "partly done: " + e.err.Error() }
func (e *remainingError) Unwrap() error { return e.err }

// Remaining says that a part succeeded: the task is retried with the payload of the rest alone. The attempt counts.
func Remaining(payload []byte, err error) error {
	if err == nil {
		err = errors.New("some parts remain")
	}
	return &remainingError{payload, err}
}

type timeoutError struct{ err error }

func (e *timeoutError) Error() string   { return e.err.Error() }
func (e *timeoutError) Unwrap() []error { return []error{ErrTimeout, e.err} }

// Timeout says that the work was cut off by a limit of its own (a process that was killed): it is retried like a failure
// and recorded as a timeout.
func Timeout(err error) error {
	if err == nil {
		err = errors.New("timed out")
	}
	return &timeoutError{err}
}

type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.value, e.stack) }

// Reasons recorded with a failed attempt or a dead letter: a closed set.
const (
	ReasonError     = "error"      // the handler returned an error
	ReasonPermanent = "permanent"  // the handler returned Permanent
	ReasonPanic     = "panic"      // the handler panicked
	ReasonTimeout   = "timeout"    // the handler outlived its limit
	ReasonPartial   = "partial"    // the handler returned Remaining
	ReasonNoHandler = "no_handler" // nobody handles the task's type
	ReasonLost      = "lost"       // its leases ran out too often: it takes its consumers down
	ReasonUnread    = "unreadable" // the record could not be read
	ReasonUnbooked  = "unbooked"   // Redis has the task and the ledger does not know it
)

// Reasons returns them all.
func Reasons() []string {
	return []string{
		ReasonError, ReasonPermanent, ReasonPanic, ReasonTimeout, ReasonPartial, ReasonNoHandler, ReasonLost, ReasonUnread, ReasonUnbooked,
	}
}

// reasonOf classes a handler's error.
func reasonOf(err error) string {
	var (
		permanent *permanentError
		panicked  *panicError
		partial   *remainingError
	)
	switch {
	case errors.As(err, &panicked):
		return ReasonPanic
	case errors.Is(err, ErrNoHandler):
		return ReasonNoHandler
	case errors.As(err, &permanent):
		return ReasonPermanent
	case errors.Is(err, ErrTimeout):
		return ReasonTimeout
	case errors.As(err, &partial):
		return ReasonPartial
	}
	return ReasonError
}

// What OutcomeOf says besides the reasons.
const (
	OutcomeSucceeded = "succeeded"
	OutcomeSnoozed   = "snoozed"    // the handler returned Snooze
	OutcomeCancelled = "cancelled"  // the task was cancelled while it ran
	OutcomeLeaseLost = "lease_lost" // somebody else has the task by now
	OutcomeStopping  = "stopping"   // the worker was shutting down
)

// OutcomeOf classes the end of a handler, for middleware that counts: err is what it returned, ctx the context it was given. The answer is
// one of a closed set, the outcomes and the reasons of failed attempts. A worker judges alike, but for what only it knows: a task
// cut off by a shutdown after it had most of a run's time is a timeout there.
func OutcomeOf(ctx context.Context, err error) string {
	var (
		snooze    *snoozeError
		after     *retryAfterError
		rest      *remainingError
		permanent *permanentError
	)
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		return OutcomeSucceeded
	case errors.As(err, &snooze):
		return OutcomeSnoozed
	case errors.As(err, &permanent):
		return ReasonPermanent
	case errors.Is(cause, ErrCancelled):
		return OutcomeCancelled
	case errors.Is(cause, ErrLeaseLost):
		return OutcomeLeaseLost
	case errors.Is(cause, ErrStopping) && !errors.As(err, &after) && !errors.As(err, &rest):
		return OutcomeStopping
	case errors.Is(cause, ErrTimeout):
		return ReasonTimeout
	}
	return reasonOf(err)
}

type taskKey struct{}

// TaskFrom returns the task that a handler's context belongs to, nil outside a handler.
func TaskFrom(ctx context.Context) *Task {
	if r, ok := ctx.Value(taskKey{}).(*running); ok {
		return &r.lease.Task
	}
	return nil
}

// Progress is how a long handler says that it is alive, which restarts its stall limit. It returns the cause when the
// handler should stop: ErrLeaseLost, ErrCancelled, ErrTimeout or ErrStopping. Outside a worker it does nothing.
func Progress(ctx context.Context) error {
	if r, ok := ctx.Value(taskKey{}).(*running); ok {
		r.alive()
	}
	return context.Cause(ctx)
}

// verdict turns a handler's error into what to tell Redis. cause is why its context had ended, if it had.
func (r *run) verdict(t *running, err, cause error) settlement {
	var (
		snooze    *snoozeError
		permanent *permanentError
		after     *retryAfterError
		rest      *remainingError
		panicked  *panicError
	)
	switch {
	case err == nil:
		return settlement{verb: verbAck}
	case errors.As(err, &panicked):
		return r.failed(t, err, ReasonPanic)
	case errors.As(err, &snooze):
		return settlement{verb: verbRelease, delay: snooze.d}
	case errors.As(err, &permanent):
		return r.failed(t, err, ReasonPermanent)
	case errors.Is(cause, ErrCancelled), errors.Is(cause, ErrLeaseLost):
		return settlement{verb: verbRelease} // ends as cancelled, or is refused
	}
	spoken := errors.As(err, &after) // the handler has said what it wants, even though its time was cut
	if errors.As(err, &rest) {
		spoken = true
		if limit := t.src.sh.q.maxPayload; len(rest.payload) > limit {
			err = fmt.Errorf("the payload that remains has %d bytes, the limit is %d; all of the task is tried again: %w", len(rest.payload), limit, err)
			rest = nil
		}
	}
	reason := reasonOf(err)
	switch {
	case errors.Is(cause, ErrStopping) && r.hadItsTime(t):
		reason, err = ReasonTimeout, fmt.Errorf("cut off by the deadline of the run: %w", err)
	case errors.Is(cause, ErrStopping) && !spoken:
		return settlement{verb: verbRelease}
	case errors.Is(cause, ErrTimeout):
		reason = ReasonTimeout
	}
	s := r.failed(t, err, reason)
	if after != nil && s.verb == verbRetry {
		s.delay = after.after
	}
	if rest != nil && s.verb == verbRetry {
		s.payload = append([]byte{}, rest.payload...)
	}
	return s
}

// hadItsTime reports whether a task that was cut off by the deadline had at least half of all the time there was.
func (r *run) hadItsTime(t *running) bool {
	if r.deadline.IsZero() {
		return false
	}
	return time.Since(t.started) >= r.deadline.Add(-r.cfg.Margin).Sub(r.began)/2
}

// failed is another attempt, or the dead letters when there is none left.
func (r *run) failed(t *running, err error, reason string) settlement {
	attrs := []any{
		"queue", t.lease.Queue, "task_id", printable(t.lease.ID), "type", printable(t.lease.Type), "biz_key", printable(t.lease.Key),
		"attempt", t.lease.Attempt, "reason", reason, "error", firstLine(err),
	}
	failed := t.lease.Failed + 1
	if reason == ReasonPermanent || failed >= t.cfg.MaxAttempts {
		r.cfg.Logger.Error("delayq: task is dead", attrs...)
		return settlement{verb: verbBury, reason: reason, err: err}
	}
	delay := t.cfg.Retry(failed)
	r.cfg.Logger.Warn("delayq: task failed, will retry", append(attrs, "retry_in", delay.Round(time.Millisecond).String())...)
	return settlement{verb: verbRetry, delay: delay, reason: reason, err: err, maxFailed: t.cfg.MaxAttempts}
}

// firstLine is an error for the log; a stack stays in Redis.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return printable(line)
}
