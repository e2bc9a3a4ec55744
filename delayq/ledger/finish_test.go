package ledger_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

func TestFinish(t *testing.T) {
	eachMode(t, func(r *rig) {
		for _, c := range []struct {
			name        string
			verb        delayq.LedgerVerb
			maxFailed   int
			want        string
			ifCancelled string
		}{
			{"succeed", delayq.LedgerSucceed, 0, "succeeded failed 0", "succeeded failed 0"},
			{"fail", delayq.LedgerFail, 2, "retry failed 1", "cancelled failed 1"},
			{"fail at the limit", delayq.LedgerFail, 1, "dead failed 1", "cancelled failed 1"},
			{"fail without limit", delayq.LedgerFail, 0, "retry failed 1", "cancelled failed 1"},
			{"give back", delayq.LedgerGiveBack, 0, "pending failed 0", "cancelled failed 0"},
			{"snooze", delayq.LedgerSnooze, 0, "pending failed 0", "cancelled failed 0"},
			{"bury", delayq.LedgerBury, 0, "dead failed 1", "cancelled failed 1"},
			{"bury unrun", delayq.LedgerBuryUnrun, 0, "dead failed 0", "cancelled failed 0"},
		} {
			for _, cancelled := range []bool{false, true} {
				id, want := c.name, c.want
				token := r.running(id)
				if cancelled {
					_, err := r.q.Cancel(r.Context(), nil, []string{id})
					r.ok(err)
					want = c.ifCancelled
				}
				before := r.row(id)
				e := end(id, token, c.verb)
				e.MaxFailed, e.Delay = c.maxFailed, time.Hour
				if c.verb == delayq.LedgerFail || c.verb == delayq.LedgerBury {
					e.Reason, e.Error = "r", "boom\x00\xff"+strings.Repeat("é", 1000)
				}
				got := r.finish(e)[0]
				row := r.row(id)
				if !got.Applied || got.Was != delayq.LedgerRunning || got.Row.Status != row.Status || got.Row.Rev != row.Rev || got.Row.Token != token {
					r.Errorf("%s, %v: %+v", id, cancelled, got)
				}
				if !strings.HasPrefix(brief(row), want) || row.Token != token {
					r.Errorf("%s, %v: %s, want %s", id, cancelled, brief(row), want)
				}
				if (row.Rev == before.Rev) != (c.verb == delayq.LedgerGiveBack && !cancelled) {
					r.Errorf("%s, %v: revision %d -> %d", id, cancelled, before.Rev, row.Rev)
				}
				if (string(got.Row.Payload) == "payload of "+id) != row.Status.Waiting() {
					r.Errorf("%s, %v: payload %q", id, cancelled, got.Row.Payload)
				}
				if later := time.Until(row.RunAt) > 50*time.Minute; later != ((c.verb == delayq.LedgerFail || c.verb == delayq.LedgerSnooze) && row.Status.Waiting()) {
					r.Errorf("%s, %v: due in %s", id, cancelled, time.Until(row.RunAt))
				}
				if e.Error != "" && (len(row.LastError) > 1024 || len(row.LastError) < 1000 || !strings.HasPrefix(row.LastError, "boom\uFFFD\uFFFDé") || row.Reason != "r") {
					r.Errorf("%s: %s %d bytes: %.20q", id, row.Reason, len(row.LastError), row.LastError)
				}
				// Another token, and the same again.
				for _, tok := range []string{newToken(), token} {
					again := end(id, tok, c.verb)
					if got := r.finish(again)[0]; got.Applied || got.Was != row.Status || got.Row == nil || got.Row.Rev != row.Rev || got.Row.Token != token {
						r.Errorf("%s, %v, again: %+v", id, cancelled, got)
					}
				}
				r.exec("DELETE FROM delayq.task WHERE id = $1::bytea AND queue = (SELECT id FROM delayq.queue WHERE name = $2::text)", []byte(id), r.name)
			}
		}
	})
}

