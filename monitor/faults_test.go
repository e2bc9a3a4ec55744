package monitor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

// allowed is how much longer than its timeout a look may take here, where the machine is busy.
const allowed = 1500 * time.Millisecond

// timed scrapes and checks that nobody had to wait for longer than the timeout.
func timed(t *testing.T, m *monitor.Monitor, timeout time.Duration) map[string]float64 {
	t.Helper()
	began := time.Now()
	got := scrape(t, m)
	if took := time.Since(began); took > timeout+allowed {
		t.Errorf("the scrape took %s, its timeout is %s", took, timeout)
	}
	return got
}

func TestRedisAwayShowsAsAnErrorAndNoOldNumbers(t *testing.T) {
	t.Parallel()
	const timeout = time.Second
	server := servers.NewRedis(t, "--save", "", "--appendonly", "yes")
	rdb := dial(t, server.Addr())
	q := open(t, rdb, "orders", delayq.Config{})
	add(t, q, "x", 5)
	m := watch(t, monitor.Config{Redis: rdb, Timeout: timeout}) // the queues are found
	fine := func() bool {
		got := scrape(t, m)
		return got["delayq_up"] == 1 && got[of("orders", "scrape_error")] == 0 && got[of("orders", "tasks", `state="due"`)] == 5
	}
	if !fine() {
		t.Fatal(scrape(t, m))
	}
	away := func(how string) {
		t.Helper()
		got := timed(t, m, timeout)
		if got["delayq_up"] != 0 || got[of("orders", "scrape_error")] != 1 {
			t.Errorf("%s: up %v, error %v", how, got["delayq_up"], got[of("orders", "scrape_error")])
		}
		if old := numbersOf(got, "orders"); len(old) > 0 {
			t.Errorf("%s: old numbers %v", how, old)
		}
		for name := range got {
			if strings.HasPrefix(name, "delayq_redis_") || name == "delayq_clock_skew_seconds" {
				t.Errorf("%s: old number %s", how, name)
			}
		}
		if v := m.Look(t.Context()); v.Err == nil || v.Queues[0].Stats != nil || v.Queues[0].Err == nil {
			t.Errorf("%s: %+v", how, v)
		}
	}
	ok(t, server.Pause())
	away("hung")
	ok(t, server.Resume())
	eventually(t, "numbers after the hang", fine)
	server.Kill()
	away("dead")
	ok(t, server.Restart())
	eventually(t, "numbers after the restart", fine)
}

// A client that does not heed contexts makes nobody wait.
func TestAClientThatDoesNotHeedItsContext(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	rdb.Options().ContextTimeoutEnabled = false
	open(t, rdb, "orders", delayq.Config{})
	m := watch(t, monitor.Config{Redis: rdb, Queues: []string{"orders"}, Timeout: 300 * time.Millisecond})
	ok(t, m.Look(t.Context()).Err)
	ok(t, server.Pause())
	defer server.Resume()
	if got := timed(t, m, 300*time.Millisecond); got["delayq_up"] != 0 || got[of("orders", "scrape_error")] != 1 {
		t.Errorf("%v", got)
	}
}

func TestDatabaseAwayShowsAsAnErrorAndRedisIsStillShown(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	database := servers.NewPostgres(t)
	url, err := database.CreateDatabase(t.Context(), "delayq")
	ok(t, err)
	rdb := dial(t, servers.NewRedis(t).Addr())
	led, _ := newLedger(t, url)
	booked, plain := "booked", "plain"
	q := open(t, rdb, booked, delayq.Config{Ledger: led, Horizon: time.Hour})
	add(t, q, "x", 5)
	add(t, q, "later", 2, delayq.In(3*time.Hour))
	add(t, open(t, rdb, plain, delayq.Config{}), "x", 3)
	m := watch(t, monitor.Config{Redis: rdb, Ledger: led, Horizon: time.Hour, Timeout: timeout}) // the queues are found
	fine := func() bool {
		got := scrape(t, m)
		return got[of(booked, "scrape_error")] == 0 && got[of(booked, "ledger_waiting_tasks")] == 2 && got[of(booked, "tasks", `state="due"`)] == 5 &&
			got[of(plain, "scrape_error")] == 0 && got[of(plain, "tasks", `state="due"`)] == 3
	}
	eventually(t, "the numbers", fine)
	look := func(how string, m *monitor.Monitor) {
		t.Helper()
		got := timed(t, m, timeout)
		if got["delayq_up"] != 1 || got[of(booked, "scrape_error")] != 1 || got[of(plain, "scrape_error")] != 0 {
			t.Errorf("%s: up %v, errors %v %v", how, got["delayq_up"], got[of(booked, "scrape_error")], got[of(plain, "scrape_error")])
		}
		if got[of(booked, "tasks", `state="due"`)] != 5 || got[of(plain, "tasks", `state="due"`)] != 3 {
			t.Errorf("%s: redis is not shown: %v", how, got)
		}
		for _, name := range []string{of(booked, "ledger_waiting_tasks"), of(booked, "tasks", `state="dead"`)} {
			if v, there := got[name]; there {
				t.Errorf("%s: %s is %v", how, name, v)
			}
		}
		q, err := m.Queue(within(t, 4*timeout), plain)
		ok(t, err)
		if s, err := q.Stats(t.Context()); err != nil || s.Due != 3 {
			t.Errorf("%s: the queue without a ledger has %+v, %v", how, s, err)
		}
		var led *delayq.LedgerError
		if _, err := m.Queue(within(t, 4*timeout), booked); !errors.As(err, &led) {
			t.Errorf("%s: the ledger's queue is opened with %v", how, err)
		}
		if _, err := m.Queue(within(t, 4*timeout), "nobody"); errors.Is(err, delayq.ErrNoQueue) {
			t.Errorf("%s: nobody can know that there is no such queue", how)
		}
	}
	away := func(how string) {
		t.Helper()
		look(how, m)
		begun := watch(t, monitor.Config{Redis: rdb, Ledger: led, Horizon: time.Hour, Timeout: timeout})
		look(how+", and the monitor begins", begun)
		for m, listed := range map[*monitor.Monitor]bool{m: true, begun: false} {
			v := m.Look(t.Context())
			i := slices.IndexFunc(v.Queues, func(q monitor.QueueView) bool { return q.Name == booked })
			var led *delayq.LedgerError
			if v.Listed != listed || v.Server.Err != nil || !errors.As(v.Queues[i].Err, &led) {
				t.Errorf("%s: listed is %v, want %v; %v, %v", how, v.Listed, listed, v.Server.Err, v.Queues[i].Err)
			}
		}
	}
	ok(t, database.Pause())
	away("hung")
	ok(t, database.Resume())
	eventually(t, "the numbers after the hang", fine)
	ok(t, database.Immediate())
	away("dead")
	ok(t, database.Restart())
	eventually(t, "the numbers after the restart", fine)
}

