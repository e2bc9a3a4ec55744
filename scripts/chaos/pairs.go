package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/reconciler"
)

// A pair is two transitions of one task that meet. It is played many times, with the two in both orders and in between.
type pair struct {
	name string
	play func(p *pairing)
}

// A pairing is one meeting.
type pairing struct {
	*stage
	ctx  context.Context //nolint:containedctx // it lives as long as one meeting
	lq   delayq.LedgerQueue
	deaf *delayq.Queue // the same queue, in a process that cannot reach Redis: its messages are lost
	pair string
	id   string
	bad  func(rule, format string, args ...any)
}

// transitionPairs plays every pair its share of times.
func transitionPairs(ctx context.Context, s *stage) error {
	deaf, closeDeaf, err := s.withoutRedis(ctx)
	if err != nil {
		return err
	}
	defer closeDeaf()
	each := max(s.tasks*3/len(pairs), 3)
	for _, pr := range pairs {
		before := len(s.met)
		for i := range each {
			m := meeting{pair: pr.name}
			p := &pairing{stage: s, ctx: ctx, lq: s.q.LedgerQueue(), deaf: deaf, pair: pr.name, id: fmt.Sprintf("%s-%d", pr.name, i)}
			p.bad = func(rule, format string, args ...any) {
				m.problems = append(m.problems, problem{rule, p.id, fmt.Sprintf(format, args...)})
			}
			pr.play(p)
			s.met = append(s.met, m)
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if err := s.agreeAfter(ctx, pr.name, &s.met[before]); err != nil {
			return err
		}
	}
	return nil
}

// A meeting is what came of one.
type meeting struct {
	pair     string
	problems []problem
}

// withoutRedis opens the queue as a process does that cannot reach Redis.
func (s *stage) withoutRedis(ctx context.Context) (*delayq.Queue, func(), error) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialTimeout: 50 * time.Millisecond, DialerRetries: 1})
	led, err := ledger.Open(ctx, s.pool)
	if err != nil {
		return nil, nil, err
	}
	q, err := delayq.Open(ctx, rdb, s.cfg.Queue, delayq.Config{Horizon: s.horizon, Ledger: led, Logger: slog.New(slog.DiscardHandler)})
	return q, func() { _ = rdb.Close() }, err
}

// agreeAfter: one full pass, and the two agree (P7); the next finds nothing (I11).
func (s *stage) agreeAfter(ctx context.Context, pair string, m *meeting) error {
	for pass := range 2 {
		rep, err := s.reconcileOnce(ctx)
		if err != nil {
			return fmt.Errorf("after %s: %w", pair, err)
		}
		if pass == 1 && rep.Drift > 0 {
			m.problems = append(m.problems, problem{"I11", pair, fmt.Sprintf("the second pass found drift: %+v", rep.Counts)})
		}
		differ, err := s.compare(ctx)
		if err != nil {
			return err
		}
		for _, d := range differ {
			m.problems = append(m.problems, problem{"P7", pair, fmt.Sprintf("after pass %d: %s", pass+1, d)})
		}
	}
	audit, err := s.q.Audit(ctx, delayq.AuditOptions{})
	if err == nil && len(audit.Violations) > 0 {
		m.problems = append(m.problems, problem{"I9", pair, fmt.Sprintf("audit: %+v", audit.Violations[0])})
	}
	return err
}

func (s *stage) reconcileOnce(ctx context.Context) (reconciler.Report, error) {
	r, err := reconciler.New(s.q, reconciler.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return reconciler.Report{}, err
	}
	return r.Pass(ctx)
}

// race runs two calls at once, each after a random moment.
func (p *pairing) race(f, g func()) {
	var both sync.WaitGroup
	for _, call := range []func(){f, g} {
		wait := time.Duration(p.rng.IntN(1500)) * time.Microsecond
		both.Go(func() {
			time.Sleep(wait)
			call()
		})
	}
	both.Wait()
}

// must reports an error that the pair does not expect.
func (p *pairing) must(err error) bool {
	if err != nil {
		p.bad("M", "%v", err)
	}
	return err == nil
}

