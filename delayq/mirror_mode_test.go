package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// twoModes is a queue that had no ledger and now has one: r is its old user, the answer its new one.
func (r *rig) twoModes() *rig {
	r.Helper()
	cfg := r.cfg
	cfg.Ledger = paperLedger{}
	led := *r
	led.cfg, led.q = cfg, r.open(r.q.Name(), cfg)
	r.broken = true // by the audit of a queue without
	return &led
}

// A queue that a ledger keeps refuses those who have none, with what they do not see of the ledger: their calls would answer what
// is not true. Leases that they hold they may end.
func TestAQueueOfALedgerRefusesThoseWithout(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		ctx := r.Context()
		r.add("waits", delayq.In(time.Hour))
		r.bring("dead", "dead")
		var held []*delayq.Lease
		for _, id := range []string{"ack", "retry", "release", "bury"} {
			held = append(held, r.bring(id, "leased"))
		}
		led := r.twoModes()
		before := r.state()
		_, err := delayq.Open(ctx, r.rdb, r.q.Name(), r.cfg)
		r.is(err, delayq.ErrLedger, "open")
		cfg := r.cfg
		cfg.NoCreate = true
		_, err = delayq.Open(ctx, r.rdb, r.q.Name(), cfg)
		r.is(err, delayq.ErrLedger, "open without creating")
		cfg.Shards = 7
		_, err = delayq.Open(ctx, r.rdb, r.q.Name(), cfg)
		r.is(err, delayq.ErrLedger, "open with other shards")
		for range 2 { // a worker's and a producer's calls, which go different ways
			_, err = r.q.Enqueue(ctx, task("new"))
			r.is(err, delayq.ErrLedger, "enqueue")
			_, err = r.q.EnqueueMany(ctx, []delayq.Task{task("new"), task("waits")}, delayq.OnConflict(delayq.Replace))
			r.is(err, delayq.ErrLedger, "enqueue many")
		}
		_, err = r.q.Lease(ctx, delayq.LeaseOptions{Max: 1, Lease: leaseTime, Consumer: "c"})
		r.is(err, delayq.ErrLedger, "lease")
		_, err = r.q.Cancel(ctx, "waits")
		r.is(err, delayq.ErrLedger, "cancel")
		r.is(r.q.RescheduleIn(ctx, "waits", 0), delayq.ErrLedger, "reschedule")
		r.is(r.q.Replay(ctx, "dead"), delayq.ErrLedger, "replay")
		r.holds(before)
		r.ok(r.q.Extend(ctx, time.Minute, held...))
		r.ok(r.q.Ack(ctx, held[0]))
		r.ok(r.q.Retry(ctx, held[1], time.Hour, errBoom))
		r.ok(r.q.Release(ctx, time.Hour, held[2]))
		r.ok(r.q.Bury(ctx, held[3], errBoom))

		// To the ledger they are older than any row.
		led.show("2 2 0 0", row("waits", 1, 0), ended("retry", 2), row("release", 3, time.Hour), ended("bury", 4))
		if n, unbooked, err := led.q.Mirror().Mend(ctx, []string{"dead"}); n != 0 || len(unbooked) != 0 || err != nil {
			r.Error(n, unbooked, err)
		}
		led.clean()
		stats, err := led.q.Stats(ctx)
		r.ok(err)
		if stats.Mode != "ledger" || stats.Shards[0].Revs != 3 || stats.Shards[0].Tasks != 3 || stats.Succeeded != 1 || stats.Created != 6 {
			r.Errorf("%+v", stats)
		}
	})
}

