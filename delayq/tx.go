package delayq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"
)

// This file is the producer's side of ledger mode: the ledger first, in the caller's transaction or in one of its own, then one
// message to Redis, which may get lost.

// EnqueueTx is Enqueue inside the caller's transaction: the task is there when the transaction commits, and never was when it
// rolls back. With a transaction that has AfterCommit, such as package ledger's Begin gives, Redis hears of it at once; with
// another it does when Sync is called after the commit, else when a worker or the reconciler next looks into the ledger, which
// is within seconds and a minute.
//
// Errors: those of Enqueue, ErrNoLedger. After an error of the database the transaction can only be rolled back.
func (q *Queue) EnqueueTx(ctx context.Context, tx Tx, t Task, opts ...Option) (Result, error) {
	results, err := q.EnqueueManyTx(ctx, tx, []Task{t}, opts...)
	return results[0], err
}

// EnqueueManyTx is EnqueueMany inside the caller's transaction. On an error nothing may be kept of it: roll back.
func (q *Queue) EnqueueManyTx(ctx context.Context, tx Tx, tasks []Task, opts ...Option) ([]Result, error) {
	results := make([]Result, len(tasks))
	fail := func(err error) ([]Result, error) {
		errs := make([]error, len(tasks))
		for i := range errs {
			results[i].ID = tasks[i].ID
			results[i].Err, errs[i] = err, err
		}
		return results, batchError("enqueue", errs)
	}
	if err := q.checkTx(tx); err != nil {
		return fail(err)
	}
	entries := make([]*entry, len(tasks))
	errs := make([]error, len(tasks))
	for i := range tasks {
		t := tasks[i]
		for _, o := range opts {
			o(&t)
		}
		entries[i], errs[i] = q.newEntry(&t)
		results[i] = Result{ID: t.ID, Err: errs[i]}
	}
	if err := batchError("enqueue", errs); err != nil {
		return results, err // before anything is written
	}
	for done := 0; done < len(entries); {
		n := fit(entries[done:])
		some, tell := q.book(ctx, tx, entries[done:done+n])
		tell()
		for i, r := range some {
			results[done+i], errs[done+i] = r, r.Err
		}
		done += n
	}
	return results, batchError("enqueue", errs)
}

// CancelTx is Cancel inside the caller's transaction.
func (q *Queue) CancelTx(ctx context.Context, tx Tx, id string) (Cancellation, error) {
	got, err := q.CancelManyTx(ctx, tx, []string{id})
	return got[0], err
}

// CancelManyTx is CancelMany inside the caller's transaction.
func (q *Queue) CancelManyTx(ctx context.Context, tx Tx, ids []string) ([]Cancellation, error) {
	if err := q.checkTx(tx); err != nil {
		return make([]Cancellation, len(ids)), err
	}
	return q.cancel(ctx, tx, ids)
}

// RescheduleTx is Reschedule inside the caller's transaction.
func (q *Queue) RescheduleTx(ctx context.Context, tx Tx, id string, at time.Time) error {
	if err := q.checkTx(tx); err != nil {
		return err
	}
	return q.reschedule(ctx, tx, id, 0, at)
}

// CompleteTx ends a running task as succeeded inside the handler's transaction, so that its effect and its completion commit
// together: once, whatever crashes. t is the task that the handler was given (TaskFrom), or that of a Lease. Return nil from the
// handler afterwards; what it returns no longer matters once the transaction has committed.
//
// Errors: ErrLeaseLost when the task is not, or no longer, this run's: roll back, or the effect happens twice. It is ErrFinished
// too when this very run has completed the task before, as after a commit whose answer was lost: the effect has happened.
// ErrNoLedger, ErrInvalid.
func (q *Queue) CompleteTx(ctx context.Context, tx Tx, t *Task) error {
	if err := q.checkTx(tx); err != nil {
		return err
	}
	if t == nil || t.token == "" {
		return &TaskError{"complete", q.name, "", &InputError{"task", "one that a worker or Lease delivered", "another"}}
	}
	changes, err := q.lq.Finish(ctx, tx, []LedgerEnd{{LedgerHeld: LedgerHeld{t.ID, t.token}, Verb: LedgerSucceed}})
	if err == nil && !changes[0].Applied && sabotage != "complete-ignores-lost" {
		err = ErrLeaseLost
		if row := changes[0].Row; row != nil && row.Status == LedgerSucceeded && row.Token == t.token {
			err = fmt.Errorf("%w: %w by this run", ErrLeaseLost, ErrFinished)
		}
	}
	if err != nil {
		return &TaskError{"complete", q.name, t.ID, err}
	}
	return nil // the worker tells Redis when the handler has returned
}

// Sync shows Redis what the ledger says of tasks, for callers whose transaction has no AfterCommit. It may be called at any
// time, and never need be. Errors: ErrNoLedger, the connections'.
func (q *Queue) Sync(ctx context.Context, ids ...string) error {
	if q.lq == nil {
		return ErrNoLedger
	}
	for len(ids) > 0 {
		n := min(len(ids), maxBatch)
		rows, err := q.lq.Rows(ctx, distinct(ids[:n]), true)
		if err != nil {
			return err
		}
		if _, err := q.Mirror().Show(ctx, rows, Showing{Now: time.Now()}); err != nil {
			return err
		}
		ids = ids[n:]
	}
	return nil
}

func distinct(ids []string) []string {
	seen := make(map[string]struct{}, len(ids))
	var once []string
	for _, id := range ids {
		if _, twice := seen[id]; !twice {
			seen[id] = struct{}{}
			once = append(once, id)
		}
	}
	return once
}

