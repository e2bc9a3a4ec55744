package functions

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-lambda-go/events"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

func (b *bench) monitor(vars ...string) *environment {
	b.t.Helper()
	return newEnvironment(b.t, program(b.t, monitorBin), append(slices.Clone(b.vars), vars...)...)
}

// watch is one tick.
func watch(t *testing.T, e *environment, budget time.Duration) Watched {
	t.Helper()
	ev := e.start(budget)
	a := e.answer()
	var got Watched
	if a.failure != "" || json.Unmarshal(a.raw, &got) != nil || got.RequestID != ev.id {
		t.Fatalf("answer %s, failure %q", a.raw, a.failure)
	}
	if late := time.Since(ev.deadline); late > 0 {
		t.Errorf("%s after the deadline", late)
	}
	// Its log comes by a pipe, after the metrics.
	eventually(t, "its log", func() bool { return strings.Contains(e.log.String(), `"request_id":"`+ev.id+`"`) })
	return got
}

// metrics are the numbers of the last line of e's output for a queue, "" for the whole, and their namespace.
func (e *environment) metrics(queue string) (namespace string, values map[string]any) {
	e.t.Helper()
	for line := range strings.Lines(e.log.String()) {
		var head struct {
			AWS struct {
				CloudWatchMetrics []struct{ Namespace string }
			} `json:"_aws"`
			Queue string
		}
		if json.Unmarshal([]byte(line), &head) != nil || len(head.AWS.CloudWatchMetrics) == 0 || head.Queue != queue {
			continue
		}
		namespace, values = head.AWS.CloudWatchMetrics[0].Namespace, map[string]any{}
		if err := json.Unmarshal([]byte(line), &values); err != nil {
			e.t.Fatal(err)
		}
	}
	if values == nil {
		e.t.Fatalf("no metrics of %q", queue)
	}
	return namespace, values
}

func wantMetrics(t *testing.T, e *environment, queue string, want map[string]any) {
	t.Helper()
	_, got := e.metrics(queue)
	for name, x := range want {
		if got[name] != x {
			t.Errorf("%q: %s is %v, want %v", queue, name, got[name], x)
		}
	}
}

func TestTheMonitorTellsCloudWatch(t *testing.T) {
	t.Parallel()
	b, _ := newLedgerBench(t, servers.SharedRedis(t), "DELAYQ_METRICS_NAMESPACE=shop/delayq")
	b.enqueueMany(7)
	b.enqueue("later", "quick", nil, delayq.In(time.Hour))
	e := b.monitor()
	got := watch(t, e, 20*time.Second)
	if got.Queues != 1 || !got.ColdStart || got.Errors != nil {
		t.Errorf("%+v", got)
	}
	want := map[string]any{"ScrapeError": 0., "TasksDue": 7., "TasksPending": 1., "EnqueuedTotal": 8., "Unserved": 1., "ConsumersHealthy": 0., "TasksDead": 0.}
	wantMetrics(t, e, b.name, want)
	wantMetrics(t, e, "", want)
	wantMetrics(t, e, "", map[string]any{"RedisUp": 1., "BacklogRatio": 0.})
	if namespace, _ := e.metrics(""); namespace != "shop/delayq" {
		t.Errorf("namespace %q", namespace)
	}

	w := b.environment("DELAYQ_IDLE_EXIT=1s")
	w.start(20 * time.Second)
	if a := w.answer(); a.failure != "" || a.Succeeded != 7 {
		t.Fatalf("%+v", a)
	}
	reconcile(t, b.reconciler(), 20*time.Second)
	if got := watch(t, e, 20*time.Second); got.ColdStart || got.Errors != nil {
		t.Errorf("%+v", got)
	}
	wantMetrics(t, e, b.name, map[string]any{"TasksDue": 0., "TasksPending": 1., "SucceededTotal": 7., "LeasedTotal": 7., "UnconfirmedTasks": 0., "DriftTotal": 0.})
	if _, m := e.metrics(b.name); m["SinceReconcile"] == nil || m["SinceLastRun"] == nil || m["SinceLastSuccess"] == nil {
		t.Errorf("%v", m)
	}
	if log := e.log.String(); strings.Count(log, `"msg":"monitor run"`) != 2 || strings.Contains(log, `"level":"WARN"`) {
		t.Error(log)
	}
}