func TestAQueueThatRedisLost(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	led, _ := newLedger(t, servers.NewDatabase(t))
	q := open(t, rdb, "booked", delayq.Config{Ledger: led, Horizon: time.Hour, Shards: 3})
	add(t, q, "later", 2, delayq.In(3*time.Hour))
	open(t, rdb, "plain", delayq.Config{})
	named := watch(t, monitor.Config{Redis: rdb, Ledger: led, Horizon: time.Hour, Queues: []string{"booked", "plain"}})
	if got := scrape(t, named); got[of("plain", "scrape_error")] != 0 || got[of("booked", "scrape_error")] != 0 {
		t.Fatal(got)
	}
	ok(t, rdb.FlushAll(t.Context()).Err())
	found := watch(t, monitor.Config{Redis: rdb, Ledger: led, Horizon: time.Hour}) // and one that never saw it in Redis
	for range 2 {
		for _, m := range []*monitor.Monitor{named, found} {
			got := scrape(t, m)
			if got[of("booked", "scrape_error")] != 0 || got[of("booked", "tasks", `state="pending"`)] != 2 || got[of("booked", "ledger_waiting_tasks")] != 2 {
				t.Errorf("the ledger's queue is not shown: %v", got)
			}
		}
		got := scrape(t, named)
		if got[of("plain", "scrape_error")] != 1 || len(numbersOf(got, "plain")) > 0 {
			t.Errorf("plain: %v", numbersOf(got, "plain"))
		}
		if v := named.Look(t.Context()).Queues[1]; !errors.Is(v.Err, delayq.ErrNoQueue) {
			t.Errorf("%v", v.Err)
		}
	}
	if n := rdb.DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("looking has made %d keys: %v", n, rdb.Keys(t.Context(), "*").Val())
	}
	// Made anew, with another count of shards.
	add(t, open(t, rdb, "plain", delayq.Config{Shards: 4}), "y", 8)
	if got := scrape(t, named); got[of("plain", "tasks", `state="due"`)] != 8 || got[of("plain", "scrape_error")] != 0 {
		t.Errorf("made anew: %v", got)
	}
	ok(t, rdb.FlushAll(t.Context()).Err())
	add(t, open(t, rdb, "plain", delayq.Config{Shards: 2}), "z", 3)
	if got := scrape(t, named); got[of("plain", "tasks", `state="due"`)] != 3 {
		t.Errorf("made anew between two scrapes: %v", got)
	}
}

func TestAScraperInAHurryGetsWhatIsThere(t *testing.T) {
	t.Parallel()
	database := servers.NewPostgres(t)
	url, err := database.CreateDatabase(t.Context(), "delayq")
	ok(t, err)
	rdb := dial(t, servers.SharedRedis(t).Addr())
	led, _ := newLedger(t, url)
	name := servers.QueueName(t)
	add(t, open(t, rdb, name, delayq.Config{Ledger: led}), "x", 2)
	m := watch(t, monitor.Config{Redis: rdb, Ledger: led, Queues: []string{name}, Timeout: time.Minute})
	ok(t, m.Look(t.Context()).Queues[0].Err)
	ok(t, database.Pause())
	defer database.Resume()
	began := time.Now()
	q := m.Look(within(t, 400*time.Millisecond)).Queues[0]
	if time.Since(began) > 400*time.Millisecond+allowed || q.Stats == nil || q.Stats.Due != 2 || !errors.Is(q.Err, context.DeadlineExceeded) {
		t.Errorf("after %s: %+v", time.Since(began), q)
	}
}
