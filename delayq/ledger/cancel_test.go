package ledger_test

import (
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// states makes a task in every state, each named so; "expired" runs and its lease has run out.
func (r *rig) states() (token string) {
	r.Helper()
	all := []string{"pending", "retry", "running", "expired", "stopping", "stopping expired", "succeeded", "cancelled", "dead"}
	token = r.running(all[1:7]...)
	r.insertIDs("pending", "cancelled", "dead")
	r.finish(end("retry", token, delayq.LedgerFail), end("succeeded", token, delayq.LedgerSucceed))
	if got := r.claim(claimOf(newToken()), r.row("dead")); len(got) != 1 {
		r.Fatal("not claimed")
	}
	dead := r.row("dead")
	r.finish(end("dead", dead.Token, delayq.LedgerBury))
	_, err := r.q.Cancel(r.Context(), nil, []string{"cancelled", "stopping", "stopping expired"})
	r.ok(err)
	r.expire("expired", "stopping expired")
	return token
}

// changed checks what a change did to every state: the status after, with + where it applied.
func (r *rig) changed(f func(ids []string) ([]delayq.LedgerChange, error), want map[string]string) {
	r.Helper()
	var names []string
	before := map[string]*delayq.LedgerRow{}
	for name := range want {
		names = append(names, name)
		if name != "absent" {
			before[name] = r.row(name)
		}
	}
	changes, err := f(names)
	r.ok(err)
	for i, name := range names {
		c := changes[i]
		got := "none"
		if c.Row != nil {
			got = string(c.Row.Status)
			if now := r.row(name); brief(now) != brief(c.Row) || now.Rev != c.Row.Rev {
				r.Errorf("%s: answered %s rev %d, is %s rev %d", name, brief(c.Row), c.Row.Rev, brief(now), now.Rev)
			}
			if (c.Row.Payload != nil) != c.Row.Status.Waiting() {
				r.Errorf("%s: payload %q", name, c.Row.Payload)
			}
		}
		if c.Applied {
			got = "+" + got
		}
		if was := before[name]; was == nil && c.Was != "" || was != nil && c.Was != was.Status {
			r.Errorf("%s: was %q", name, c.Was)
		}
		if got != want[name] {
			r.Errorf("%s became %s, want %s", name, got, want[name])
		}
		if was := before[name]; c.Row != nil && (c.Row.Rev != was.Rev) != (c.Applied && c.Row.Status != delayq.LedgerRunning) {
			r.Errorf("%s: revision %d -> %d", name, was.Rev, c.Row.Rev)
		}
	}
}

func TestCancel(t *testing.T) {
	eachMode(t, func(r *rig) {
		r.states()
		cancel := func(ids []string) ([]delayq.LedgerChange, error) { return r.q.Cancel(r.Context(), nil, ids) }
		r.changed(cancel, map[string]string{
			"pending": "+cancelled", "retry": "+cancelled", "running": "+running", "expired": "+cancelled", "stopping": "running",
			"stopping expired": "+cancelled", "succeeded": "succeeded", "cancelled": "cancelled", "dead": "dead", "absent": "none",
		})
		r.want("running", "running failed 0 lost 0 deliveries 1 stop")
		r.want("retry", "cancelled failed 1 lost 0 deliveries 1")
		r.changed(cancel, map[string]string{"pending": "cancelled", "running": "running", "expired": "cancelled", "stopping": "running"})
	})
}

func TestReschedule(t *testing.T) {
	eachMode(t, func(r *rig) {
		r.states()
		at := time.Date(2033, 1, 1, 0, 0, 0, 1000, time.UTC)
		r.changed(func(ids []string) ([]delayq.LedgerChange, error) {
			dues := make([]delayq.LedgerDue, len(ids))
			for i, id := range ids {
				if dues[i].At = at; id == "retry" {
					dues[i] = delayq.LedgerDue{In: time.Hour}
				}
			}
			return r.q.Reschedule(r.Context(), nil, ids, dues)
		}, map[string]string{
			"pending": "+pending", "retry": "+retry", "running": "running", "expired": "running", "stopping": "running",
			"succeeded": "succeeded", "cancelled": "cancelled", "dead": "dead", "absent": "none",
		})
		if got := r.row("pending"); !got.RunAt.Equal(at) || string(got.Payload) != "payload of pending" {
			r.Errorf("%+v", got)
		}
		if got := r.row("retry"); time.Until(got.RunAt) < 50*time.Minute || got.Failed != 1 {
			r.Errorf("%+v", got)
		}
	})
}

func TestReplay(t *testing.T) {
	eachMode(t, func(r *rig) {
		r.states()
		r.changed(func(ids []string) ([]delayq.LedgerChange, error) { return r.q.Replay(r.Context(), nil, ids) }, map[string]string{
			"pending": "pending", "retry": "retry", "running": "running", "succeeded": "succeeded", "cancelled": "cancelled",
			"dead": "+pending", "absent": "none",
		})
		r.want("dead", "pending failed 0 lost 0 deliveries 0")
		if got := r.row("dead"); time.Since(got.RunAt) > time.Minute || got.LastError != "" {
			r.Errorf("%+v", got)
		}
	})
}

func TestPurge(t *testing.T) {
	eachMode(t, func(r *rig) {
		r.states()
		r.changed(func(ids []string) ([]delayq.LedgerChange, error) { return r.q.Purge(r.Context(), nil, ids) }, map[string]string{
			"pending": "pending", "running": "running", "succeeded": "succeeded", "cancelled": "cancelled", "dead": "+none", "absent": "none",
		})
		if rows, err := r.q.Rows(r.Context(), []string{"dead"}, false); err != nil || len(rows) != 0 {
			r.Error(rows, err)
		}
	})
}
