package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// Overlapping batches of all verbs, in any order of ids, by many at once: no deadlock, no task run by two, and each ends once.
func TestOverlappingBatches(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	all := ids("", 300)
	r.insertIDs(all...)
	var mu sync.Mutex
	holder, succeeded := map[string]string{}, map[string]int{}
	some := func() []string {
		s := make([]string, 0, 150)
		for _, i := range rand.Perm(len(all))[:150] {
			s = append(s, all[i])
		}
		return s
	}
	var wg sync.WaitGroup
	until := time.Now().Add(3 * time.Second)
	var begun int64
	r.ok(r.pool.QueryRow(ctx, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&begun))
	for range 6 {
		wg.Go(func() {
			for time.Now().Before(until) {
				rows, err := r.q.Rows(ctx, some(), false)
				r.fine(err)
				want := make([]delayq.LedgerWant, len(rows))
				for i, row := range rows {
					want[i] = delayq.LedgerWant{ID: row.ID, Rev: row.Rev}
				}
				token := newToken()
				c := claimOf(token)
				c.MaxLost = 0
				got, err := r.q.Claim(ctx, c, want)
				r.fine(err)
				var held []delayq.LedgerHeld
				mu.Lock()
				for _, row := range got {
					if other := holder[row.ID]; other != "" {
						t.Errorf("%s is run by two", row.ID)
					}
					holder[row.ID] = token
					held = append(held, delayq.LedgerHeld{ID: row.ID, Token: token})
				}
				mu.Unlock()
				rand.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
				_, err = r.q.Heartbeat(ctx, time.Minute, held)
				r.fine(err)
				mu.Lock()
				for _, h := range held {
					holder[h.ID] = ""
				}
				mu.Unlock()
				ends := make([]delayq.LedgerEnd, len(held))
				for i, h := range held {
					verbs := []delayq.LedgerVerb{delayq.LedgerFail, delayq.LedgerGiveBack, delayq.LedgerSnooze}
					ends[i] = end(h.ID, h.Token, verbs[rand.IntN(len(verbs))])
					if rand.IntN(40) == 0 {
						ends[i].Verb = delayq.LedgerSucceed
					}
				}
				for len(ends) > 0 {
					changes, err := r.q.Finish(ctx, nil, ends)
					r.fine(err)
					var busy []delayq.LedgerEnd
					mu.Lock()
					for i, ch := range changes {
						switch {
						case !ch.Applied && ch.Row.Status == delayq.LedgerRunning && ch.Row.Token == token:
							busy = append(busy, ends[i])
						case !ch.Applied:
							t.Errorf("%+v", ch)
						case ends[i].Verb == delayq.LedgerSucceed:
							succeeded[ends[i].ID]++
						}
					}
					mu.Unlock()
					ends = busy
				}
			}
		})
	}
	for range 2 { // what users do meanwhile
		wg.Go(func() {
			for time.Now().Before(until) {
				s := some()
				_, err := r.q.Reschedule(ctx, nil, s, make([]delayq.LedgerDue, len(s)))
				r.fine(err)
				tasks := make([]delayq.LedgerTask, len(s))
				for i, id := range s {
					tasks[i] = newTask(id)
				}
				_, err = r.q.Insert(ctx, nil, tasks, true)
				r.fine(err)
			}
		})
	}
	wg.Wait()
	for id, n := range succeeded {
		if row := r.row(id); n != 1 || row.Status != delayq.LedgerSucceeded {
			t.Errorf("%s succeeded %d times and is %s", id, n, row.Status)
		}
	}
	if len(succeeded) < 50 {
		t.Errorf("only %d got to an end", len(succeeded))
	}
	r.reads() // brings the statistics up to date
	var dead int64
	r.ok(r.pool.QueryRow(ctx, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&dead))
	if dead > begun {
		t.Errorf("%d deadlocks", dead-begun)
	}
}

// fine is ok for goroutines.
func (r *rig) fine(err error) {
	if err != nil {
		r.Error(err)
	}
}

// Two claim the same expired leases at once: each task goes to one of them, and one lost lease is charged.
func TestTakeoverRace(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	all := ids("", 100)
	for range 5 {
		r.exec("DELETE FROM delayq.task WHERE queue > 0")
		r.running(all...)
		r.expire(all...)
		rows := make([]*delayq.LedgerRow, len(all))
		for i, id := range all {
			rows[i] = r.row(id)
		}
		counts := make(chan int, 4)
		for range 4 {
			go func() { counts <- len(r.claim(claimOf(newToken()), rows...)) }()
		}
		sum := 0
		for range 4 {
			sum += <-counts
		}
		if sum != len(all) {
			t.Errorf("%d of %d claimed", sum, len(all))
		}
		for _, id := range all {
			r.want(id, "running failed 0 lost 1 deliveries 2")
		}
	}
}

