package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// callers is how many calls a producer makes at once.
const callers = 12

// A producer is a process that enqueues a plan and makes later calls for its tasks.
type producer struct {
	*roleConfig
	j     *journal
	q     *delayq.Queue
	pool  *pgxpool.Pool
	calls atomic.Int64
	slots chan struct{}
}

func produce(c *roleConfig) error {
	ctx, stop := c.hear()
	defer stop()
	j, err := openJournal(c.Dir, c.Name)
	if err != nil {
		return err
	}
	defer j.close()
	link, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer link.close()
	p := &producer{roleConfig: c, j: j, q: link.q, slots: make(chan struct{}, callers)}
	if p.pool, err = c.pool(ctx, callers); err != nil {
		return err
	}
	defer p.pool.Close()
	began := time.Now()
	var tasks sync.WaitGroup
	for _, t := range plan(c.Seed, c.Tasks, c.Over, c.Mix) {
		if !pause(ctx, time.Until(began.Add(t.At))) {
			break
		}
		tasks.Go(func() { p.task(ctx, &t) })
	}
	tasks.Wait()
	return nil
}

// pause reports whether ctx is still alive after d.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// task makes all calls for one task.
func (p *producer) task(ctx context.Context, t *planned) {
	outcome, _ := p.enqueue(ctx, opEnqueue, t, t.Tx, t.Delay, 1)
	for try := 0; t.Stubborn && !t.RollBack && outcome != outDone && try < 40; try++ {
		if !pause(ctx, 250*time.Millisecond) {
			return
		}
		outcome, _ = p.enqueue(ctx, opRepeat, t, t.Tx, t.Delay, 1)
	}
	if t.RollBack || outcome != outDone {
		return
	}
	began := time.Now()
	for _, then := range t.Then {
		if !pause(ctx, time.Until(began.Add(then.After))) {
			return
		}
		switch then.Op {
		case opRepeat:
			p.enqueue(ctx, opRepeat, t, t.Tx, t.Delay, 1)
		case opReplace:
			p.enqueue(ctx, opReplace, t, then.Tx && t.Tx, then.Delay, 2)
		case opReschedule:
			p.reschedule(ctx, t, then)
		case opCancel:
			for range 10 {
				if p.cancel(ctx, t, then.Tx) != outDoubt || !t.Stubborn || !pause(ctx, 250*time.Millisecond) {
					break
				}
			}
		}
	}
}

// call makes one call and writes down what came of it.
func (p *producer) call(ctx context.Context, e event, f func(ctx context.Context) (outcome, answer string)) (outcome, answer string) {
	p.slots <- struct{}{}
	defer func() { <-p.slots }()
	e.Kind, e.Call, e.At = evCall, p.calls.Add(1), micros()
	p.j.write(e)
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	outcome, answer = f(ctx)
	p.j.write(event{Kind: evRet, Call: e.Call, Task: e.Task, Outcome: outcome, Answer: answer})
	return outcome, answer
}

func (p *producer) enqueue(ctx context.Context, op opKind, t *planned, inTx bool, delay time.Duration, version int) (outcome, answer string) {
	task := delayq.Task{ID: t.ID, Type: typeMail, Payload: t.body(version), Delay: delay}
	if t.Tx { // the type belongs to the task, whoever sends it again
		task.Type = typeOrder
	}
	if op == opReplace {
		task.Conflict = delayq.Replace
	}
	now := time.Now()
	due := now.Add(delay)
	if t.Absolute {
		task.Delay, task.RunAt = 0, due
	}
	e := event{Task: t.ID, Op: op, Tx: inTx, Due: due.UnixMicro(), Version: version, Fate: t.Fate}
	return p.call(ctx, e, func(ctx context.Context) (outcome, answer string) {
		var res delayq.Result
		var err error
		if inTx {
			outcome, err = p.inTx(ctx, t, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "insert into chaos.orders (task) values ($1) on conflict do nothing", t.ID); err != nil {
					return err
				}
				res, err = p.q.EnqueueTx(ctx, tx, task)
				return err
			})
		} else {
			res, err = p.q.Enqueue(ctx, task)
			outcome = outcomeOf(err)
		}
		switch {
		case errors.Is(err, delayq.ErrCancelled): // sent twice, and cancelled in between
			return outDone, "cancelled"
		case err != nil:
			return outcome, err.Error()
		case res.Outcome.Duplicate() && op == opReplace: // too late for that
			return outRefused, res.Outcome.String()
		case res.Outcome.Duplicate():
			return outDone, res.Outcome.String()
		}
		return outDone, ""
	})
}

var errOnPurpose = errors.New("rolled back on purpose")

// inTx runs f in a transaction. Without the answer to its commit nobody knows whether it happened.
func (p *producer) inTx(ctx context.Context, t *planned, f func(tx pgx.Tx) error) (outcome string, err error) {
	committing := false
	body := func(tx pgx.Tx) error {
		if err := f(tx); err != nil {
			return err
		}
		if t.RollBack {
			return errOnPurpose
		}
		if t.Dawdle > 0 {
			time.Sleep(t.Dawdle)
		}
		committing = true
		return nil
	}
	if t.Telling != byCommit {
		if err = pgx.BeginFunc(ctx, p.pool, body); err == nil && t.Telling == bySync {
			if err := p.q.Sync(ctx, t.ID); err != nil {
				slog.Warn("sync", "task", t.ID, "error", err.Error())
			}
		}
	} else {
		err = ledger.BeginFunc(ctx, p.pool, func(tx *ledger.Tx) error { return body(tx) })
	}
	switch {
	case err == nil:
		return outDone, nil
	case !committing || errors.Is(err, pgx.ErrTxCommitRollback):
		if refused(err) {
			return outRefused, err
		}
		return outRolledBack, err
	}
	return outDoubt, err
}

// refused says that an error is an answer.
func refused(err error) bool {
	for _, answer := range []error{
		delayq.ErrRunning, delayq.ErrFinished, delayq.ErrNotFound, delayq.ErrDead, delayq.ErrCancelled, delayq.ErrConflict, delayq.ErrInvalid,
	} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return false
}

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return outDone
	case refused(err):
		return outRefused
	}
	return outDoubt
}

func (p *producer) reschedule(ctx context.Context, t *planned, then planned1) {
	at := time.Now().Add(then.Delay)
	e := event{Task: t.ID, Op: opReschedule, Tx: then.Tx, Due: at.UnixMicro()}
	p.call(ctx, e, func(ctx context.Context) (outcome, answer string) {
		var err error
		if then.Tx {
			outcome, err = p.inTx(ctx, t, func(tx pgx.Tx) error { return p.q.RescheduleTx(ctx, tx, t.ID, at) })
		} else {
			err = p.q.Reschedule(ctx, t.ID, at)
			outcome = outcomeOf(err)
		}
		if err != nil {
			answer = err.Error()
		}
		return outcome, answer
	})
}

func (p *producer) cancel(ctx context.Context, t *planned, inTx bool) (outcome string) {
	outcome, _ = p.call(ctx, event{Task: t.ID, Op: opCancel, Tx: inTx}, func(ctx context.Context) (outcome, answer string) {
		var got delayq.Cancellation
		var err error
		if inTx {
			outcome, err = p.inTx(ctx, t, func(tx pgx.Tx) error {
				got, err = p.q.CancelTx(ctx, tx, t.ID)
				return err
			})
		} else {
			got, err = p.q.Cancel(ctx, t.ID)
			outcome = outcomeOf(err)
		}
		if err != nil {
			return outcome, err.Error()
		}
		return outDone, got.String()
	})
	return outcome
}
