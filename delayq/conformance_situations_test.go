package delayq_test

import (
	"errors"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// TestEveryVerbInEverySituation is the truth table of the calls that name a task by id.
func TestEveryVerbInEverySituation(t *testing.T) {
	const (
		created, replaced = delayq.Created, delayq.Replaced
		pending, running  = delayq.DuplicatePending, delayq.DuplicateProcessing
		dead, done        = delayq.DuplicateDead, delayq.DuplicateDone
	)
	var (
		isRunning, isDead, isFinished = delayq.ErrRunning, delayq.ErrDead, delayq.ErrFinished
		notFound                      = delayq.ErrNotFound
	)
	table := []struct {
		situation     string
		get           delayq.State // "" for ErrNotFound
		keep, replace delayq.Outcome
		cancel, again delayq.Cancellation
		reschedule    error
		replay, purge error
	}{
		{"unknown", "", created, created, delayq.Unknown, delayq.Unknown, notFound, notFound, notFound},
		{"pending", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"due", delayq.StateDue, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"leased", delayq.StateProcessing, running, running, delayq.Running, delayq.Running, isRunning, notFound, notFound},
		{"expired", delayq.StateDue, running, running, delayq.Cancelled, delayq.AlreadyCancelled, isRunning, notFound, notFound},
		{"taken back", delayq.StateDue, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"leased by another", delayq.StateProcessing, running, running, delayq.Running, delayq.Running, isRunning, notFound, notFound},
		{"told to stop", delayq.StateProcessing, running, running, delayq.Running, delayq.Running, isRunning, notFound, notFound},
		{"retried", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"released", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"replaced", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"dead", delayq.StateDead, dead, dead, delayq.Dead, delayq.Dead, isDead, nil, nil},
		{"replayed", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
		{"purged", "", created, created, delayq.Unknown, delayq.Unknown, notFound, notFound, notFound},
		{"done", delayq.StateDone, done, done, delayq.Finished, delayq.Finished, isFinished, notFound, notFound},
		{"forgotten", "", created, created, delayq.Unknown, delayq.Unknown, notFound, notFound, notFound},
		{"cancelled", delayq.StateCancelled, created, created, delayq.AlreadyCancelled, delayq.AlreadyCancelled, isFinished, notFound, notFound},
		{"cancelled while running", delayq.StateCancelled, created, created, delayq.AlreadyCancelled, delayq.AlreadyCancelled, isFinished, notFound, notFound},
		{"cancelled after its lease", delayq.StateCancelled, created, created, delayq.AlreadyCancelled, delayq.AlreadyCancelled, isFinished, notFound, notFound},
		{"cancelled and enqueued again", delayq.StatePending, pending, replaced, delayq.Cancelled, delayq.AlreadyCancelled, nil, notFound, notFound},
	}
	everyMode(t, 1, func(r *rig) {
		ctx := r.Context()
		// in prepares a queue and checks that a call that is refused changes nothing.
		in := func(situation string, call func(r *rig) (refused bool)) {
			r.Run(situation, func(t *testing.T) {
				r := r.sub(t)
				r.bring("x", situation)
				before := r.state()
				if call(r) && r.state() != before {
					t.Errorf("the queue held\n%s\nand holds\n%s", before, r.state())
				}
			})
		}
		for _, row := range table {
			if r.pool != nil && row.situation == "taken back" {
				continue // with a ledger it is as if expired: the row says who has the task
			}
			if r.pool != nil && row.situation == "replayed" {
				row.get = delayq.StateDue // its clock does not stand still
			}
			in(row.situation, func(r *rig) bool {
				info, err := r.q.Get(ctx, "x")
				switch {
				case row.get == "":
					r.is(err, notFound, "get")
				case err != nil || info.State != row.get:
					r.Errorf("get: %+v, %v; want %s", info, err, row.get)
				}
				return true
			})
			for policy, want := range []delayq.Outcome{row.keep, row.replace, row.keep} {
				in(row.situation, func(r *rig) bool {
					res, err := r.q.Enqueue(ctx, task("x"), delayq.In(2*time.Hour), delayq.OnConflict(delayq.Conflict(policy)))
					if res.Outcome != want || res.ID != "x" || !errors.Is(err, res.Err) {
						r.Errorf("enqueue by policy %d: %+v, %v; want %v", policy, res, err, want)
					}
					wantErr := error(nil)
					if delayq.Conflict(policy) == delayq.Reject && want.Duplicate() {
						wantErr = delayq.ErrConflict
					}
					r.is(err, wantErr, "enqueue by policy ", policy)
					return want.Duplicate()
				})
			}
			in(row.situation, func(r *rig) bool {
				r.cancel("x", row.cancel)
				after := r.state()
				r.cancel("x", row.again)
				if r.state() != after {
					r.Errorf("the second cancel changed\n%s\nto\n%s", after, r.state())
				}
				return row.cancel != delayq.Cancelled && row.cancel != delayq.Running
			})
			in(row.situation, func(r *rig) bool {
				err := r.q.Reschedule(ctx, "x", instant(3*time.Hour))
				r.is(err, row.reschedule, "reschedule")
				if info, _ := r.q.Get(ctx, "x"); err == nil && !info.At.Equal(instant(3*time.Hour)) {
					r.Errorf("rescheduled to %v", info.At)
				}
				r.is(r.q.RescheduleIn(ctx, "x", time.Hour), row.reschedule, "reschedule again")
				return err != nil
			})
			in(row.situation, func(r *rig) bool {
				r.is(r.q.Replay(ctx, "x"), row.replay, "replay")
				r.is(r.q.Replay(ctx, "x"), notFound, "replay again")
				return row.replay != nil
			})
			in(row.situation, func(r *rig) bool {
				r.is(r.q.Purge(ctx, "x"), row.purge, "purge")
				r.is(r.q.Purge(ctx, "x"), notFound, "purge again")
				return row.purge != nil
			})
		}
	})
}

// TestOnlyTheHolderOfALeaseCanUseIt is the truth table of the calls that name a lease, for the lease that each situation
// began with. Public cases: B15 to B17, B19, B59.
func TestOnlyTheHolderOfALeaseCanUseIt(t *testing.T) {
	verbs := []struct {
		name string
		call func(r *rig, l *delayq.Lease) error
	}{
		{"extend", func(r *rig, l *delayq.Lease) error { return r.q.Extend(r.Context(), time.Minute, l) }},
		{"ack", func(r *rig, l *delayq.Lease) error { return r.q.Ack(r.Context(), l) }},
		{"retry", func(r *rig, l *delayq.Lease) error { return r.q.Retry(r.Context(), l, time.Second, errBoom) }},
		{"release", func(r *rig, l *delayq.Lease) error { return r.q.Release(r.Context(), time.Second, l) }},
		{"bury", func(r *rig, l *delayq.Lease) error { return r.q.Bury(r.Context(), l, errBoom) }},
	}
	var (
		lost, notFound, cancelled = delayq.ErrLeaseLost, delayq.ErrNotFound, delayq.ErrCancelled
		all                       = func(err error) [5]error { return [5]error{err, err, err, err, err} }
	)
	everyMode(t, 1, func(r *rig) {
		for situation, want := range map[string][5]error{
			"leased":                       all(nil),
			"expired":                      all(nil), // nobody else has it yet
			"told to stop":                 {cancelled, nil, cancelled, cancelled, cancelled},
			"taken back":                   all(lost),
			"leased by another":            all(lost),
			"retried":                      {lost, lost, nil, lost, lost}, // each answers its own repeat
			"released":                     {lost, lost, lost, nil, lost},
			"dead":                         {lost, lost, lost, lost, nil},
			"done":                         {notFound, nil, lost, lost, lost},
			"cancelled while running":      {notFound, lost, cancelled, cancelled, cancelled},
			"cancelled after its lease":    {notFound, lost, cancelled, cancelled, cancelled},
			"replaced":                     all(notFound),
			"replayed":                     all(notFound),
			"purged":                       all(notFound),
			"forgotten":                    all(notFound),
			"cancelled and enqueued again": all(notFound),
		} {
			if r.pool != nil && situation == "taken back" {
				want = all(nil) // nobody else has it yet, whatever Redis has done
			}
			for i, verb := range verbs {
				if r.pool != nil { // it remembers the task where Redis has forgotten the lease
					gone := situation == "purged" || situation == "forgotten"
					if errors.Is(want[i], notFound) && (!gone || verb.name == "extend") {
						want[i] = lost
					}
					// The end that was first stands; one that comes to the same is a repeat of it.
					end := situation + ", " + verb.name
					if situation == "done" && verb.name != "extend" || end == "retried, release" || end == "released, retry" || end == "dead, retry" {
						want[i] = nil
					}
				}
				r.Run(situation+"/"+verb.name, func(t *testing.T) {
					r := r.sub(t)
					l := r.bring("x", situation)
					before := r.state()
					r.is(verb.call(r, l), want[i])
					after := r.state()
					held := situation == "leased" || situation == "expired" || situation == "told to stop" || situation == "taken back" && r.pool != nil
					if !held && after != before {
						t.Errorf("the queue held\n%s\nand holds\n%s", before, after)
					}
					r.is(verb.call(r, l), want[i], "repeated")
					if r.state() != after {
						t.Errorf("the repeat changed\n%s\nto\n%s", after, r.state())
					}
				})
			}
		}
	})
}

// TestCancelOfARunningTask follows a task that is told to stop to each of its ends. Public case: B59.
func TestCancelOfARunningTask(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		ctx := r.Context()
		for name, row := range map[string]struct {
			end   func(r *rig, l *delayq.Lease)
			state delayq.State
		}{
			"ack wins":   {func(r *rig, l *delayq.Lease) { r.ok(r.q.Ack(ctx, l)) }, delayq.StateDone},
			"retry":      {func(r *rig, l *delayq.Lease) { r.is(r.q.Retry(ctx, l, 0, errBoom), delayq.ErrCancelled) }, delayq.StateCancelled},
			"release":    {func(r *rig, l *delayq.Lease) { r.is(r.q.Release(ctx, 0, l), delayq.ErrCancelled) }, delayq.StateCancelled},
			"bury":       {func(r *rig, l *delayq.Lease) { r.is(r.q.Bury(ctx, l, errBoom), delayq.ErrCancelled) }, delayq.StateCancelled},
			"lease over": {func(r *rig, _ *delayq.Lease) { r.pass(leaseTime) }, delayq.StateCancelled},
			"extended, then over": {func(r *rig, l *delayq.Lease) {
				r.is(r.q.Extend(ctx, time.Minute, l), delayq.ErrCancelled)
				r.pass(leaseTime)
				if info, err := r.q.Get(ctx, "x"); err != nil || info.State != delayq.StateProcessing || !info.CancelRequested {
					r.Errorf("after extend: %+v, %v", info, err)
				}
				r.pass(leaseTime)
			}, delayq.StateCancelled},
		} {
			r.Run(name, func(t *testing.T) {
				r := r.sub(t)
				row.end(r, r.bring("x", "told to stop"))
				if got := r.lease(10); len(got) != 0 {
					r.Errorf("leased %q after its cancel", idsOf(got))
				}
				info, err := r.q.Get(ctx, "x")
				if err != nil || info.State != row.state {
					r.Errorf("ended as %+v, %v; want %s", info, err, row.state)
				}
				if row.state == delayq.StateCancelled {
					r.holds("done x cancelled")
				}
			})
		}
	})
}