// What makes a lost shard again may be a process without a ledger. The next one with a ledger that meets it puts that right.
func TestAShardMadeAgainWithoutALedger(t *testing.T) {
	everyServer(t, 2, func(r *rig) {
		for name, call := range map[string]func(r *rig) error{
			"show": func(r *rig) error {
				_, err := r.q.Mirror().Show(r.Context(), []delayq.LedgerRow{row("x", 1, 0), row("y", 2, 0)}, delayq.Showing{})
				return err
			},
			"drop": func(r *rig) error {
				_, err := r.q.Mirror().Show(r.Context(), []delayq.LedgerRow{ended("x", 1), ended("y", 2)}, delayq.Showing{})
				return err
			},
			"check": func(r *rig) error {
				found, err := r.q.Mirror().Check(r.Context(), []delayq.LedgerWant{{ID: "x", Rev: 1}, {ID: "y", Rev: 1}})
				if err == nil && fmt.Sprint(found) != fmt.Sprint([]delayq.Finding{delayq.FoundAbsent, delayq.FoundAbsent}) {
					err = fmt.Errorf("found %v", found)
				}
				return err
			},
			"quarantine": func(r *rig) error {
				_, err := r.q.Mirror().Quarantine(r.Context(), []delayq.Suspect{{ID: "x"}, {ID: "y"}}, "r", "t")
				return err
			},
			"mend":  func(r *rig) error { _, _, err := r.q.Mirror().Mend(r.Context(), []string{"x", "y"}); return err },
			"nudge": func(r *rig) error { return r.q.Mirror().Nudge(r.Context(), []string{"x", "y", "x"}) },
			"lease": func(r *rig) error {
				for shard := range 2 {
					if _, err := delayq.DoLease(r.Context(), r.q, shard, delayq.LeaseCall{Max: 1, Lease: leaseTime, Consumer: "c"}); err != nil {
						return err
					}
				}
				return nil
			},
		} {
			for _, how := range []string{"gone", "made again"} {
				r.Run(name+" "+how, func(t *testing.T) {
					r := r.sub(t)
					var lost atomic.Int64
					r.cfg.OnWarning = func(w delayq.Warning) {
						if w.Code == "data_lost" {
							lost.Add(1)
						}
					}
					led := r.twoModes()
					for shard := range 2 {
						r.rdb.Del(r.Context(), delayq.Keys(r.q, shard)...)
					}
					if how == "made again" {
						r.open(r.q.Name(), r.cfg)
					}
					r.ok(call(led))
					if lost.Load() == 0 {
						t.Error("nobody was told")
					}
					_, err := r.q.Enqueue(r.Context(), task("new"))
					r.is(err, delayq.ErrLedger)
					led.clean()
				})
			}
		}
	})
}

func TestLeasesCarryRevisions(t *testing.T) {
	everyServer(t, 1, func(r *rig) {
		r.add("old")
		r.add("older and leased before", delayq.In(2*time.Second))
		led := r.twoModes()
		led.show("2 0 0 0", row("a", 1<<53, 0), row("b", 7, time.Second))
		r.pass(3 * time.Second)
		led.leaseRedis(0, 500)
		r.pass(leaseTime)
		call := delayq.LeaseCall{Max: 500, Lease: leaseTime, Consumer: "c"}
		first, err := delayq.DoLease(r.Context(), led.q, 0, call)
		r.ok(err)
		all := strings.Fields(strings.ReplaceAll(revisions(first), " and leased before", ""))
		if slices.Sort(all); fmt.Sprint(all) != "[a@9007199254740992 b@7 old@0 older@0]" {
			r.Errorf("leased %q", all)
		}
		call.Token = first.Token
		again, err := delayq.DoLease(r.Context(), led.q, 0, call)
		r.ok(err)
		repeated := strings.Fields(strings.ReplaceAll(revisions(again), " and leased before", ""))
		if slices.Sort(repeated); !slices.Equal(all, repeated) {
			r.Errorf("repeated %q", repeated)
		}
		// A record that is gone takes its revision along.
		r.pass(leaseTime)
		led.harm("a", "record")
		got := led.leaseRedis(0, 500)
		if fmt.Sprint(got.Missing) != "[a]" || strings.Contains(led.revs(), "a@") {
			r.Errorf("missing %q, revisions %s", got.Missing, led.revs())
		}
	})
}

func TestDeadLettersOfALedgerQueueTakeTheirRevisionsAlong(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		r.cfg.DeadCap = 2
		r.q = r.open(r.q.Name(), r.cfg)
		for i, id := range []string{"a", "b", "c", "d"} {
			r.show("1 0 0 0", row(id, int64(i+1), time.Hour))
			r.quarantine(1, delayq.Suspect{ID: id, Rev: int64(i + 1)})
			r.pass(time.Millisecond)
		}
		if got := r.revs(); got != "c@3 d@4" {
			r.Error(got)
		}
		r.clean()
		infos, err := r.q.Mirror().Unbooked(r.Context(), []string{"d", "a"})
		if r.ok(err); len(infos) != 1 || infos[0].ID != "d" || infos[0].State != delayq.StateDead || infos[0].Reason != delayq.ReasonUnbooked {
			r.Errorf("%+v", infos)
		}
		if codes, err := delayq.RunScript(r.Context(), r.q, 0, "purge", 2, "c", "a"); fmt.Sprint(codes) != "[1 2 -2]" || err != nil {
			r.Error(codes, err)
		}
		if got := r.revs(); got != "d@4" {
			r.Error(got)
		}
		r.clean()
		r.show("1 0 0 0", row("d", 4, time.Hour)) // lifted
		stats, err := r.q.Stats(r.Context())
		r.ok(err)
		if stats.Quarantined != 4 || stats.Trimmed != 2 || stats.Purged != 1 || stats.Dead != 0 || stats.Pending != 1 {
			r.Errorf("%+v", stats)
		}
	})
}

