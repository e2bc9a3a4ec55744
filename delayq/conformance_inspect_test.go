package delayq_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

func TestGetDescribesATask(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		for situation, want := range map[string]delayq.Info{
			"pending":      {State: delayq.StatePending, At: instant(time.Hour + time.Microsecond), Task: delayq.Task{Attempt: 1}},
			"due":          {State: delayq.StateDue, At: instant(time.Microsecond), Task: delayq.Task{Attempt: 1}},
			"leased":       {State: delayq.StateProcessing, At: instant(leaseTime + time.Millisecond), LeasedAt: instant(time.Millisecond), Task: delayq.Task{Attempt: 1, Deliveries: 1}},
			"expired":      {State: delayq.StateDue, At: instant(leaseTime + time.Millisecond), LeasedAt: instant(time.Millisecond), Task: delayq.Task{Attempt: 1, Deliveries: 1}},
			"taken back":   {State: delayq.StateDue, At: instant(leaseTime + time.Millisecond), LeasedAt: instant(time.Millisecond), Task: delayq.Task{Attempt: 2, Deliveries: 1, Lost: 1}},
			"told to stop": {State: delayq.StateProcessing, At: instant(leaseTime + time.Millisecond), LeasedAt: instant(time.Millisecond), CancelRequested: true, Task: delayq.Task{Attempt: 1, Deliveries: 1}},
			"retried": {
				State: delayq.StatePending, At: instant(time.Hour + 1001*time.Microsecond), LeasedAt: instant(time.Millisecond),
				Reason: delayq.ReasonError, LastError: "boom", Task: delayq.Task{Attempt: 2, Deliveries: 1, Failed: 1},
			},
			"dead": {
				State: delayq.StateDead, At: instant(1001 * time.Microsecond), LeasedAt: instant(time.Millisecond), Reason: delayq.ReasonError,
				LastError: "boom", Task: delayq.Task{Attempt: 2, Deliveries: 1, Failed: 1},
			},
			"replayed":  {State: delayq.StatePending, At: instant(1001 * time.Microsecond), Task: delayq.Task{Attempt: 1}},
			"done":      {State: delayq.StateDone},
			"cancelled": {State: delayq.StateCancelled},
		} {
			r.Run(situation, func(t *testing.T) {
				r := r.sub(t)
				r.bring("x", situation)
				got, err := r.q.Get(r.Context(), "x")
				r.ok(err)
				want.ID, want.Queue = "x", r.q.Name()
				if want.State != delayq.StateDone && want.State != delayq.StateCancelled {
					want.Type, want.Payload, want.EnqueuedAt = "t", []byte("of-x"), got.EnqueuedAt
				}
				if want.State == delayq.StatePending || want.State == delayq.StateDue && want.Deliveries == want.Lost {
					want.Due = want.At
				}
				a, _ := json.Marshal(got)
				b, _ := json.Marshal(want)
				if string(a) != string(b) {
					t.Errorf("got  %s\nwant %s", a, b)
				}
			})
		}
	})
}

func (r *rig) list(o delayq.ListOptions) *delayq.Page {
	r.Helper()
	page, err := r.q.List(r.Context(), o)
	r.ok(err)
	return page
}

// Many tasks at one instant, pages that end amid them, and the task that a cursor names gone before the next page: whatever
// does not move is shown exactly once.
func TestListShowsEachTaskOnce(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				ctx := r.Context()
				want := map[string]int{}
				for i := range 120 {
					id := fmt.Sprintf("%d\x00%d", i%7, i)
					r.add(id, delayq.At(instant(time.Duration(i/50)*time.Second))) // by itself: in one call they would differ by their place
					want[id] = 1
				}
				r.pass(-time.Hour)
				got := map[string]int{}
				last := time.Time{}
				cursor := ""
				for pages := 0; ; pages++ {
					page := r.list(delayq.ListOptions{State: delayq.StatePending, Limit: 7, Cursor: cursor})
					for _, info := range page.Tasks {
						got[info.ID]++
						if info.At.Before(last) || info.State != delayq.StatePending {
							r.Errorf("%q: %s at %v after %v", info.ID, info.State, info.At, last)
						}
						last = info.At
					}
					if cursor = page.Next; cursor == "" {
						break
					}
					if pages > 60 {
						r.Fatal("the listing does not end")
					}
					switch id := page.Tasks[len(page.Tasks)-1].ID; pages % 3 {
					case 0:
						r.cancel(id, delayq.Cancelled)
					case 1:
						r.ok(r.q.Reschedule(ctx, id, instant(-time.Minute))) // to a place already shown
					}
				}
				if !maps.Equal(got, want) {
					r.Errorf("%d of %d shown, or some twice: %v", len(got), len(want), got)
				}
			})
		})
	}
}

