package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/delayq/toolkit/delayq"
)

// TestWhatEachEndOfALeaseLeaves says the whole state before and after each call on leases of a and b.
func TestWhatEachEndOfALeaseLeaves(t *testing.T) {
	const before = `
		processing a 30001
		processing b 30001
		task a of-a
		task b of-b
		state a L t1 1:0:0 1
		state b L t1 1:0:0 1`
	everyServer(t, 1, func(r *rig) {
		for name, row := range map[string]struct {
			call  func(r *rig, ctx context.Context, leases []*delayq.Lease) error
			after string
		}{
			"extend": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error { return r.q.Extend(ctx, time.Minute, l...) }, `
				processing a 61001
				processing b 61001
				task a of-a
				task b of-b
				state a L t1 1:0:0 1
				state b L t1 1:0:0 1`,
			},
			"ack": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error { return r.q.Ack(ctx, l...) }, `
				done a t1
				done b t1`,
			},
			"release": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error { return r.q.Release(ctx, time.Minute, l...) }, `
				pending a 61001.001
				pending b 61001.002
				task a of-a
				task b of-b
				state a X t1 1:0:0 1
				state b X t1 1:0:0 1`,
			},
			"release, due at once": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error {
					return r.q.Release(ctx, -time.Minute, l...)
				}, `
				pending a 1001.001
				pending b 1001.002
				task a of-a
				task b of-b
				state a X t1 1:0:0 1
				state b X t1 1:0:0 1`,
			},
			"retry": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error {
					return r.q.Retry(ctx, l[1], time.Minute, errBoom)
				}, `
				processing a 30001
				pending b 61001.001
				task a of-a
				task b of-b
				state a L t1 1:0:0 1
				state b R t1 1:1:0 1
				error b error boom`,
			},
			"bury": {
				func(r *rig, ctx context.Context, l []*delayq.Lease) error {
					return r.q.Bury(ctx, l[1], delayq.Permanent(errBoom))
				}, `
				processing a 30001
				dead b 1001.001
				task a of-a
				task b of-b
				state a L t1 1:0:0 1
				state b B t1 1:1:0 1
				error b permanent boom`,
			},
		} {
			r.Run(name, func(t *testing.T) {
				r := r.sub(t)
				r.add("a")
				r.add("b", delayq.At(instant(time.Millisecond)))
				r.pass(time.Millisecond)
				leases := r.lease(2)
				r.pass(time.Second)
				r.holds(before)
				r.ok(row.call(r, r.Context(), leases))
				r.holds(row.after)
			})
		}
	})
}

func TestEachLeaseOfABatchIsJudgedAlone(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyServer(t, shards, func(r *rig) {
				ctx := r.Context()
				for name, row := range map[string]struct {
					call func(r *rig, leases ...*delayq.Lease) error
					want map[string]error
				}{
					"extend": {
						func(r *rig, l ...*delayq.Lease) error { return r.q.Extend(ctx, time.Minute, l...) },
						map[string]error{"lost": delayq.ErrLeaseLost, "done": delayq.ErrNotFound, "stopped": delayq.ErrCancelled},
					},
					"ack": {
						func(r *rig, l ...*delayq.Lease) error { return r.q.Ack(ctx, l...) },
						map[string]error{"lost": delayq.ErrLeaseLost, "gone": delayq.ErrNotFound},
					},
					"release": {
						func(r *rig, l ...*delayq.Lease) error { return r.q.Release(ctx, 0, l...) },
						map[string]error{"lost": delayq.ErrLeaseLost, "done": delayq.ErrLeaseLost, "stopped": delayq.ErrCancelled},
					},
				} {
					r.Run(name, func(t *testing.T) {
						r := r.sub(t)
						lost := r.bring("lost", "leased by another")
						if name == "ack" {
							row.want["lost"] = delayq.ErrLeaseLost
						}
						r.pass(time.Millisecond)
						var leases []*delayq.Lease
						for _, id := range []string{"held", "stopped", "done", "gone"} {
							r.add(id)
							r.pass(time.Millisecond)
							leases = append(leases, r.lease1())
						}
						leases = append(leases, lost, leases[0]) // held once more: the second is a repeat
						r.cancel("stopped", delayq.Running)
						r.ok(r.q.Ack(ctx, leases[2]))
						if name == "ack" {
							r.ok(r.q.Bury(ctx, leases[3], errBoom))
							r.ok(r.q.Purge(ctx, "gone"))
						}
						err := row.call(r, leases...)
						var batch *delayq.BatchError
						if !errors.As(err, &batch) || len(batch.Errs) != len(leases) {
							t.Fatalf("error %v", err)
						}
						for i, l := range leases {
							r.is(batch.Errs[i], row.want[l.ID], l.ID)
							var of *delayq.TaskError
							if batch.Errs[i] != nil && (!errors.As(batch.Errs[i], &of) || of.ID != l.ID || of.Queue != r.q.Name() || of.Op != name) {
								t.Errorf("error of %s: %v", l.ID, batch.Errs[i])
							}
						}
					})
				}
			})
		})
	}
}

