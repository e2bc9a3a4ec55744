package ledger_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

func TestClaim(t *testing.T) {
	eachMode(t, func(r *rig) {
		token := r.states()
		mine := newToken()
		r.insertIDs("moved")
		old := r.row("moved")
		_, err := r.q.Reschedule(r.Context(), nil, []string{"moved"}, []delayq.LedgerDue{{}})
		r.ok(err)
		names := []string{"pending", "retry", "running", "expired", "stopping", "stopping expired", "succeeded", "cancelled", "dead"}
		rows := []*delayq.LedgerRow{old, {ID: "absent", Rev: 1}}
		for _, name := range names {
			rows = append(rows, r.row(name))
		}
		want := map[string]string{
			"pending": "running failed 0 lost 0 deliveries 1", "retry": "running failed 1 lost 0 deliveries 2",
			"expired": "running failed 0 lost 1 deliveries 2", "stopping expired": "cancelled failed 0 lost 1 deliveries 1 stop",
		}
		for try := range 2 { // the second is the repeat of a call whose answer was lost
			got := r.claim(claimOf(mine), rows...)
			if try == 1 {
				delete(want, "stopping expired") // told once; after that the row says so
			}
			for id := range got {
				row := r.row(id)
				if brief(row) != want[id] || row.Rev != got[id].Rev || row.Failed != got[id].Failed || row.Lost != got[id].Lost || row.Deliveries != got[id].Deliveries {
					r.Errorf("try %d: %s is %s, want %s; answered %+v", try, id, brief(row), want[id], got[id])
				}
				if running := row.Status == delayq.LedgerRunning; running != (got[id].Token == mine) || running && (row.Token != mine || row.LockedBy != "test" ||
					time.Until(row.LockedUntil) < 50*time.Second || time.Since(row.StartedAt) > 10*time.Second) {
					r.Errorf("try %d: %+v", try, row)
				}
			}
			if len(got) != len(want) {
				r.Errorf("try %d: %d rows, want %d", try, len(got), len(want))
			}
		}
		if row := r.row("running"); row.Token != token || row.Deliveries != 1 {
			r.Errorf("a live lease was taken: %+v", row)
		}
		if rev := r.row("pending").Rev; rev != rows[2].Rev {
			r.Error("a claim changed the revision")
		}
		// The caller's own lease is renewed even when it has run out, and nothing is charged.
		r.expire("pending")
		if got := r.claim(claimOf(mine), r.row("pending")); len(got) != 1 {
			r.Error("own lease refused")
		}
		r.want("pending", "running failed 0 lost 0 deliveries 1")
	})
}

func TestTakeoverEndsWhatIsLostTooOften(t *testing.T) {
	eachMode(t, func(r *rig) {
		r.running("a")
		c := claimOf("")
		for lost, want := range []string{"running failed 0 lost 1 deliveries 2", "running failed 0 lost 2 deliveries 3", "dead failed 0 lost 3 deliveries 3 lost"} {
			r.expire("a")
			c.Token = newToken()
			before := r.row("a")
			got := r.claim(c, before)["a"]
			r.want("a", want)
			if lost == 2 && (got.Status != delayq.LedgerDead || got.Rev <= before.Rev || got.Token == c.Token) {
				r.Errorf("%+v", got)
			}
		}
		// No limit.
		r.running("b")
		c.MaxLost = 0
		for range 5 {
			r.expire("b")
			c.Token = newToken()
			r.claim(c, r.row("b"))
		}
		r.want("b", "running failed 0 lost 5 deliveries 6")
	})
}

func (r *rig) lease(c delayq.LedgerClaim, most int) []string {
	r.Helper()
	rows, err := r.q.Lease(r.Context(), c, most)
	r.ok(err)
	var got []string
	for _, row := range rows {
		got = append(got, row.ID+" "+string(row.Status))
		if (row.Payload != nil) != (row.Status == delayq.LedgerRunning) || row.Status == delayq.LedgerRunning && (row.Token != c.Token || len(row.Stamp) != 12) {
			r.Errorf("%+v", row)
		}
	}
	slices.Sort(got)
	return got
}

