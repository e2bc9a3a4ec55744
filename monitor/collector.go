package monitor

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/delayq/toolkit/delayq"
)

// Collector gives what Look sees to Prometheus, anew at each scrape. docs/metrics.md has its metrics; they keep nothing, so what cannot
// be read has no series.
func (m *Monitor) Collector() prometheus.Collector { return &collector{m, context.Background()} }

type collector struct {
	m   *Monitor
	ctx context.Context // of one scrape, or of none
}

// Describe is for the registry.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range descs {
		to <- d
	}
}

// Collect looks, and tells what it has seen.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	e := exporter{to}
	v := c.m.Look(c.ctx)
	e.server(v)
	for i := range v.Queues {
		e.queue(c.m, &v.Queues[i])
	}
}

var descs []*prometheus.Desc

func describe(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc("delayq_"+name, help, labels, nil)
	descs = append(descs, d)
	return d
}

// Metrics of the whole.
var (
	upDesc         = describe("up", "Whether Redis, and every master of it, answers.")
	tookDesc       = describe("scrape_duration_seconds", "How long the look took that this scrape shows.")
	unlistedDesc   = describe("queues_unlisted", "Whether the names of the queues could not be listed, so that some may have no metrics.")
	leftOutDesc    = describe("queues_left_out", "Queues that are not watched because there are too many.")
	memoryUsedDesc = describe("redis_memory_used_bytes", "Memory that Redis uses, of the fullest master.")
	memoryMaxDesc  = describe("redis_memory_max_bytes", "Memory that Redis may use, of the fullest master; 0 is no limit.")
	evictedDesc    = describe("redis_evicted_keys_total", "Keys that Redis has evicted since it was started.")
	lastSaveDesc   = describe("redis_last_save_ok", "Whether the last RDB save and AOF write of every master succeeded.")
	unsafeDesc     = describe("redis_eviction_unsafe", "Whether the eviction policy lets Redis delete a queue's keys.")
	skewDesc       = describe("clock_skew_seconds", "Redis' clock less the monitor's.")
)

// Gauges of a queue.
var (
	tasksDesc         = describe("tasks", "Tasks of the queue by state.", "queue", "state")
	dueAgeDesc        = describe("oldest_due_age_seconds", "Age of the oldest task past its due time, 0 when none is.", "queue")
	processingAgeDesc = describe("oldest_processing_age_seconds",
		"How long the oldest lease has been held, 0 when there is none.", "queue")
	backlogDesc     = describe("backlog_ratio", "Due tasks among all that wait or run, 0 when there are none.", "queue")
	lastRunDesc     = describe("last_run_timestamp_seconds", "When anybody last asked for tasks.", "queue")
	lastSuccessDesc = describe("last_success_timestamp_seconds", "When a task last succeeded.", "queue")
	consumersDesc   = describe("consumers", "Consumers by health.", "queue", "health")
	oldestBeatDesc  = describe("consumer_heartbeat_oldest_seconds",
		"Time since the last sign of the consumer that has been silent for longest and has not ended.", "queue")
	youngestBeatDesc = describe("consumer_heartbeat_youngest_seconds",
		"Time since the last sign of any consumer, one that has ended included.", "queue")
	unservedDesc     = describe("unserved", "Whether a task is due and no consumer is healthy.", "queue")
	consumerSkewDesc = describe("consumer_clock_skew_seconds",
		"The clock of the consumer that is furthest off, less Redis' clock.", "queue")
	shardDesc      = describe("shard_tasks", "Tasks that a shard holds, of any state.", "queue", "shard")
	tombstonesDesc = describe("tombstones", "Finished tasks that Redis still remembers.", "queue")
	waitingDesc    = describe("ledger_waiting_tasks",
		"Pending tasks that wait in the ledger alone, beyond the horizon; counted up to 100000.", "queue")
	unconfirmedDesc = describe("ledger_unconfirmed_tasks",
		"Tasks open in the ledger that Redis was told have ended, as of the last full pass of the reconciler.", "queue")
	lastFullDesc    = describe("reconcile_last_full_timestamp_seconds", "When the last full pass of the reconciler ended.", "queue")
	coverageDesc    = describe("reconcile_coverage_ratio", "How far the reconciler's pass is that is under way or ended last.", "queue")
	scrapeErrorDesc = describe("scrape_error", "Whether the queue's numbers could not be read, of Redis or of the ledger.", "queue")
)

// Histograms of a queue.
var (
	latenessDesc = describe("lateness_seconds", "From due time to lease.", "queue")
	durationDesc = describe("duration_seconds", "From lease to success.", "queue")
)