func TestListKeepsTheStatesApart(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				ctx := r.Context()
				ids := func(state delayq.State) string {
					var ids []string
					for _, info := range r.list(delayq.ListOptions{State: state}).Tasks {
						ids = append(ids, info.ID)
						if info.State != state || string(info.Payload) != "of-"+info.ID {
							r.Errorf("listed as %s: %+v", state, info)
						}
					}
					return strings.Join(ids, " ")
				}
				check := func(pending, due, processing, dead string) {
					r.Helper()
					for state, want := range map[delayq.State]string{
						delayq.StatePending: pending, delayq.StateDue: due, delayq.StateProcessing: processing, delayq.StateDead: dead,
					} {
						if got := ids(state); got != want {
							r.Errorf("%s: %q, want %q", state, got, want)
						}
					}
				}
				check("", "", "", "")
				r.bring("dead1", "dead")
				r.pass(time.Second)
				r.bring("dead2", "dead")
				expires := r.bring("expires", "leased")
				r.pass(time.Second)
				r.bring("runs", "leased")
				r.add("soon", delayq.In(time.Minute))
				r.add("later", delayq.In(time.Hour))
				r.pass(time.Millisecond)
				check("soon later", "", "expires runs", "dead1 dead2")
				r.pass(leaseTime - time.Second)
				check("soon later", "expires", "runs", "dead1 dead2") // a lease that ran out is due
				r.ok(r.q.Extend(ctx, time.Second/2, expires))
				check("soon later", "", "expires runs", "dead1 dead2")
				r.pass(leaseTime + 5*time.Second)
				check("later", "expires runs soon", "", "dead1 dead2")
			})
		})
	}
}

func TestWhatListRefuses(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		for _, id := range []string{"a", "b"} {
			r.bring(id, "dead")
		}
		oldest, newest := r.list(delayq.ListOptions{State: delayq.StateDead, Limit: 1}), r.list(delayq.ListOptions{State: delayq.StateDead, Limit: 1, NewestFirst: true})
		if oldest.Next == "" || newest.Next == "" {
			r.Fatal("one page shows both")
		}
		for _, o := range []delayq.ListOptions{
			{},
			{State: "nonsense"},
			{State: delayq.StateDone},
			{State: delayq.StateDead, Limit: 501},
			{State: delayq.StateDead, Limit: -1},
			{State: delayq.StateDead, Cursor: "nonsense"},
			{State: delayq.StateDead, Cursor: "W10"},
			{State: delayq.StateDead, Cursor: "nonsense", NewestFirst: true},
			{State: delayq.StateDead, Cursor: "nW10", NewestFirst: true},
			{State: delayq.StateDead, Cursor: oldest.Next, NewestFirst: true}, // between shards it would skip some
			{State: delayq.StateDead, Cursor: newest.Next},
			{State: delayq.StatePending, NewestFirst: true},
		} {
			_, err := r.q.List(r.Context(), o)
			r.is(err, delayq.ErrInvalid, o)
		}
	})
}

func TestListPagesOfTheGreatestSizeEnd(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		tasks := make([]delayq.Task, 1000)
		for i := range tasks {
			tasks[i] = task(fmt.Sprint(i))
		}
		_, err := r.q.EnqueueMany(r.Context(), tasks, delayq.In(time.Hour))
		r.ok(err)
		page := r.list(delayq.ListOptions{State: delayq.StatePending, Limit: 500})
		second := r.list(delayq.ListOptions{State: delayq.StatePending, Limit: 500, Cursor: page.Next})
		if len(page.Tasks) != 500 || len(second.Tasks) != 500 || second.Next != "" {
			r.Errorf("pages of %d and %d, then %q", len(page.Tasks), len(second.Tasks), second.Next)
		}
	})
}

