package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

const truthHorizon = time.Hour

// holds compares a scrape with the truth: numbers exactly, ages within what the clock went on meanwhile.
func (s *situation) holds(m *monitor.Monitor, extra map[string]float64) map[string]float64 {
	s.Helper()
	before := s.truth()
	got := scrape(s.T, m)
	slack := s.rdb.Time(s.Context()).Val().Sub(before.now).Seconds() + 0.002
	for name, v := range extra {
		before.exact[name] = v
	}
	for name, want := range before.exact {
		if v, there := got[name]; !there || v != want {
			s.Errorf("%s is %v (there: %t), the truth is %v", name, v, there, want)
		}
	}
	for name, want := range before.ages {
		if v := got[name]; v < want-0.002 || v > want+slack {
			s.Errorf("%s is %v, the truth is %v to %v", name, v, want, want+slack)
		}
	}
	return got
}

// plant writes what a worker of another process would have said of itself.
func (s *situation) plant(consumer string, silent, progress time.Duration, stuck int) {
	now := s.rdb.Time(s.Context()).Val()
	beat := now.Add(-silent)
	key := fmt.Sprintf("dq:{%s:0}:", s.name)
	ok(s.T, s.rdb.ZAdd(s.Context(), key+"consumers", redis.Z{Score: float64(beat.UnixMicro()), Member: consumer}).Err())
	ok(s.T, s.rdb.HSet(s.Context(), key+"beats", consumer,
		fmt.Sprintf(`%d {"v":1,"s":%d,"p":%d,"r":4,"c":4,"k":%d,"w":-2500000}`, beat.UnixMicro(), time.Hour.Milliseconds(), progress.Milliseconds(), stuck)).Err())
}

func newSituation(t *testing.T, withLedger bool) (*situation, monitor.Config) {
	t.Helper()
	t.Parallel()
	s := &situation{T: t, rdb: dial(t, servers.SharedRedis(t).Addr()), name: servers.QueueName(t)}
	cfg := delayq.Config{Shards: 2}
	watching := monitor.Config{Redis: s.rdb, Queues: []string{s.name}}
	if withLedger {
		led, pool := newLedger(t, servers.NewDatabase(t))
		s.pool, cfg.Ledger, cfg.Horizon = pool, led, truthHorizon
		watching.Ledger, watching.Horizon = led, truthHorizon
	}
	s.q = open(t, s.rdb, s.name, cfg)
	return s, watching
}

// happen makes tasks in every state, by calls that count in every counter that a caller can raise.
func (s *situation) happen() {
	ctx := s.Context()
	add(s.T, s.q, "due", 9)
	add(s.T, s.q, "due", 2) // known already
	add(s.T, s.q, "soon", 4, delayq.In(10*time.Minute))
	add(s.T, s.q, "later", 3, delayq.In(5*time.Hour))
	_, err := s.q.Enqueue(ctx, delayq.Task{ID: "soon0", Type: "t", Payload: []byte("new"), Delay: time.Minute, Conflict: delayq.Replace})
	ok(s.T, err)
	ok(s.T, s.q.RescheduleIn(ctx, "soon1", 20*time.Minute))
	_, err = s.q.Cancel(ctx, "soon2")
	ok(s.T, err)
	leases, err := s.q.Lease(ctx, delayq.LeaseOptions{Max: 7, Lease: time.Minute, Consumer: "caller"})
	ok(s.T, err)
	for len(leases) < 7 { // the shards are leased from in turn
		more, err := s.q.Lease(ctx, delayq.LeaseOptions{Max: 7 - len(leases), Lease: time.Minute, Consumer: "caller"})
		ok(s.T, err)
		leases = append(leases, more...)
	}
	ok(s.T, s.q.Ack(ctx, leases[0], leases[1]))
	ok(s.T, s.q.Retry(ctx, leases[2], time.Minute, errors.New("not yet")))
	ok(s.T, s.q.Bury(ctx, leases[3], errors.New("never")))
	ok(s.T, s.q.Release(ctx, 0, leases[4]))
	if err := s.q.Ack(ctx, leases[4]); !errors.Is(err, delayq.ErrLeaseLost) {
		s.Fatal(err)
	}
}