func TestLease(t *testing.T) {
	eachMode(t, func(r *rig) {
		for i, id := range []string{"first", "second", "third", "later"} {
			task := newTask(id)
			task.Due.At = time.Now().Add(time.Duration(i-5) * time.Minute)
			if id == "later" {
				task.Due.At = time.Now().Add(time.Hour)
			}
			r.insert(task)
		}
		c := claimOf(newToken())
		c.Overdue = 3*time.Minute + 30*time.Second
		r.same(r.lease(c, 10), "first running", "second running")
		r.same(r.lease(c, 10), "first running", "second running") // the repeat
		r.want("first", "running failed 0 lost 0 deliveries 1")
		c2 := claimOf(newToken())
		r.same(r.lease(c2, 10), "third running")
		r.expire("first", "second")
		_, err := r.q.Cancel(r.Context(), nil, []string{"third"})
		r.ok(err)
		r.expire("third")
		c3 := claimOf(newToken())
		c3.MaxLost = 1
		r.same(r.lease(c3, 1), "first dead") // most overdue first
		r.same(r.lease(c3, 10), "second dead", "third cancelled")
		r.same(r.lease(c3, 10))
	})
}

func (r *rig) same(got []string, want ...string) {
	r.Helper()
	if !slices.Equal(got, want) {
		r.Errorf("got %q, want %q", got, want)
	}
}

// Redis delivers an expired lease too: one that ran out just now is left to it.
func TestLeaseLeavesFreshExpiriesToRedis(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	r.running("a")
	r.expire("a") // a second ago
	c := claimOf(newToken())
	c.Overdue = time.Minute
	r.same(r.lease(c, 10))
	c.Overdue = 0
	r.same(r.lease(c, 10), "a running")
}

// What another transaction is at is left out, without waiting.
func TestLeaseSkipsLocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	r.insertIDs("a", "b")
	tx, err := r.pool.Begin(r.Context())
	r.ok(err)
	_, err = r.q.Cancel(r.Context(), tx, []string{"a"})
	r.ok(err)
	r.same(r.lease(claimOf(newToken()), 10), "b running")
	r.ok(tx.Rollback(r.Context()))
	r.same(r.lease(claimOf(newToken()), 10), "a running")
}

func TestHeartbeat(t *testing.T) {
	eachMode(t, func(r *rig) {
		token := r.states()
		names := []string{"running", "expired", "stopping", "stopping expired", "pending", "retry", "succeeded", "cancelled", "dead", "absent"}
		held := make([]delayq.LedgerHeld, len(names)+1)
		for i, name := range names {
			held[i] = delayq.LedgerHeld{ID: name, Token: token}
		}
		r.running("another's")
		held[len(names)] = delayq.LedgerHeld{ID: "another's", Token: token}
		rev := r.row("running").Rev
		beats, err := r.q.Heartbeat(r.Context(), time.Hour, held)
		r.ok(err)
		want := make([]delayq.LedgerBeat, len(held))
		copy(want, []delayq.LedgerBeat{delayq.LedgerRenewed, delayq.LedgerRenewed, delayq.LedgerStop, delayq.LedgerStop})
		if !slices.Equal(beats, want) {
			r.Errorf("%v, want %v", beats, want)
		}
		for _, id := range names[:4] {
			if row := r.row(id); time.Until(row.LockedUntil) < 50*time.Minute || row.Lost != 0 {
				r.Errorf("%+v", row)
			}
		}
		if r.row("running").Rev != rev {
			r.Error("a heartbeat changed the revision")
		}
		if time.Until(r.row("another's").LockedUntil) > 10*time.Minute {
			r.Error("another's lease was renewed")
		}
	})
}
