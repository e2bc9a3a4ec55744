package ledger_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

func (r *rig) insertOne(task delayq.LedgerTask, replace bool) delayq.LedgerChange {
	r.Helper()
	changes, err := r.q.Insert(r.Context(), nil, []delayq.LedgerTask{task}, replace)
	r.ok(err)
	return changes[0]
}

func TestInsertKeepsEveryByte(t *testing.T) {
	eachMode(t, func(r *rig) {
		at := time.Date(2031, 2, 3, 4, 5, 6, 789_123_000, time.UTC)
		tasks := []delayq.LedgerTask{
			{ID: "\x00\xff'\\\"{},", Type: "größe'\\", Key: "{\"a\"}\\", Payload: []byte("\x00\x01\\x'\"\xff"), Stamp: []byte("\x00\xff\\'{}\",456789012")[:12], Due: delayq.LedgerDue{At: at}},
			{ID: "nil payload", Type: "t", Stamp: []byte(newToken()[:12])},
			{ID: "NULL", Type: "NULL", Key: "", Payload: bytes.Repeat([]byte{0xfe}, 300_000), Stamp: []byte(newToken()[:12])},
		}
		r.insert(tasks...)
		for _, want := range tasks {
			got := r.row(want.ID)
			if got.Type != want.Type || got.Key != want.Key || !bytes.Equal(got.Payload, want.Payload) || got.Payload == nil || !bytes.Equal(got.Stamp, want.Stamp) {
				r.Errorf("%q came back as %q %q with %d bytes", want.ID, got.Type, got.Key, len(got.Payload))
			}
		}
		if got := r.row(tasks[0].ID); !got.RunAt.Equal(at) || got.Status != delayq.LedgerPending || got.Token != "" || got.CreatedAt.IsZero() {
			r.Errorf("%+v", got)
		}
	})
}

func TestInsertKeepsTheOrderOfEqualDelays(t *testing.T) {
	eachMode(t, func(r *rig) {
		tasks := make([]delayq.LedgerTask, 500)
		for i, id := range ids("", 500) {
			tasks[499-i] = newTask(id) // the order of the call, not of the ids
			tasks[499-i].Due.In = time.Hour
		}
		before := time.Now()
		rows := r.insert(tasks...)
		seen := map[int64]bool{}
		for i, row := range rows {
			if row.ID != tasks[i].ID || i > 0 && row.RunAt.Sub(rows[i-1].RunAt) != time.Microsecond || seen[row.Rev] {
				r.Fatalf("place %d: %s due %s rev %d", i, row.ID, row.RunAt, row.Rev)
			}
			seen[row.Rev] = true
		}
		if d := rows[0].RunAt.Sub(before); d < time.Hour-time.Second || d > time.Hour+time.Minute {
			r.Errorf("due in %s", d)
		}
		task := newTask("overdue")
		task.Due.In = -time.Hour
		if d := time.Since(r.insert(task)[0].RunAt); d > time.Minute {
			r.Errorf("overdue by %s, want now", d)
		}
	})
}

