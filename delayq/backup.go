package delayq

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"
)

// With a ledger, hungRedis bounds a lease call, and a worker whose Redis has not answered for redisGone leases from the ledger
// instead. While Redis answers it still looks there every ledgerLook, for tasks that Redis should have delivered lateAfter ago.
const (
	hungRedis  = 2 * time.Second
	redisGone  = time.Second
	ledgerLook = 5 * time.Second
	lateAfter  = 2 * time.Second
)

// claimLimit bounds one call of the ledger by the poll loop, which waits for it.
const claimLimit = 5 * time.Second

// claiming bounds the claims of one round, all together: the poll loop waits for them.
func (r *run) claiming() (context.Context, context.CancelFunc) {
	return r.call(r.base, min(r.cfg.Lease/3, claimLimit), r.cfg.Margin/2)
}

// startAll starts leased tasks: with a ledger, those that it grants.
func (s *source) startAll(ctx context.Context, leases []*Lease) {
	q, r := s.sh.q, s.run
	if q.lq != nil && len(leases) > 0 {
		granted, err := q.claim(ctx, r.ledgerClaim(leases[0].token), leases)
		if err != nil {
			s.unclaimed = leases
			s.failed(err)
			return
		}
		r.mu.Lock()
		r.stats.Refused += int64(len(leases) - len(granted))
		r.mu.Unlock()
		s.unclaimed, leases = nil, granted
	}
	for _, l := range leases {
		r.start(s, l)
	}
}

func (r *run) ledgerClaim(token string) LedgerClaim {
	return LedgerClaim{
		Token: token, Lease: r.cfg.Lease, Consumer: r.cfg.Consumer, MaxLost: r.cfg.MaxLost, MaxFailed: r.cfg.MaxAttempts,
	}
}

// claimAgain repeats claims that the ledger has not answered, and returns the sources that have none left. A claim may have been
// made although its answer was lost, so it is repeated, with its token, until there is too little left of the lease to be
// worth it; then the lease runs out.
func (r *run) claimAgain(ctx context.Context, chosen []*source) (free []*source, err error) {
	for _, s := range chosen {
		if len(s.unclaimed) == 0 {
			free = append(free, s)
			continue
		}
		if time.Until(s.unclaimed[0].Deadline) < r.cfg.Lease/3 {
			r.cfg.Logger.Warn("delayq: the ledger did not answer a claim; its tasks wait for the end of their lease", "queue", s.sh.q.name,
				"tasks", len(s.unclaimed))
			s.unclaimed = nil
			free = append(free, s)
			continue
		}
		s.startAll(ctx, s.unclaimed)
		if len(s.unclaimed) > 0 {
			err = errUnclaimed
		} else {
			s.failures = 0
			s.pollAt = time.Now()
		}
	}
	return free, err
}

// letGo claims for the last time what has had no answer, at the end of a run: what is granted then goes back uncharged, instead of
// being locked until its lease ends.
func (r *run) letGo() {
	r.mu.Lock()
	r.stopping = ErrStopping
	r.mu.Unlock()
	ctx, cancel := r.call(r.base, time.Second, r.cfg.Margin/2)
	defer cancel()
	for _, s := range r.sources {
		if len(s.unclaimed) > 0 {
			s.startAll(ctx, s.unclaimed)
		}
	}
}

var errUnclaimed = errors.New("delayq: the ledger does not answer")

// A backup leases from the ledger of one queue what Redis does not deliver: all that is due while Redis is gone, what is overdue
// otherwise. Only the poll loop uses it.
type backup struct {
	q       *Queue
	sources []*source
	at      time.Time // when to look again
	token   string    // of a call without an answer
	failed  int
	wasDown bool // Redis, at the last look
}

// redisDown is since when a part of the queue's Redis has not answered.
func (b *backup) redisDown() (since time.Time, down bool) {
	for _, s := range b.sources {
		if s.failures > 0 && len(s.unclaimed) == 0 && (!down || s.failedAt.Before(since)) {
			since, down = s.failedAt, true
		}
	}
	return since, down
}

func (b *backup) dueAt() time.Time {
	if sabotage == "no-fallback" {
		return time.Now().Add(farAway)
	}
	if since, down := b.redisDown(); down && !b.wasDown {
		if gone := since.Add(redisGone); gone.Before(b.at) {
			return gone
		}
	}
	return b.at
}

// behind reports whether Redis answers and has more that is due: then it is a matter of time, not of the ledger.
func (b *backup) behind() bool {
	_, down := b.redisDown()
	return !down && slices.ContainsFunc(b.sources, func(s *source) bool { return s.more })
}

// backupDue is the backup whose look is due longest.
func (r *run) backupDue(now time.Time) (due *backup) {
	for _, b := range r.backups {
		if at := b.dueAt(); !at.After(now) && (due == nil || at.Before(due.dueAt())) {
			due = b
		}
	}
	return due
}

// fallBack leases from the ledger, once, an even share of what is free.
func (r *run) fallBack(b *backup, free int) error {
	if b.behind() {
		b.at = time.Now().Add(ledgerLook)
		return nil
	}
	ctx, cancel := r.call(r.base, min(r.cfg.Lease/3, claimLimit), r.cfg.Margin)
	defer cancel()
	_, down := b.redisDown()
	if b.token == "" {
		b.token = string(randomToken())
	}
	b.wasDown = down
	c := r.ledgerClaim(b.token)
	if !down {
		c.Overdue = lateAfter
	}
	most := min((free+len(r.backups)-1)/len(r.backups), maxBatch)
	leases, err := b.q.leaseBooked(ctx, c, most)
	now := time.Now()
	if err != nil {
		b.failed++
		b.at = now.Add(min(500*time.Millisecond<<min(b.failed, 4), 5*time.Second))
		if b.failed == 1 {
			r.cfg.Logger.Warn("delayq: cannot lease from the ledger, will keep trying", "queue", b.q.name, "error", err.Error())
		}
		return err
	}
	b.token, b.failed = "", 0
	b.at = now.Add(ledgerLook/2 + rand.N(ledgerLook))
	if down {
		b.at = now.Add(r.cfg.MaxPoll)
		if len(leases) == most {
			b.at = now
		}
	}
	r.mu.Lock()
	r.stats.FromLedger += int64(len(leases))
	r.mu.Unlock()
	for _, l := range leases {
		r.start(b.sources[0], l)
	}
	return nil
}