func TestGaugesAreTheTruth(t *testing.T) {
	for _, mode := range []string{"redis", "ledger"} {
		t.Run(mode, func(t *testing.T) {
			s, cfg := newSituation(t, mode == "ledger")
			m := watch(t, cfg)
			s.happen()
			s.holds(m, map[string]float64{
				"delayq_up": 1, of(s.name, "scrape_error"): 0, of(s.name, "unserved"): 0,
				of(s.name, "consumers", `health="healthy"`): 1, of(s.name, "consumers", `health="stale"`): 0, of(s.name, "consumers", `health="stuck"`): 0,
			})

			// Consumers of other processes, one of each kind; and one that has ended.
			s.plant("killed", 2*time.Minute, 0, 0)
			s.plant("idle", 20*time.Second, 10*time.Minute, 0)
			s.plant("full", time.Second, 0, 4)
			ok(t, s.rdb.ZAdd(t.Context(), fmt.Sprintf("dq:{%s:0}:consumers", s.name),
				redis.Z{Score: float64(time.Now().Add(-30 * time.Minute).UnixMicro()), Member: "ended"}).Err())
			got := s.holds(m, map[string]float64{
				of(s.name, "consumers", `health="healthy"`): 1, of(s.name, "consumers", `health="stale"`): 1,
				of(s.name, "consumers", `health="stuck"`): 2, of(s.name, "consumer_clock_skew_seconds"): -2.5, of(s.name, "unserved"): 0,
			})
			if oldest := got[of(s.name, "consumer_heartbeat_oldest_seconds")]; oldest < 120 || oldest > 125 {
				t.Errorf("oldest heartbeat %v", oldest)
			}
			if youngest := got[of(s.name, "consumer_heartbeat_youngest_seconds")]; youngest > 5 {
				t.Errorf("youngest heartbeat %v", youngest)
			}
			last := got[of(s.name, "last_run_timestamp_seconds")]
			if now := float64(time.Now().Unix()); last < now-10 || last > now+1 {
				t.Errorf("last run %v", last)
			}
			if success := got[of(s.name, "last_success_timestamp_seconds")]; success < last-10 || success > last+1 {
				t.Errorf("last success %v, last run %v", success, last)
			}

			// Without the one that works, what is due is unserved.
			ok(t, s.rdb.ZRem(t.Context(), fmt.Sprintf("dq:{%s:0}:consumers", s.name), "caller").Err())
			s.holds(m, map[string]float64{of(s.name, "unserved"): 1, of(s.name, "consumers", `health="healthy"`): 0})
		})
	}
}

func TestALiveWorkerIsHealthy(t *testing.T) {
	s, cfg := newSituation(t, false)
	m := watch(t, cfg)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), s.q)
	go func() { _, err := w.Run(ctx); ended <- err }()
	add(t, s.q, "x", 20)
	eventually(t, "all tasks done, and a healthy consumer", func() bool {
		got := scrape(t, m)
		return got[of(s.name, "succeeded_total")] == 20 && got[of(s.name, "consumers", `health="healthy"`)] == 1
	})
	s.holds(m, nil)
	stop()
	ok(t, <-ended)
}