func TestTheLastErrorIsKeptShortAndReadable(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		ctx := r.Context()
		for _, row := range []struct {
			cause        error
			reason, text string // text is a prefix
		}{
			{nil, delayq.ReasonError, ""},
			{errBoom, delayq.ReasonError, "boom"},
			{errors.New("two\nlines"), delayq.ReasonError, "two\nlines"},
			{errors.New("bad \xff\x00 bytes"), delayq.ReasonError, "bad ?\x00 bytes"},
			{errors.New(strings.Repeat("ä", 2000)), delayq.ReasonError, strings.Repeat("ä", 500)},
			{fmt.Errorf("wrapped: %w", delayq.Permanent(errBoom)), delayq.ReasonPermanent, "wrapped: boom"},
			{delayq.Timeout(errBoom), delayq.ReasonTimeout, "boom"},
			{delayq.Remaining(nil, errBoom), delayq.ReasonPartial, "partly done: boom"},
			{delayq.ErrNoHandler, delayq.ReasonNoHandler, "no handler"},
		} {
			if r.pool != nil {
				row.text = strings.ReplaceAll(row.text, "\x00", "\uFFFD") // PostgreSQL keeps no NUL in a text
			}
			kept := func() {
				r.Helper()
				info, err := r.q.Get(ctx, "x")
				r.ok(err)
				if info.Reason != row.reason || !strings.HasPrefix(info.LastError, row.text) || len(info.LastError) > 1024 || !utf8.ValidString(info.LastError) {
					r.Errorf("%v: kept %q and %q", row.cause, info.Reason, info.LastError)
				}
			}
			r.ok(r.q.Retry(ctx, r.bring("x", "leased"), 0, row.cause))
			kept()
			r.pass(time.Millisecond)
			l := r.lease1()
			kept()
			r.ok(r.q.Bury(ctx, l, row.cause))
			kept()
			r.ok(r.q.Purge(ctx, "x"))
		}
		r.holds("")
	})
}

// An error is kept while it is the last word on the task: over a retry, not over its success.
func TestTheLastErrorGoesWithTheTask(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.bring("x", "retried")
		r.pass(2 * time.Hour)
		r.ok(r.q.Ack(r.Context(), r.lease1()))
		r.holds("done x t2")
		r.bring("y", "retried")
		r.cancel("y", delayq.Cancelled)
		r.bring("z", "retried")
		r.pass(2 * time.Hour)
		r.lease1()
		r.cancel("z", delayq.Running)
		r.pass(leaseTime)
		r.lease(1)
		if n := r.rdb.HLen(r.Context(), delayq.Keys(r.q, 0)[7]).Val(); n != 1 {
			r.Errorf("errors has %d entries, want the sentinel", n)
		}
	})
}

