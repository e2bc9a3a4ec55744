package delayq

import (
	"context"
	"time"
)

// A Ledger keeps every task of a queue in a database, so that no task is lost when Redis loses its data. Config.Ledger turns it
// on; package ledger has the one for PostgreSQL. Applications call Queue, not these methods.
type Ledger interface {
	// OpenQueue describes a queue, and makes it known when it is new and create is set. Zero fields of want mean as stored, or
	// the defaults of Config for a new queue; Retention and MaxPayload that are set replace what is stored.
	//
	// Errors: ErrNoQueue, ErrShards when want.Shards differs from the stored count, ErrSchema, ErrInvalid.
	OpenQueue(ctx context.Context, name string, want LedgerConfig, create bool) (LedgerQueue, LedgerConfig, error)
}

// A LedgerConfig is what the ledger stores of a queue's configuration.
type LedgerConfig struct {
	Shards     int
	Retention  time.Duration
	MaxPayload int
	Since      time.Time // when the ledger first knew the queue
	Now        time.Time // the database's clock
}

// Tx is a transaction of the caller; which types work, the ledger says (package ledger: pgx.Tx). One that also has
// AfterCommit(func(context.Context)) gets what is to be told to Redis after the commit.
type Tx interface {
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// A LedgerQueue is one queue of a ledger. Every method is one atomic step and safe to repeat. A nil tx means a transaction of
// its own. Ids of one call are distinct, at most 500, and answers have one place for each, in order, unless said otherwise.
type LedgerQueue interface {
	// Insert adds tasks. A known id is left alone, but for two cases: a cancelled one starts afresh as if new, unless it is
	// this very enqueue (equal Stamp), and with replace one that waits gets the new payload and due time and starts its
	// attempts afresh. Without tx, an id that another transaction is about to insert has no Row in its answer.
	Insert(ctx context.Context, tx Tx, tasks []LedgerTask, replace bool) ([]LedgerChange, error)
	// Cancel ends tasks that wait, and running ones whose lease has run out; a running one is asked to stop.
	Cancel(ctx context.Context, tx Tx, ids []string) ([]LedgerChange, error)
	// Reschedule moves tasks that wait. dues has one place for each id.
	Reschedule(ctx context.Context, tx Tx, ids []string, dues []LedgerDue) ([]LedgerChange, error)
	// Replay makes dead letters wait again, due now, counts at zero.
	Replay(ctx context.Context, tx Tx, ids []string) ([]LedgerChange, error)
	// Purge deletes dead letters.
	Purge(ctx context.Context, tx Tx, ids []string) ([]LedgerChange, error)

	// Claim makes tasks that Redis leased run under the call's token, if they still are as they were leased (the revision)
	// and nobody else runs them; it answers its own repeat. A takeover of a task whose lease ran out counts it as lost and
	// may end it instead: as cancelled, or as dead. The answer has only rows that are now the token's or were so ended, in any
	// order, and of them ID, Status, Rev, Token and the counts. A row that another transaction has locked for longer than a
	// moment is left out.
	Claim(ctx context.Context, c LedgerClaim, want []LedgerWant) ([]LedgerRow, error)
	// Lease claims due tasks straight from the ledger, most overdue first, at most max, with Payload; it leaves out what others
	// are at. Its repeat answers what the token already holds. Rows that a takeover ended are among the answer.
	Lease(ctx context.Context, c LedgerClaim, max int) ([]LedgerRow, error)
	// Heartbeat renews the leases of running tasks.
	Heartbeat(ctx context.Context, lease time.Duration, held []LedgerHeld) ([]LedgerBeat, error)
	// Finish ends leases: one change for each, not Applied when the lease is not the caller's (any more). Of tasks that succeed the
	// row has ID, Status, Rev and Token. Without tx, a row that another transaction has locked for longer than a moment is not
	// changed, and answered as it is: running, under the token.
	Finish(ctx context.Context, tx Tx, ends []LedgerEnd) ([]LedgerChange, error)

	// Rows reads rows as they are now, on the primary: whole, or else ID, Status, RunAt, Rev and LockedUntil alone, which is for those
	// who read all of a queue. The answer has only rows that exist, in any order.
	Rows(ctx context.Context, ids []string, whole bool) ([]LedgerRow, error)
	// Page lists rows without Payload, in the order of its kind.
	Page(ctx context.Context, p LedgerPage) ([]LedgerRow, error)
	// Counts counts tasks, each number up to most, which then means at least so many: counting costs time in proportion.
	Counts(ctx context.Context, most int, horizon time.Duration) (LedgerCounts, error)

	// State is what SetState last stored, empty before the first: where the reconciler stands. The last writer wins.
	State(ctx context.Context) ([]byte, error)
	SetState(ctx context.Context, state []byte) error
	// Retain deletes tasks that ended longer ago than the ledger keeps them, in small steps, for at most budget, and says how
	// many and whether that is all.
	Retain(ctx context.Context, budget time.Duration) (deleted int64, all bool, err error)
}

// LedgerCounts are numbers of tasks.
type LedgerCounts struct {
	Open  int64
	Later int64 // of the open ones, due beyond the horizon from now; 0 without one
	Dead  int64
}

// LedgerStatus is where a task stands in the ledger.
type LedgerStatus string

// The statuses. A task is open in the first three.
const (
	LedgerPending   LedgerStatus = "pending"
	LedgerRetry     LedgerStatus = "retry" // pending after a failed attempt
	LedgerRunning   LedgerStatus = "running"
	LedgerSucceeded LedgerStatus = "succeeded"
	LedgerCancelled LedgerStatus = "cancelled"
	LedgerDead      LedgerStatus = "dead"
)

// Open reports whether the task is still to run or running.
func (s LedgerStatus) Open() bool {
	return s == LedgerPending || s == LedgerRetry || s == LedgerRunning
}

// Waiting reports whether the task is open and not running.
func (s LedgerStatus) Waiting() bool { return s == LedgerPending || s == LedgerRetry }

// A LedgerDue is a due time: At, or In from the database's clock when At is zero. Whole milliseconds when given, and kept as
// microseconds; tasks of one call with equal In keep their order by a microsecond each.
type LedgerDue struct {
	In time.Duration
	At time.Time
}

// A LedgerTask is a task on its way into the ledger.
type LedgerTask struct {
	ID, Type, Key string
	Payload       []byte
	Stamp         []byte // 12 bytes that tell a resent enqueue from a second one, see envelope.go
	Due           LedgerDue
}

// A LedgerRow is a task as the ledger holds it.
type LedgerRow struct {
	ID              string
	Status          LedgerStatus
	RunAt           time.Time // due time, whole microseconds
	Rev             int64     // rises with every change that Redis must show, over all tasks of the ledger
	Token           string    // 16 bytes, of the last lease; kept after its end; empty before the first
	LockedBy        string
	LockedUntil     time.Time // of a running task, by the database's clock
	CancelRequested bool
	Failed          int
	Lost            int
	Deliveries      int
	Reason          string
	LastError       string
	CreatedAt       time.Time
	StartedAt       time.Time // of the last lease, zero before the first
	EndedAt         time.Time // of a task that is not open

	Type, Key string
	Payload   []byte // nil where the method says so
	Stamp     []byte
}

// A LedgerChange is what became of one task.
type LedgerChange struct {
	Applied bool
	Was     LedgerStatus // before; empty when there was no such task
	Row     *LedgerRow   // as it is now, with Payload where it waits; nil when there is no such task (any more)
}

// A LedgerClaim says who claims, under which token and for how long.
type LedgerClaim struct {
	Token     string // 16 random bytes, new for each call, kept over repeats
	Lease     time.Duration
	Consumer  string
	MaxLost   int // leases that may run out before a takeover ends the task as dead instead
	MaxFailed int // noted in the row
	// Overdue is of Lease: only tasks that have been due for so long, since Redis will deliver the others.
	Overdue time.Duration
}

// A LedgerWant is an id at a revision.
type LedgerWant struct {
	ID  string
	Rev int64
}

// A LedgerHeld is a lease that its caller believes to hold.
type LedgerHeld struct{ ID, Token string }

// A LedgerBeat is the ledger's answer about one lease.
type LedgerBeat int

// The answers.
const (
	LedgerLost LedgerBeat = iota // the lease is not the caller's
	LedgerRenewed
	LedgerStop // renewed, and the task was cancelled
	LedgerBusy // no answer: another transaction has the row locked
)

// LedgerVerb is how a lease ends.
type LedgerVerb int

// The ends. A cancel request turns all but LedgerSucceed into cancelled.
const (
	LedgerSucceed   LedgerVerb = iota
	LedgerFail                 // another attempt after Delay, or dead when MaxFailed is reached; counts as failed
	LedgerGiveBack             // never started: due as it was, nothing counted, same revision
	LedgerSnooze               // due after Delay, nothing counted
	LedgerBury                 // dead; counts as failed
	LedgerBuryUnrun            // dead without an attempt
)

// A LedgerEnd is one lease and how it ends.
type LedgerEnd struct {
	LedgerHeld
	Verb      LedgerVerb
	Delay     time.Duration
	MaxFailed int    // of LedgerFail: failed attempts that make it dead
	Reason    string // of LedgerFail and the burials
	Error     string
	Payload   []byte // of LedgerFail: the rest of the work, nil = unchanged
}

// LedgerPage asks for a page of rows by keyset, never by offset.
type LedgerPage struct {
	Kind   LedgerKind
	After  LedgerMark
	Until  time.Time // of LedgerOpen and LedgerWaiting: due up to here by the database's clock; zero = no bound
	Limit  int       // 1 to 1000
	Newest bool      // of LedgerDeadRows: in the opposite order, the last to die first
}

// LedgerKind chooses the rows of a page.
type LedgerKind int

// The kinds.
const (
	LedgerOpenRows    LedgerKind = iota // by due time, then id
	LedgerWaitingRows                   // those of them that are not running
	LedgerRunningRows                   // those that are
	LedgerDeadRows                      // by time of death, then id
)

// A LedgerMark is the last row of the page before: its RunAt (of dead rows EndedAt) and ID. Zero for the first page.
type LedgerMark struct {
	At time.Time
	ID string
}
