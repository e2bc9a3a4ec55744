package monitor

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/delayq/toolkit/delayq"
)

// Middleware counts and times handlers in this process, for workers that live long enough to be scraped; what short-lived ones do is
// in the metrics that Collector reads from Redis. Its metrics are delayq_worker_running, delayq_worker_duration_seconds and
// delayq_worker_outcomes_total, by type of task. They are registered with reg; two of one registerer share them.
//
//	mux := delayq.NewMux()
//	mux.Use(monitor.Middleware(prometheus.DefaultRegisterer))
//
// It panics when reg has other metrics of these names, as MustRegister does.
func Middleware(reg prometheus.Registerer) delayq.Middleware {
	w := &workerMetrics{
		running: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "delayq_worker_running", Help: "Handlers that run now in this process.",
		}, []string{"type"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "delayq_worker_duration_seconds", Help: "How long handlers ran in this process, whatever came of it.", Buckets: seconds(bounds),
		}, []string{"type"}),
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "delayq_worker_outcomes_total", Help: "Handlers that ended in this process, by what came of it.",
		}, []string{"type", "outcome"}),
		types: map[string]struct{}{},
	}
	err := reg.Register(w)
	if again, ok := err.(prometheus.AlreadyRegisteredError); ok { //nolint:errorlint // it is never wrapped
		if have, ok := again.ExistingCollector.(*workerMetrics); ok {
			return have.wrap
		}
	}
	if err != nil {
		panic(err)
	}
	return w.wrap
}

func seconds(of []time.Duration) []float64 {
	s := make([]float64, len(of))
	for i, d := range of {
		s[i] = d.Seconds()
	}
	return s
}

// workerMetrics are registered as one, so that those who share them share the bound on types too.
type workerMetrics struct {
	running  *prometheus.GaugeVec
	duration *prometheus.HistogramVec
	outcomes *prometheus.CounterVec

	mu    sync.Mutex
	types map[string]struct{}
}

// Describe is for the registry.
func (w *workerMetrics) Describe(to chan<- *prometheus.Desc) {
	w.running.Describe(to)
	w.duration.Describe(to)
	w.outcomes.Describe(to)
}

// Collect is for the registry.
func (w *workerMetrics) Collect(to chan<- prometheus.Metric) {
	w.running.Collect(to)
	w.duration.Collect(to)
	w.outcomes.Collect(to)
}

// mostTypes bounds the series: anybody who can enqueue can make up types.
const mostTypes = 100

// label is the type, or "other" for those beyond the first 100 that came.
func (w *workerMetrics) label(typ string) string {
	typ = strings.ToValidUTF8(typ, "?")
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, known := w.types[typ]; known {
		return typ
	}
	if len(w.types) >= mostTypes {
		return other
	}
	w.types[typ] = struct{}{}
	return typ
}

func (w *workerMetrics) wrap(next delayq.Handler) delayq.Handler {
	return delayq.HandlerFunc(func(ctx context.Context, t *delayq.Task) (err error) {
		label := w.label(t.Type)
		began := time.Now()
		w.running.WithLabelValues(label).Inc()
		outcome := delayq.ReasonPanic
		defer func() {
			w.running.WithLabelValues(label).Dec()
			w.duration.WithLabelValues(label).Observe(time.Since(began).Seconds())
			w.outcomes.WithLabelValues(label, outcome).Inc()
		}()
		err = next.HandleTask(ctx, t)
		outcome = delayq.OutcomeOf(ctx, err)
		return err
	})
}
