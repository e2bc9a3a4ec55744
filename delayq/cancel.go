package delayq

import (
	"context"
	"time"
)

// Cancellation is what a cancel found.
type Cancellation int

// The answers of Cancel.
const (
	// Cancelled: the task will not run.
	Cancelled Cancellation = iota + 1
	// AlreadyCancelled: an earlier cancel did it.
	AlreadyCancelled
	// Running: its handler is running and told to stop; if it succeeds all the same, that stands.
	Running
	// Finished: the task had succeeded before.
	Finished
	// Dead: the task is a dead letter and will not run.
	Dead
	// Unknown: the queue knows no such task, or has forgotten it.
	Unknown
)

func (c Cancellation) String() string {
	switch c {
	case Cancelled:
		return "cancelled"
	case AlreadyCancelled:
		return "already cancelled"
	case Running:
		return "running, told to stop"
	case Finished:
		return "already finished"
	case Dead:
		return "dead"
	case Unknown:
		return "unknown"
	}
	return "none"
}

// MarshalText makes cancellations readable in JSON.
func (c Cancellation) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

var cancellations = map[int]Cancellation{
	codeOK: Cancelled, codeFinished: Finished, codeCancelledBefore: AlreadyCancelled, codeRunning: Running,
	codeUnknown: Unknown, codeDead: Dead,
}

// Cancel ends a task and says what really happened. All answers are without error; the error is the connection's.
func (q *Queue) Cancel(ctx context.Context, id string) (Cancellation, error) {
	got, err := q.CancelMany(ctx, []string{id})
	return got[0], err
}

// CancelMany cancels tasks, each on its own. An id whose call failed has answer 0.
func (q *Queue) CancelMany(ctx context.Context, ids []string) ([]Cancellation, error) {
	return q.cancel(ctx, nil, ids)
}

func (q *Queue) cancel(ctx context.Context, tx Tx, ids []string) ([]Cancellation, error) {
	got := make([]Cancellation, len(ids))
	errs := q.eachBatch("cancel", ids, func(sh *shard, batch []int) ([]int, error) {
		if q.lq != nil {
			return q.cancelBooked(ctx, tx, chosen(ids, batch))
		}
		args := []any{q.clock(), len(batch)}
		for _, i := range batch {
			args = append(args, ids[i])
		}
		return sh.batch(ctx, q.scripts.cancel, args, len(batch), codeCancelledBefore)
	}, func(i, code int) error {
		got[i] = cancellations[code]
		return nil
	})
	return got, batchError("cancel", errs)
}

// Reschedule moves a waiting task to another due time; the id and attempts stay. It is atomic: on an error the old time
// stands.
//
// Errors: ErrRunning, ErrDead, ErrFinished, ErrNotFound, ErrInvalid.
func (q *Queue) Reschedule(ctx context.Context, id string, at time.Time) error {
	return q.reschedule(ctx, nil, id, 0, at)
}

// RescheduleIn is Reschedule to d from now, by Redis' clock.
func (q *Queue) RescheduleIn(ctx context.Context, id string, d time.Duration) error {
	return q.reschedule(ctx, nil, id, d, time.Time{})
}

func (q *Queue) reschedule(ctx context.Context, tx Tx, id string, d time.Duration, at time.Time) error {
	due, err := dueArg(d, at)
	if err != nil {
		return &TaskError{"reschedule", q.name, id, err}
	}
	return batchError("reschedule", q.eachBatch("reschedule", []string{id}, func(sh *shard, _ []int) ([]int, error) {
		if q.lq != nil {
			changes, err := q.lq.Reschedule(ctx, tx, []string{id}, []LedgerDue{ledgerDue(d, at)})
			return q.waitingBooked(ctx, tx, changes, "e:rescheduled"), err
		}
		return sh.batch(ctx, q.scripts.reschedule, []any{q.clock(), 1, id, due}, 1, codeOK)
	}, func(_, code int) error { return waitingErrors[code] }))
}

// waitingErrors say why a task is not waiting.
var waitingErrors = map[int]error{
	codeProcessing: ErrRunning, codeDead: ErrDead, codeDone: ErrFinished, codeUnknown: ErrNotFound,
}

// eachBatch splits ids by shard into calls of at most maxBatch distinct ids. call gets places in ids and answers their codes;
// took turns a code into the item's error, if it is one.
func (q *Queue) eachBatch(op string, ids []string, call func(*shard, []int) ([]int, error), took func(i, code int) error) []error {
	errs := make([]error, len(ids))
	byShard := make([][]int, len(q.shards))
	for i, id := range ids {
		if id == "" || len(id) > maxID {
			errs[i] = &TaskError{op, q.name, id, &InputError{"ID", "1 to 256 bytes", itoa(int64(len(id))) + " bytes"}}
			continue
		}
		s := shardOf(id, len(q.shards))
		byShard[s] = append(byShard[s], i)
	}
	for s, places := range byShard {
		for len(places) > 0 {
			seen := make(map[string]struct{}, min(len(places), maxBatch))
			n := 0
			for n < len(places) && n < maxBatch {
				if _, twice := seen[ids[places[n]]]; twice {
					break
				}
				seen[ids[places[n]]] = struct{}{}
				n++
			}
			batch := places[:n]
			places = places[n:]
			codes, err := call(q.shards[s], batch)
			for k, i := range batch {
				cause := err
				if err == nil {
					cause = took(i, codes[k])
				}
				if cause != nil {
					errs[i] = &TaskError{op, q.name, ids[i], cause}
				}
			}
		}
	}
	return errs
}

func chosen(ids []string, places []int) []string {
	some := make([]string, len(places))
	for k, i := range places {
		some[k] = ids[i]
	}
	return some
}
