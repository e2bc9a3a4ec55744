package delayq

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// What the tests of package delayq_test reach inside.

// Bounds of one script call.
const (
	MaxBatch = maxBatch
	MaxReply = maxReply
)

// SetClock makes the scripts of q take the time in ms from now instead of from Redis.
func SetClock(q *Queue, now func() float64) {
	q.clock = func() string { return strconv.FormatFloat(now(), 'f', 3, 64) }
}

// Keys are the Redis keys of one shard, in the order in which scripts get them.
func Keys(q *Queue, shard int) []string { return q.shards[shard].keys }

// ShardOf is the shard of an id.
func ShardOf(q *Queue, id string) int { return q.shard(id).index }

// RunScript runs a verb's script on one shard with bare arguments.
func RunScript(ctx context.Context, q *Queue, shard int, verb string, args ...any) (any, error) {
	s := q.scripts
	for _, sc := range []script{
		s.init, s.enqueue, s.lease, s.extend, s.ack, s.retry, s.release, s.bury, s.cancel, s.reschedule, s.replay, s.purge,
		s.stats, s.get, s.list, s.audit, s.beat, s.consumers, s.put, s.drop, s.quarantine, s.check, s.mend, s.nudge,
	} {
		if sc.verb == verb {
			return q.shards[shard].run(ctx, sc, args, nil)
		}
	}
	return nil, fmt.Errorf("no script %q", verb)
}

// Encode and Decode are the record of a task.
var Encode = encode

// Decode is the inverse of Encode.
func Decode(record []byte) (Task, error) {
	var t Task
	err := decode(record, &t)
	return t, err
}

// A LeaseCall is a bare lease call; the same Token again is a resend of it.
type LeaseCall struct {
	Token    string // empty means a new one
	Max      int
	Lease    time.Duration
	Consumer string
	Group    string // of the baton
	Register bool
	Keep     int
}

// A Leased is what a bare lease call answers.
type Leased struct {
	Leases  []*Lease
	Token   string
	Next    time.Duration // until something falls due, negative when nothing is known
	Stay    bool
	Version int64 // of cancellations
	Missing []string
}

// DoLease makes a bare lease call to one shard.
func DoLease(ctx context.Context, q *Queue, shard int, c LeaseCall) (*Leased, error) {
	if c.Token == "" {
		c.Token = string(randomToken())
	}
	got, err := q.shards[shard].lease(ctx, leaseCall{
		token: c.Token, max: c.Max, lease: c.Lease, consumer: c.Consumer, group: c.Group, register: c.Register, keep: c.Keep,
	})
	if err != nil {
		return nil, err
	}
	return &Leased{got.leases, c.Token, got.next, got.stay, got.version, got.missing}, nil
}

// Flying is how many group commits of a shard are under way.
func Flying(q *Queue, shard int) int {
	c := &q.shards[shard].group
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.flying
}

// Waiting is how many callers of Enqueue wait for their group commit to begin.
func Waiting(q *Queue, shard int) int {
	c := &q.shards[shard].group
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue)
}

// Rev is the revision at which a lease was leased.
func Rev(l *Lease) int64 { return l.rev }

// BareToken is the token of a lease as Redis has it.
func BareToken(l *Lease) string { return l.token }

// Init runs the script that makes a shard or checks it.
func Init(ctx context.Context, q *Queue, shard int) (string, error) {
	got, err := q.shards[shard].init(ctx, len(q.shards), true)
	got.now = time.Time{}
	return fmt.Sprint(got), err
}