func TestInsertOfKnownIDs(t *testing.T) {
	eachMode(t, func(r *rig) {
		ctx := r.Context()
		r.insertIDs("waits", "cancelled", "dead", "succeeded", "runs", "failed")
		token := newToken()
		r.claim(claimOf(token), r.row("dead"), r.row("succeeded"), r.row("runs"), r.row("failed"))
		r.finish(end("dead", token, delayq.LedgerBury), end("succeeded", token, delayq.LedgerSucceed), end("failed", token, delayq.LedgerFail))
		_, err := r.q.Cancel(ctx, nil, []string{"cancelled"})
		r.ok(err)
		was := map[string]delayq.LedgerStatus{
			"waits": "pending", "cancelled": "cancelled", "dead": "dead", "succeeded": "succeeded", "runs": "running", "failed": "retry",
		}
		// Left alone by a second enqueue, but for the cancelled one.
		for id, status := range was {
			before := r.row(id)
			c := r.insertOne(newTask(id), false)
			if c.Was != status || c.Applied != (status == "cancelled") {
				r.Errorf("%s: %+v", id, c)
			}
			if !c.Applied && (c.Row.Rev != before.Rev || !bytes.Equal(c.Row.Stamp, before.Stamp) || (c.Row.Payload == nil) == c.Row.Status.Waiting()) {
				r.Errorf("%s was changed: %+v", id, c.Row)
			}
		}
		r.want("cancelled", "pending failed 0 lost 0 deliveries 0")
		// Replaced where they wait.
		for _, id := range []string{"waits", "failed", "runs", "dead", "succeeded"} {
			before := r.row(id)
			task := newTask(id)
			task.Payload, task.Due.In = []byte("new"), time.Hour
			c := r.insertOne(task, true)
			if c.Applied != before.Status.Waiting() || c.Was != before.Status {
				r.Errorf("replace %s: %+v", id, c)
			}
			got := r.row(id)
			if c.Applied && (got.Rev <= before.Rev || string(got.Payload) != "new" || string(c.Row.Payload) != "new" || time.Until(got.RunAt) < 50*time.Minute ||
				brief(got) != "pending failed 0 lost 0 deliveries 0") {
				r.Errorf("%s: %+v", id, got)
			}
			if !c.Applied && got.Rev != before.Rev {
				r.Errorf("%s was changed", id)
			}
		}
	})
}

// An enqueue whose answer was lost is sent again: it must not undo what has happened since.
func TestInsertResent(t *testing.T) {
	eachMode(t, func(r *rig) {
		task := newTask("a")
		rev := r.insert(task)[0].Rev
		for _, replace := range []bool{false, true} {
			if c := r.insertOne(task, replace); c.Applied || c.Row.Rev != rev || !bytes.Equal(c.Row.Stamp, task.Stamp) {
				r.Errorf("%+v", c)
			}
		}
		_, err := r.q.Cancel(r.Context(), nil, []string{"a"})
		r.ok(err)
		if c := r.insertOne(task, false); c.Applied || c.Row.Status != delayq.LedgerCancelled {
			r.Errorf("cancelled, yet back: %+v", c.Row)
		}
		if c := r.insertOne(newTask("a"), false); !c.Applied || c.Was != delayq.LedgerCancelled || c.Row.Rev <= rev {
			r.Errorf("a second enqueue after the cancel: %+v", c)
		}
	})
}

func TestInsertInATransaction(t *testing.T) {
	eachMode(t, func(r *rig) {
		tx, err := r.pool.Begin(r.Context())
		r.ok(err)
		_, err = r.q.Insert(r.Context(), tx, []delayq.LedgerTask{newTask("a")}, false)
		r.ok(err)
		if rows, err := r.q.Rows(r.Context(), []string{"a"}, false); err != nil || len(rows) != 0 {
			r.Error("seen before the commit", rows, err)
		}
		r.ok(tx.Rollback(r.Context()))
		tx, err = r.pool.Begin(r.Context())
		r.ok(err)
		_, err = r.q.Insert(r.Context(), tx, []delayq.LedgerTask{newTask("a")}, false)
		r.ok(err)
		r.ok(tx.Commit(r.Context()))
		r.want("a", "pending failed 0 lost 0 deliveries 0")
	})
}

// An insert in a transaction waits for one of the same id in another, and finds what became of that; one without is told soon.
func TestInsertWaitsForTheOther(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	for _, commit := range []bool{false, true} {
		tx, err := r.pool.Begin(r.Context())
		r.ok(err)
		defer tx.Rollback(r.Context())
		_, err = r.q.Insert(r.Context(), tx, []delayq.LedgerTask{newTask("a")}, false)
		r.ok(err)
		got := make(chan delayq.LedgerChange, 1)
		if c := r.insertOne(newTask("a"), false); c.Applied || c.Row != nil {
			r.Errorf("alone: %+v", c)
		}
		go func() {
			second, err := r.pool.Begin(r.Context())
			r.fine(err)
			changes, err := r.q.Insert(r.Context(), second, []delayq.LedgerTask{newTask("a")}, false)
			r.fine(err)
			r.fine(second.Commit(r.Context()))
			got <- changes[0]
		}()
		r.waitForLock()
		if commit {
			r.ok(tx.Commit(r.Context()))
		} else {
			r.ok(tx.Rollback(r.Context()))
		}
		if c := <-got; c.Applied == commit {
			r.Errorf("commit %v: %+v", commit, c)
		}
		r.exec("DELETE FROM delayq.task WHERE queue > 0")
	}
}