// Counters of a queue, since its data began in Redis.
var (
	failedDesc   = describe("failed_total", "Failed attempts by reason.", "queue", "reason")
	driftDesc    = describe("reconcile_drift_total", "Tasks that the reconciler found to differ between Redis and the ledger.", "queue")
	repairedDesc = describe("reconcile_repaired_total", "Tasks that the reconciler made equal again.", "queue")
)

type counter struct {
	desc *prometheus.Desc
	of   func(s *delayq.Stats) int64
}

var counters = []counter{
	{describe("enqueued_total", "Tasks that were created.", "queue"), func(s *delayq.Stats) int64 { return s.Created }},
	{
		describe("duplicates_total", "Enqueues of an id that was known, left alone.", "queue"),
		func(s *delayq.Stats) int64 { return s.Duplicates },
	},
	{
		describe("replaced_total", "Waiting tasks that an enqueue has replaced.", "queue"),
		func(s *delayq.Stats) int64 { return s.Replaced },
	},
	{describe("leased_total", "Leases.", "queue"), func(s *delayq.Stats) int64 { return s.Leased }},
	{describe("succeeded_total", "Tasks that succeeded.", "queue"), func(s *delayq.Stats) int64 { return s.Succeeded }},
	{
		describe("retried_total", "Attempts after which a task waits for another.", "queue"),
		func(s *delayq.Stats) int64 { return s.Retried },
	},
	{describe("released_total", "Leases that were given back unused.", "queue"), func(s *delayq.Stats) int64 { return s.Released }},
	{describe("lost_leases_total", "Leases that ran out.", "queue"), func(s *delayq.Stats) int64 { return s.Expired }},
	{describe("buried_total", "Tasks that became dead letters.", "queue"), func(s *delayq.Stats) int64 { return s.Buried }},
	{describe("cancelled_total", "Tasks that ended as cancelled.", "queue"), func(s *delayq.Stats) int64 { return s.Cancelled }},
	{
		describe("stale_calls_total", "Calls that were refused because the lease was no longer the caller's.", "queue"),
		func(s *delayq.Stats) int64 { return s.Stale },
	},
	{describe("missing_total", "Tasks whose record was gone from Redis.", "queue"), func(s *delayq.Stats) int64 { return s.Missing }},
	{
		describe("trimmed_total", "Dead letters that were deleted because there were too many.", "queue"),
		func(s *delayq.Stats) int64 { return s.Trimmed },
	},
	{describe("replayed_total", "Dead letters that were made to run again.", "queue"), func(s *delayq.Stats) int64 { return s.Replayed }},
	{describe("purged_total", "Dead letters that were deleted by hand.", "queue"), func(s *delayq.Stats) int64 { return s.Purged }},
	{
		describe("rescheduled_total", "Tasks that were given another due time.", "queue"),
		func(s *delayq.Stats) int64 { return s.Rescheduled },
	},
	{
		describe("quarantined_total", "Tasks in Redis that the ledger did not know.", "queue"),
		func(s *delayq.Stats) int64 { return s.Quarantined },
	},
}

// reasons are the values of the label reason of delayq_failed_total.
var reasons = append(delayq.Reasons(), other)

// other is the label of what a closed set has no name for.
const other = "other"

// exporter sends metrics.
type exporter struct{ to chan<- prometheus.Metric }

func (e exporter) gauge(d *prometheus.Desc, v float64, labels ...string) {
	e.to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (e exporter) count(d *prometheus.Desc, n int64, labels ...string) {
	e.to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(max(n, 0)), labels...)
}

// instant is a gauge of a time that may not have come yet.
func (e exporter) instant(d *prometheus.Desc, t time.Time, labels ...string) {
	if !t.IsZero() {
		e.gauge(d, float64(t.UnixMilli())/1000, labels...)
	}
}

func (e exporter) flag(d *prometheus.Desc, on bool, labels ...string) {
	v := 0.0
	if on {
		v = 1
	}
	e.gauge(d, v, labels...)
}

func (e exporter) server(v *View) {
	e.flag(upDesc, v.Server.Err == nil)
	e.gauge(tookDesc, v.Took.Seconds())
	e.flag(unlistedDesc, v.FindErr != nil)
	e.gauge(leftOutDesc, float64(v.LeftOut))
	s := v.Server
	if s.Err != nil {
		return
	}
	if s.MemoryUsed >= 0 {
		e.gauge(memoryUsedDesc, float64(s.MemoryUsed))
	}
	if s.MemoryMax >= 0 {
		e.gauge(memoryMaxDesc, float64(s.MemoryMax))
	}
	if s.Evicted >= 0 {
		e.count(evictedDesc, s.Evicted)
	}
	e.flag(lastSaveDesc, s.LastSaveOK)
	if s.Policy != "" {
		e.flag(unsafeDesc, s.EvictionUnsafe())
	}
	e.gauge(skewDesc, s.Skew.Seconds())
}

