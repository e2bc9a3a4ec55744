package monitor

import (
	"cmp"
	"encoding/json"
	"io"
	"math"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// EMFNamespace is the namespace of the CloudWatch metrics where none is given.
const EMFNamespace = "delayq"

// WriteEMF writes what a look has seen in CloudWatch's Embedded Metric Format: a line of JSON for each queue, whose metrics have
// the dimension Queue, and last a line for the whole, whose metrics have none. On the standard output of a function CloudWatch makes
// metrics of them; send them through no logger, which would wrap them.
//
// The line for the whole is made for alarms, which cannot be made for queues whose names are not known yet. It has the sum of what can
// be added up and the worst queue of the rest; BacklogRatio there is of queues with at least 20 due tasks, and SinceLastRun of queues in
// which tasks wait and that have no healthy consumer, or 0.
//
// Names that end in Total are counters as Redis keeps them: they only rise, and fall when Redis loses data. Their growth is DIFF(m) of
// the statistic Maximum, in metric math. Differences made here would depend on what this process has seen: they would be lost with it,
// and be counted twice where two of them look in turn, or where CloudWatch takes a line twice, as it may.
//
// What is not known is left out. A queue that could not be read has ScrapeError 1, and of the rest what was read by this look; the line
// for the whole has the number of such queues, at least 1 when Redis does not answer, and no sum that would lack a queue.
func WriteEMF(w io.Writer, namespace string, v *View) error {
	namespace = cmp.Or(namespace, EMFNamespace)
	whole := &emfLine{namespace: namespace, at: v.At}
	for i := range v.Queues {
		line := &emfLine{namespace: namespace, at: v.At, queue: v.Queues[i].Name}
		line.add("ScrapeError", "Count", flag(v.Queues[i].Err != nil))
		for _, m := range emfQueue {
			if x, ok := m.of(&v.Queues[i]); ok {
				line.add(m.name, m.unit, x)
			}
		}
		if err := line.write(w); err != nil {
			return err
		}
	}
	whole.server(v)
	for _, m := range emfQueue {
		if x, ok := m.whole(v.Queues); ok {
			whole.add(m.name, m.unit, x)
		}
	}
	return whole.write(w)
}

// An emfMetric is one that each queue has, and the whole.
type emfMetric struct {
	name, unit string
	value      func(*QueueView) (float64, bool)
	// worst takes the largest for the whole, not the sum; of those that count, when only some do.
	worst  bool
	counts func(*QueueView) bool
}

// of is the value for a queue, if it is known.
func (m *emfMetric) of(q *QueueView) (float64, bool) {
	if q.Stats == nil {
		return 0, false
	}
	return m.value(q)
}

// whole is the value for all queues, if it is known of one, or a sum of all.
func (m *emfMetric) whole(queues []QueueView) (total float64, known bool) {
	for i := range queues {
		x, ok := m.of(&queues[i])
		if !ok && !m.worst && queues[i].Err != nil {
			return 0, false
		}
		if !ok {
			continue
		}
		known = true
		switch {
		case !m.worst:
			total += x
		case m.counts == nil || m.counts(&queues[i]):
			total = max(total, x)
		}
	}
	return total, known
}

// mostWaiting is a backlog that is worth an alarm: the one task of a quiet queue would be one of 100 %.
const mostWaiting = 20

// emfQueue is kept short, as each metric of each queue is paid for by the month. The collector has them all.
var emfQueue = []emfMetric{
	{name: "TasksPending", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Pending })},
	{name: "TasksDue", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Due })},
	{name: "TasksProcessing", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Processing })},
	{name: "TasksDead", unit: "Count", value: func(q *QueueView) (float64, bool) { return float64(q.Stats.Dead), !q.RedisOnly }},
	{name: "LargestShard", unit: "Count", worst: true, value: number(largestShard)},
	{name: "OldestDueAge", unit: "Seconds", worst: true, value: length(func(q *QueueView) time.Duration { return q.Stats.OldestDueAge })},
	{name: "OldestProcessingAge", unit: "Seconds", worst: true, value: length(func(q *QueueView) time.Duration { return q.Stats.OldestProcessingAge })},
	{
		name: "BacklogRatio", unit: "None", worst: true, value: backlog,
		counts: func(q *QueueView) bool { return q.Stats.Due >= mostWaiting },
	},
	{
		name: "SinceLastRun", unit: "Seconds", worst: true, value: since(func(q *QueueView) time.Time { return q.Stats.LastRun }),
		counts: func(q *QueueView) bool { return q.Healthy == 0 && q.Stats.Pending+q.Stats.Due > 0 },
	},
	{name: "SinceLastSuccess", unit: "Seconds", worst: true, value: since(func(q *QueueView) time.Time { return q.Stats.LastSuccess })},
	{name: "ConsumersHealthy", unit: "Count", value: number(func(q *QueueView) int64 { return int64(q.Healthy) })},
	{name: "ConsumersStale", unit: "Count", value: number(func(q *QueueView) int64 { return int64(q.Stale) })},
	{name: "ConsumersStuck", unit: "Count", value: number(func(q *QueueView) int64 { return int64(q.Stuck) })},
	{name: "ConsumerClockSkew", unit: "Seconds", worst: true, value: consumerSkew},
	{name: "Unserved", unit: "Count", value: func(q *QueueView) (float64, bool) { return flag(q.Stats.Due > 0 && q.Healthy == 0), true }},

	{name: "EnqueuedTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Created })},
	{name: "LeasedTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Leased })},
	{name: "SucceededTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Succeeded })},
	{name: "FailedTotal", unit: "Count", value: number(failed)},
	{name: "NoHandlerTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Failed[delayq.ReasonNoHandler] })},
	{name: "BuriedTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Buried })},
	{name: "TrimmedTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Trimmed })},
	{name: "LostLeasesTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Expired })},
	{name: "StaleCallsTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Stale })},
	{name: "MissingTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Missing })},
	{name: "QuarantinedTotal", unit: "Count", value: number(func(q *QueueView) int64 { return q.Stats.Quarantined })},
	{name: "LateTotal", unit: "Count", value: number(late)}, // of LeasedTotal
	// With LeasedTotal and SucceededTotal, the average lateness and length of a run.
	{name: "LatenessTotal", unit: "Seconds", value: length(func(q *QueueView) time.Duration { return q.Stats.Lateness.Sum })},
	{name: "DurationTotal", unit: "Seconds", value: length(func(q *QueueView) time.Duration { return q.Stats.Duration.Sum })},

	{name: "SinceReconcile", unit: "Seconds", worst: true, value: reconciled(func(q *QueueView) (float64, bool) {
		return since(func(q *QueueView) time.Time { return q.Reconciler.LastFull })(q)
	})},
	{
		name: "Unreconciled", unit: "Count",
		value: func(q *QueueView) (float64, bool) {
			return flag(q.Reconciler == nil), !q.RedisOnly && q.Stats.Mode != ""
		},
	},
	{name: "UnconfirmedTasks", unit: "Count", value: reconciled(func(q *QueueView) (float64, bool) {
		return float64(q.Reconciler.Last.Unconfirmed), !q.Reconciler.LastFull.IsZero()
	})},
	{name: "DriftTotal", unit: "Count", value: reconciled(number(func(q *QueueView) int64 { return q.Reconciler.Total.Drift }))},
	{name: "RepairedTotal", unit: "Count", value: reconciled(number(func(q *QueueView) int64 { return q.Reconciler.Total.Repaired }))},
}

func number(of func(*QueueView) int64) func(*QueueView) (float64, bool) {
	return func(q *QueueView) (float64, bool) { return float64(of(q)), true }
}

func length(of func(*QueueView) time.Duration) func(*QueueView) (float64, bool) {
	return func(q *QueueView) (float64, bool) { return of(q).Seconds(), true }
}

// since is the age of a moment, if there was one, by Redis' clock.
func since(of func(*QueueView) time.Time) func(*QueueView) (float64, bool) {
	return func(q *QueueView) (float64, bool) {
		at := of(q)
		return max(0, q.Stats.Now.Sub(at).Seconds()), !at.IsZero()
	}
}

// reconciled leaves out what a queue without a reconciler does not have.
func reconciled(value func(*QueueView) (float64, bool)) func(*QueueView) (float64, bool) {
	return func(q *QueueView) (float64, bool) {
		if q.Reconciler == nil {
			return 0, false
		}
		return value(q)
	}
}

func backlog(q *QueueView) (float64, bool) {
	all := q.Stats.Pending + q.Stats.Due + q.Stats.Processing
	return float64(q.Stats.Due) / float64(max(all, 1)), true
}

func failed(q *QueueView) (n int64) {
	for _, of := range q.Stats.Failed {
		n += of
	}
	return n
}

// veryLate is a bound of the histogram of lateness.
const veryLate = time.Minute

// late are the leases that began very late.
func late(q *QueueView) int64 {
	n := q.Stats.Lateness.Count
	for _, b := range q.Stats.Lateness.Buckets {
		if b.UpTo <= veryLate {
			n -= b.Count
		}
	}
	return max(n, 0)
}

// largestShard is the number of tasks in the fullest shard.
func largestShard(q *QueueView) (most int64) {
	for i := range q.Stats.Shards {
		most = max(most, q.Stats.Shards[i].Tasks)
	}
	return most
}

// consumerSkew is the largest by size, and so is the worst of all queues.
func consumerSkew(q *QueueView) (worst float64, known bool) {
	for i := range q.Consumers {
		if c := &q.Consumers[i]; !c.Beat.IsZero() {
			worst, known = max(worst, math.Abs(c.Skew.Seconds())), true
		}
	}
	return worst, known
}

func flag(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// An emfLine is a document of the format.
type emfLine struct {
	namespace string
	at        time.Time
	queue     string // none in the line for the whole
	metrics   []emfName
	values    map[string]any
}

type emfName struct {
	Name string
	Unit string
}

func (l *emfLine) add(name, unit string, value float64) {
	if l.values == nil {
		l.values = map[string]any{}
	}
	l.metrics = append(l.metrics, emfName{name, unit})
	l.values[name] = value
}

// server adds what there is once, whatever the queues.
func (l *emfLine) server(v *View) {
	var unread float64
	for i := range v.Queues {
		unread += flag(v.Queues[i].Err != nil)
	}
	if v.Err != nil {
		unread = max(unread, 1)
	}
	l.add("ScrapeError", "Count", unread)
	l.add("ScrapeDuration", "Seconds", v.Took.Seconds())
	l.add("QueuesLeftOut", "Count", float64(v.LeftOut))
	s := &v.Server
	l.add("RedisUp", "Count", flag(s.Err == nil))
	if s.Err != nil {
		return
	}
	l.add("ClockSkew", "Seconds", math.Abs(s.Skew.Seconds()))
	if s.MemoryUsed >= 0 {
		l.add("RedisMemoryUsed", "Bytes", float64(s.MemoryUsed))
		if s.MemoryMax > 0 {
			l.add("RedisMemoryPercent", "Percent", 100*float64(s.MemoryUsed)/float64(s.MemoryMax))
		}
	}
	if s.Evicted >= 0 {
		l.add("RedisEvictedTotal", "Count", float64(s.Evicted))
	}
	if s.Policy != "" {
		l.add("RedisEvictionUnsafe", "Count", flag(s.EvictionUnsafe()))
	}
	l.add("RedisSaveFailed", "Count", flag(!s.LastSaveOK))
}

// write sends the line in one piece: two functions' lines must not run into each other.
func (l *emfLine) write(w io.Writer) error {
	dimensions := []string{}
	doc := l.values
	if l.queue != "" {
		dimensions = append(dimensions, "Queue")
		doc["Queue"] = l.queue
	}
	doc["_aws"] = map[string]any{
		"Timestamp": l.at.UnixMilli(),
		"CloudWatchMetrics": []any{map[string]any{
			"Namespace":  l.namespace,
			"Dimensions": [][]string{dimensions},
			"Metrics":    l.metrics,
		}},
	}
	text, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}