// What was true when a statement began may not be any more when it gets the lock: the outcome must be that of the later one.
func TestChangesInARace(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	for _, c := range []struct {
		name   string
		first  func(tx pgx.Tx, id, token string) error
		second func(id, token string) string
		want   string
	}{
		{"finish after a takeover", func(tx pgx.Tx, id, _ string) error {
			_, err := tx.Exec(ctx, "UPDATE delayq.task SET token = gen_random_uuid(), lost = 1 WHERE id = $1::bytea", []byte(id))
			return err
		}, func(id, token string) string {
			return fmt.Sprint(r.finish(end(id, token, delayq.LedgerSucceed))[0].Applied)
		}, "false: running failed 0 lost 1 deliveries 1"},
		{"heartbeat after a success", func(tx pgx.Tx, id, token string) error {
			_, err := r.q.Finish(ctx, tx, []delayq.LedgerEnd{end(id, token, delayq.LedgerSucceed)})
			return err
		}, func(id, token string) string {
			beats, err := r.q.Heartbeat(ctx, time.Minute, []delayq.LedgerHeld{{ID: id, Token: token}})
			r.fine(err)
			return fmt.Sprint(beats[0] == delayq.LedgerRenewed)
		}, "false: succeeded failed 0 lost 0 deliveries 1"},
		{"fail after a cancel", func(tx pgx.Tx, id, _ string) error {
			_, err := r.q.Cancel(ctx, tx, []string{id})
			return err
		}, func(id, token string) string {
			return fmt.Sprint(r.finish(end(id, token, delayq.LedgerFail))[0].Applied)
		}, "true: cancelled failed 1 lost 0 deliveries 1 stop"},
		{"cancel after a fail", func(tx pgx.Tx, id, token string) error {
			_, err := r.q.Finish(ctx, tx, []delayq.LedgerEnd{end(id, token, delayq.LedgerFail)})
			return err
		}, func(id, _ string) string {
			changes, err := r.q.Cancel(ctx, nil, []string{id})
			r.fine(err)
			return fmt.Sprint(changes[0].Applied)
		}, "true: cancelled failed 1 lost 0 deliveries 1"},
		{"takeover after a heartbeat", func(tx pgx.Tx, id, _ string) error {
			if _, err := r.pool.Exec(ctx, "UPDATE delayq.task SET locked_until = now() - interval '1 s' WHERE id = $1::bytea", []byte(id)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "UPDATE delayq.task SET locked_until = now() + interval '1 h' WHERE id = $1::bytea", []byte(id))
			return err
		}, func(id, _ string) string {
			return fmt.Sprint(len(r.claim(claimOf(newToken()), r.row(id))) == 1)
		}, "false: running failed 0 lost 0 deliveries 1"},
		{"replay after a purge", func(tx pgx.Tx, id, token string) error {
			r.finish(end(id, token, delayq.LedgerBury))
			_, err := r.q.Purge(ctx, tx, []string{id})
			return err
		}, func(id, _ string) string {
			changes, err := r.q.Replay(ctx, nil, []string{id})
			r.fine(err)
			return fmt.Sprint(changes[0].Applied, changes[0].Row == nil)
		}, "false true"},
	} {
		token := r.running(c.name)
		tx, err := r.pool.Begin(ctx)
		r.ok(err)
		defer tx.Rollback(ctx)
		r.ok(c.first(tx, c.name, token))
		got := make(chan string, 1)
		go func() { got <- c.second(c.name, token) }()
		r.waitForLock()
		r.ok(tx.Commit(ctx))
		s := <-got
		if rows, err := r.q.Rows(ctx, []string{c.name}, true); err == nil && len(rows) == 1 {
			s += ": " + brief(&rows[0])
		}
		if s != c.want {
			t.Errorf("%s: %s, want %s", c.name, s, c.want)
		}
	}
}

// A deadlock with a transaction of somebody else is undone by PostgreSQL; a statement of our own is sent again.
func TestDeadlockIsRetried(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	r.insertIDs("a", "b")
	tx, err := r.pool.Begin(ctx)
	r.ok(err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, "SET LOCAL deadlock_timeout = '1h'") // so that the other is the one that is undone
	r.ok(err)
	lock := func(id string) error {
		_, err := tx.Exec(ctx, "UPDATE delayq.task SET reason = 'held' WHERE id = $1::bytea", []byte(id))
		return err
	}
	r.ok(lock("b"))
	got := make(chan error, 1)
	go func() {
		_, err := r.q.Cancel(ctx, nil, []string{"a", "b"})
		got <- err
	}()
	r.waitForLock() // it has a and waits for b
	r.ok(lock("a"))
	r.ok(tx.Commit(ctx))
	if err := <-got; err != nil {
		t.Error(err)
	}
	r.want("a", "cancelled failed 0 lost 0 deliveries 0 held")
}

// Claims, heartbeats and cancel requests touch no index: they are HOT updates while pages have room, and none would be else. How much room
// there is depends on when old versions can be pruned.