func TestReconcilerGauges(t *testing.T) {
	s, cfg := newSituation(t, true)
	m := watch(t, cfg)
	add(t, s.q, "x", 6)
	for _, name := range []string{"reconcile_last_full_timestamp_seconds", "reconcile_drift_total", "ledger_unconfirmed_tasks"} {
		if v, there := scrape(t, m)[of(s.name, name)]; there {
			t.Errorf("%s is %v before the first pass", name, v)
		}
	}
	rec, err := reconciler.New(s.q, reconciler.Config{Logger: slog.New(slog.DiscardHandler)})
	ok(t, err)
	pass := func() {
		t.Helper()
		_, err := rec.Pass(t.Context())
		ok(t, err)
	}
	s.forShards("revs", func(key string) { // both pieces and whole ones go missing
		for _, id := range []string{"x0", "x1"} {
			base := strings.TrimSuffix(key, "revs")
			for _, c := range []string{"tasks", "revs"} {
				ok(t, s.rdb.HDel(t.Context(), base+c, id).Err())
			}
			ok(t, s.rdb.ZRem(t.Context(), base+"pending", id).Err())
		}
	})
	pass()
	got := s.holds(m, map[string]float64{
		of(s.name, "reconcile_drift_total"): 2, of(s.name, "reconcile_repaired_total"): 2, of(s.name, "reconcile_coverage_ratio"): 1,
		of(s.name, "ledger_unconfirmed_tasks"): 0,
	})
	if at, now := got[of(s.name, "reconcile_last_full_timestamp_seconds")], float64(time.Now().Unix()); at < now-10 || at > now+1 {
		t.Errorf("last full pass %v, now %v", at, now)
	}

	// A ledger that goes back to before the end of a task, of which Redis was told.
	exec := func(sql string) {
		t.Helper()
		_, err := s.pool.Exec(t.Context(), sql)
		ok(t, err)
	}
	exec("create table aside as select * from delayq.task where id = 'x2'")
	leases, err := s.q.Lease(t.Context(), delayq.LeaseOptions{Max: 10, Lease: time.Minute, Consumer: "c"})
	ok(t, err)
	for _, l := range leases {
		if l.ID == "x2" {
			ok(t, s.q.Ack(t.Context(), l))
		}
	}
	exec("delete from delayq.task where id = 'x2'")
	exec("insert into delayq.task select * from aside")
	pass()
	s.holds(m, map[string]float64{
		of(s.name, "ledger_unconfirmed_tasks"): 1, of(s.name, "reconcile_drift_total"): 3, of(s.name, "reconcile_repaired_total"): 2,
	})
	// Sums rise over passes that find nothing, and over slices.
	for range 3 {
		_, err := rec.Slice(t.Context(), time.Minute)
		ok(t, err)
	}
	if drift := scrape(t, m)[of(s.name, "reconcile_drift_total")]; drift != 6 {
		t.Errorf("drift %v after three more looks at the one that stays", drift)
	}
}

func TestWithoutTheLedgerRedisIsStillShown(t *testing.T) {
	s, cfg := newSituation(t, true)
	s.happen()
	cfg.Ledger, cfg.Horizon = nil, 0
	m := watch(t, cfg)
	got := scrape(t, m)
	want := s.truth()
	for name, v := range want.exact {
		v := v
		switch name {
		case of(s.name, "tasks", `state="dead"`), of(s.name, "ledger_waiting_tasks"):
			if have, there := got[name]; there {
				t.Errorf("%s is %v, which nobody can know", name, have)
			}
			continue
		case of(s.name, "tasks", `state="pending"`):
			v -= want.exact[of(s.name, "ledger_waiting_tasks")]
		case of(s.name, "backlog_ratio"):
			continue // of what is in Redis
		}
		if have, there := got[name]; !there || have != v {
			t.Errorf("%s is %v (there: %t), the truth is %v", name, have, there, v)
		}
	}
	view := m.Look(t.Context())
	if q := view.Queues[0]; q.Err != nil || !q.RedisOnly || view.Err != nil {
		t.Errorf("%+v %v", q, view.Err)
	}
	if _, err := m.Queue(t.Context(), s.name); !errors.Is(err, delayq.ErrLedger) {
		t.Errorf("a queue to change without its ledger: %v", err)
	}
}