// Counters that come with messages are added to those of the same name, and what drop times is no ack.
func TestStatsOfALedgerQueue(t *testing.T) {
	everyServer(t, 3, func(r *rig) {
		r.bring("acked", "done")
		r.bring("cancelled", "cancelled")
		led := r.twoModes()
		led.showing("3 0 0 0", delayq.Showing{Counts: map[string]int64{"e:created": 4, "e:replaced": 1}}, row("a", 1, 0), row("b", 2, 0), row("c", 3, 0))
		r.pass(time.Millisecond)
		for shard := range 3 {
			led.leaseRedis(shard, 10)
		}
		r.pass(40 * time.Millisecond)
		led.showing("0 2 0 0", delayq.Showing{Counts: map[string]int64{"e:succeeded": 3}, Durations: true}, ended("a", 4), ended("b", 5))
		led.showing("1 0 0 0", delayq.Showing{Counts: map[string]int64{"e:retried": 1, "f:timeout": 1}}, row("c", 6, time.Hour))
		led.showing("0 1 0 0", delayq.Showing{Counts: map[string]int64{
			"e:buried": 1, "e:cancelled": 2, "e:rescheduled": 3, "e:replayed": 4, "e:released": 5, "f:timeout": 1,
		}}, ended("c", 7))
		stats, err := led.q.Stats(r.Context())
		r.ok(err)
		got := fmt.Sprint(stats.Created, stats.Replaced, stats.Succeeded, stats.Retried, stats.Buried, stats.Cancelled, stats.Rescheduled, stats.Replayed,
			stats.Released, stats.Leased, stats.Failed, stats.Pending, stats.Duration.Count)
		if want := "6 1 4 1 1 3 3 4 5 4 map[timeout:2] 0 3"; got != want {
			r.Errorf("got %s, want %s", got, want)
		}
		if stats.Duration.Quantile(1) != 50*time.Millisecond || stats.Duration.Sum < 80*time.Millisecond {
			r.Errorf("durations %+v", stats.Duration)
		}
		led.clean()
	})
}

func TestAuditOfALedgerQueue(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		for name, want := range map[string]string{
			"nothing": "", "rev": "I4 x", "record": "I1 x, I4 x, I5", "place": "I1 x", "rev of nobody": "I4 nobody", "malformed rev": "I4 x",
			"dead": "I1 x", "counter": "I5", "expiry": "I6", "no revs": "I4 x, I6",
		} {
			r.Run(name, func(t *testing.T) {
				r := r.sub(t)
				r.place("waiting")
				k, ctx := delayq.Keys(r.q, 0), r.Context()
				switch name {
				case "nothing":
				case "rev of nobody":
					r.rdb.HSet(ctx, k[11], "nobody", 1)
				case "malformed rev":
					r.rdb.HSet(ctx, k[11], "x", "1e3")
				case "counter":
					r.rdb.HIncrBy(ctx, k[8], "e:shown", 1)
				case "expiry":
					r.rdb.Expire(ctx, k[11], time.Hour)
				case "no revs":
					r.rdb.Del(ctx, k[11])
				default:
					r.harm("x", name)
				}
				var got []string
				for _, v := range r.audit(ctx) {
					got = append(got, strings.TrimSpace(v.Invariant+" "+v.ID))
				}
				slices.Sort(got)
				if text := strings.Join(slices.Compact(got), ", "); text != want {
					t.Errorf("found %q, want %q", text, want)
				}
			})
		}
	})
}

func TestNudgeMakesWorkersLook(t *testing.T) {
	ledgerServer(t, 4, func(r *rig) {
		version := func(shard int) int64 { return r.leaseRedis(shard, 0).Version }
		a, b := inShard(r.q, 1, "a"), inShard(r.q, 3, "b")
		before := []int64{version(0), version(1), version(2), version(3)}
		r.ok(r.q.Mirror().Nudge(r.Context(), []string{a, b, a}))
		for shard, v := range before {
			if want := v + int64(shard%2); version(shard) != want {
				r.Errorf("shard %d: version %d, want %d", shard, version(shard), want)
			}
		}
	})
}