// TestStatsAreTheTruth makes every counted event a known number of times.
func TestStatsAreTheTruth(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyServer(t, shards, func(r *rig) {
				ctx := r.Context()
				var leases []*delayq.Lease
				for i := range 10 { // 10 created and leased 2 ms late
					r.add(fmt.Sprint("task", i), delayq.At(instant(time.Duration(r.clock.Load())*time.Microsecond)))
					r.pass(2 * time.Millisecond)
					leases = append(leases, r.lease1())
				}
				r.pass(10 * time.Millisecond)
				r.ok(r.q.Ack(ctx, leases[0], leases[1]))
				r.ok(r.q.Ack(ctx, leases[0])) // repeats count for nothing
				r.ok(r.q.Retry(ctx, leases[2], time.Hour, errBoom))
				r.ok(r.q.Retry(ctx, leases[2], time.Hour, errBoom))
				r.is(r.q.Ack(ctx, leases[2]), delayq.ErrLeaseLost) // stale
				r.ok(r.q.Release(ctx, time.Hour, leases[3]))
				r.ok(r.q.Bury(ctx, leases[4], delayq.Permanent(errBoom)))
				r.ok(r.q.Bury(ctx, leases[5], errBoom))
				r.ok(r.q.Bury(ctx, leases[6], errBoom))
				r.ok(r.q.Replay(ctx, "task5"))
				r.ok(r.q.Purge(ctx, "task6"))
				r.cancel("task2", delayq.Cancelled)
				r.cancel("task2", delayq.AlreadyCancelled)
				r.cancel("task7", delayq.Running)
				r.ok(r.q.RescheduleIn(ctx, "task3", 2*time.Hour))
				res, err := r.q.Enqueue(ctx, task("task3"), delayq.In(3*time.Hour))
				if res.Outcome != delayq.DuplicatePending || err != nil {
					r.Error(res, err)
				}
				res, err = r.q.Enqueue(ctx, task("task3"), delayq.In(3*time.Hour), delayq.OnConflict(delayq.Replace))
				if res.Outcome != delayq.Replaced || err != nil {
					r.Error(res, err)
				}
				r.pass(leaseTime)
				// Of what was leased 7 is cancelled now, 8 and 9 are taken back; 5 was due before them.
				r.add("later", delayq.In(time.Hour))
				r.lease(1)
				for range 2 {
					r.lease(1)
				}
				r.pass(time.Second)
				r.add("overdue", delayq.At(instant(time.Duration(r.clock.Load())*time.Microsecond-5*time.Second)))
				stats, err := r.q.Stats(ctx)
				r.ok(err)
				got := *stats
				got.Now, got.Lateness, got.Duration, got.Shards = time.Time{}, delayq.Histogram{}, delayq.Histogram{}, nil
				want := delayq.Stats{
					Queue: r.q.Name(), Pending: 2, Due: 1, Processing: 3, Dead: 1, OldestDueAge: 5 * time.Second, Consumers: 1,
					OldestProcessingAge: time.Second, LastRun: instant(leaseTime + 30*time.Millisecond), LastSuccess: instant(30 * time.Millisecond),
					Created: 12, Replaced: 1, Duplicates: 1, Leased: 13, Succeeded: 2, Retried: 1, Released: 1, Buried: 3, Cancelled: 2,
					Expired: 2, Stale: 1, Replayed: 1, Purged: 1, Rescheduled: 1,
					Failed: map[string]int64{"error": 3, "permanent": 1},
				}
				a, _ := json.Marshal(got)
				b, _ := json.Marshal(want)
				if string(a) != string(b) {
					r.Errorf("got  %s\nwant %s", a, b)
				}
				if len(stats.Shards) != shards || !stats.Now.Equal(instant(time.Duration(r.clock.Load())*time.Microsecond)) {
					r.Errorf("%d shards at %v", len(stats.Shards), stats.Now)
				}
				if h := stats.Duration; h.Count != 2 || h.Quantile(1) != 50*time.Millisecond || h.Sum < 50*time.Millisecond || h.Sum > 60*time.Millisecond {
					r.Errorf("durations %+v", h) // 28 and 30 ms
				}
				if h := stats.Lateness; h.Count != 13 || h.Quantile(0.5) != 2*time.Millisecond || h.Quantile(1) < time.Second {
					r.Errorf("lateness %+v", h)
				}
			})
		})
	}
}

