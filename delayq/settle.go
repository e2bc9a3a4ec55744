package delayq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// longestDelay keeps a task that is given back before the sentinel's score; nobody waits that long.
const longestDelay = 100 * 365 * 24 * time.Hour

// maxError bounds the text of a last error in Redis, in bytes.
const maxError = 1024

// A settlement is one lease and what to do with it.
type settlement struct {
	lease   *Lease
	verb    settleVerb
	delay   time.Duration // retry, release
	at      time.Time     // release: an instant instead of delay
	reason  string        // retry, bury
	err     error         // retry, bury
	payload []byte        // retry: the rest of the work, nil = unchanged

	maxFailed int // retry with a ledger: attempts that may fail
}

type settleVerb int

const (
	verbAck settleVerb = iota
	verbRetry
	verbRelease
	verbBury
	verbBuryUnrun // the attempt was not made, so it does not count
	verbCount
)

func (v settleVerb) String() string {
	return [...]string{"ack", "retry", "release", "bury", "bury"}[v]
}

// Ack ends tasks as succeeded. An error is per task, in a BatchError if there is more than one: ErrLeaseLost, ErrNotFound;
// with a ledger also ErrBusy: another transaction has the task locked, so try again.
func (q *Queue) Ack(ctx context.Context, leases ...*Lease) error {
	return q.settleAll(ctx, verbAck, leases, settlement{})
}

// Release gives tasks back, due after delay, without counting an attempt. Errors as for Ack; ErrCancelled when a task was
// told to stop meanwhile: it has ended as cancelled.
func (q *Queue) Release(ctx context.Context, delay time.Duration, leases ...*Lease) error {
	return q.settleAll(ctx, verbRelease, leases, settlement{delay: delay})
}

// Retry gives a task back, due after delay, as a failed attempt with its cause. Errors as for Release.
func (q *Queue) Retry(ctx context.Context, l *Lease, delay time.Duration, cause error) error {
	return q.settleAll(ctx, verbRetry, []*Lease{l}, settlement{delay: delay, reason: reasonOf(cause), err: cause})
}

// Bury moves a task to the dead letters with its cause. Errors as for Release.
func (q *Queue) Bury(ctx context.Context, l *Lease, cause error) error {
	return q.settleAll(ctx, verbBury, []*Lease{l}, settlement{reason: reasonOf(cause), err: cause})
}

// Extend renews leases to run out d from now, 100 ms to 12 h. Errors as for Ack, ErrInvalid; ErrCancelled means renewed and told to stop.
func (q *Queue) Extend(ctx context.Context, d time.Duration, leases ...*Lease) error {
	if d < shortestLease || d > longestLease {
		return fmt.Errorf("delayq: extend: %w", &InputError{"lease", "100 ms to 12 h", d.String()})
	}
	errs := make([]error, len(leases))
	for sh, places := range byShard(leases) {
		for len(places) > 0 {
			batch := places[:min(len(places), maxBatch)]
			places = places[len(batch):]
			some := make([]*Lease, len(batch))
			for k, i := range batch {
				some[k] = leases[i]
			}
			for k, err := range sh.extend(ctx, d, some) {
				errs[batch[k]] = err
			}
		}
	}
	return batchError("extend", errs)
}

func byShard(leases []*Lease) map[*shard][]int {
	m := map[*shard][]int{}
	for i, l := range leases {
		m[l.shard] = append(m[l.shard], i)
	}
	return m
}

// extend renews at most maxBatch leases of one shard; the answer has one place for each.
func (sh *shard) extend(ctx context.Context, d time.Duration, leases []*Lease) []error {
	if sh.q.lq != nil {
		return sh.q.renew(ctx, sh, d, leases)
	}
	return sh.extendInRedis(ctx, d, leases)
}

func (sh *shard) extendInRedis(ctx context.Context, d time.Duration, leases []*Lease) []error {
	args := make([]any, 0, 6+len(leases))
	args = append(args, sh.q.clock(), ms(d), len(leases))
	args = appendByToken(args, leases)
	sent := time.Now()
	errs := sh.codes(ctx, sh.q.scripts.extend, "extend", args, leases)
	for i, err := range errs {
		if err == nil || errors.Is(err, ErrCancelled) {
			leases[i].Deadline = sent.Add(d)
		}
	}
	return errs
}

