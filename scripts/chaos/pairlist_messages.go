package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// messagePairs are about what Redis is told, by whom and in which order.
var messagePairs = []pair{
	{"ack-reconcile", func(p *pairing) {
		p.enqueue(0)
		l := p.lease()
		if l == nil {
			p.bad("M", "not given out")
			return
		}
		p.race(func() { p.must(p.q.Ack(p.ctx, l)) }, func() {
			_, err := p.reconcileOnce(p.ctx)
			p.must(err)
		})
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"two-reconcilers", func(p *pairing) {
		_, err := p.deaf.Enqueue(p.ctx, delayq.Task{ID: p.id, Type: typeMail, Payload: []byte("1"), Delay: time.Hour})
		p.must(err)
		once := func() {
			_, err := p.reconcileOnce(p.ctx)
			p.must(err)
		}
		p.race(once, once)
		p.agree()
		p.cancel()
	}},
	{"reschedule-claim", func(p *pairing) {
		p.enqueue(0)
		rev := p.row().Rev
		token := newToken()
		var moved error
		var granted bool
		p.race(func() { moved = p.q.RescheduleIn(p.ctx, p.id, time.Hour) }, func() { _, granted = p.claim(token, time.Minute, rev) })
		if (moved == nil) == granted {
			p.bad("I3", "moved by an hour (%v), and given out %v", moved, granted)
		}
		if granted {
			p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		} else {
			p.cancel()
		}
	}},
	{"replace-claim", func(p *pairing) {
		p.enqueue(0)
		rev := p.row().Rev
		token := newToken()
		var res delayq.Result
		var granted bool
		p.race(func() {
			var err error
			res, err = p.q.Enqueue(p.ctx, delayq.Task{ID: p.id, Type: typeMail, Payload: []byte("2"), Conflict: delayq.Replace, Delay: time.Hour})
			p.must(err)
		}, func() { _, granted = p.claim(token, time.Minute, rev) })
		if (res.Outcome == delayq.Replaced) == granted {
			p.bad("I3", "the replacement is answered %s, and the old payload was given out %v", res.Outcome, granted)
		}
		if granted {
			p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		} else {
			p.cancel()
		}
	}},
	{"horizon-cancel", func(p *pairing) {
		p.enqueue(2 * farHorizon)
		var moved error
		p.race(func() { moved = p.q.RescheduleIn(p.ctx, p.id, time.Hour) }, func() { p.cancel() })
		if moved != nil && !errors.Is(moved, delayq.ErrFinished) {
			p.bad("I8", "moved over the horizon: %v", moved)
		}
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"horizon-both-ways", func(p *pairing) {
		p.enqueue(time.Hour)
		p.race(func() { p.must(p.q.RescheduleIn(p.ctx, p.id, 2*farHorizon)) }, func() { p.must(p.q.RescheduleIn(p.ctx, p.id, 2*time.Hour)) })
		p.agree() // without a fault there is no drift, in whichever order the messages came
		p.must(p.q.RescheduleIn(p.ctx, p.id, 2*farHorizon))
		p.agree()
		p.must(p.q.RescheduleIn(p.ctx, p.id, time.Hour))
		p.agree()
		p.cancel()
	}},
	{"horizon-comes", func(p *pairing) { // a task that lay beyond the horizon comes in unchanged
		p.enqueue(time.Hour)
		p.must(p.q.RescheduleIn(p.ctx, p.id, 2*farHorizon))
		rows := []delayq.LedgerRow{p.row()}
		shown, err := p.q.Mirror().Show(p.ctx, rows, delayq.Showing{Now: time.Now().Add(farHorizon + time.Hour)})
		p.must(err)
		if shown.Put != 1 {
			p.bad("P7", "it does not come in: %+v", shown)
		}
		p.cancel()
	}},
	{"late-put", func(p *pairing) { // messages in the wrong order: the older says nothing
		p.enqueue(time.Hour)
		old := p.row()
		p.must(p.q.RescheduleIn(p.ctx, p.id, 2*time.Hour))
		show := func() {
			_, err := p.q.Mirror().Show(p.ctx, []delayq.LedgerRow{old}, delayq.Showing{Now: time.Now()})
			p.must(err)
			p.agree()
		}
		show()
		p.cancel()
		show()
	}},
	{"lost-messages", func(p *pairing) { // all of them, to a task of each kind; then one pass (P7) is made by the caller
		task := delayq.Task{ID: p.id, Type: typeMail, Payload: []byte("1"), Delay: time.Hour}
		_, err := p.q.Enqueue(p.ctx, task)
		p.must(err)
		switch p.rng.IntN(5) {
		case 0:
			_, err = p.deaf.Cancel(p.ctx, p.id)
		case 1:
			err = p.deaf.RescheduleIn(p.ctx, p.id, 2*time.Hour)
		case 2:
			err = p.deaf.RescheduleIn(p.ctx, p.id, 2*farHorizon)
		case 3:
			task.Conflict, task.Payload = delayq.Replace, []byte("2")
			_, err = p.deaf.Enqueue(p.ctx, task)
		default:
			task.ID += "x"
			_, err = p.deaf.Enqueue(p.ctx, task)
		}
		p.must(err)
	}},
	{"lost-everything", func(p *pairing) {
		p.enqueue(time.Hour)
		if p.rng.IntN(3) == 0 {
			p.must(p.rdb.FlushAll(p.ctx).Err())
			_, err := p.reconcileOnce(p.ctx)
			p.must(err)
			p.agree()
		}
	}},
	{"revision-lost-cancel", func(p *pairing) { // it then looks like a task from before the queue had a ledger
		p.enqueue(time.Hour)
		for shard := range p.cfg.Shards {
			p.must(p.rdb.HDel(p.ctx, fmt.Sprintf("dq:{%s:%d}:revs", p.cfg.Queue, shard), p.id).Err())
		}
		_, err := p.lq.Cancel(p.ctx, nil, []string{p.id})
		p.must(err)
		_, err = p.reconcileOnce(p.ctx)
		p.must(err)
		p.ended("I8", delayq.LedgerCancelled)
	}},
	{"resent-cancelled", func(p *pairing) { // an enqueue is sent again after its task was cancelled
		stamp := []byte(p.id + "............")[:12]
		task := delayq.LedgerTask{ID: p.id, Type: typeMail, Payload: []byte("1"), Stamp: stamp, Due: delayq.LedgerDue{In: time.Hour}}
		for range 2 {
			_, err := p.lq.Insert(p.ctx, nil, []delayq.LedgerTask{task}, false)
			p.must(err)
			p.cancel()
		}
		if _, err := p.lq.Insert(p.ctx, nil, []delayq.LedgerTask{task}, false); !p.must(err) {
			return
		}
		p.ended("I8", delayq.LedgerCancelled)
	}},
}

// completePairs are about the handler's own transaction.
var completePairs = []pair{
	{"complete-cancel", func(p *pairing) {
		p.enqueue(0)
		l := p.lease()
		if l == nil {
			p.bad("M", "not given out")
			return
		}
		var err error
		p.race(func() { err = p.complete(&l.Task) }, func() { p.cancel() })
		p.must(err)
		p.ended("I8", delayq.LedgerSucceeded)
		p.effects(1)
	}},
	{"complete-takeover", func(p *pairing) {
		p.enqueue(0)
		l := p.leaseFor(100 * time.Millisecond)
		if l == nil {
			p.bad("M", "not given out")
			return
		}
		rev, token := p.row().Rev, newToken()
		time.Sleep(101 * time.Millisecond)
		var done error
		var granted bool
		p.race(func() { done = p.complete(&l.Task) }, func() { _, granted = p.claim(token, time.Minute, rev) })
		if (done == nil) == granted {
			p.bad("I4", "completed (%v) and taken over %v", done, granted)
		}
		if done != nil && !errors.Is(done, delayq.ErrLeaseLost) {
			p.bad("M", "%v", done)
		}
		p.effects(count(done == nil))
		if granted {
			p.finish(token, delayq.LedgerEnd{Verb: delayq.LedgerSucceed})
		}
		p.ended("I1", delayq.LedgerSucceeded)
	}},
	{"complete-twice", func(p *pairing) { // the reply to the commit is lost, and the handler tries again
		p.enqueue(0)
		l := p.lease()
		if l == nil {
			p.bad("M", "not given out")
			return
		}
		p.must(p.complete(&l.Task))
		if err := p.complete(&l.Task); !errors.Is(err, delayq.ErrFinished) || !errors.Is(err, delayq.ErrLeaseLost) {
			p.bad("I12", "the second time: %v", err)
		}
		p.effects(1)
		p.ended("I1", delayq.LedgerSucceeded)
	}},
}