// A task that is due in ten hours is not late. Public case: B84.
func TestTheAgeCountsFromTheDueTime(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		age := func(want time.Duration) {
			r.Helper()
			stats, err := r.q.Stats(r.Context())
			r.ok(err)
			if stats.OldestDueAge != want {
				r.Errorf("age %v, want %v", stats.OldestDueAge, want)
			}
		}
		age(0)
		r.add("x", delayq.At(instant(10*time.Hour)))
		age(0)
		r.pass(11 * time.Hour)
		age(time.Hour)
		r.lease1()
		age(0)
		r.pass(leaseTime + time.Minute)
		age(time.Minute)
	})
}

// Public cases: B5, B71.
func TestAuditFindsPlantedDamage(t *testing.T) {
	const (
		pending, processing, dead, tasks, state, errs, req = 0, 1, 2, 3, 4, 7, 9
	)
	everyServer(t, 1, func(r *rig) {
		for name, row := range map[string]struct {
			plant func(r *rig, k []string, rdb redis.UniversalClient)
			want  string // "invariant id" of each, sorted
		}{
			"nothing":                      {func(*rig, []string, redis.UniversalClient) {}, ""},
			"record lost":                  {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HDel(r.Context(), k[tasks], "waits") }, "I1 waits, I5"},
			"record of a leased task lost": {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HDel(r.Context(), k[tasks], "runs") }, "I1 runs, I4 runs, I5"},
			"membership lost":              {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.ZRem(r.Context(), k[pending], "waits") }, "I1 waits"},
			"lease member lost":            {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.ZRem(r.Context(), k[processing], "runs") }, "I1 runs"},
			"in two places": {func(r *rig, k []string, rdb redis.UniversalClient) {
				rdb.ZAdd(r.Context(), k[dead], redis.Z{Score: 1, Member: "waits"})
			}, "I1 waits"},
			"leased and waiting": {func(r *rig, k []string, rdb redis.UniversalClient) {
				rdb.ZAdd(r.Context(), k[pending], redis.Z{Score: 1, Member: "runs"})
			}, "I1 runs, I3 runs"},
			"lease without state": {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HDel(r.Context(), k[state], "runs") }, "I3 runs"},
			"wrong flag": {func(r *rig, k []string, rdb redis.UniversalClient) {
				e := rdb.HGet(r.Context(), k[state], "runs").Val()
				rdb.HSet(r.Context(), k[state], "runs", "B"+e[1:])
			}, "I3 runs"},
			"malformed state": {func(r *rig, k []string, rdb redis.UniversalClient) {
				rdb.HSet(r.Context(), k[state], "runs", "L")
			}, "I3 runs"},
			"state of nobody": {func(r *rig, k []string, rdb redis.UniversalClient) {
				e := rdb.HGet(r.Context(), k[state], "runs").Val()
				rdb.HSet(r.Context(), k[state], "nobody", e)
			}, "I4 nobody"},
			"error of nobody":     {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HSet(r.Context(), k[errs], "nobody", "x") }, "I4 nobody"},
			"record of nobody":    {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HSet(r.Context(), k[tasks], "nobody", "x") }, "I1 nobody, I5"},
			"counter changed":     {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.HIncrBy(r.Context(), k[8], "c:created", 1) }, "I5"},
			"key with expiry":     {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.Expire(r.Context(), k[tasks], time.Hour) }, "I6"},
			"key without content": {func(r *rig, k []string, rdb redis.UniversalClient) { rdb.Del(r.Context(), k[req]) }, "I6"},
		} {
			r.Run(name, func(t *testing.T) {
				r := r.sub(t)
				r.bring("runs", "leased")
				r.add("waits", delayq.In(time.Hour))
				row.plant(r, delayq.Keys(r.q, 0), r.rdb)
				var got []string
				for _, v := range r.audit(r.Context()) {
					got = append(got, strings.TrimSpace(v.Invariant+" "+v.ID))
				}
				slices.Sort(got)
				if strings.Join(slices.Compact(got), ", ") != row.want {
					t.Errorf("found %q, want %q", got, row.want)
				}
			})
		}
	})
}

