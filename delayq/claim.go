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
	want := make([]LedgerWant, 0, len(leases))
	for _, l := range leases {
		if len(l.ID) <= maxID { // else somebody has planted it
			want = append(want, LedgerWant{l.ID, l.rev})
		}
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
	if len(refused) == 0 {
		return granted, nil
	}
	now, err := q.rowsOf(ctx, refused)
	if err != nil {
		return nil, err // the repeat is granted the same again
	}
	wrong := refused[:0]
	for _, l := range refused {
		if row := now[l.ID]; row != nil && row.Status == LedgerRunning && row.Token == l.token {
			l.fill(row)                  // an earlier send of this claim was still under way
			granted = append(granted, l) // until its lease in Redis ends, which is older
		} else {
			wrong = append(wrong, l)
		}
	}
	q.after(ctx, nil, func(ctx context.Context) error { return q.putRight(ctx, wrong, now) })
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

// rowsOf reads the rows of leases, by id.
func (q *Queue) rowsOf(ctx context.Context, leases []*Lease) (map[string]*LedgerRow, error) {
	ids := make([]string, 0, len(leases))
	for _, l := range leases {
		if len(l.ID) <= maxID {
			ids = append(ids, l.ID)
		}
	}
	byID := make(map[string]*LedgerRow, len(ids))
	if len(ids) == 0 {
		return byID, nil
	}
	rows, err := q.lq.Rows(ctx, ids, true)
	for i := range rows {
		byID[rows[i].ID] = &rows[i]
	}
	return byID, err
}

// reread takes tasks whose record in Redis is unreadable from the ledger. One that is not there either ends as unreadable.
func (q *Queue) reread(ctx context.Context, leases []*Lease) {
	if len(leases) == 0 {
		return
	}
	rows, err := q.rowsOf(ctx, leases)
	if err != nil {
		return // it is tried again
	}
	for _, l := range leases {
		if row := rows[l.ID]; row != nil {
			l.fill(row)
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

// lockedFor is how long a task is given back whose row another transaction has locked.
const lockedFor = time.Second

// putRight tells Redis about tasks whose claim was refused, by their rows: quarantined when the ledger does not know them, dropped,
// moved, or given back until whoever runs them, or has them locked, is done.
func (q *Queue) putRight(ctx context.Context, refused []*Lease, byID map[string]*LedgerRow) error {
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
		default:
			at, soon := row.RunAt, time.Now().Add(lockedFor)
			if row.Status == LedgerRunning {
				at = row.LockedUntil
			}
			if at.Before(soon) { // else it is due at once, and refused again
				at = soon
			}
			back[l.shard] = append(back[l.shard], settlement{lease: l, verb: verbRelease, at: at})
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
