package delayq_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/google/uuid"
)

func TestEnqueueStoresTheTask(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.holds("")
		results, err := r.q.EnqueueMany(r.Context(), []delayq.Task{task("a"), task("b")}, delayq.In(time.Second))
		r.ok(err)
		r.add("c", delayq.At(instant(500*time.Millisecond)))
		if results[0] != (delayq.Result{ID: "a", Outcome: delayq.Created}) || results[1] != (delayq.Result{ID: "b", Outcome: delayq.Created}) {
			r.Error(results)
		}
		r.holds(`
			pending a 1000.001
			pending b 1000.002
			pending c 500
			task a of-a
			task b of-b
			task c of-c`)
	})
}

// Public cases: B29, B35.
func TestDelaysAreRoundedUpAndNeverCutShort(t *testing.T) {
	const day = 24 * time.Hour
	everyServer(t, 1, func(r *rig) {
		for i, row := range []struct {
			option delayq.Option
			want   float64 // ms
		}{
			{delayq.In(0), 0.001}, // the place in the call
			{delayq.In(1), 1.001},
			{delayq.In(999 * time.Microsecond), 1.001},
			{delayq.In(time.Millisecond), 1.001},
			{delayq.In(time.Millisecond + 1), 2.001},
			{delayq.In(-time.Hour), 0.001},
			{delayq.In(math.MinInt64), 0.001},
			{delayq.In(25 * day), 25*86_400_000 + 0.001},
			{delayq.In(100 * 365 * day), 36500*86_400_000 + 0.001},
			{delayq.At(instant(0)), 0},
			{delayq.At(instant(1)), 1},
			{delayq.At(instant(-time.Hour)), -3_600_000},
			{delayq.At(time.Unix(-1e9, 0)), -zero},
			{delayq.At(time.Date(2199, 12, 31, 0, 0, 0, 0, time.UTC)), 7258032000000 - zero},
		} {
			id := fmt.Sprint("task-", i)
			r.add(id, row.option)
			score, err := r.rdb.ZScore(r.Context(), delayq.Keys(r.q, 0)[0], id).Result()
			r.ok(err)
			if got := score/1000 - zero; math.Abs(got-row.want) > 0.0004 {
				r.Errorf("row %d: due at %.3f ms, want %.3f", i, got, row.want)
			}
		}
	})
}

func TestWhatEnqueueRefuses(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		long := func(n int) string { return strings.Repeat("x", n) }
		for field, change := range map[string]func(*delayq.Task){
			"ID":              func(t *delayq.Task) { t.ID = long(257) },
			"Type":            func(t *delayq.Task) { t.Type = "" },
			"Key":             func(t *delayq.Task) { t.Key = long(2049) },
			"Payload":         func(t *delayq.Task) { t.Payload = make([]byte, 64<<10+1) },
			"Conflict":        func(t *delayq.Task) { t.Conflict = 7 },
			"Delay and RunAt": func(t *delayq.Task) { t.Delay, t.RunAt = time.Second, instant(0) },
			"Delay":           func(t *delayq.Task) { t.Delay = math.MaxInt64 },
			"RunAt":           func(t *delayq.Task) { t.RunAt = time.Date(2201, 1, 1, 0, 0, 0, 0, time.UTC) },
		} {
			bad := task("x")
			change(&bad)
			res, err := r.q.Enqueue(r.Context(), bad)
			var input *delayq.InputError
			if !errors.As(err, &input) || input.Field != field || !errors.Is(err, delayq.ErrInvalid) || res.Outcome != 0 {
				r.Errorf("%s: %+v, %v", field, res, err)
			}
		}
		bad := task("x")
		bad.Type = long(129)
		_, err := r.q.Enqueue(r.Context(), bad)
		r.is(err, delayq.ErrInvalid)
		r.holds("")

		most := delayq.Task{ID: long(256), Type: long(128), Key: long(256), Payload: make([]byte, 64<<10)}
		_, err = r.q.Enqueue(r.Context(), most)
		r.ok(err)
	})
}

