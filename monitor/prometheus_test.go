package monitor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/reconciler"
	"github.com/delayq/toolkit/scripts/servers"
)

// A scene is a queue with a ledger on real servers, whose monitor a real Prometheus scrapes, with the alert rules loaded.
type scene struct {
	queue   *delayq.Queue
	prom    *servers.Prometheus
	redis   *servers.Redis
	monitor *httptest.Server
}

const sceneConfig = `
global: {scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: delayq
    static_configs: [{targets: [%q]}]
`

var forClause = regexp.MustCompile(`(?m)^( +for: )\S+$`)

func newScene(t *testing.T) *scene {
	t.Helper()
	servers.NeedPrometheus(t)
	s := &scene{redis: servers.NewRedis(t, "--maxmemory", "500mb")}
	rdb := redis.NewClient(&redis.Options{Addr: s.redis.Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	pool, err := pgxpool.New(t.Context(), servers.NewDatabase(t))
	s.ok(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	s.ok(t, err)
	led, err := ledger.Open(t.Context(), pool)
	s.ok(t, err)
	s.queue, err = delayq.Open(t.Context(), rdb, "orders", delayq.Config{Ledger: led, Horizon: time.Hour})
	s.ok(t, err)
	m, err := monitor.New(monitor.Config{Redis: rdb, Ledger: led, Horizon: time.Hour, StaleAfter: 4 * time.Second})
	s.ok(t, err)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.Handler())
	s.monitor = httptest.NewServer(mux)
	t.Cleanup(s.monitor.Close)

	rules, err := os.ReadFile("alerts.yml")
	s.ok(t, err)
	if n := len(forClause.FindAll(rules, -1)); n < 25 {
		t.Fatalf("only %d alerts wait before they fire", n)
	}
	s.prom = servers.NewPrometheus(t, fmt.Sprintf(sceneConfig, strings.TrimPrefix(s.monitor.URL, "http://")),
		map[string]string{"alerts.yml": forClause.ReplaceAllString(string(rules), "${1}3s")})
	return s
}

func (s *scene) ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// work runs a worker that is fed all the time, until stop, and makes each counter move that one can.
func (s *scene) work(t *testing.T) (stop func()) {
	t.Helper()
	mux := delayq.NewMux()
	mux.HandleFunc("well", func(context.Context, *delayq.Task) error { time.Sleep(5 * time.Millisecond); return nil })
	mux.HandleFunc("ill", func(context.Context, *delayq.Task) error { return delayq.Permanent(errors.New("no such order")) })
	mux.HandleFunc("long", func(ctx context.Context, _ *delayq.Task) error { <-ctx.Done(); return ctx.Err() })
	w := delayq.NewWorker(mux, s.queue)
	w.Logger = slog.New(slog.DiscardHandler)
	w.Grace = 2 * time.Second
	rec, err := reconciler.New(s.queue, reconciler.Config{Logger: w.Logger})
	s.ok(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		if _, err := w.Run(ctx); err != nil {
			t.Errorf("worker: %v", err)
		}
	})
	all.Go(func() { _ = rec.Run(ctx, time.Second) }) // what fails is tried again
	all.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			s.feed(ctx, i)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); all.Wait() }) }
	t.Cleanup(stop)
	return stop
}

// feed enqueues what is due now, soon, later, and beyond the horizon.
func (s *scene) feed(ctx context.Context, i int) {
	for k, in := range []struct {
		typ string
		in  time.Duration
	}{{"well", 0}, {"well", 50 * time.Millisecond}, {"ill", 0}, {"well", 10 * time.Minute}, {"well", 3 * time.Hour}} {
		task, err := delayq.NewTask(fmt.Sprintf("%d-%d", i, k), in.typ, nil)
		if err == nil {
			_, _ = s.queue.Enqueue(ctx, task, delayq.In(in.in)) // the end of ctx may meet it
		}
	}
}

type promSeries struct {
	Metric map[string]string `json:"metric"`
	Values [][2]any          `json:"values"`
}

