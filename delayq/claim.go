package delayq

import (
	"context"
	"errors"
	"time"
)

// This file is the consumer's side of ledger mode. A lease in Redis is permission to ask; the claim in the ledger is the lock.

// claim asks the ledger for what Redis has leased and returns what may run. It may be repeated with the same arguments until it
// is answered. What is refused is put right in Redis, by what the ledger says now.
func (q *Queue) claim(ctx context.Context, c LedgerClaim, leases []*Lease) ([]*Lease, error) {
	if len(leases) == 0 || sabotage == "claim-skipped" {
		return leases, nil
	}
	want := make([]LedgerWant, len(leases))
	for i, l := range leases {
		want[i] = LedgerWant{l.ID, l.rev}
	}
	sent := time.Now()
	rows, err := q.lq.Claim(ctx, c, want)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]*LedgerRow, len(rows))
	for i := range rows {
		byID[rows[i].ID] = &rows[i]
	}
	granted := make([]*Lease, 0, len(leases))
	var ended []LedgerRow
	var refused, unread []*Lease
	for _, l := range leases {
		row := byID[l.ID]
		switch {
		case row == nil:
			refused = append(refused, l)
		case row.Status != LedgerRunning || row.Token != l.token:
			ended = append(ended, *row)
		default:
			l.take(row)
			l.Deadline = sent.Add(c.Lease) // the ledger's lease counts, and it begins here
			if l.broken != nil {
				unread = append(unread, l)
			}
			granted = append(granted, l)
		}
	}
	q.reread(ctx, unread)
	q.tell(ctx, nil, ended, endedCounts(ended))
	if len(refused) > 0 {
		q.after(ctx, nil, func(ctx context.Context) error { return q.putRight(ctx, refused) })
	}
	return granted, nil
}

// take fills a lease with what the ledger counts.
func (l *Lease) take(row *LedgerRow) {
	l.Failed, l.Lost, l.Deliveries = row.Failed, row.Lost, row.Deliveries
	l.Attempt = l.Failed + l.Lost + 1
	l.Task.token = l.token
}

// fill makes a lease of a whole row.
func (l *Lease) fill(row *LedgerRow) {
	l.ID, l.Type, l.Key, l.Payload, l.broken = row.ID, row.Type, row.Key, row.Payload, nil
	l.EnqueuedAt = stampTime(row.Stamp)
	l.rev = row.Rev
	l.take(row)
}

// reread takes tasks whose record in Redis is unreadable from the ledger.
func (q *Queue) reread(ctx context.Context, leases []*Lease) {
	if len(leases) == 0 {
		return
	}
	ids := make([]string, len(leases))
	for i, l := range leases {
		ids[i] = l.ID
	}
	rows, err := q.lq.Rows(ctx, ids, true)
	if err != nil {
		return // it ends as unreadable, and is tried again
	}
	for _, l := range leases {
		for i := range rows {
			if rows[i].ID == l.ID {
				l.fill(&rows[i])
			}
		}
	}
}

func endedCounts(ended []LedgerRow) map[string]int64 {
	counts := map[string]int64{}
	for _, row := range ended {
		if row.Status == LedgerDead {
			counts["e:buried"]++
		} else {
			counts["e:cancelled"]++
		}
	}
	return counts
}

// putRight tells Redis about tasks whose claim was refused: quarantined when the ledger does not know them, dropped, moved,
// or given back until whoever runs them is done.
func (q *Queue) putRight(ctx context.Context, refused []*Lease) error {
	ids := make([]string, len(refused))
	for i, l := range refused {
		ids[i] = l.ID
	}
	rows, err := q.lq.Rows(ctx, ids, true)
	if err != nil {
		return err
	}
	byID := make(map[string]*LedgerRow, len(rows))
	for i := range rows {
		byID[rows[i].ID] = &rows[i]
	}
	var show []LedgerRow
	var unknown []Suspect
	back := map[*shard][]settlement{}
	for _, l := range refused {
		row := byID[l.ID]
		switch {
		case row == nil && l.rev == 0 && l.broken == nil:
			// Enqueued before the queue had a ledger, perhaps: the reconciler looks closer.
			back[l.shard] = append(back[l.shard], settlement{lease: l, verb: verbRelease, delay: time.Minute})
		case row == nil:
			unknown = append(unknown, Suspect{ID: l.ID, Rev: l.rev, Token: l.token})
		case !row.Status.Open() || row.Rev != l.rev:
			show = append(show, *row)
		case row.Status == LedgerRunning:
			back[l.shard] = append(back[l.shard], settlement{lease: l, verb: verbRelease, at: row.LockedUntil})
		default:
			back[l.shard] = append(back[l.shard], settlement{lease: l, verb: verbRelease, at: row.RunAt})
		}
	}
	var errs []error
	if len(show) > 0 {
		_, err := q.Mirror().Show(ctx, show, Showing{Now: time.Now()})
		errs = append(errs, err)
	}
	if len(unknown) > 0 {
		errs = append(errs, q.quarantine(ctx, unknown))
	}
	for sh, items := range back {
		for _, err := range sh.settleInRedis(ctx, items) {
			if err != nil && !errors.Is(err, ErrLeaseLost) && !errors.Is(err, ErrNotFound) {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func (q *Queue) quarantine(ctx context.Context, unknown []Suspect) error {
	_, err := q.Mirror().Quarantine(ctx, unknown, ReasonUnbooked, "redis has this task and the ledger does not know it")
	return err
}

// leaseClaimed is Lease with a ledger: from Redis if it answers, each task then claimed, else from the ledger alone.
func (q *Queue) leaseClaimed(ctx context.Context, o LeaseOptions) ([]*Lease, error) {
	redisCtx, cancel := context.WithTimeout(ctx, hungRedis)
	leases, err := q.leaseInRedis(redisCtx, o)
	cancel()
	claim := LedgerClaim{Lease: o.Lease, Consumer: o.Consumer, MaxLost: defaultMaxLost, MaxFailed: defaultMaxAttempts}
	if err != nil && away(err) {
		claim.Token = string(randomToken())
		return q.leaseBooked(ctx, claim, min(o.Max, maxBatch))
	}
	if err != nil {
		return nil, err
	}
	var granted []*Lease
	for len(leases) > 0 {
		n := 1
		for n < len(leases) && leases[n].token == leases[0].token {
			n++
		}
		claim.Token = leases[0].token
		some, err := q.claim(ctx, claim, leases[:n])
		if err != nil && len(granted) == 0 {
			return nil, err // what Redis leased comes again when the leases have run out
		}
		granted = append(granted, some...)
		leases = leases[n:]
	}
	return granted, nil
}

// leaseBooked leases straight from the ledger: lease and claim in one.
func (q *Queue) leaseBooked(ctx context.Context, c LedgerClaim, most int) ([]*Lease, error) {
	sent := time.Now()
	rows, err := q.lq.Lease(ctx, c, most)
	if err != nil {
		return nil, err
	}
	var leases []*Lease
	var ended []LedgerRow
	for i := range rows {
		row := &rows[i]
		if row.Status != LedgerRunning || row.Token != c.Token {
			ended = append(ended, *row)
			continue
		}
		l := &Lease{shard: q.shard(row.ID), token: c.Token, Deadline: sent.Add(c.Lease)}
		l.Queue, l.Due = q.name, row.RunAt
		l.fill(row)
		leases = append(leases, l)
	}
	q.tell(ctx, nil, ended, endedCounts(ended))
	return leases, nil
}

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
			}
		}
		if err == nil && beats[i] != LedgerLost {
			l.Deadline = sent.Add(d)
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