func TestAuditReportsNoMoreThanAsked(t *testing.T) {
	everyServer(t, 16, func(r *rig) {
		r.broken = true
		for i := range 20 {
			id := fmt.Sprint(i)
			r.rdb.HSet(r.Context(), delayq.Keys(r.q, delayq.ShardOf(r.q, id))[7], id, "x")
		}
		told := int64(0)
		report, err := r.q.Audit(r.Context(), delayq.AuditOptions{Most: 3, Progress: func(done, _ int64) { told = done }})
		r.ok(err)
		if len(report.Violations) != 3 || report.Omitted != 17 || report.Checked != 20 || told != 20 {
			r.Errorf("%+v, progress %d", report, told)
		}
	})
}

// Dead letters beyond the cap go with everything that belongs to them, and so do those that are purged. Public case: B71.
func TestDeadLettersBeyondTheCapLeaveNothingBehind(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		ctx := r.Context()
		const limit = 25
		r.cfg.DeadCap = limit
		r.q = r.open(r.q.Name(), r.cfg)
		sizes := func() string {
			stats, err := r.q.Stats(ctx)
			r.ok(err)
			s := stats.Shards[0]
			return fmt.Sprintf("%d dead, %d tasks, %d states, %d errors, %d trimmed", s.Dead, s.Tasks, s.States, s.Errors, stats.Trimmed)
		}
		const n = 60
		for i := range n {
			r.bring(fmt.Sprintf("%03d", i), "dead")
		}
		if got := sizes(); got != "25 dead, 25 tasks, 25 states, 25 errors, 35 trimmed" {
			r.Error(got)
		}
		var ids []string
		for _, info := range r.list(delayq.ListOptions{State: delayq.StateDead}).Tasks {
			ids = append(ids, info.ID)
		}
		if len(ids) != limit || ids[0] != "035" || ids[limit-1] != "059" {
			r.Errorf("kept %q, want the youngest", ids)
		}
		r.add("034", delayq.In(time.Hour)) // what was trimmed is free
		r.cancel("034", delayq.Cancelled)

		// A lower cap is reached step by step: each call trims no more than twice what it buries.
		r.cfg.DeadCap = 10
		r.q = r.open(r.q.Name(), r.cfg)
		r.bring("100", "dead")
		if got := sizes(); got != "24 dead, 24 tasks, 24 states, 24 errors, 37 trimmed" {
			r.Error(got)
		}
		err := r.q.Purge(ctx, append(ids[2:], "100", "unknown")...)
		var batch *delayq.BatchError
		if !errors.As(err, &batch) || len(batch.Unwrap()) != 1 || !errors.Is(batch.Errs[len(batch.Errs)-1], delayq.ErrNotFound) {
			r.Errorf("purge: %v", err)
		}
		if got := sizes(); got != "0 dead, 0 tasks, 0 states, 0 errors, 37 trimmed" {
			r.Error(got)
		}
	})
}

func TestReplayedTasksStartAfreshInTheOrderGiven(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		for _, id := range []string{"a", "b", "c"} {
			r.bring(id, "dead")
		}
		r.ok(r.q.Replay(r.Context(), "c", "a", "b"))
		r.pass(time.Millisecond)
		var got []string
		for _, l := range r.lease(10) {
			got = append(got, fmt.Sprint(l.ID, l.Attempt, l.Failed, l.Deliveries))
		}
		if strings.Join(got, " ") != "c1 0 1 a1 0 1 b1 0 1" {
			r.Errorf("leased %q", got)
		}
	})
}