// Each task of a batch stands for itself, whatever becomes of its neighbours.
func TestEnqueueManyAnswersForEachTask(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				r.add("known", delayq.In(time.Hour))
				r.bring("done", "done")
				tasks := []delayq.Task{
					task("new"), task("known"), {ID: "bad"}, task("new"), task("done"), task("known"), task("known"), task(""),
				}
				tasks[5].Conflict = delayq.Reject
				tasks[6].Conflict = delayq.Replace
				results, err := r.q.EnqueueMany(r.Context(), tasks, func(t *delayq.Task) { t.Delay = time.Minute })
				var batch *delayq.BatchError
				if !errors.As(err, &batch) || len(batch.Errs) != len(tasks) || !errors.Is(err, delayq.ErrInvalid) || !errors.Is(err, delayq.ErrConflict) {
					r.Fatalf("error %v", err)
				}
				for i, want := range []struct {
					outcome delayq.Outcome
					err     error
				}{
					{delayq.Created, nil},
					{delayq.DuplicatePending, nil},
					{0, delayq.ErrInvalid},
					{delayq.DuplicatePending, nil},
					{delayq.DuplicateDone, nil},
					{delayq.DuplicatePending, delayq.ErrConflict},
					{delayq.Replaced, nil},
					{delayq.Created, nil},
				} {
					if results[i].Outcome != want.outcome {
						r.Errorf("task %d: %+v, want %v", i, results[i], want.outcome)
					}
					r.is(results[i].Err, want.err, "task ", i)
					r.is(batch.Errs[i], want.err, "batch error ", i)
				}
				if id, err := uuid.Parse(results[7].ID); err != nil || id.Version() != 7 {
					r.Errorf("made the id %q", results[7].ID)
				}
				stats, err := r.q.Stats(r.Context())
				r.ok(err)
				if stats.Pending != 3 {
					r.Errorf("%d tasks are pending, want new, known and the one without id", stats.Pending)
				}
			})
		})
	}
}

// Public cases: B38, B54.
func TestEqualDelaysRunInTheOrderOfTheirEnqueues(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		delayq.SetClock(r.q, func() float64 { return 0 }) // Redis' own: its microseconds are part of the order
		var want []string
		enqueue := func(n int) {
			tasks := make([]delayq.Task, n)
			for i := range tasks {
				// Ids that sort the other way.
				tasks[i] = task(fmt.Sprint(9999 - len(want)))
				want = append(want, tasks[i].ID)
			}
			_, err := r.q.EnqueueMany(r.Context(), tasks)
			r.ok(err)
		}
		enqueue(1000)
		for range 30 {
			enqueue(1)
		}
		enqueue(7)
		var got []string
		for len(got) < len(want) {
			got = append(got, idsOf(r.lease(300))...)
		}
		if !slices.Equal(got, want) {
			r.Error("leased in another order")
		}
	})
}

func TestEqualInstantsKeepTheOrderOfTheirCall(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		at := func(id string, d time.Duration) delayq.Task {
			t := task(id)
			t.RunAt = instant(d)
			return t
		}
		for _, tasks := range [][]delayq.Task{
			{at("c", time.Second), at("b", time.Second), at("a", time.Second)},
			{at("z", 2*time.Second), at("f", time.Minute), at("e", time.Minute), at("d", time.Minute)}, // several due times
		} {
			_, err := r.q.EnqueueMany(r.Context(), tasks)
			r.ok(err)
		}
		r.pass(time.Hour)
		if got := strings.Join(idsOf(r.lease(10)), ""); got != "cbazfed" {
			r.Errorf("leased as %s", got)
		}
	})
}

func TestAReplacedTaskStartsAfresh(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		r.bring("x", "retried")
		r.holds(`
			pending x 3600001.001
			task x of-x
			state x R t1 1:1:0 1
			error x error boom`)
		other := task("x")
		other.Payload = []byte("other")
		res, err := r.q.Enqueue(r.Context(), other, delayq.In(time.Second), delayq.OnConflict(delayq.Replace))
		r.ok(err)
		if res.Outcome != delayq.Replaced {
			r.Error(res)
		}
		r.holds(`
			pending x 1001.001
			task x other`)
		r.pass(2 * time.Second)
		if l := r.lease1(); l.Attempt != 1 || l.Failed != 0 || string(l.Payload) != "other" {
			r.Errorf("leased %+v", l.Task)
		}
	})
}