// checkTx refuses a transaction where none can be used.
func (q *Queue) checkTx(tx Tx) error {
	switch {
	case q.lq == nil:
		return fmt.Errorf("delayq: %s: %w", q.name, ErrNoLedger)
	case tx == nil:
		return fmt.Errorf("delayq: %s: %w", q.name, &InputError{"tx", "a transaction", "nil"})
	}
	return nil
}

// book writes one call's worth of entries into the ledger. tell is what remains: to show them to Redis.
func (q *Queue) book(ctx context.Context, tx Tx, entries []*entry) (results []Result, tell func()) {
	tasks := make([]LedgerTask, len(entries))
	for i, e := range entries {
		tasks[i] = LedgerTask{
			ID: e.task.ID, Type: e.task.Type, Key: e.task.Key, Payload: e.task.Payload, Stamp: e.blob[1 : 1+stampSize],
			Due: ledgerDue(e.task.Delay, e.task.RunAt),
		}
	}
	policy := entries[0].task.Conflict
	changes, err := q.lq.Insert(ctx, tx, tasks, policy == Replace)
	results = make([]Result, len(entries))
	var told []LedgerRow
	var made, replaced int64
	for i, e := range entries {
		r := &results[i]
		r.ID = e.task.ID
		if err != nil {
			r.Err = &TaskError{"enqueue", q.name, r.ID, err}
			continue
		}
		c := &changes[i]
		if c.Row == nil {
			r.Err = &TaskError{"enqueue", q.name, r.ID, ErrBusy}
			continue
		}
		r.Outcome = outcomeOf(c, tasks[i].Stamp)
		switch {
		case r.Outcome == 0:
			r.Err = &TaskError{"enqueue", q.name, r.ID, ErrCancelled}
		case policy == Reject && r.Outcome.Duplicate():
			r.Err = &TaskError{"enqueue", q.name, r.ID, ErrConflict}
		}
		if c.Applied {
			told = append(told, *c.Row)
			if r.Outcome == Replaced {
				replaced++
			} else {
				made++
			}
		}
	}
	if sabotage == "enqueue-needs-redis" {
		_, err := q.shards[0].run(ctx, q.scripts.put, []any{"0", 0, 0}, nil)
		for i := range results {
			results[i].Err = errors.Join(results[i].Err, err)
		}
	}
	return results, func() { q.tell(ctx, tx, told, map[string]int64{"e:created": made, "e:replaced": replaced}) }
}

// ledgerDue rounds a due time up to whole milliseconds.
func ledgerDue(delay time.Duration, at time.Time) LedgerDue {
	if at.IsZero() {
		return LedgerDue{In: time.Duration(ms(delay)) * time.Millisecond}
	}
	return LedgerDue{At: time.UnixMilli(max(unixMS(at), 0))}
}

// outcomeOf reads what an insert found. 0 is an enqueue sent twice whose task has been cancelled since.
func outcomeOf(c *LedgerChange, stamp []byte) Outcome {
	switch {
	case c.Applied && c.Was.Waiting():
		return Replaced
	case c.Applied:
		return Created
	case bytes.Equal(c.Row.Stamp, stamp) && c.Row.Status == LedgerCancelled:
		return 0
	case bytes.Equal(c.Row.Stamp, stamp):
		return Created
	}
	switch c.Row.Status {
	case LedgerRunning:
		return DuplicateProcessing
	case LedgerDead:
		return DuplicateDead
	case LedgerSucceeded:
		return DuplicateDone
	default:
		return DuplicatePending
	}
}

// cancelBooked cancels in the ledger and answers as cancel.lua does.
func (q *Queue) cancelBooked(ctx context.Context, tx Tx, ids []string) ([]int, error) {
	changes, err := q.lq.Cancel(ctx, tx, ids)
	if err != nil && sabotage == "cancel-redis-first" {
		err, changes = nil, nil
	}
	if err != nil {
		return nil, err
	}
	codes := make([]int, len(ids))
	if changes == nil && sabotage == "cancel-redis-first" {
		for i := range codes {
			codes[i] = codeOK
		}
	}
	var told []LedgerRow
	var running []string
	for i, c := range changes {
		switch {
		case c.Row == nil:
			codes[i] = codeUnknown
		case c.Applied && c.Row.Status == LedgerCancelled:
			codes[i] = codeOK
			told = append(told, *c.Row)
		case c.Row.Status == LedgerRunning:
			codes[i] = codeRunning
			running = append(running, ids[i])
		case c.Row.Status == LedgerCancelled:
			codes[i] = codeCancelledBefore
		case c.Row.Status == LedgerDead:
			codes[i] = codeDead
		default:
			codes[i] = codeFinished
		}
	}
	q.tell(ctx, tx, told, map[string]int64{"e:cancelled": int64(len(told))})
	if len(running) > 0 { // workers hear of it at their next heartbeat; this makes it soon
		q.after(ctx, tx, func(ctx context.Context) error { return q.Mirror().Nudge(ctx, running) })
	}
	return codes, nil
}

// waitingBooked is the answer of reschedule and replay.
func (q *Queue) waitingBooked(ctx context.Context, tx Tx, changes []LedgerChange, event string) []int {
	codes := make([]int, len(changes))
	var told []LedgerRow
	for i, c := range changes {
		switch {
		case c.Applied:
			codes[i] = codeOK
			told = append(told, *c.Row)
		case c.Row == nil:
			codes[i] = codeUnknown
		case c.Row.Status == LedgerRunning:
			codes[i] = codeProcessing
		case c.Row.Status == LedgerDead:
			codes[i] = codeDead
		default:
			codes[i] = codeDone
		}
	}
	q.tell(ctx, tx, told, map[string]int64{event: int64(len(told))})
	return codes
}