func TestCancelManyAnswersForEachID(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				r.bring("expired", "expired")
				r.bring("running", "due")
				if got := r.lease(1); got[0].ID == "expired" {
					r.lease(1)
					r.cancel("expired", delayq.Running)
				}
				r.add("waiting", delayq.In(time.Hour))
				ids := []string{"waiting", "unknown", "", "running", "waiting", "running"}
				got, err := r.q.CancelMany(r.Context(), ids)
				var batch *delayq.BatchError
				if !errors.As(err, &batch) || !errors.Is(batch.Errs[2], delayq.ErrInvalid) || len(batch.Unwrap()) != 1 {
					r.Errorf("error %v", err)
				}
				for i, want := range []delayq.Cancellation{
					delayq.Cancelled, delayq.Unknown, 0, delayq.Running, delayq.AlreadyCancelled, delayq.Running,
				} {
					if got[i] != want {
						r.Errorf("id %q: %v, want %v", ids[i], got[i], want)
					}
				}
			})
		})
	}
}

// A tombstone is kept for the retention at least and twice as long at most, however the ends of tasks lie around rotations.
func TestAFinishedTaskIsRememberedForTheRetention(t *testing.T) {
	const retention = 2 * time.Minute // the default
	everyServer(t, 1, func(r *rig) {
		known := func(id string) bool {
			_, err := r.q.Get(r.Context(), id)
			if err != nil {
				r.is(err, delayq.ErrNotFound)
			}
			return err == nil
		}
		ended := map[string]time.Duration{}
		now := func() time.Duration { return time.Duration(r.clock.Load()) * time.Microsecond }
		// Gaps shorter and longer than the retention and twice it, and busy times.
		for i, gap := range []time.Duration{0, 1, 50, 119, 1, 120, 240, 1, 1, 60, 60, 60, 60, 300, 121, 119, 239, 241, 10, 1000, 5, 120, 120} {
			r.pass(gap * time.Second)
			id := fmt.Sprint("task", i)
			r.bring(id, []string{"done", "cancelled", "cancelled while running", "cancelled after its lease"}[i%4])
			ended[id] = now()
			for id, at := range ended {
				switch age := now() - at; {
				case age < retention && !known(id):
					r.Fatalf("%s is forgotten after %v", id, age)
				case age > 2*retention && known(id):
					r.Fatalf("%s is known after %v", id, age)
				}
			}
		}
		r.pass(2*retention + time.Second)
		for id := range ended {
			if known(id) {
				r.Errorf("%s is known after two retentions", id)
			}
		}
		// Memory goes with the next ends.
		r.bring("last", "done")
		if stats, err := r.q.Stats(r.Context()); err != nil || stats.Shards[0].Tombstones != 1 {
			r.Errorf("tombstones: %+v, %v", stats.Shards, err)
		}
	})
}

func TestARepeatedAckIsAnsweredForTheRetention(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		l := r.bring("x", "done")
		for range 11 { // others end meanwhile, so that generations rotate
			r.pass(10 * time.Second)
			r.bring("other", "done")
			r.ok(r.q.Ack(r.Context(), l))
			r.pass(time.Second)
			r.rdb.HDel(r.Context(), delayq.Keys(r.q, 0)[5], "other")
			r.rdb.HDel(r.Context(), delayq.Keys(r.q, 0)[6], "other")
		}
		r.pass(5 * time.Minute)
		r.is(r.q.Ack(r.Context(), l), delayq.ErrNotFound)
	})
}

// Steps of the server's clock make leases and due times longer or shorter by the step; they lose and double nothing.
func TestAClockThatStepsBackLosesNothing(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		l := r.bring("x", "done")
		r.add("waiting", delayq.In(time.Second))
		r.pass(-10 * time.Minute)
		if got := r.lease(10); len(got) != 0 {
			r.Errorf("leased %q early", idsOf(got))
		}
		r.ok(r.q.Ack(r.Context(), l))
		r.bring("y", "done")
		r.pass(10*time.Minute + 2*time.Second)
		r.ok(r.q.Ack(r.Context(), r.lease1()))
		r.ok(r.q.Ack(r.Context(), l))
	})
}
