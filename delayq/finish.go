package delayq

import (
	"context"
	"errors"
	"time"
)

// This file is the consumer's side of ledger mode after the claim: heartbeats and ends, in the ledger first.

// renew extends leases in the ledger, whose answer decides, and then in Redis, where nothing depends on it but peace: a lease
// that runs out there is leased again and refused.
func (q *Queue) renew(ctx context.Context, sh *shard, d time.Duration, leases []*Lease) []error {
	if n := untilTwice(len(leases), func(i int) string { return leases[i].ID }); n < len(leases) {
		return append(q.renew(ctx, sh, d, leases[:n]), q.renew(ctx, sh, d, leases[n:])...)
	}
	if sabotage == "heartbeat-redis-only" {
		return sh.extendInRedis(ctx, d, leases)
	}
	held := make([]LedgerHeld, len(leases))
	for i, l := range leases {
		held[i] = LedgerHeld{l.ID, l.token}
	}
	sent := time.Now()
	beats, err := q.lq.Heartbeat(ctx, d, held)
	errs := make([]error, len(leases))
	alive := make([]*Lease, 0, len(leases))
	for i, l := range leases {
		cause := err
		if err == nil {
			switch beats[i] {
			case LedgerLost:
				cause = ErrLeaseLost
			case LedgerStop:
				cause = ErrCancelled
			case LedgerBusy:
				cause = ErrBusy
			}
		}
		if err == nil && (beats[i] == LedgerRenewed || beats[i] == LedgerStop) {
			l.Deadline = sent.Add(d)
		}
		if err == nil && beats[i] != LedgerLost {
			alive = append(alive, l)
		}
		if cause != nil {
			errs[i] = &TaskError{"extend", q.name, l.ID, cause}
		}
	}
	if len(alive) > 0 {
		q.after(ctx, nil, func(ctx context.Context) error {
			for _, err := range sh.extendInRedis(ctx, d, alive) {
				if err != nil && !answered(err) {
					return err
				}
			}
			return nil
		})
	}
	return errs
}

// untilTwice is how many of the first of n ids are distinct. A worker can have a task twice: lost, and not yet given up by its
// handler, and leased again.
func untilTwice(n int, id func(i int) string) int {
	seen := make(map[string]struct{}, n)
	for i := range n {
		if _, twice := seen[id(i)]; twice {
			return i
		}
		seen[id(i)] = struct{}{}
	}
	return n
}

// answered reports whether the error of one task is Redis' answer, not the want of one.
func answered(err error) bool {
	return errors.Is(err, ErrLeaseLost) || errors.Is(err, ErrNotFound) || errors.Is(err, ErrCancelled)
}

var ledgerVerbs = [verbCount]LedgerVerb{
	verbAck: LedgerSucceed, verbRetry: LedgerFail, verbRelease: LedgerGiveBack, verbBury: LedgerBury, verbBuryUnrun: LedgerBuryUnrun,
}

// finish ends leases in the ledger, then tells Redis. Where the task had succeeded already, in the handler's own transaction, the
// item's verb is changed to that.
func (q *Queue) finish(ctx context.Context, items []settlement) []error {
	if n := untilTwice(len(items), func(i int) string { return items[i].lease.ID }); n < len(items) {
		return append(q.finish(ctx, items[:n]), q.finish(ctx, items[n:])...)
	}
	if sabotage == "give-back-redis-only" && items[0].verb == verbRelease {
		return items[0].lease.shard.settleInRedis(ctx, items)
	}
	ends := make([]LedgerEnd, len(items))
	for i, s := range items {
		e := LedgerEnd{
			LedgerHeld: LedgerHeld{s.lease.ID, s.lease.token}, Verb: ledgerVerbs[s.verb], Delay: min(s.delay, longestDelay),
			MaxFailed: s.maxFailed, Reason: s.reason, Payload: s.payload,
		}
		if e.Verb == LedgerGiveBack && s.delay > 0 {
			e.Verb = LedgerSnooze
		}
		if s.err != nil {
			_, e.Error = cutError(s)
		}
		ends[i] = e
	}
	changes, err := q.lq.Finish(ctx, nil, ends)
	errs := make([]error, len(items))
	var done, other []LedgerRow
	var back []settlement
	counts := map[string]int64{}
	for i := range items {
		s := &items[i]
		if err != nil {
			errs[i] = &TaskError{s.verb.String(), q.name, s.lease.ID, err}
			continue
		}
		row := changes[i].Row
		cause := error(nil)
		switch {
		case row == nil:
			cause = ErrNotFound
		case !changes[i].Applied && row.Status == LedgerRunning && row.Token == s.lease.token:
			cause = ErrBusy
		case !changes[i].Applied && !doneBefore(s, row):
			cause = ErrLeaseLost
		case row.Status == LedgerSucceeded:
			s.verb = verbAck
			done = append(done, *row)
		case row.Status == LedgerCancelled:
			cause = ErrCancelled
			counts["e:cancelled"]++
			other = append(other, *row)
		case ends[i].Verb == LedgerGiveBack && row.Rev == s.lease.rev:
			back = append(back, settlement{lease: s.lease, verb: verbRelease, at: row.RunAt})
		default:
			counts[eventOf[s.verb]]++
			if s.reason != "" && s.verb != verbBuryUnrun {
				counts["f:"+s.reason]++
			}
			other = append(other, *row)
		}
		if cause != nil {
			errs[i] = &TaskError{s.verb.String(), q.name, s.lease.ID, cause}
		}
	}
	q.tellDone(ctx, done)
	q.tell(ctx, nil, other, counts)
	if len(back) > 0 {
		q.after(ctx, nil, func(ctx context.Context) error { return q.giveBack(ctx, back) })
	}
	return errs
}

// doneBefore reports whether a row that a finish did not match is what an earlier finish by this lease has made of it: this very
// call's, whose answer was lost, or the handler's own CompleteTx, which any verdict gives way to.
func doneBefore(s *settlement, row *LedgerRow) bool {
	if row.Token != s.lease.token {
		return false
	}
	switch row.Status {
	case LedgerSucceeded:
		return true
	case LedgerCancelled:
		return s.verb != verbAck
	case LedgerDead:
		return s.verb == verbBury || s.verb == verbBuryUnrun || s.verb == verbRetry
	case LedgerPending, LedgerRetry:
		return s.verb == verbRelease || s.verb == verbRetry
	default:
		return false
	}
}

var eventOf = [verbCount]string{verbRetry: "e:retried", verbRelease: "e:released", verbBury: "e:buried", verbBuryUnrun: "e:buried"}

func (q *Queue) tellDone(ctx context.Context, rows []LedgerRow) {
	if len(rows) == 0 {
		return
	}
	q.after(ctx, nil, func(ctx context.Context) error {
		_, err := q.Mirror().Show(ctx, rows, Showing{
			Now: time.Now(), Counts: map[string]int64{"e:succeeded": int64(len(rows))}, Durations: true,
		})
		return err
	})
}

// giveBack releases Redis leases of tasks that the ledger has as they were. One that came from the ledger has none.
func (q *Queue) giveBack(ctx context.Context, items []settlement) error {
	byShard := map[*shard][]settlement{}
	for _, s := range items {
		byShard[s.lease.shard] = append(byShard[s.lease.shard], s)
	}
	for sh, items := range byShard {
		for _, err := range sh.settleInRedis(ctx, items) {
			if err != nil && !answered(err) {
				return err
			}
		}
	}
	return nil
}
