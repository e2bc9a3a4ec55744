package ledger_test

import (
	"testing"

	"github.com/delayq/toolkit/delayq"
)

func TestLife(t *testing.T) {
	eachMode(t, func(r *rig) {
		row := r.insertIDs("a")[0]
		tok := newToken()
		got := r.claim(claimOf(tok), row)["a"]
		if got.Token != tok || got.Status != delayq.LedgerRunning || got.Deliveries != 1 {
			r.Errorf("%+v", got)
		}
		beats, err := r.q.Heartbeat(r.Context(), 1e9, []delayq.LedgerHeld{{ID: "a", Token: tok}})
		if err != nil || beats[0] != delayq.LedgerRenewed {
			r.Error(beats, err)
		}
		c := r.finish(end("a", tok, delayq.LedgerFail))[0]
		if !c.Applied || c.Row.Status != delayq.LedgerRetry || c.Row.Failed != 1 || string(c.Row.Payload) != "payload of a" {
			r.Errorf("%+v", c)
		}
		rows, err := r.q.Lease(r.Context(), claimOf(tok), 10)
		if err != nil || len(rows) != 1 || string(rows[0].Payload) != "payload of a" {
			r.Error(rows, err)
		}
		c = r.finish(end("a", tok, delayq.LedgerSucceed))[0]
		if !c.Applied || c.Row.Status != delayq.LedgerSucceeded {
			r.Errorf("%+v", c)
		}
		c = r.finish(end("a", tok, delayq.LedgerFail))[0]
		if c.Applied || c.Row.Status != delayq.LedgerSucceeded || c.Row.Token != tok {
			r.Errorf("%+v", c)
		}
		h, err := r.led.History(r.Context(), r.name, "a")
		if err != nil || len(h.Events) != 1 || h.Events[0].Event != "retry" {
			r.Errorf("%+v %v", h, err)
		}
		for kind := range delayq.LedgerDeadRows + 1 {
			if _, err := r.q.Page(r.Context(), delayq.LedgerPage{Kind: kind, Limit: 10}); err != nil {
				r.Error(err)
			}
		}
		if _, err := r.q.Counts(r.Context(), 10, 0); err != nil {
			r.Error(err)
		}
		if _, _, err := r.led.Retain(r.Context(), 1e9); err != nil {
			r.Error(err)
		}
		r.ok(r.q.SetState(r.Context(), []byte("x")))
		if s, err := r.q.State(r.Context()); err != nil || string(s) != "x" {
			r.Error(s, err)
		}
		for _, f := range []func() ([]delayq.LedgerChange, error){
			func() ([]delayq.LedgerChange, error) {
				return r.q.Insert(r.Context(), nil, []delayq.LedgerTask{newTask("a")}, true)
			},
			func() ([]delayq.LedgerChange, error) { return r.q.Cancel(r.Context(), nil, []string{"a"}) },
			func() ([]delayq.LedgerChange, error) {
				return r.q.Reschedule(r.Context(), nil, []string{"a"}, []delayq.LedgerDue{{In: 5}})
			},
			func() ([]delayq.LedgerChange, error) { return r.q.Replay(r.Context(), nil, []string{"a"}) },
			func() ([]delayq.LedgerChange, error) { return r.q.Purge(r.Context(), nil, []string{"a"}) },
		} {
			c, err := f()
			if err != nil || c[0].Applied || c[0].Row.Status != delayq.LedgerSucceeded {
				r.Errorf("%+v %v", c, err)
			}
		}
	})
}