// ask asks Prometheus, which must answer without an error or a warning.
func (s *scene) ask(t *testing.T, path string, into any) {
	t.Helper()
	r, err := http.Get(s.prom.URL() + path)
	s.ok(t, err)
	defer r.Body.Close()
	var answer struct {
		Status   string
		Error    string
		Warnings []string
		Data     json.RawMessage
	}
	s.ok(t, json.NewDecoder(r.Body).Decode(&answer))
	if answer.Status != "success" || len(answer.Warnings) > 0 {
		t.Fatalf("prometheus says %q %v to %s", answer.Error, answer.Warnings, path)
	}
	s.ok(t, json.Unmarshal(answer.Data, into))
}

// rangeOf evaluates an expression over the last seconds, as a panel does.
func (s *scene) rangeOf(t *testing.T, what, expr string) []promSeries {
	t.Helper()
	now := time.Now()
	q := url.Values{"query": {expr}, "start": {fmt.Sprint(now.Add(-10 * time.Second).Unix())}, "end": {fmt.Sprint(now.Unix())}, "step": {"1"}}
	var got struct {
		ResultType string
		Result     []promSeries
	}
	s.ask(t, "/api/v1/query_range?"+q.Encode(), &got)
	if got.ResultType != "matrix" {
		t.Fatalf("%s: the answer is a %s", what, got.ResultType)
	}
	return got.Result
}

// alerts are the alerts of a severity in a state, by name and queue.
func (s *scene) alerts(t *testing.T, state, severity string) []string {
	t.Helper()
	var got struct {
		Alerts []struct {
			State  string
			Labels map[string]string
		}
	}
	s.ask(t, "/api/v1/alerts", &got)
	var names []string
	for _, a := range got.Alerts {
		if a.State == state && a.Labels["severity"] == severity {
			names = append(names, a.Labels["alertname"]+" "+a.Labels["queue"])
		}
	}
	slices.Sort(names)
	return names
}

func (s *scene) eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(90 * time.Second); !is(); time.Sleep(250 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in 90 s: %s; pages that fire: %v", what, s.alerts(t, "firing", "page"))
		}
	}
}

// onePage waits for a page and wants no other beside it, but for the one about the third of all tasks that fails here.
func (s *scene) onePage(t *testing.T, want string) {
	t.Helper()
	s.eventually(t, want+" fires", func() bool { return slices.Contains(s.alerts(t, "firing", "page"), want) })
	others := slices.DeleteFunc(s.alerts(t, "firing", "page"), func(a string) bool { return a == want || a == "DelayqFailureRateHigh orders" })
	if len(others) > 0 {
		t.Errorf("what makes %s fire makes these page too: %v", want, others)
	}
}

// A real Prometheus scrapes a real run: the dashboard is full while the worker works, and when it stops with tasks due one page goes
// out, and is taken back when the worker comes again. Then Redis goes, and then the monitor.
func TestPrometheusSeesAWorkerStop(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	stop := s.work(t)
	moving := fmt.Sprintf("rate(delayq_succeeded_total{queue=%q}[20s]) > 0 and on (queue) delayq_reconcile_last_full_timestamp_seconds", s.queue.Name())
	s.eventually(t, "the queue is seen to work", func() bool { return len(s.rangeOf(t, "progress", moving)) > 0 })
	time.Sleep(6 * time.Second) // longer than any alert waits here
	t.Run("dashboard", func(t *testing.T) { dashboardIsAnswered(t, s) })
	firing := s.alerts(t, "firing", "page")
	if len(firing) > 0 && !slices.Equal(firing, []string{"DelayqFailureRateHigh orders"}) { // a third of what it does fails
		t.Errorf("pages while the queue is at work: %v", firing)
	}
	if tickets := s.alerts(t, "firing", "ticket"); !slices.Contains(tickets, "DelayqDeadRising orders") {
		t.Errorf("tasks died, and the tickets are %v", tickets)
	}

	stop()
	for i := range 5 {
		s.feed(t.Context(), 1_000_000+i)
	}
	s.onePage(t, "DelayqUnserved orders")
	if down := s.alerts(t, "firing", "ticket"); slices.Contains(down, "DelayqConsumerDown orders") {
		t.Error("a worker that said goodbye counts as one that has gone silent")
	}

	stop = s.work(t)
	s.eventually(t, "DelayqUnserved is taken back", func() bool {
		return !slices.Contains(s.alerts(t, "firing", "page"), "DelayqUnserved orders")
	})
	stop()

	s.redis.Kill()
	s.onePage(t, "DelayqRedisDown ")
	s.monitor.Close()
	s.onePage(t, "DelayqMonitorAbsent ")
}
