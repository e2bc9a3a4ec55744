package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestNewNamesWhatIsWrong(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{})
	defer rdb.Close()
	for field, cfg := range map[string]monitor.Config{
		"Config.Redis":      {},
		"Config.Horizon":    {Redis: rdb, Horizon: time.Hour},
		"Config.MostQueues": {Redis: rdb, MostQueues: 10_001},
		"Config.Timeout":    {Redis: rdb, Timeout: time.Millisecond},
		"Config.StaleAfter": {Redis: rdb, StaleAfter: -1},
		"Config.StuckAfter": {Redis: rdb, StuckAfter: time.Millisecond},
		"Config.Queues":     {Redis: rdb, Queues: []string{"a b"}},
	} {
		_, err := monitor.New(cfg)
		var input *delayq.InputError
		if !errors.As(err, &input) || input.Field != field || !errors.Is(err, delayq.ErrInvalid) {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := monitor.New(monitor.Config{Redis: rdb}); err != nil {
		t.Errorf("the rest has defaults: %v", err)
	}
}

func TestHealth(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{})
	defer rdb.Close()
	m := watch(t, monitor.Config{Redis: rdb, StaleAfter: time.Minute, StuckAfter: 5 * time.Minute})
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for _, c := range []struct {
		name string
		c    delayq.Consumer
		want string
	}{
		{"a caller of Lease that calls", delayq.Consumer{Seen: ago(59 * time.Second)}, monitor.Healthy},
		{"a caller of Lease, or a run that ended", delayq.Consumer{Seen: ago(61 * time.Second)}, monitor.Gone},
		{"a worker that works", delayq.Consumer{Seen: ago(time.Second), Beat: ago(time.Second), Progress: ago(2 * time.Second), Concurrency: 4, Running: 4}, monitor.Healthy},
		{"one that began just now", delayq.Consumer{Seen: ago(0), Beat: ago(0), Started: ago(0), Concurrency: 4}, monitor.Healthy},
		{"one that was killed", delayq.Consumer{Seen: ago(61 * time.Second), Beat: ago(70 * time.Second)}, monitor.Stale},
		{"killed while stuck", delayq.Consumer{Seen: ago(2 * time.Minute), Beat: ago(2 * time.Minute), Concurrency: 1, Stuck: 1}, monitor.Stale},
		{"only its beat was heard", delayq.Consumer{Seen: ago(10 * time.Minute), Beat: ago(time.Second), Progress: ago(time.Second)}, monitor.Healthy},
		{"alive and without progress", delayq.Consumer{Seen: ago(time.Second), Beat: ago(time.Second), Started: ago(time.Hour), Progress: ago(6 * time.Minute)}, monitor.Stuck},
		{"stuck in all slots", delayq.Consumer{Seen: ago(0), Beat: ago(0), Started: ago(0), Progress: ago(0), Concurrency: 2, Stuck: 2}, monitor.Stuck},
		{"stuck in one of two", delayq.Consumer{Seen: ago(0), Beat: ago(0), Started: ago(0), Progress: ago(0), Concurrency: 2, Stuck: 1}, monitor.Healthy},
		{"its clock is ahead", delayq.Consumer{Seen: now.Add(time.Second)}, monitor.Healthy},
	} {
		if got := m.Health(&c.c, now); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestQueuesAreFound(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	for i := range 7 {
		open(t, rdb, fmt.Sprintf("q%d", i), delayq.Config{})
	}
	ok(t, rdb.HSet(t.Context(), "dq:{\xff\n:0}:meta", "epoch", "x").Err()) // anybody can write a key
	m := watch(t, monitor.Config{Redis: rdb, MostQueues: 5})
	v := m.Look(t.Context())
	var names []string
	for _, q := range v.Queues {
		names = append(names, q.Name)
		if q.Err != nil {
			t.Errorf("%s: %v", q.Name, q.Err)
		}
	}
	if !slices.Equal(names, []string{"q0", "q1", "q2", "q3", "q4"}) || v.LeftOut != 2 || v.Err != nil {
		t.Errorf("%v, %d left out, %v", names, v.LeftOut, v.Err)
	}
	if got := scrape(t, m)["delayq_queues_left_out"]; got != 2 {
		t.Errorf("left out: %v", got)
	}
	q, err := m.Queue(t.Context(), "q6") // one that is not watched
	ok(t, err)
	add(t, q, "x", 1)
	again, err := m.Queue(t.Context(), "q1")
	ok(t, err)
	if twice, err := m.Queue(t.Context(), "q1"); err != nil || twice != again {
		t.Errorf("not kept open: %v", err)
	}
	for _, name := range []string{"nobody", "no such\nname"} {
		if _, err := m.Queue(t.Context(), name); !errors.Is(err, delayq.ErrNoQueue) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func calls(t *testing.T, rdb *redis.Client, command string) (n int) {
	t.Helper()
	stats := rdb.InfoMap(t.Context(), "commandstats").Item("Commandstats", "cmdstat_"+command)
	if _, err := fmt.Sscanf(stats, "calls=%d", &n); err != nil && stats != "" {
		t.Fatal(err)
	}
	return n
}

// The first queue is seen by the next look, and the looks for it stay cheap.
func TestTheFirstQueueIsSeenAtOnce(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	m := watch(t, monitor.Config{Redis: rdb})
	proxy := servers.NewProxy(t, server.Addr())
	proxy.SetLatency(15 * time.Millisecond) // a walk takes its time, as where there are many keys
	slow := watch(t, monitor.Config{Redis: dial(t, proxy.Addr())})
	for _, m := range []*monitor.Monitor{m, slow} {
		if v := m.Look(t.Context()); v.Err != nil || len(v.Queues) != 0 || !v.Listed {
			t.Fatalf("%+v", v)
		}
	}
	before := calls(t, rdb, "scan")
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		slow.Look(t.Context())
	}
	if n := calls(t, rdb, "scan") - before; n > 1 {
		t.Errorf("%d walks in a second", n)
	}
	open(t, rdb, "orders", delayq.Config{})
	if v := m.Look(t.Context()); v.Err != nil || len(v.Queues) != 1 || v.Queues[0].Stats == nil {
		t.Errorf("%+v", v)
	}
	eventually(t, "the queue, found by slow walks", func() bool { return len(slow.Look(t.Context()).Queues) == 1 })
	before = calls(t, rdb, "scan")
	for range 20 {
		m.Look(t.Context())
	}
	if n := calls(t, rdb, "scan") - before; n != 0 {
		t.Errorf("%d walks with a queue", n)
	}
}

func TestACluster(t *testing.T) {
	t.Parallel()
	cluster := servers.SharedCluster(t)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	name := servers.QueueName(t)
	add(t, open(t, rdb, name, delayq.Config{Shards: 8}), "x", 40)
	v := watch(t, monitor.Config{Redis: rdb}).Look(t.Context())
	ok(t, v.Err)
	i := slices.IndexFunc(v.Queues, func(q monitor.QueueView) bool { return q.Name == name })
	if i < 0 || v.Queues[i].Stats == nil || v.Queues[i].Stats.Due != 40 || len(v.Queues[i].Stats.Shards) != 8 {
		t.Fatalf("%+v", v)
	}
	s := v.Server
	if s.MemoryUsed < 1 || s.Version == "" || s.Policy == "" || !s.LastSaveOK || s.Skew.Abs() > time.Second {
		t.Errorf("%+v", s)
	}
}

func TestServerTellsTheTruth(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
	rdb := dial(t, server.Addr())
	ctx := t.Context()
	for i := range 400 {
		ok(t, rdb.Set(ctx, fmt.Sprint(i), strings.Repeat("x", 10_000), 0).Err())
	}
	m := watch(t, monitor.Config{Redis: rdb, Queues: []string{"none"}})
	if scrape(t, m)["delayq_redis_last_save_ok"] != 1 {
		t.Error("a save has failed before there was one")
	}
	ok(t, os.Mkdir(filepath.Join(server.Dir(), rdb.ConfigGet(ctx, "dbfilename").Val()["dbfilename"]), 0o700)) // nothing can be saved over it
	ok(t, rdb.BgSave(ctx).Err())
	eventually(t, "a failed save", func() bool { return scrape(t, m)["delayq_redis_last_save_ok"] == 0 })
	got := scrape(t, m)
	info := rdb.InfoMap(ctx).Item("Stats", "evicted_keys")
	if got["delayq_redis_eviction_unsafe"] != 1 || got["delayq_redis_memory_max_bytes"] != 3<<20 || got["delayq_redis_memory_used_bytes"] < 1<<20 ||
		info == "0" || fmt.Sprint(got["delayq_redis_evicted_keys_total"]) != info {
		t.Errorf("evicted %s: %v", info, got)
	}
}

// Callers share a look, but nobody gets one that began before the call.
func TestCallersShareALook(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	q := open(t, rdb, "orders", delayq.Config{})
	m := watch(t, monitor.Config{Redis: rdb, Queues: []string{"orders"}})
	m.Look(t.Context())
	ok(t, rdb.ConfigResetStat(t.Context()).Err())
	const callers, rounds = 20, 15
	views := make(chan *monitor.View, callers)
	for round := range rounds {
		add(t, q, fmt.Sprintf("r%d-", round), 1)
		asked := time.Now()
		var all sync.WaitGroup
		for range callers {
			all.Go(func() { views <- m.Look(t.Context()) })
		}
		all.Wait()
		for range callers {
			v := <-views
			if v.At.Before(asked) || v.Queues[0].Stats == nil || v.Queues[0].Stats.Due != int64(round+1) {
				t.Fatalf("round %d, asked at %s: %+v", round, asked, v)
			}
		}
	}
	var calls int
	if _, err := fmt.Sscanf(rdb.InfoMap(t.Context(), "commandstats").Item("Commandstats", "cmdstat_info"), "calls=%d", &calls); err != nil || calls == 0 {
		t.Fatalf("calls of info: %v", err)
	}
	if calls > callers*rounds/2 {
		t.Errorf("%d looks for %d calls", calls, callers*rounds)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if v := m.Look(ctx); v == nil || v.Err == nil && v.Queues[0].Stats == nil {
		t.Errorf("%+v", v)
	}
}
