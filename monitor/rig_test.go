package monitor_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) {
	logging.Disable() // a line for each failed dial
	servers.Main(m)
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func dial(t testing.TB, addr string) *redis.Client {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	return rdb
}

func newLedger(t testing.TB, url string) (*ledger.Ledger, *pgxpool.Pool) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	ok(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	ok(t, err)
	led, err := ledger.Open(t.Context(), pool)
	ok(t, err)
	return led, pool
}

func open(t testing.TB, rdb redis.UniversalClient, name string, cfg delayq.Config) *delayq.Queue {
	t.Helper()
	cfg.Logger, cfg.OnWarning = slog.New(slog.DiscardHandler), func(delayq.Warning) {}
	q, err := delayq.Open(t.Context(), rdb, name, cfg)
	ok(t, err)
	return q
}

func watch(t testing.TB, cfg monitor.Config) *monitor.Monitor {
	t.Helper()
	m, err := monitor.New(cfg)
	ok(t, err)
	return m
}

func add(t testing.TB, q *delayq.Queue, prefix string, n int, opts ...delayq.Option) {
	t.Helper()
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = delayq.Task{ID: fmt.Sprintf("%s%d", prefix, i), Type: "t", Payload: []byte("p")}
	}
	_, err := q.EnqueueMany(t.Context(), tasks, opts...)
	ok(t, err)
}

// scrape returns every sample as `name{label="value",...}`; of a histogram name_count, name_sum and name_bucket.
func scrape(t testing.TB, m *monitor.Monitor) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(m.Collector())
	return gather(t, reg)
}

func gather(t testing.TB, reg prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	ok(t, err)
	samples := map[string]float64{}
	for _, f := range families {
		for _, one := range f.GetMetric() {
			labels := labelsOf(one)
			switch h := one.GetHistogram(); {
			case h != nil:
				samples[f.GetName()+"_count"+labels] = float64(h.GetSampleCount())
				samples[f.GetName()+"_sum"+labels] = h.GetSampleSum()
				for _, b := range h.GetBucket() {
					samples[fmt.Sprintf("%s_bucket%s le=%v", f.GetName(), labels, b.GetUpperBound())] = float64(b.GetCumulativeCount())
				}
			case one.GetCounter() != nil:
				samples[f.GetName()+labels] = one.GetCounter().GetValue()
			default:
				samples[f.GetName()+labels] = one.GetGauge().GetValue()
			}
		}
	}
	return samples
}

func labelsOf(m *dto.Metric) string {
	var pairs []string
	for _, l := range m.GetLabel() {
		pairs = append(pairs, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
	}
	if len(pairs) == 0 {
		return ""
	}
	slices.Sort(pairs)
	return "{" + strings.Join(pairs, ",") + "}"
}

// of is a sample's name with the label queue, and more.
func of(queue, name string, more ...string) string {
	pairs := append([]string{fmt.Sprintf("queue=%q", queue)}, more...)
	slices.Sort(pairs)
	return "delayq_" + name + "{" + strings.Join(pairs, ",") + "}"
}

// numbersOf are the samples of a queue that tell something of its state or past, not of the scrape.
func numbersOf(samples map[string]float64, queue string) []string {
	var names []string
	for name := range samples {
		if strings.Contains(name, fmt.Sprintf("queue=%q", queue)) && !strings.HasPrefix(name, "delayq_scrape_error") {
			names = append(names, name)
		}
	}
	return names
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); {
		if time.Now().After(end) {
			t.Fatalf("never came: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