// Pages of a shard: every id is found, whatever it is in and however many there are.
func TestPagesOfAMirror(t *testing.T) {
	for _, n := range []int{3, 1500} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			everyServer(t, 2, func(r *rig) {
				var tasks []delayq.Task
				want := map[string]int64{}
				strays := map[string]bool{}
				for i := range n {
					id := fmt.Sprintf("old%04d", i)
					tasks = append(tasks, task(id))
					strays[id] = true
				}
				r.bring("dead", "dead")
				strays["dead"] = true
				r.bring("retried", "retried")
				strays["retried"] = true
				_, err := r.q.EnqueueMany(r.Context(), tasks)
				r.ok(err)
				led := r.twoModes()
				var rows []delayq.LedgerRow
				for i := range n {
					id := fmt.Sprintf("new%04d", i)
					rows = append(rows, row(id, int64(i+1), time.Hour))
					want[id] = int64(i + 1)
				}
				led.show(fmt.Sprint(n, " 0 0 0"), rows...)
				led.show("0 1 0 0", ended("new0000", 5000))
				delete(want, "new0000")
				k := func(id string) []string { return delayq.Keys(r.q, delayq.ShardOf(r.q, id)) }
				r.rdb.HSet(r.Context(), k("record")[3], "record", "of nobody")
				r.rdb.HSet(r.Context(), k("state")[4], "state", "of nobody")
				r.rdb.HSet(r.Context(), k("error")[7], "error", "of nobody")
				strays["record"], strays["state"], strays["error"] = true, true, true

				got, odd := map[string]int64{}, map[string]bool{}
				m, ctx := led.q.Mirror(), r.Context()
				var sum delayq.MirrorSizes
				for shard := range 2 {
					for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
						var entries []delayq.LedgerWant
						entries, cursor, err = m.Entries(ctx, shard, cursor)
						r.ok(err)
						for _, e := range entries {
							got[e.ID] = e.Rev
						}
						if pages > 100 {
							r.Fatal("no end")
						}
					}
					for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
						var ids []string
						ids, cursor, err = m.Strays(ctx, shard, cursor)
						r.ok(err)
						for _, id := range ids {
							odd[id] = true
						}
						if pages > 200 {
							r.Fatal("no end")
						}
					}
					s, err := m.Sizes(ctx, shard)
					r.ok(err)
					if len(s.Epoch) != 32 {
						r.Errorf("epoch %q", s.Epoch)
					}
					sum.Tasks += s.Tasks
					sum.Revs += s.Revs
					sum.Pending += s.Pending
					sum.Processing += s.Processing
					sum.Dead += s.Dead
					sum.States += s.States
					sum.Errors += s.Errors
				}
				if !maps.Equal(got, want) {
					r.Errorf("%d entries, want %d", len(got), len(want))
				}
				if !maps.Equal(odd, strays) {
					r.Errorf("%d strays, want %d", len(odd), len(strays))
				}
				total := int64(n)
				if want := (delayq.MirrorSizes{
					Tasks: 2*total + 2, Revs: total - 1, Pending: 2*total - 1 - sum.Processing + 1, Processing: sum.Processing, Dead: 1,
					States: sum.States, Errors: 3,
				}); sum != want {
					r.Errorf("sizes %+v, want %+v", sum, want)
				}

				// What is of no revision is told apart: whole, and then it is described, or in pieces, and then it goes.
				ids := slices.Collect(maps.Keys(strays))
				n, unbooked, err := m.Mend(ctx, ids)
				r.ok(err)
				if n != 3 || len(unbooked) != int(total)+1 {
					r.Errorf("%d mended, %d unbooked", n, len(unbooked))
				}
				infos, err := m.Unbooked(ctx, append(unbooked, "new0001", "unheard of"))
				if r.ok(err); len(infos) != len(unbooked) {
					r.Errorf("%d described, want %d", len(infos), len(unbooked))
				}
				for _, in := range infos {
					if in.Type != "t" || string(in.Payload) != "of-"+in.ID || in.At.IsZero() {
						r.Errorf("%+v", in)
					}
				}
			})
		})
	}
}

// A message that meets a dead server ends at the caller's deadline.
func TestShowEndsWithItsContext(t *testing.T) {
	onRedis(t, delayq.Config{Shards: 8, Ledger: paperLedger{}}, func(r *rig) {
		ctx, cancel := context.WithCancel(r.Context())
		cancel()
		began := time.Now()
		_, err := r.q.Mirror().Show(ctx, []delayq.LedgerRow{row("a", 1, 0), row("b", 2, 0), ended("c", 3)}, delayq.Showing{})
		if !errors.Is(err, context.Canceled) || time.Since(began) > time.Second {
			t.Error(err, time.Since(began))
		}
	})
}