func (p *pairing) enqueue(due time.Duration) {
	_, err := p.q.Enqueue(p.ctx, delayq.Task{ID: p.id, Type: typeMail, Payload: []byte("1"), Delay: due})
	p.must(err)
}

// row is the task as the ledger has it now.
func (p *pairing) row() delayq.LedgerRow {
	rows, err := p.lq.Rows(p.ctx, []string{p.id}, true)
	if err != nil || len(rows) != 1 {
		p.bad("M", "%d rows, %v", len(rows), err)
		return delayq.LedgerRow{}
	}
	return rows[0]
}

func newToken() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	return string(b)
}

// claim claims the task as a consumer does whose Redis lease is of a revision.
func (p *pairing) claim(token string, lasts time.Duration, rev int64) (row delayq.LedgerRow, granted bool) {
	c := delayq.LedgerClaim{Token: token, Lease: lasts, Consumer: "pairs", MaxLost: 3, MaxFailed: 3}
	rows, err := p.lq.Claim(p.ctx, c, []delayq.LedgerWant{{ID: p.id, Rev: rev}})
	if !p.must(err) || len(rows) == 0 {
		return row, false
	}
	return rows[0], rows[0].Status == delayq.LedgerRunning && rows[0].Token == token
}

// lapsed gives the task to a consumer and lets its lease run out.
func (p *pairing) lapsed() (token string) {
	p.enqueue(0)
	token = newToken()
	if _, ok := p.claim(token, 20*time.Millisecond, p.row().Rev); !ok {
		p.bad("M", "a waiting task is not granted")
	}
	time.Sleep(21 * time.Millisecond)
	return token
}

// held gives the task to a consumer.
func (p *pairing) held() (token string) {
	p.enqueue(0)
	token = newToken()
	if _, ok := p.claim(token, time.Minute, p.row().Rev); !ok {
		p.bad("M", "a waiting task is not granted")
	}
	return token
}

// finish ends a lease and reports whether the ledger took it.
func (p *pairing) finish(token string, e delayq.LedgerEnd) bool {
	e.LedgerHeld = delayq.LedgerHeld{ID: p.id, Token: token}
	e.MaxFailed = max(e.MaxFailed, 1)
	changes, err := p.lq.Finish(p.ctx, nil, []delayq.LedgerEnd{e})
	return p.must(err) && changes[0].Applied
}

func (p *pairing) beat(token string) delayq.LedgerBeat {
	beats, err := p.lq.Heartbeat(p.ctx, time.Minute, []delayq.LedgerHeld{{ID: p.id, Token: token}})
	if !p.must(err) {
		return delayq.LedgerLost
	}
	return beats[0]
}

func (p *pairing) cancel() delayq.Cancellation {
	got, err := p.q.Cancel(p.ctx, p.id)
	p.must(err)
	return got
}

// lease leases the task from Redis and claims it, as a consumer does.
func (p *pairing) lease() *delayq.Lease { return p.leaseFor(time.Minute) }

func (p *pairing) leaseFor(d time.Duration) *delayq.Lease {
	leases, err := p.q.Lease(p.ctx, delayq.LeaseOptions{Max: 100, Lease: d, Consumer: "pairs"})
	p.must(err)
	var mine *delayq.Lease
	for _, l := range leases {
		if l.ID == p.id {
			mine = l
		} else if err := p.q.Ack(p.ctx, l); err != nil { // left by another meeting
			p.bad("M", "ack of %s: %v", l.ID, err)
		}
	}
	return mine
}

// ended checks the task's status.
func (p *pairing) ended(rule string, want ...delayq.LedgerStatus) {
	got := p.row().Status
	for _, w := range want {
		if got == w {
			return
		}
	}
	p.bad(rule, "ended as %s, not %v", got, want)
}

// judgePairs makes a verdict of what came of the meetings.
func judgePairs(met []meeting) *verdict {
	v := &verdict{}
	for i, m := range met {
		v.problems = append(v.problems, m.problems...)
		if len(m.problems) == 0 {
			v.ok = append(v.ok, fmt.Sprint(i))
		}
		for _, p := range m.problems {
			v.overlapping += count(p.rule == "I4")
			v.early += count(p.rule == "I3")
			v.duplicateEffects += count(p.rule == "P2")
		}
	}
	return v
}