// waitForLock returns when another session of the database waits for a lock.
func (r *rig) waitForLock() {
	r.Helper()
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var n int
		r.ok(r.pool.QueryRow(r.Context(), "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").Scan(&n))
		if n > 0 {
			return
		}
		if time.Now().After(until) {
			r.Fatal("nobody waits")
		}
	}
}

func TestInvalidInput(t *testing.T) {
	eachMode(t, func(r *rig) {
		ctx := r.Context()
		bad := func(field string, edit func(*delayq.LedgerTask)) {
			r.Helper()
			good, task := newTask("good"), newTask("bad")
			edit(&task)
			_, err := r.q.Insert(ctx, nil, []delayq.LedgerTask{good, task}, false)
			r.invalid(field, err)
		}
		bad("ID", func(t *delayq.LedgerTask) { t.ID = "" })
		bad("ID", func(t *delayq.LedgerTask) { t.ID = string(make([]byte, 257)) })
		bad("ids of one call", func(t *delayq.LedgerTask) { t.ID = "good" })
		bad("Type", func(t *delayq.LedgerTask) { t.Type = "" })
		bad("Type", func(t *delayq.LedgerTask) { t.Type = "a\xff" })
		bad("Type", func(t *delayq.LedgerTask) { t.Type = "a\x00" })
		bad("Key", func(t *delayq.LedgerTask) { t.Key = "\xc3" })
		bad("Stamp", func(t *delayq.LedgerTask) { t.Stamp = nil })
		bad("Due", func(t *delayq.LedgerTask) { t.Due.At = time.Date(2201, 1, 1, 0, 0, 0, 0, time.UTC) })
		bad("Due", func(t *delayq.LedgerTask) { t.Due.In = 1 << 62 })
		if rows, err := r.q.Rows(ctx, []string{"good"}, false); err != nil || len(rows) != 0 {
			r.Error("something was written", rows, err)
		}
		many := make([]delayq.LedgerTask, 501)
		for i, id := range ids("", 501) {
			many[i] = newTask(id)
		}
		_, err := r.q.Insert(ctx, nil, many, false)
		r.invalid("tasks of one call", err)
		_, err = r.q.Insert(ctx, notTx{}, many[:1], false)
		r.invalid("tx", err)
		_, err = r.q.Claim(ctx, delayq.LedgerClaim{Token: "short", Lease: time.Minute}, []delayq.LedgerWant{{ID: "a"}})
		r.invalid("Token", err)
		_, err = r.q.Claim(ctx, delayq.LedgerClaim{Token: newToken()}, []delayq.LedgerWant{{ID: "a"}})
		r.invalid("Lease", err)
		_, err = r.q.Claim(ctx, delayq.LedgerClaim{Token: newToken(), Lease: time.Minute, Consumer: "\xff"}, []delayq.LedgerWant{{ID: "a"}})
		r.invalid("Consumer", err)
		_, err = r.q.Lease(ctx, claimOf(newToken()), 0)
		r.invalid("max", err)
		_, err = r.q.Heartbeat(ctx, time.Minute, []delayq.LedgerHeld{{ID: "a"}})
		r.invalid("Token", err)
		_, err = r.q.Finish(ctx, nil, []delayq.LedgerEnd{end("a", newToken(), 17)})
		r.invalid("Verb", err)
		_, err = r.q.Page(ctx, delayq.LedgerPage{Limit: 1001})
		r.invalid("Limit", err)
		_, _, err = r.led.OpenQueue(ctx, "a\x00", delayq.LedgerConfig{}, true)
		r.invalid("queue name", err)
	})
}

type notTx struct{ delayq.Tx }

func (r *rig) invalid(field string, err error) {
	r.Helper()
	var in *delayq.InputError
	if !errors.As(err, &in) || in.Field != field || !errors.Is(err, delayq.ErrInvalid) {
		r.Errorf("%v, want an InputError of %s", err, field)
	}
}