// A Redis that refuses, and one that does not answer, is told of in time; the numbers of the look before are not.
func TestTheMonitorWithoutRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b, _ := newLedgerBench(t, server)
	b.enqueueMany(3)
	proxy := servers.NewProxy(t, server.Addr())
	hung, refused := b.monitor("DELAYQ_REDIS_URL=redis://"+proxy.Addr()), b.monitor()
	for _, e := range []*environment{hung, refused} {
		if got := watch(t, e, 20*time.Second); got.Errors != nil {
			t.Errorf("%+v", got)
		}
	}
	proxy.BlackHole(true)
	for _, e := range []*environment{hung, refused} {
		if e == refused {
			server.Kill()
		}
		for _, budget := range []time.Duration{3 * time.Second, 20 * time.Second} { // cut short by the deadline, and by its own limit
			got := watch(t, e, budget)
			if got.Errors["redis"] == "" || got.Errors[b.name] == "" || got.Queues != 1 {
				t.Errorf("%+v", got)
			}
			wantMetrics(t, e, "", map[string]any{"ScrapeError": 1., "RedisUp": 0., "TasksDue": nil, "EnqueuedTotal": nil, "Unserved": nil})
			wantMetrics(t, e, b.name, map[string]any{"ScrapeError": 1., "TasksDue": nil})
		}
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	proxy.BlackHole(false)
	b.enqueueMany(1)
	for _, e := range []*environment{hung, refused} {
		eventually(t, "it sees Redis again", func() bool {
			watch(t, e, 20*time.Second)
			_, m := e.metrics("")
			return m["RedisUp"] == 1.
		})
	}
}

// Without its database the monitor tells what Redis says, cold and warm, and that something is missing.
func TestTheMonitorWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	b, pool := newLedgerBench(t, servers.SharedRedis(t))
	b.enqueueMany(3)
	proxy := servers.NewProxy(t, servers.SharedPostgres(t).Addr())
	conn := pool.Config().ConnConfig
	e := b.monitor("DELAYQ_DATABASE_URL=postgres://" + conn.User + "@" + proxy.Addr() + "/" + conn.Database + "?sslmode=disable")
	for range 2 { // cold and warm
		proxy.BlackHole(true)
		if got := watch(t, e, 20*time.Second); got.Errors[b.name] == "" || got.Errors["redis"] != "" {
			t.Errorf("%+v", got)
		}
		wantMetrics(t, e, "", map[string]any{"ScrapeError": 1., "RedisUp": 1., "TasksDue": 3., "TasksDead": nil})
		proxy.BlackHole(false)
		proxy.CloseConns()
		eventually(t, "it sees the database again", func() bool { return watch(t, e, 20*time.Second).Errors == nil })
		wantMetrics(t, e, "", map[string]any{"ScrapeError": 0., "TasksDue": 3., "TasksDead": 0.})
	}
}

// A queue that nobody has made, or of which Redis knows nothing any more, is a scrape error, and the monitor does not make it.
func TestTheMonitorMakesNoQueue(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t))
	none := queueOf(t)
	e := b.monitor("DELAYQ_QUEUES=" + none + "," + b.name)
	if got := watch(t, e, 20*time.Second); !strings.Contains(got.Errors[none], delayq.ErrNoQueue.Error()) || len(got.Errors) != 1 || got.Queues != 2 {
		t.Errorf("%+v", got)
	}
	wantMetrics(t, e, none, map[string]any{"ScrapeError": 1., "TasksDue": nil})
	wantMetrics(t, e, b.name, map[string]any{"ScrapeError": 0., "TasksDue": 0.})
	wantMetrics(t, e, "", map[string]any{"ScrapeError": 1., "RedisUp": 1.})
	if keys, err := b.rdb.Keys(t.Context(), "*"+none+"*").Result(); err != nil || len(keys) > 0 {
		t.Errorf("%v %v", keys, err)
	}
}