func (e exporter) queue(m *Monitor, q *QueueView) {
	e.flag(scrapeErrorDesc, q.Err != nil, q.Name)
	if r := q.Reconciler; r != nil {
		e.instant(lastFullDesc, r.LastFull, q.Name)
		e.gauge(coverageDesc, r.Coverage, q.Name)
		e.count(driftDesc, r.Total.Drift, q.Name)
		e.count(repairedDesc, r.Total.Repaired, q.Name)
		if !r.LastFull.IsZero() {
			e.gauge(unconfirmedDesc, float64(r.Last.Unconfirmed), q.Name)
		}
	}
	if q.Stats == nil {
		return
	}
	e.stats(q)
	e.consumers(m, q)
	e.totals(q)
}

func (e exporter) stats(q *QueueView) {
	s, name := q.Stats, q.Name
	e.gauge(tasksDesc, float64(s.Pending), name, "pending")
	e.gauge(tasksDesc, float64(s.Due), name, "due")
	e.gauge(tasksDesc, float64(s.Processing), name, "processing")
	if !q.RedisOnly { // else most of the dead letters are where nobody can look
		e.gauge(tasksDesc, float64(s.Dead), name, "dead")
		if s.Mode != "" {
			e.gauge(waitingDesc, float64(s.Later), name)
		}
	}
	e.gauge(dueAgeDesc, s.OldestDueAge.Seconds(), name)
	e.gauge(processingAgeDesc, s.OldestProcessingAge.Seconds(), name)
	ratio := 0.0
	if all := s.Pending + s.Due + s.Processing; all > 0 {
		ratio = float64(s.Due) / float64(all)
	}
	e.gauge(backlogDesc, ratio, name)
	e.instant(lastRunDesc, s.LastRun, name)
	e.instant(lastSuccessDesc, s.LastSuccess, name)
	tombstones := int64(0)
	for i := range s.Shards {
		tombstones += s.Shards[i].Tombstones
		e.gauge(shardDesc, float64(s.Shards[i].Tasks), name, strconv.Itoa(i))
	}
	e.gauge(tombstonesDesc, float64(tombstones), name)
}

func (e exporter) consumers(m *Monitor, q *QueueView) {
	e.gauge(consumersDesc, float64(q.Healthy), q.Name, Healthy)
	e.gauge(consumersDesc, float64(q.Stale), q.Name, Stale)
	e.gauge(consumersDesc, float64(q.Stuck), q.Name, Stuck)
	e.flag(unservedDesc, q.Stats.Due > 0 && q.Healthy == 0, q.Name)
	if len(q.Consumers) == 0 {
		return
	}
	oldest, youngest, skew := time.Duration(-1), time.Duration(math.MaxInt64), time.Duration(0)
	for i := range q.Consumers {
		c := &q.Consumers[i]
		age := max(q.Stats.Now.Sub(lastSign(c)), 0)
		youngest = min(youngest, age)
		if m.Health(c, q.Stats.Now) == Gone {
			continue // its silence says nothing
		}
		oldest = max(oldest, age)
		if c.Skew.Abs() > skew.Abs() {
			skew = c.Skew
		}
	}
	e.gauge(youngestBeatDesc, youngest.Seconds(), q.Name)
	if oldest >= 0 {
		e.gauge(oldestBeatDesc, oldest.Seconds(), q.Name)
		e.gauge(consumerSkewDesc, skew.Seconds(), q.Name)
	}
}

func (e exporter) totals(q *QueueView) {
	s := q.Stats
	for _, c := range counters {
		e.count(c.desc, c.of(s), q.Name)
	}
	failed := map[string]int64{}
	for reason, n := range s.Failed {
		if !slices.Contains(reasons, reason) {
			reason = other
		}
		failed[reason] += n
	}
	for _, reason := range reasons {
		e.count(failedDesc, failed[reason], q.Name, reason)
	}
	e.histogram(latenessDesc, s.Lateness, q.Name)
	e.histogram(durationDesc, s.Duration, q.Name)
}

// bounds are those of lua/include/buckets.lua. A bucket that nothing fell into yet is not in Redis, and must still be a series: what
// sums over queues needs the same ones of each.
var bounds = []time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
	30 * time.Second, time.Minute, 5 * time.Minute, time.Hour,
}

func (e exporter) histogram(d *prometheus.Desc, h delayq.Histogram, labels ...string) {
	buckets := make(map[float64]uint64, len(bounds))
	below, next := uint64(0), 0
	for _, bound := range bounds {
		for next < len(h.Buckets) && h.Buckets[next].UpTo <= bound {
			below += uint64(max(h.Buckets[next].Count, 0))
			next++
		}
		buckets[bound.Seconds()] = below
	}
	e.to <- prometheus.MustNewConstHistogram(d, uint64(max(h.Count, 0)), h.Sum.Seconds(), buckets, labels...)
}
