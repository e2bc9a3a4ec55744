package main

import (
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// pairs are all that the protocol names, and messages that meet in the wrong order.
var pairs = slices.Concat(leasePairs, messagePairs, completePairs)

// leasePairs are steps of those who want the task, hold it or end it.
var leasePairs = []pair{
	{"cancel-claim", func(p *pairing) {
		p.enqueue(0)
		var l *delayq.Lease
		var got delayq.Cancellation
		p.race(func() { l = p.lease() }, func() { got = p.cancel() })
		switch {
		case got == delayq.Cancelled && l != nil:
			p.bad("I8", "cancelled, and given out")
		case got == delayq.Running && l == nil:
			p.bad("I8", "told to stop, and nobody runs it")
		case got == delayq.Running:
			if err := p.q.Extend(p.ctx, time.Minute, l); !errors.Is(err, delayq.ErrCancelled) {
				p.bad("I8", "a heartbeat after the cancel: %v", err)
			}
			if err := p.q.Retry(p.ctx, l, 0, errNotYet); !errors.Is(err, delayq.ErrCancelled) {
				p.bad("I8", "a failure after the cancel: %v", err)
			}
		}
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"cancel-takeover", func(p *pairing) {
		p.lapsed()
		token, rev := newToken(), p.row().Rev
		var got delayq.Cancellation
		var granted bool
		p.race(func() { _, granted = p.claim(token, time.Minute, rev) }, func() { got = p.cancel() })
		if got == delayq.Cancelled && granted {
			p.bad("I8", "cancelled, and given out")
		}
		if granted && p.beat(token) != delayq.LedgerStop {
			p.bad("I8", "the one who took it over is not told to stop")
		}
		if granted {
			p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerFail, MaxFailed: 3})
		}
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"told-to-stop-takeover", func(p *pairing) { // the holder was told to stop and is gone: nobody may start it again
		token := newToken()
		p.enqueue(0)
		if _, ok := p.claim(token, 40*time.Millisecond, p.row().Rev); !ok || p.cancel() != delayq.Running {
			return // a slow machine: the lease had run out
		}
		time.Sleep(41 * time.Millisecond)
		if _, granted := p.claim(newToken(), time.Minute, p.row().Rev); granted {
			p.bad("I8", "told to stop, and given out again")
		}
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"ack-takeover", func(p *pairing) {
		old, token := p.lapsed(), newToken()
		rev := p.row().Rev
		var acked, granted bool
		p.race(func() { acked = p.finish(old, delayq.LedgerEnd{Verb: delayq.LedgerSucceed}) }, func() { _, granted = p.claim(token, time.Minute, rev) })
		if acked == granted {
			p.bad("I4", "acked %v and taken over %v", acked, granted)
		}
		if granted {
			if p.finish(old, delayq.LedgerEnd{Verb: delayq.LedgerSucceed}) || p.beat(old) != delayq.LedgerLost {
				p.bad("I6", "the old holder is still heard")
			}
			if !p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed}) {
				p.bad("I6", "the new holder is not heard")
			}
		}
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"heartbeat-takeover", func(p *pairing) {
		old, token := p.lapsed(), newToken()
		rev := p.row().Rev
		var beat delayq.LedgerBeat
		var granted bool
		p.race(func() { beat = p.beat(old) }, func() { _, granted = p.claim(token, time.Minute, rev) })
		if (beat == delayq.LedgerRenewed) == granted {
			p.bad("I4", "renewed %v and taken over %v", beat == delayq.LedgerRenewed, granted)
		}
		holder := old
		if granted {
			holder = token
		}
		p.finish(holder, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"claim-live", func(p *pairing) { // a Redis lease of somebody else, who knows the right revision
		token := p.held()
		if _, granted := p.claim(newToken(), time.Minute, p.row().Rev); granted {
			p.bad("I4", "a live lease was given away")
		}
		p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"claim-ended", func(p *pairing) { // Redis has forgotten that it ended
		token := p.held()
		rev := p.row().Rev
		p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		for _, r := range []int64{rev, p.row().Rev} {
			if _, granted := p.claim(newToken(), time.Minute, r); granted {
				p.bad("I5", "an ended task was given out")
			}
		}
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"claim-again", func(p *pairing) { // the reply to a claim is lost
		p.enqueue(0)
		token, rev := newToken(), p.row().Rev
		first, ok1 := p.claim(token, time.Minute, rev)
		second, ok2 := p.claim(token, time.Minute, rev)
		if !ok1 || !ok2 || first.Deliveries != second.Deliveries || second.Lost != 0 {
			p.bad("I12", "first %v (delivery %d), then %v (delivery %d, %d lost)", ok1, first.Deliveries, ok2, second.Deliveries, second.Lost)
		}
		p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"claim-ledger-lease", func(p *pairing) { // one worker leases from Redis, another has lost it
		p.enqueue(0)
		token, other, rev := newToken(), newToken(), p.row().Rev
		var granted bool
		var rows []delayq.LedgerRow
		p.race(func() { _, granted = p.claim(token, time.Minute, rev) }, func() {
			var err error
			rows, err = p.lq.Lease(p.ctx, delayq.LedgerClaim{Token: other, Lease: time.Minute, Consumer: "pairs", MaxLost: 3, MaxFailed: 3}, 10)
			p.must(err)
		})
		n, holder := count(granted), token
		for _, r := range rows {
			if r.ID == p.id {
				n++
				holder = other
			}
		}
		if n > 1 {
			p.bad("I4", "both have it")
		}
		if n == 0 { // the one passed over what the other had locked, and that one came too late
			p.cancel()
			return
		}
		p.finish(holder, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"ledger-lease-live", func(p *pairing) { // the fallback leaves alone what runs
		token := p.held()
		rows, err := p.lq.Lease(p.ctx, delayq.LedgerClaim{Token: newToken(), Lease: time.Minute, Consumer: "pairs", MaxLost: 3, MaxFailed: 3}, 100)
		p.must(err)
		for _, r := range rows {
			if r.ID == p.id {
				p.bad("I4", "a live lease was given away")
			}
		}
		p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"limit-takeover", func(p *pairing) { // the lost leases count at the takeover
		p.enqueue(0)
		for lost := range 3 {
			if _, granted := p.claim(newToken(), 10*time.Millisecond, p.row().Rev); !granted {
				p.bad("I7", "not given out after %d lost leases of 3", lost)
			}
			time.Sleep(11 * time.Millisecond)
		}
		if _, granted := p.claim(newToken(), time.Minute, p.row().Rev); granted {
			p.bad("I7", "given out after 3 lost leases of 3")
		}
		p.ended("I7", delayq.LedgerDead)
	}},
	{"fail-cancel", func(p *pairing) {
		token := p.held()
		p.race(func() { p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerFail, Delay: time.Hour, MaxFailed: 3}) }, func() { p.cancel() })
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"give-back-cancel", func(p *pairing) {
		token := p.held()
		p.race(func() { p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerGiveBack}) }, func() { p.cancel() })
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"snooze-cancel", func(p *pairing) {
		token := p.held()
		p.race(func() { p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSnooze, Delay: time.Hour}) }, func() { p.cancel() })
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"give-back", func(p *pairing) { // never started: nobody is charged
		p.enqueue(0)
		l := p.lease()
		if l == nil {
			p.bad("M", "not given out")
			return
		}
		p.must(p.q.Release(p.ctx, 0, l))
		if r := p.row(); r.Status != delayq.LedgerPending || r.Lost != 0 || r.Failed != 0 {
			p.bad("I7", "given back, and it is %s, failed %d, lost %d", r.Status, r.Failed, r.Lost)
		}
		p.cancel()
	}},
	{"retry-dead", func(p *pairing) { // the last failure is reported twice
		token := p.held()
		var a, b bool
		fail := delayq.LedgerEnd{Verb: delayq.LedgerFail, MaxFailed: 1, Reason: "error"}
		p.race(func() { a = p.finish(token, fail) }, func() { b = p.finish(token, fail) })
		if r := p.row(); a == b || r.Status != delayq.LedgerDead || r.Failed != 1 {
			p.bad("I7", "taken %v and %v: %s after %d failures", a, b, r.Status, r.Failed)
		}
	}},
	{"replay-late-ack", func(p *pairing) {
		token := p.held()
		p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerBury, Reason: "error"})
		var late bool
		p.race(func() { late = p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed}) }, func() {
			_, err := p.lq.Replay(p.ctx, nil, []string{p.id})
			p.must(err)
		})
		if late {
			p.bad("I6", "a late ack of a dead letter was taken")
		}
		p.ended("I6", delayq.LedgerPending)
		p.cancel()
	}},
}

var errNotYet = errors.New("not yet")

// complete has an effect together with the completion.
func (p *pairing) complete(t *delayq.Task) error {
	return pgx.BeginFunc(p.ctx, p.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(p.ctx, "insert into chaos.effect (task, delivery) values ($1, 1)", p.id); err != nil {
			return err
		}
		return p.q.CompleteTx(p.ctx, tx, t)
	})
}

func (p *pairing) effects(want int) {
	var n int
	p.must(p.pool.QueryRow(p.ctx, "select count(*) from chaos.effect where task = $1", p.id).Scan(&n))
	if n != want {
		p.bad("P2", "%d effects, not %d", n, want)
	}
}

// agree: the two sides do, without any help, as soon as the messages that callers share have been sent.
func (p *pairing) agree() {
	var mine []problem
	for until := time.Now().Add(time.Second); ; pause(p.ctx, 5*time.Millisecond) {
		differ, err := p.compare(p.ctx)
		if !p.must(err) {
			return
		}
		mine = slices.DeleteFunc(differ, func(d problem) bool { return d.task != p.id })
		if len(mine) == 0 || time.Now().After(until) {
			break
		}
	}
	for _, d := range mine {
		p.bad("I10", "%s", d.detail)
	}
}
