package delayq

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// A Lease is the right to run one task until its deadline. Every verb that ends it compares its token in Redis, so a lease
// that was lost can do no harm.
type Lease struct {
	Task
	// Deadline is when the lease runs out, by this machine's clock and counted from before the call was sent.
	Deadline time.Time

	shard  *shard
	token  string
	rev    int64 // of the ledger, as the task was leased; 0 without one
	broken error // the record could not be read
}

// Token is the lease's name, 32 hex digits: the same for all tasks of one lease call.
func (l *Lease) Token() string { return fmt.Sprintf("%x", l.token) }

// Bounds of a lease.
const (
	shortestLease = 100 * time.Millisecond
	longestLease  = 12 * time.Hour
)

// LeaseOptions says what to lease.
type LeaseOptions struct {
	Max      int           // tasks at most, 1 to 500 a call and shard
	Lease    time.Duration // how long; 100 ms to 12 h
	Consumer string        // who asks; one lease call of a consumer at a time. 1 to 128 bytes without blanks
	Dues     bool          // fill Task.Due, which costs Redis 7.0 about a microsecond a task
}

// Lease leases due tasks, most overdue first, for those who write their own loop; others use NewWorker. It answers at once,
// with none when nothing is due, and may give fewer than Max when payloads are large. A repeat after a lost reply is made
// inside and gets the same tasks.
//
// A task whose record cannot be read is among the answer with Type empty; bury it.
func (q *Queue) Lease(ctx context.Context, o LeaseOptions) ([]*Lease, error) {
	switch {
	case o.Max < 1 || o.Max > 10_000:
		return nil, &InputError{"LeaseOptions.Max", "1 to 10000", strconv.Itoa(o.Max)}
	case o.Lease < shortestLease || o.Lease > longestLease:
		return nil, &InputError{"LeaseOptions.Lease", "100 ms to 12 h", o.Lease.String()}
	}
	if err := validConsumer("LeaseOptions.Consumer", o.Consumer); err != nil {
		return nil, err
	}
	if q.lq != nil {
		return q.leaseClaimed(ctx, o)
	}
	return q.leaseInRedis(ctx, o)
}

func (q *Queue) leaseInRedis(ctx context.Context, o LeaseOptions) ([]*Lease, error) {
	var all []*Lease
	first := q.turn.next(len(q.shards))
	for i := range q.shards {
		sh := q.shards[(first+i)%len(q.shards)]
		for len(all) < o.Max {
			ask := min(o.Max-len(all), maxBatch)
			got, err := sh.lease(ctx, leaseCall{max: ask, lease: o.Lease, consumer: o.Consumer, dues: o.Dues})
			if err != nil {
				if len(all) > 0 {
					return all, nil // what is leased must not be lost; the next call meets the error again
				}
				return nil, err
			}
			all = append(all, got.leases...)
			if len(got.leases) == 0 || !got.more {
				break
			}
		}
	}
	return all, nil
}

func validConsumer(field, s string) error {
	if s == "" || len(s) > 128 || strings.ContainsAny(s, " \t\r\n\x00") {
		return &InputError{field, "1 to 128 bytes without blanks", fmt.Sprintf("%d bytes", len(s))}
	}
	return nil
}

// A leaseCall is the arguments of lease.lua; token is set once and kept over resends.
type leaseCall struct {
	token    string
	max      int
	lease    time.Duration
	consumer string
	group    string
	register bool
	keep     int
	dues     bool
}

// A leased is its reply.
type leased struct {
	leases  []*Lease
	more    bool          // more is due now
	next    time.Duration // until something falls due, from the reply on; negative when nothing is known
	stay    bool
	version int64 // of cancellations: a change means that a running task was cancelled
	missing []string
}

func (c *leaseCall) args(q *Queue) []any {
	if c.token == "" {
		c.token = string(randomToken())
	}
	return []any{
		q.clock(), c.token, c.max, ms(c.lease), c.consumer, maxReply,
		c.group, c.consumer, bit(c.register), max(c.keep, 1), bit(c.dues), bit(q.mode() != ""),
	}
}

func (sh *shard) lease(ctx context.Context, c leaseCall) (*leased, error) {
	var got *leased
	err := sh.withEpoch(ctx, func() error {
		args := c.args(sh.q)
		sent := time.Now()
		reply, err := sh.run(ctx, sh.q.scripts.lease, args, nil)
		if err == nil {
			got, err = sh.leased(reply, &c, sent)
		}
		return err
	})
	return got, err
}

// leased reads the reply of lease.lua to a call sent at an instant.
func (sh *shard) leased(reply any, c *leaseCall, sent time.Time) (*leased, error) {
	f, ok := reply.([]any)
	if ok && len(f) == 1 && f[0] == int64(codeNoEpoch) {
		return nil, errNoEpoch
	}
	if ok && len(f) == 1 && f[0] == int64(codeMode) {
		return nil, fmt.Errorf("delayq: lease %s: %w", sh.q.name, ErrLedger)
	}
	if !ok || len(f) != 12 {
		return nil, errReply
	}
	var n [6]int64
	var err error
	for i := range n {
		if n[i], err = number(f[i]); err != nil {
			return nil, err
		}
	}
	ids, ok1 := f[6].([]any)
	blobs, ok2 := f[7].([]any)
	extras, ok3 := f[9].([]any)
	missing, ok4 := f[10].([]any)
	revs, ok5 := f[11].([]any)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || len(ids) != len(blobs) {
		return nil, errReply
	}
	l := &leased{stay: n[3] == 1, version: n[4], next: -1}
	if n[2] >= 0 {
		l.next = max(0, time.Duration(n[2]-n[1])*time.Microsecond)
		l.more = n[2] <= n[1]
	}
	for _, id := range missing {
		l.missing = append(l.missing, text(id))
	}
	dues := strings.Fields(text(f[8]))
	backing := make([]Lease, len(ids))
	l.leases = make([]*Lease, len(ids))
	for i := range ids {
		le := &backing[i]
		l.leases[i] = le
		le.shard, le.token, le.Deadline = sh, c.token, sent.Add(c.lease)
		le.ID, le.Queue, le.Deliveries, le.Attempt = text(ids[i]), sh.q.name, 1, 1
		if i < len(dues) {
			le.Due = scoreTime(dues[i])
		}
		if i < len(revs) {
			le.rev, _ = strconv.ParseInt(text(revs[i]), 10, 64)
		}
		le.broken = decode([]byte(text(blobs[i])), &le.Task)
	}
	for i := 0; i+1 < len(extras); i += 2 {
		at, err := number(extras[i])
		if err != nil || at < 1 || at > int64(len(ids)) {
			return nil, errReply
		}
		l.leases[at-1].counts(text(extras[i+1]))
	}
	return l, nil
}

// counts reads "deliveries:failed:lost".
func (t *Task) counts(s string) {
	d, rest, _ := strings.Cut(s, ":")
	f, lost, _ := strings.Cut(rest, ":")
	t.Deliveries, _ = strconv.Atoi(d)
	t.Failed, _ = strconv.Atoi(f)
	t.Lost, _ = strconv.Atoi(lost)
	t.Attempt = t.Failed + t.Lost + 1
}

// scoreTime is a score, microseconds, as time; zero if it is none.
func scoreTime(s string) time.Time {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMicro(int64(f))
}
