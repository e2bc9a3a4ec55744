package monitor_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMetricsPassTheLinter(t *testing.T) {
	s, cfg := newSituation(t, true)
	s.happen()
	problems, err := testutil.CollectAndLint(watch(t, cfg).Collector())
	ok(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	reg := prometheus.NewRegistry()
	worked(t, reg, "t", nil)
	problems, err = testutil.GatherAndLint(reg)
	ok(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

var (
	descParts = regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([\w,]*)\}`)
	docRow    = regexp.MustCompile("(?m)^\\| `(delayq_\\w+)` \\| ([^|]*) \\| (gauge|counter|histogram) \\| ([^|]*) \\| ([^|]+) \\| ([^|]+) \\| ([^|]+) \\|$")
)

// The table of docs/metrics.md and the collectors describe the same metrics.
func TestTheTableHasEveryMetricAndNoOther(t *testing.T) {
	text, err := os.ReadFile("../docs/metrics.md")
	ok(t, err)
	documented := map[string]string{}
	for _, row := range docRow.FindAllStringSubmatch(string(text), -1) {
		labels := strings.NewReplacer("`", "", " ", "", "-", "").Replace(row[2])
		if _, twice := documented[row[1]]; twice {
			t.Errorf("%s is there twice", row[1])
		}
		documented[row[1]] = labels
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `delayq_") && !docRow.MatchString(strings.TrimSpace(line)) {
			t.Errorf("a row that lacks something: %s", line)
		}
	}
	rdb := redis.NewClient(&redis.Options{})
	defer rdb.Close()
	described := map[string]string{}
	for _, c := range []prometheus.Collector{watch(t, monitor.Config{Redis: rdb}).Collector(), workerCollector(t)} {
		descs := make(chan *prometheus.Desc, 100)
		c.Describe(descs)
		close(descs)
		for d := range descs {
			parts := descParts.FindStringSubmatch(d.String())
			if parts == nil {
				t.Fatalf("cannot read %s", d)
			}
			described[parts[1]] = parts[2]
		}
	}
	for name, labels := range described {
		if doc, there := documented[name]; !there || doc != labels {
			t.Errorf("%s{%s}: the table has it: %t, with labels %q", name, labels, there, doc)
		}
	}
	for name := range documented {
		if _, there := described[name]; !there {
			t.Errorf("the table has %s, which nothing exports", name)
		}
	}
	if len(described) < 50 {
		t.Errorf("only %d metrics are described", len(described))
	}
}

// The number of series depends on nothing but the queues and their shards.
func TestSeriesAreBounded(t *testing.T) {
	s, cfg := newSituation(t, false)
	ctx := t.Context()
	s.happen()
	m := watch(t, cfg)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(m.Collector())
	before, err := testutil.GatherAndCount(reg)
	ok(t, err)
	count := func(what string) {
		t.Helper()
		after, err := testutil.GatherAndCount(reg)
		ok(t, err)
		if after != before {
			t.Errorf("%s: %d series, before there were %d", what, after, before)
		}
	}
	key := fmt.Sprintf("dq:{%s:0}:", s.name)
	// 10,000 consumers that live for one call each, by the real script.
	for i := range 10_000 {
		if _, err := s.q.Lease(ctx, delayq.LeaseOptions{Max: 1, Lease: time.Hour, Consumer: fmt.Sprintf("function-%d", i)}); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.rdb.ZCard(ctx, key+"consumers").Val(); n < 5000 {
		t.Fatalf("redis knows only %d consumers", n)
	}
	count("10,000 consumers")
	for i := range 200 {
		ok(t, s.rdb.HIncrBy(ctx, key+"meta", fmt.Sprintf("f:made-up-%d", i), 2).Err())
		ok(t, s.rdb.HIncrBy(ctx, key+"meta", fmt.Sprintf("c:made-up-%d", i), 2).Err())
		ok(t, s.rdb.HIncrBy(ctx, key+"meta", fmt.Sprintf("l:%d", 7000+i), 1).Err())
		ok(t, s.rdb.HIncrBy(ctx, key+"meta", fmt.Sprintf("made-up:%d", i), 1).Err())
	}
	count("unknown reasons, counters and buckets")
	if got := scrape(t, m)[of(s.name, "failed_total", `reason="other"`)]; got != 400 {
		t.Errorf("unknown reasons: %v", got)
	}
	for i := range 300 {
		_, err := s.q.Enqueue(ctx, delayq.Task{ID: fmt.Sprintf("id-%d", i), Type: fmt.Sprintf("type-%d", i), Key: fmt.Sprint(i), Payload: []byte("p")})
		ok(t, err)
	}
	count("unknown types, keys and ids")
}

func TestTheHandlerAnswersBeforeTheScraperGivesUp(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := dial(t, server.Addr())
	open(t, rdb, "orders", delayq.Config{})
	m := watch(t, monitor.Config{Redis: rdb, Queues: []string{"orders"}, Timeout: time.Minute})
	ask := func(timeout string) (string, time.Duration) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
		r.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", timeout)
		w := httptest.NewRecorder()
		began := time.Now()
		m.Handler().ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
		return w.Body.String(), time.Since(began)
	}
	for _, header := range []string{"10", "", "nonsense", "-1", "NaN", "Inf"} {
		if body, _ := ask(header); !strings.Contains(body, "delayq_up 1\n") {
			t.Errorf("header %q: %s", header, body)
		}
	}
	ok(t, server.Pause())
	defer server.Resume()
	body, took := ask("1.5")
	if took < 500*time.Millisecond || took > 1500*time.Millisecond {
		t.Errorf("answered after %s", took)
	}
	if !strings.Contains(body, "delayq_up 0\n") || !strings.Contains(body, `delayq_scrape_error{queue="orders"} 1`) || strings.Contains(body, "delayq_tasks{") {
		t.Errorf("%s", body)
	}
}

// workerCollector collects what Middleware registers.
func workerCollector(t *testing.T) prometheus.Collector {
	t.Helper()
	r := &recorder{}
	monitor.Middleware(r)
	return r
}

// recorder is a registerer, and a collector of what was registered.
type recorder struct{ all []prometheus.Collector }

func (r *recorder) Register(c prometheus.Collector) error   { r.all = append(r.all, c); return nil }
func (r *recorder) MustRegister(cs ...prometheus.Collector) { r.all = append(r.all, cs...) }
func (r *recorder) Unregister(prometheus.Collector) bool    { return false }
func (r *recorder) Collect(to chan<- prometheus.Metric)     { collectAll(r.all, to) }
func (r *recorder) Describe(to chan<- *prometheus.Desc) {
	for _, c := range r.all {
		c.Describe(to)
	}
}

func collectAll(all []prometheus.Collector, to chan<- prometheus.Metric) {
	for _, c := range all {
		c.Collect(to)
	}
}

// worked runs one handler under the middleware.
func worked(t *testing.T, reg prometheus.Registerer, typ string, verdict error) {
	t.Helper()
	ran(t.Context(), reg, typ, func(context.Context) error { return verdict })
}

func ran(ctx context.Context, reg prometheus.Registerer, typ string, f func(context.Context) error) {
	h := monitor.Middleware(reg)(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error { return f(ctx) }))
	_ = h.HandleTask(ctx, &delayq.Task{Type: typ})
}

func TestMiddleware(t *testing.T) {
	reg := prometheus.NewRegistry()
	oops := fmt.Errorf("oops")
	for outcome, verdict := range map[string]error{
		"succeeded": nil, "error": oops, "permanent": delayq.Permanent(oops), "timeout": delayq.Timeout(oops), "snoozed": delayq.Snooze(time.Second),
		"partial": delayq.Remaining([]byte("x"), oops), "no_handler": delayq.ErrNoHandler,
	} {
		if verdict != nil {
			verdict = fmt.Errorf("wrapped: %w", verdict)
		}
		worked(t, reg, outcome, verdict)
	}
	for outcome, cause := range map[string]error{
		"cancelled": delayq.ErrCancelled, "lease_lost": delayq.ErrLeaseLost, "stopping": delayq.ErrStopping, "timeout": delayq.ErrTimeout,
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		ran(ctx, reg, "cut-"+outcome, func(ctx context.Context) error { return ctx.Err() })
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic did not go on to the worker")
			}
		}()
		ran(t.Context(), reg, "panic", func(context.Context) error {
			if got := gather(t, reg)[`delayq_worker_running{type="panic"}`]; got != 1 {
				t.Errorf("running: %v", got)
			}
			panic("oops")
		})
	}()
	got := gather(t, reg)
	for _, outcome := range []string{"succeeded", "error", "permanent", "timeout", "snoozed", "partial", "no_handler", "panic"} {
		if v := got[fmt.Sprintf("delayq_worker_outcomes_total{outcome=%q,type=%q}", outcome, outcome)]; v != 1 {
			t.Errorf("%s: %v", outcome, v)
		}
		if v := got[fmt.Sprintf("delayq_worker_running{type=%q}", outcome)]; v != 0 {
			t.Errorf("%s still runs: %v", outcome, v)
		}
	}
	for _, outcome := range []string{"cancelled", "lease_lost", "stopping", "timeout"} {
		if v := got[fmt.Sprintf("delayq_worker_outcomes_total{outcome=%q,type=%q}", outcome, "cut-"+outcome)]; v != 1 {
			t.Errorf("cut by %s: %v", outcome, v)
		}
	}
	// Anybody who enqueues can make up types, of any bytes.
	many := prometheus.NewRegistry()
	muxes := []delayq.Middleware{monitor.Middleware(many), monitor.Middleware(many)} // which share the bound
	for i := range 1000 {
		h := muxes[i%2](delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }))
		ok(t, h.HandleTask(t.Context(), &delayq.Task{Type: fmt.Sprintf("\xff-%d", i)}))
	}
	got = gather(t, many)
	if v := got[`delayq_worker_outcomes_total{outcome="succeeded",type="other"}`]; v != 900 {
		t.Errorf("beyond the first 100 types: %v", v)
	}
	var types []string
	for name := range got {
		if strings.HasPrefix(name, "delayq_worker_running") {
			types = append(types, name)
		}
	}
	if slices.Sort(types); len(types) != 101 {
		t.Errorf("%d types", len(types))
	}
}