// Of a cluster the numbers of all shards are summed, and scripts have the header that the server wants.
func TestTheMonitorOnACluster(t *testing.T) {
	t.Parallel()
	cluster := servers.SharedStrict(t)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	t.Cleanup(func() { _ = rdb.Close() })
	name := queueOf(t)
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{Shards: 4, ScriptHeader: "#!lua"})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		if _, err := q.Enqueue(t.Context(), delayq.Task{ID: fmt.Sprint(i), Type: "quick"}); err != nil {
			t.Fatal(err)
		}
	}
	vars := []string{"DELAYQ_REDIS_URL=redis://" + cluster.Addrs()[0], "DELAYQ_REDIS_CLUSTER=true", "DELAYQ_QUEUES=" + name, "DELAYQ_MARGIN=500ms"}
	e := newEnvironment(t, program(t, monitorBin), append(vars, "DELAYQ_SCRIPT_HEADER=#!lua")...)
	if got := watch(t, e, 20*time.Second); got.Errors != nil {
		t.Errorf("%+v", got)
	}
	wantMetrics(t, e, "", map[string]any{"RedisUp": 1., "TasksDue": 40., "EnqueuedTotal": 40.})

	e = newEnvironment(t, program(t, monitorBin), append(vars, "DELAYQ_SCRIPT_HEADER=#!none")...)
	if got := watch(t, e, 20*time.Second); got.Errors[name] == "" {
		t.Errorf("a header that the server does not know is not used: %+v", got)
	}
}

func TestTheMonitorFailsWhenItCanSayNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t))
	for name, tt := range map[string]struct{ variable, want string }{
		"no queues":     {"DELAYQ_QUEUES=", "DELAYQ_QUEUES: is not set"},
		"short token":   {"DELAYQ_MONITOR_TOKEN=canary", "DELAYQ_MONITOR_TOKEN: must be at least 16 characters, got 6"},
		"AWS namespace": {"DELAYQ_METRICS_NAMESPACE=AWS/Lambda", "DELAYQ_METRICS_NAMESPACE: "},
		"no namespace":  {"DELAYQ_METRICS_NAMESPACE=a\tb", "DELAYQ_METRICS_NAMESPACE: "},
		"no time":       {"DELAYQ_MARGIN=10s", delayq.ErrNoTime.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := b.monitor(tt.variable)
			for range 2 {
				e.start(5 * time.Second)
				if a := e.answer(); !strings.Contains(a.failure, tt.want) {
					t.Errorf("failure %q, answer %s", a.failure, a.raw)
				}
			}
			if strings.Contains(e.log.String(), "canary") || strings.Contains(e.log.String(), "_aws") {
				t.Error(e.log.String())
			}
		})
	}

	full := errors.New("no space left")
	rdb := redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr(), DisableIdentity: true, ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	watch := Monitor(WithRedis(rdb), WithMetrics(brokenWriter{full}), WithLogger(slog.New(slog.DiscardHandler)), WithConfig(Config{Queues: []string{b.name}}))
	if _, err := watch(t.Context(), nil); !errors.Is(err, full) {
		t.Errorf("metrics that could not be written: %v", err)
	}
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

// One process may be given several events at once.
func TestTheMonitorAtOnce(t *testing.T) {
	t.Parallel()
	b, _ := newLedgerBench(t, servers.SharedRedis(t))
	b.enqueueMany(3)
	var out syncBuffer
	vars := map[string]string{}
	for _, v := range b.vars {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	cfg, wrong := configFrom(vars)
	if err := asError(wrong); err != nil {
		t.Fatal(err)
	}
	cfg.MonitorToken = testToken
	handle := Monitor(WithConfig(cfg), WithMetrics(&out), WithLogger(slog.New(slog.DiscardHandler)))
	var group sync.WaitGroup
	for i := range 16 {
		group.Go(func() {
			event := `{}`
			if i%2 == 0 {
				event = request("GET", "/metrics", "authorization", "Bearer "+testToken)
			}
			got, err := handle(t.Context(), json.RawMessage(event))
			if r, ok := got.(events.LambdaFunctionURLResponse); err != nil || ok != (i%2 == 0) || ok && !strings.Contains(r.Body, "delayq_up 1") {
				t.Errorf("%+v %v", got, err)
			}
		})
	}
	group.Wait()
	if lines := strings.Count(out.String(), "\n"); lines != 16 || strings.Count(out.String(), `"TasksDue":3`) != 16 {
		t.Errorf("%d lines:\n%s", lines, out.String())
	}
}
