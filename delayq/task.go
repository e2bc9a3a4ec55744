package delayq

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Bounds of a task's fields.
const (
	maxID   = 256
	maxType = 128
	maxKey  = 2048
)

// latestDue is the last instant that a score holds with its microseconds.
var latestDue = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)

// A Task is a piece of work for later. ID, Type, Payload and a due time are what a producer sets; the fields below Conflict
// are set on delivery and ignored by Enqueue.
type Task struct {
	// ID comes from the business, such as "cancel-order:42": enqueueing it twice gives one task. 1 to 256 bytes of any
	// kind; IDOf makes one of a longer key. Empty means a new UUIDv7, which then cannot find a duplicate.
	ID string `json:"id"`
	// Type chooses the handler. 1 to 128 bytes; with a ledger UTF-8 without NUL, as Key.
	Type string `json:"type"`
	// Key is a business key for logs, at most 2048 bytes. Optional.
	Key string `json:"key,omitempty"`
	// Payload is what the handler needs; bytes out are the bytes in. At most Queue.MaxPayload.
	Payload []byte `json:"payload,omitempty"`

	// Delay counts from when Redis gets the call, by its clock, rounded up to a millisecond; negative means now.
	Delay time.Duration `json:"-"`
	// RunAt is an absolute due time instead, rounded up to a millisecond; in the past means now, ordered by that time. Before
	// the year 2200.
	RunAt time.Time `json:"-"`
	// Conflict says what to do when the id is known. Defaults to Keep.
	Conflict Conflict `json:"-"`

	// Queue is where the task came from.
	Queue string `json:"queue,omitempty"`
	// Attempt is the number of this run, from 1: failed runs and lost leases count, releases and snoozes do not.
	Attempt int `json:"attempt,omitempty"`
	// Failed counts runs that ended in an error, Lost leases that ran out (a crash, a stalled machine), Deliveries all leases.
	Failed     int `json:"failed,omitempty"`
	Lost       int `json:"lost,omitempty"`
	Deliveries int `json:"deliveries,omitempty"`
	// Due is when the task fell due, by Redis' clock: for a retry the retry's time, after a lost lease its old deadline.
	Due time.Time `json:"due,omitzero"`
	// EnqueuedAt is when the producer enqueued the task, by its own clock.
	EnqueuedAt time.Time `json:"enqueued_at,omitzero"`

	token string // of the lease, for CompleteTx
	stamp []byte // of the record, where it was read
}

// Conflict is what Enqueue does with an id that the queue knows.
type Conflict int

// The conflict policies.
const (
	// Keep leaves the known task alone; the outcome tells where it is.
	Keep Conflict = iota
	// Replace exchanges payload and due time of a task that waits, and starts its attempts afresh; otherwise as Keep.
	Replace
	// Reject makes it an error, ErrConflict.
	Reject
)

// An Option sets a field of a task in passing.
type Option func(*Task)

// In makes the task due d from now, by Redis' clock.
func In(d time.Duration) Option { return func(t *Task) { t.Delay, t.RunAt = d, time.Time{} } }

// At makes the task due at an instant.
func At(at time.Time) Option { return func(t *Task) { t.Delay, t.RunAt = 0, at } }

// OnConflict sets the conflict policy.
func OnConflict(c Conflict) Option { return func(t *Task) { t.Conflict = c } }

// NewTask makes a task whose payload is the JSON of v.
func NewTask(id, typ string, v any) (Task, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Task{}, fmt.Errorf("delayq: payload of %s: %w", printable(id), err)
	}
	return Task{ID: id, Type: typ, Payload: body}, nil
}

// IDOf is the id of a business key of any length: the key itself if it is short enough, else its beginning and its SHA-256,
// always the same. Keep the original in Task.Key:
//
//	q.Enqueue(ctx, delayq.Task{ID: delayq.IDOf(key), Key: key, Type: "refund"})
//	q.Cancel(ctx, delayq.IDOf(key))
func IDOf(key string) string {
	if len(key) <= maxID {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return key[:maxID-1-2*len(sum)] + "~" + hex.EncodeToString(sum[:])
}

// Outcome is what an enqueue did.
type Outcome int

// The outcomes.
const (
	Created Outcome = iota + 1
	Replaced
	DuplicatePending
	DuplicateProcessing
	DuplicateDead
	DuplicateDone // finished within the retention
)

// Duplicate reports whether the queue knew the id and left it as it was.
func (o Outcome) Duplicate() bool { return o >= DuplicatePending }

func (o Outcome) String() string {
	switch o {
	case Created:
		return "created"
	case Replaced:
		return "replaced"
	case DuplicatePending:
		return "pending"
	case DuplicateProcessing:
		return "processing"
	case DuplicateDead:
		return "dead"
	case DuplicateDone:
		return "done"
	}
	return "none"
}

// MarshalText makes outcomes readable in JSON.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// A Result is what became of one task of an enqueue.
type Result struct {
	ID      string
	Outcome Outcome
	Err     error // why it is not in the queue; Outcome is then 0, or the duplicate that was rejected
}

// prepare checks a task, gives it an id and encodes it.
func (q *Queue) prepare(t *Task) ([]byte, error) {
	if err := q.validate(t); err != nil {
		return nil, &TaskError{"enqueue", q.name, t.ID, err}
	}
	if t.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return nil, &TaskError{"enqueue", q.name, "", err}
		}
		t.ID = id.String()
	}
	return encode(t, time.Now()), nil
}

func (q *Queue) validate(t *Task) error {
	bytes := func(n int) string { return fmt.Sprintf("%d bytes", n) }
	switch {
	case len(t.ID) > maxID:
		return &InputError{"ID", "at most 256 bytes", bytes(len(t.ID))}
	case t.Type == "":
		return &InputError{"Type", "1 to 128 bytes", "none"}
	case len(t.Type) > maxType:
		return &InputError{"Type", "1 to 128 bytes", bytes(len(t.Type))}
	case len(t.Key) > maxKey:
		return &InputError{"Key", "at most 2048 bytes", bytes(len(t.Key))}
	case len(t.Payload) > q.maxPayload:
		return &InputError{"Payload", "at most " + bytes(q.maxPayload), bytes(len(t.Payload))}
	case q.lq != nil && !plainText(t.Type):
		return &InputError{"Type", "UTF-8 without NUL with a ledger", "other bytes"}
	case q.lq != nil && !plainText(t.Key):
		return &InputError{"Key", "UTF-8 without NUL with a ledger", "other bytes"}
	case t.Conflict < Keep || t.Conflict > Reject:
		return &InputError{"Conflict", "Keep, Replace or Reject", fmt.Sprint(int(t.Conflict))}
	}
	_, err := dueArg(t.Delay, t.RunAt)
	return err
}

// plainText reports whether a database takes a text.
func plainText(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

// dueArg is a due time as the scripts read it: a delay in ms, or @ and an instant in ms.
func dueArg(delay time.Duration, at time.Time) (string, error) {
	switch {
	case delay != 0 && !at.IsZero():
		return "", &InputError{"Delay and RunAt", "one or the other", "both"}
	case at.IsZero():
		if time.Now().Add(delay).After(latestDue) {
			return "", &InputError{"Delay", "due before the year 2200", delay.String()}
		}
		return itoa(ms(delay)), nil
	case at.After(latestDue):
		return "", &InputError{"RunAt", "before the year 2200", at.UTC().Format(time.RFC3339)}
	case at.Before(time.UnixMilli(0)):
		return "@0", nil
	}
	return "@" + itoa(unixMS(at)), nil
}