// Success is fenced even after the lease has run out and somebody else has the task.
func TestFinishOfALostLease(t *testing.T) {
	eachMode(t, func(r *rig) {
		token := r.running("a", "b")
		r.expire("a", "b")
		if got := r.finish(end("b", token, delayq.LedgerSucceed))[0]; !got.Applied {
			r.Error("an expired lease that nobody took is still the caller's")
		}
		other := newToken()
		r.claim(claimOf(other), r.row("a"))
		for verb := range delayq.LedgerBuryUnrun + 1 {
			if got := r.finish(end("a", token, verb))[0]; got.Applied || got.Row.Token != other || got.Row.Status != delayq.LedgerRunning {
				r.Errorf("%+v", got)
			}
		}
		if got := r.finish(end("absent", token, delayq.LedgerSucceed))[0]; got.Applied || got.Row != nil {
			r.Errorf("%+v", got)
		}
	})
}

func TestFinishMixed(t *testing.T) {
	eachMode(t, func(r *rig) {
		all := ids("t", 500)
		token := r.running(all...)
		ends := make([]delayq.LedgerEnd, 500)
		for i, id := range all {
			ends[499-i] = end(id, token, delayq.LedgerVerb(i%2))
			ends[499-i].Payload = []byte("rest of " + id)
		}
		ends[7].Token = newToken()
		for i, got := range r.finish(ends...) {
			if got.Row == nil || got.Row.ID != ends[i].ID || got.Applied != (i != 7) {
				r.Fatalf("place %d: %+v", i, got)
			}
			if ends[i].Verb == delayq.LedgerFail && i != 7 && string(got.Row.Payload) != "rest of "+ends[i].ID {
				r.Errorf("%q", got.Row.Payload)
			}
		}
	})
}

func TestFinishInATransaction(t *testing.T) {
	eachMode(t, func(r *rig) {
		token := r.running("a")
		r.inTx(func(ctx context.Context, tx pgx.Tx) {
			changes, err := r.q.Finish(ctx, tx, []delayq.LedgerEnd{end("a", token, delayq.LedgerSucceed)})
			if err != nil || !changes[0].Applied {
				r.Error(changes, err)
			}
		})
		r.want("a", "running failed 0 lost 0 deliveries 1")
	})
}

func TestHistory(t *testing.T) {
	eachMode(t, func(r *rig) {
		token := r.running("plain")
		r.finish(end("plain", token, delayq.LedgerSucceed))
		h, err := r.led.History(r.Context(), r.name, "plain")
		r.ok(err)
		if len(h.Events) != 0 || h.LockedBy != "test" || h.MaxLost != 3 || h.MaxFailed != 5 || time.Since(h.Now) > time.Minute || string(h.Payload) != "payload of plain" {
			r.Errorf("%+v", h)
		}
		r.insertIDs("long")
		for range 60 {
			_, err := r.q.Reschedule(r.Context(), nil, []string{"long"}, []delayq.LedgerDue{{}})
			r.ok(err)
		}
		token = newToken()
		r.claim(claimOf(token), r.row("long"))
		e := end("long", token, delayq.LedgerFail)
		e.Reason, e.Error = "error", "boom"
		r.finish(e)
		h, err = r.led.History(r.Context(), r.name, "long")
		r.ok(err)
		last := h.Events[len(h.Events)-1]
		if len(h.Events) != 51 || last.Event != "retry" || last.By != "test" || last.Attempt != 1 || last.Reason != "error" || last.Error != "boom" ||
			time.Since(last.At) > time.Minute || !last.At.After(h.Events[0].At) {
			r.Errorf("%d events, the last %+v", len(h.Events), last)
		}
		_, err = r.led.History(r.Context(), r.name, "absent")
		r.is(err, delayq.ErrNotFound)
		_, err = r.led.History(r.Context(), "absent", "absent")
		r.is(err, delayq.ErrNoQueue)
	})
}