// Ids and payloads are bytes, and nobody reads a meaning into them. Public cases: B32, B73, B75.
func TestBytesOutAreTheBytesIn(t *testing.T) {
	ids := []string{
		"\xff\xfe", "\x00", "a:b", "{x}", "}{", "%", "%s%d", "\n", "\r\n", " ", "0", "-1", "1e300", "null", "nil", "@1", "ä",
		" no such id ", "cancelled", strings.Repeat("\x00", 256), strings.Repeat("x", 256), "inf", "-inf", "'\"\\",
	}
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				ctx := r.Context()
				payload := func(id string) []byte { return []byte("\x00\xff" + id + "\n") }
				text := func(id string) string { // types and keys are texts where a database keeps them
					if r.pool != nil {
						id = strings.ReplaceAll(strings.ToValidUTF8(id, "?"), "\x00", "?")
					}
					return id
				}
				typ := func(id string) string { return text(id)[:min(len(text(id)), 128)] }
				tasks := make([]delayq.Task, len(ids))
				for i, id := range ids {
					tasks[i] = delayq.Task{ID: id, Type: typ(id), Key: text(id), Payload: payload(id)}
				}
				results, err := r.q.EnqueueMany(ctx, tasks, delayq.In(time.Hour))
				r.ok(err)
				for i, res := range results {
					if res.ID != ids[i] || res.Outcome != delayq.Created {
						r.Errorf("id %q: %+v", ids[i], res)
					}
					r.ok(r.q.RescheduleIn(ctx, ids[i], 0))
				}
				r.open(r.q.Name(), r.cfg) // opening a queue that is there changes nothing
				r.pass(time.Millisecond)
				check := func(got delayq.Task) {
					id := got.ID
					if !slices.Contains(ids, id) || got.Type != typ(id) || got.Key != text(id) || string(got.Payload) != string(payload(id)) {
						r.Errorf("got %+v", got)
					}
				}
				page, err := r.q.List(ctx, delayq.ListOptions{State: delayq.StateDue, Limit: 500})
				r.ok(err)
				if len(page.Tasks) != len(ids) {
					r.Errorf("listed %d of %d", len(page.Tasks), len(ids))
				}
				for _, info := range page.Tasks {
					check(info.Task)
				}
				leases := r.lease(1000)
				if len(leases) != len(ids) {
					r.Fatalf("leased %q", idsOf(leases))
				}
				r.ok(r.q.Extend(ctx, time.Minute, leases...))
				for i, l := range leases {
					check(l.Task)
					switch i % 4 {
					case 0:
						r.ok(r.q.Retry(ctx, l, time.Hour, errors.New("\xff\x00\n"+l.ID)))
						r.cancel(l.ID, delayq.Cancelled)
					case 1:
						r.ok(r.q.Release(ctx, time.Hour, l))
						r.cancel(l.ID, delayq.Cancelled)
					case 2:
						r.ok(r.q.Bury(ctx, l, errBoom))
						info, err := r.q.Get(ctx, l.ID)
						r.ok(err)
						check(info.Task)
						r.ok(r.q.Replay(ctx, l.ID))
						r.cancel(l.ID, delayq.Cancelled)
					default:
						r.ok(r.q.Ack(ctx, l))
						r.cancel(l.ID, delayq.Finished)
					}
				}
				if stats, err := r.q.Stats(ctx); err != nil || stats.Pending+stats.Due+stats.Processing+stats.Dead != 0 {
					r.Errorf("left over: %+v, %v", stats, err)
				}
			})
		})
	}
}

func TestIDsOutOfBoundsAreRefusedEverywhere(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		ctx := r.Context()
		for _, id := range []string{"", strings.Repeat("x", 257)} {
			_, err := r.q.Get(ctx, id)
			r.is(err, delayq.ErrInvalid, "get")
			_, err = r.q.Cancel(ctx, id)
			r.is(err, delayq.ErrInvalid, "cancel")
			r.is(r.q.RescheduleIn(ctx, id, 0), delayq.ErrInvalid, "reschedule")
			r.is(r.q.Replay(ctx, id), delayq.ErrInvalid, "replay")
			r.is(r.q.Purge(ctx, id), delayq.ErrInvalid, "purge")
		}
	})
}

// Public case: B73.
func TestQueuesOfDifferentNamesShareNothing(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		base := r.q.Name()
		queues := []*delayq.Queue{r.q}
		for _, suffix := range []string{":0", ":1", "/0", ".", "-", "_", ":pending", "x"} {
			queues = append(queues, r.open(base+suffix, r.cfg))
		}
		for _, q := range queues {
			_, err := q.Enqueue(r.Context(), delayq.Task{ID: "x", Type: "t", Payload: []byte(q.Name())})
			r.ok(err)
		}
		r.pass(time.Millisecond)
		for _, q := range queues {
			got, err := q.Lease(r.Context(), delayq.LeaseOptions{Max: 10, Lease: leaseTime, Consumer: "c"})
			r.ok(err)
			if len(got) != 1 || string(got[0].Payload) != q.Name() || got[0].Queue != q.Name() {
				r.Errorf("queue %s: %q", q.Name(), idsOf(got))
			}
			r.ok(q.Ack(r.Context(), got...))
			r.rdb.Del(r.Context(), delayq.Keys(q, 0)...)
		}
		for _, name := range []string{"", "{x}", "}{", "%", "a b", "a\n", "ä", "a\x00", strings.Repeat("x", 129)} {
			_, err := delayq.Open(r.Context(), r.rdb, name, r.cfg)
			r.is(err, delayq.ErrInvalid, name)
		}
		r.broken = true // its keys are gone
	})
}

func TestALongKeyHasAnID(t *testing.T) {
	everyMode(t, 1, func(r *rig) {
		key := strings.Repeat("customer/", 100)
		id := delayq.IDOf(key)
		if len(id) != 256 || id != delayq.IDOf(key) || id == delayq.IDOf(key+"x") || delayq.IDOf("short") != "short" {
			r.Fatalf("%q", id)
		}
		for _, want := range []delayq.Outcome{delayq.Created, delayq.DuplicatePending} {
			res, err := r.q.Enqueue(r.Context(), delayq.Task{ID: delayq.IDOf(key), Key: key, Type: "t"})
			if err != nil || res.Outcome != want {
				r.Error(res, err)
			}
		}
		if in, err := r.q.Get(r.Context(), delayq.IDOf(key)); err != nil || in.Key != key {
			r.Errorf("%+v, %v", in, err)
		}
	})
}
