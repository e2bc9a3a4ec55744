package delayq

import (
	"errors"
	"fmt"
	"strings"
)

// Errors to branch on with errors.Is. Most arrive inside a TaskError that says which task.
var (
	// ErrLeaseLost: the lease is not, or no longer, the caller's. Nothing was changed.
	ErrLeaseLost = errors.New("lease lost")
	// ErrCancelled: the task was cancelled. For a running handler it is the cause of its context's end.
	ErrCancelled = errors.New("task cancelled")
	// ErrTimeout: the handler outlived its timeout, or was silent for longer than its stall limit.
	ErrTimeout = errors.New("task timed out")
	// ErrStopping: the worker is shutting down; the cause of a handler's context's end. The task goes back uncharged.
	ErrStopping = errors.New("worker stopping")
	// ErrNoHandler: no handler is registered for the task's type.
	ErrNoHandler = errors.New("no handler for this task type")
	// ErrNotFound: the queue knows no such task.
	ErrNotFound = errors.New("no such task")
	// ErrRunning: the task is leased, so it cannot be rescheduled.
	ErrRunning = errors.New("task is running")
	// ErrDead: the task is among the dead letters.
	ErrDead = errors.New("task is a dead letter")
	// ErrFinished: the task has ended and is still remembered.
	ErrFinished = errors.New("task has finished")
	// ErrConflict: the id is known and the conflict policy is Reject.
	ErrConflict = errors.New("task id is known")
	// ErrInvalid: an argument is out of bounds; errors.As to an InputError for the field and the limit.
	ErrInvalid = errors.New("invalid")
	// ErrNoQueue: Config.NoCreate is set and the queue does not exist.
	ErrNoQueue = errors.New("no such queue")
	// ErrShards: Config.Shards differs from the stored count.
	ErrShards = errors.New("wrong shard count")
	// ErrNoLedger: the call needs Config.Ledger.
	ErrNoLedger = errors.New("the queue has no ledger")
	// ErrLedger: the queue is kept by a ledger, and Config.Ledger is not set.
	ErrLedger = errors.New("queue is kept by a ledger")
	// ErrBusy: another transaction has the task locked, in a ledger. Calls that end or extend leases answer it within a moment; try
	// again. Enqueue waits instead.
	ErrBusy = errors.New("another transaction is at the task")
	// ErrSchema: the queue's data has another schema version than this package.
	ErrSchema = errors.New("wrong schema version")
	// ErrEviction: Redis may evict the queue's keys; set maxmemory-policy to noeviction, or at least to a volatile one.
	ErrEviction = errors.New("eviction policy can lose tasks")
	// ErrServerVersion: the server is too old. Redis 6.2, Valkey 7.2 and later work.
	ErrServerVersion = errors.New("server too old")
	// ErrClockSkew: this machine's clock and Redis' clock are further apart than Config.MaxSkew.
	ErrClockSkew = errors.New("clock skew")
	// ErrFull: Redis is out of memory and refuses new tasks; everything else goes on.
	ErrFull = errors.New("redis is out of memory")
	// ErrNoTime: too little time is left before the context's deadline to start.
	ErrNoTime = errors.New("too little time left")
	// ErrStuck: so many handlers ignore the end of their context that the worker has no room left.
	ErrStuck = errors.New("too many stuck handlers")
)

// A TaskError says on which task of which queue an operation failed.
type TaskError struct {
	Op, Queue, ID string
	Err           error
}

func (e *TaskError) Error() string {
	return fmt.Sprintf("delayq: %s %s/%s: %v", e.Op, e.Queue, printable(e.ID), e.Err)
}

func (e *TaskError) Unwrap() error { return e.Err }

// A LedgerError is an error that came from a queue's ledger: with it, callers can tell which of the queue's two servers it was.
type LedgerError struct {
	Op  string // such as "page orders"
	Err error
}

func (e *LedgerError) Error() string { return fmt.Sprintf("delayq: ledger %s: %v", e.Op, e.Err) }

func (e *LedgerError) Unwrap() error { return e.Err }

// An InputError names an argument that is out of bounds, and the bound. It matches ErrInvalid.
type InputError struct {
	Field string // as the caller knows it, such as "Payload"
	Limit string // such as "at most 65536 bytes"
	Got   string // what came, never the value itself where that may be private
}

func (e *InputError) Error() string {
	return fmt.Sprintf("%s must be %s, got %s", e.Field, e.Limit, e.Got)
}

// Is reports that an InputError is ErrInvalid.
func (e *InputError) Is(target error) bool { return target == ErrInvalid }

// A BatchError tells which items of a batch failed; the others went through. errors.Is and As look at every item.
type BatchError struct {
	Op   string
	Errs []error // one place for each item, nil where it went through
}

func (e *BatchError) Error() string {
	failed := e.Unwrap()
	return fmt.Sprintf("delayq: %s: %d of %d failed, the first with: %v", e.Op, len(failed), len(e.Errs), failed[0])
}

// Unwrap returns the errors of the items that failed.
func (e *BatchError) Unwrap() []error {
	var failed []error
	for _, err := range e.Errs {
		if err != nil {
			failed = append(failed, err)
		}
	}
	return failed
}

// batchError returns nil when no item failed, the item's own error for a batch of one, otherwise a BatchError.
func batchError(op string, errs []error) error {
	for _, err := range errs {
		if err == nil {
			continue
		}
		if len(errs) == 1 {
			return err
		}
		return &BatchError{Op: op, Errs: errs}
	}
	return nil
}

// printable keeps ids of any bytes from breaking a line of text.
func printable(id string) string {
	clean := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return '?'
		}
		return r
	}, id)
	if len(clean) > 300 {
		clean = clean[:300]
	}
	return clean
}