func (q *Queue) settleAll(ctx context.Context, verb settleVerb, leases []*Lease, like settlement) error {
	errs := make([]error, len(leases))
	for sh, places := range byShard(leases) {
		for len(places) > 0 {
			items := make([]settlement, 0, min(len(places), maxBatch))
			seen := make(map[string]struct{}, cap(items))
			for _, i := range places[:cap(items)] {
				if _, twice := seen[leases[i].ID]; twice {
					break
				}
				seen[leases[i].ID] = struct{}{}
				s := like
				s.lease, s.verb = leases[i], verb
				items = append(items, s)
			}
			for k, err := range sh.settle(ctx, items) {
				errs[places[k]] = err
			}
			places = places[len(items):]
		}
	}
	return batchError(verb.String(), errs)
}

// settle sends at most maxBatch settlements of one verb and shard; the answer has one place for each.
func (sh *shard) settle(ctx context.Context, items []settlement) []error {
	if sh.q.lq != nil {
		return sh.q.finish(ctx, items)
	}
	return sh.settleInRedis(ctx, items)
}

func (sh *shard) settleInRedis(ctx context.Context, items []settlement) []error {
	q, n, verb := sh.q, len(items), items[0].verb
	leases := make([]*Lease, n)
	for i, s := range items {
		leases[i] = s.lease
	}
	args := make([]any, 0, 4+5*n)
	args = append(args, q.clock(), n)
	if verb == verbAck {
		return sh.codes(ctx, q.scripts.ack, "ack", appendByToken(args, leases), leases)
	}
	if verb == verbBury || verb == verbBuryUnrun {
		args = append(args, q.cfg.DeadCap, bit(verb == verbBury))
	}
	for _, l := range leases {
		args = append(args, l.ID)
	}
	for _, l := range leases {
		args = append(args, l.token)
	}
	var sc script
	switch verb {
	case verbRelease:
		sc = q.scripts.release
		for _, s := range items {
			if s.at.IsZero() {
				args = append(args, ms(min(s.delay, longestDelay)))
			} else {
				args = append(args, "@"+itoa(unixMS(s.at)))
			}
		}
	case verbRetry:
		sc = q.scripts.retry
		for _, s := range items {
			args = append(args, ms(min(s.delay, longestDelay)))
		}
		for _, s := range items {
			args = append(args, errorRecord(s))
		}
		for _, s := range items {
			args = append(args, s.record())
		}
	default:
		sc = q.scripts.bury
		for _, s := range items {
			args = append(args, errorRecord(s))
		}
	}
	return sh.codes(ctx, sc, verb.String(), args, leases)
}

// appendByToken adds runs of leases that share a token, then their ids: a token travels once a run.
func appendByToken(args []any, leases []*Lease) []any {
	at := len(args)
	args = append(args, 0)
	runs := 0
	for i := 0; i < len(leases); {
		k := i
		for k < len(leases) && leases[k].token == leases[i].token {
			k++
		}
		args = append(args, leases[i].token, k-i)
		runs++
		i = k
	}
	args[at] = runs
	for _, l := range leases {
		args = append(args, l.ID)
	}
	return args
}

// cost is an upper estimate of what the settlement adds to a call.
func (s *settlement) cost() int {
	n := 2*len(s.lease.ID) + len(s.payload) + 128
	if s.err != nil {
		n += maxError
	}
	return n
}

// record is the re-encoded task when its payload changes, empty otherwise.
func (s *settlement) record() []byte {
	if s.payload == nil {
		return nil
	}
	t := s.lease.Task
	t.Payload = s.payload
	return encode(&t, t.EnqueuedAt)
}

// codes runs a script over leases and turns its codes into errors.
func (sh *shard) codes(ctx context.Context, sc script, op string, args []any, leases []*Lease) []error {
	reply, err := sh.run(ctx, sc, args, nil)
	var codes []int
	if err == nil {
		codes, err = exceptions(reply, len(leases))
	}
	errs := make([]error, len(leases))
	for i, l := range leases {
		cause := err
		if err == nil {
			cause = leaseErrors[codes[i]]
		}
		if cause != nil {
			errs[i] = &TaskError{op, sh.q.name, l.ID, cause}
		}
	}
	return errs
}

var leaseErrors = map[int]error{
	codeCancelled: ErrCancelled, codeStop: ErrCancelled, codeLeaseLost: ErrLeaseLost, codeUnknown: ErrNotFound,
}

// errorRecord is reason and text as kept in Redis.
func errorRecord(s settlement) string {
	reason, body := cutError(s)
	return fmt.Sprintf("%s\n%s", reason, body)
}

// cutError is reason and text of a failure: valid UTF-8, cut to maxError.
func cutError(s settlement) (reason, text string) {
	body := ""
	if s.err != nil {
		body = strings.ToValidUTF8(s.err.Error(), "?")
	}
	if len(body) > maxError {
		body = body[:maxError]
		for !utf8.ValidString(body) {
			body = body[:len(body)-1]
		}
	}
	return s.reason, body
}
