package monitor_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/reconciler"
)

// An emfDoc is a line that the format's rules were checked for.
type emfDoc struct {
	namespace string
	at        int64
	queue     string // "" in the line for the whole
	units     map[string]string
	values    map[string]float64
}

// The units CloudWatch knows that a metric here may have: it drops a metric with another.
var emfUnits = []string{"Seconds", "Bytes", "Percent", "Count", "None"}

var emfNamespace = regexp.MustCompile(`^[A-Za-z0-9.\-_/#: ]{1,255}$`)

// readEMF checks every line against the specification: what must be there, what may be, and that every name refers to a value.
func readEMF(t *testing.T, text []byte) (docs []emfDoc) {
	t.Helper()
	if len(text) == 0 || text[len(text)-1] != '\n' {
		t.Fatalf("does not end with a line: %q", text)
	}
	for line := range bytes.Lines(text) {
		if len(line) > 256<<10 {
			t.Errorf("%d bytes: CloudWatch takes 256 KB", len(line))
		}
		var root map[string]json.RawMessage
		if err := json.Unmarshal(line, &root); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		var aws struct {
			Timestamp         *int64
			CloudWatchMetrics []struct {
				Namespace  string
				Dimensions [][]string
				Metrics    []struct {
					Name, Unit        string
					StorageResolution int
				}
			}
		}
		strict := json.NewDecoder(bytes.NewReader(root["_aws"]))
		strict.DisallowUnknownFields() // the specification allows no other members in it
		if err := strict.Decode(&aws); err != nil {
			t.Fatalf("_aws: %v: %s", err, line)
		}
		if aws.Timestamp == nil || len(aws.CloudWatchMetrics) != 1 {
			t.Fatalf("no timestamp, or not one directive: %s", line)
		}
		d := aws.CloudWatchMetrics[0]
		doc := emfDoc{namespace: d.Namespace, at: *aws.Timestamp, units: map[string]string{}, values: map[string]float64{}}
		if !emfNamespace.MatchString(d.Namespace) || strings.HasPrefix(d.Namespace, "AWS/") {
			t.Errorf("namespace %q", d.Namespace)
		}
		if len(d.Metrics) == 0 || len(d.Metrics) > 100 {
			t.Errorf("%d metrics: want 1 to 100", len(d.Metrics))
		}
		if len(d.Dimensions) != 1 || len(d.Dimensions[0]) > 30 {
			t.Errorf("dimensions %q", d.Dimensions)
		}
		refers := map[string]bool{"_aws": true}
		for _, name := range slices.Concat(d.Dimensions...) {
			refers[name] = true
			if err := json.Unmarshal(root[name], &doc.queue); err != nil || name != "Queue" || doc.queue == "" || len(doc.queue) > 1024 {
				t.Errorf("dimension %s: %s", name, root[name])
			}
		}
		for _, m := range d.Metrics {
			var x float64
			if err := json.Unmarshal(root[m.Name], &x); err != nil || math.Abs(x) > math.Pow(2, 360) {
				t.Errorf("metric %s: %s: not a number", m.Name, root[m.Name])
			}
			if refers[m.Name] || m.Name == "" || len(m.Name) > 255 || !slices.Contains(emfUnits, m.Unit) {
				t.Errorf("metric %q of %q", m.Name, m.Unit)
			}
			refers[m.Name] = true
			doc.units[m.Name], doc.values[m.Name] = m.Unit, x
		}
		for name := range root {
			if !refers[name] {
				t.Errorf("%s is there, and no metric or dimension", name)
			}
		}
		docs = append(docs, doc)
	}
	return docs
}

func writeEMF(t *testing.T, v *monitor.View) []emfDoc {
	t.Helper()
	var out bytes.Buffer
	if err := monitor.WriteEMF(&out, "", v); err != nil {
		t.Fatal(err)
	}
	docs := readEMF(t, out.Bytes())
	if len(docs) != len(v.Queues)+1 {
		t.Fatalf("%d lines for %d queues", len(docs), len(v.Queues))
	}
	for _, d := range docs {
		if d.namespace != monitor.EMFNamespace || d.at != v.At.UnixMilli() {
			t.Errorf("%s at %d", d.namespace, d.at)
		}
	}
	return docs
}

var noon = time.Date(2026, 12, 1, 12, 0, 0, 5e6, time.UTC)

// busyView is of two queues, one worse than the other in each way.
func busyView() *monitor.View {
	orders := &delayq.Stats{
		Queue: "orders", Now: noon, Pending: 10, Due: 30, Processing: 20, Dead: 4, OldestDueAge: 90 * time.Second,
		OldestProcessingAge: 1500 * time.Millisecond, LastRun: noon.Add(-2 * time.Second), LastSuccess: noon.Add(-time.Minute),
		Created: 100, Leased: 80, Succeeded: 50, Retried: 6, Buried: 4, Expired: 3, Stale: 2, Missing: 1, Trimmed: 5, Quarantined: 7,
		Failed: map[string]int64{delayq.ReasonError: 8, delayq.ReasonNoHandler: 2},
		Lateness: delayq.Histogram{
			Count: 80, Sum: 40 * time.Second, Buckets: []delayq.Bucket{{UpTo: time.Second, Count: 60}, {UpTo: time.Minute, Count: 9}, {UpTo: time.Hour, Count: 8}},
		},
		Duration: delayq.Histogram{Sum: 12500 * time.Millisecond}, Mode: "ledger", Shards: []delayq.ShardStats{{Tasks: 21}, {Tasks: 43}},
	}
	mail := &delayq.Stats{
		Queue: "mail", Now: noon, Due: 1, OldestDueAge: 400 * time.Second, LastRun: noon.Add(-200 * time.Second), Created: 1,
		Failed: map[string]int64{delayq.ReasonNoHandler: 1},
	}
	return &monitor.View{
		At: noon, Took: 30 * time.Millisecond, LeftOut: 3,
		Server: monitor.Server{
			MemoryUsed: 900, MemoryMax: 1000, Policy: "allkeys-lru", Evicted: 11, LastSaveOK: true, Skew: -1500 * time.Millisecond,
		},
		Queues: []monitor.QueueView{
			{Name: "mail", Stats: mail, Stale: 1, Stuck: 2},
			{
				Name: "orders", Stats: orders, Healthy: 2, Stale: 1,
				Consumers: []delayq.Consumer{{Name: "a", Beat: noon, Skew: -3 * time.Second}, {Name: "b", Beat: noon, Skew: time.Second}, {Name: "c"}},
				Reconciler: &reconciler.Status{
					LastFull: noon.Add(-10 * time.Minute), Total: reconciler.Counts{Drift: 9, Repaired: 8}, Last: reconciler.Counts{Unconfirmed: 6},
				},
			},
		},
	}
}

func TestEMFHasEachQueueAndTheWhole(t *testing.T) {
	t.Parallel()
	docs := writeEMF(t, busyView())
	for i, want := range []map[string]float64{
		{
			"ScrapeError": 0, "TasksPending": 0, "TasksDue": 1, "TasksProcessing": 0, "TasksDead": 0, "OldestDueAge": 400, "OldestProcessingAge": 0,
			"BacklogRatio": 1, "SinceLastRun": 200, "ConsumersHealthy": 0, "ConsumersStale": 1, "ConsumersStuck": 2, "Unserved": 1,
			"EnqueuedTotal": 1, "LeasedTotal": 0, "SucceededTotal": 0, "FailedTotal": 1, "NoHandlerTotal": 1, "BuriedTotal": 0, "TrimmedTotal": 0,
			"LostLeasesTotal": 0, "StaleCallsTotal": 0, "MissingTotal": 0, "QuarantinedTotal": 0, "LatenessTotal": 0, "DurationTotal": 0,
			"LargestShard": 0, "LateTotal": 0,
		},
		{
			"ScrapeError": 0, "TasksPending": 10, "TasksDue": 30, "TasksProcessing": 20, "TasksDead": 4, "OldestDueAge": 90, "OldestProcessingAge": 1.5,
			"BacklogRatio": 0.5, "SinceLastRun": 2, "SinceLastSuccess": 60, "ConsumersHealthy": 2, "ConsumersStale": 1, "ConsumersStuck": 0,
			"ConsumerClockSkew": 3, "Unserved": 0,
			"EnqueuedTotal": 100, "LeasedTotal": 80, "SucceededTotal": 50, "FailedTotal": 10, "NoHandlerTotal": 2, "BuriedTotal": 4, "TrimmedTotal": 5,
			"LostLeasesTotal": 3, "StaleCallsTotal": 2, "MissingTotal": 1, "QuarantinedTotal": 7, "LatenessTotal": 40, "DurationTotal": 12.5,
			"LargestShard": 43, "LateTotal": 11, "Unreconciled": 0,
			"SinceReconcile": 600, "UnconfirmedTasks": 6, "DriftTotal": 9, "RepairedTotal": 8,
		},
		{ // BacklogRatio is not that of the one task of mail; SinceLastRun is not that of orders, which is served
			"ScrapeError": 0, "ScrapeDuration": 0.03, "RedisUp": 1, "QueuesLeftOut": 3, "ClockSkew": 1.5, "RedisMemoryUsed": 900,
			"RedisMemoryPercent": 90, "RedisEvictedTotal": 11, "RedisEvictionUnsafe": 1, "RedisSaveFailed": 0,
			"TasksPending": 10, "TasksDue": 31, "TasksProcessing": 20, "TasksDead": 4, "OldestDueAge": 400, "OldestProcessingAge": 1.5,
			"BacklogRatio": 0.5, "SinceLastRun": 200, "SinceLastSuccess": 60, "ConsumersHealthy": 2, "ConsumersStale": 2, "ConsumersStuck": 2,
			"ConsumerClockSkew": 3, "Unserved": 1,
			"EnqueuedTotal": 101, "LeasedTotal": 80, "SucceededTotal": 50, "FailedTotal": 11, "NoHandlerTotal": 3, "BuriedTotal": 4, "TrimmedTotal": 5,
			"LostLeasesTotal": 3, "StaleCallsTotal": 2, "MissingTotal": 1, "QuarantinedTotal": 7, "LatenessTotal": 40, "DurationTotal": 12.5,
			"LargestShard": 43, "LateTotal": 11, "Unreconciled": 0,
			"SinceReconcile": 600, "UnconfirmedTasks": 6, "DriftTotal": 9, "RepairedTotal": 8,
		},
	} {
		if queue := []string{"mail", "orders", ""}[i]; docs[i].queue != queue {
			t.Errorf("line %d is of %q, want %q", i, docs[i].queue, queue)
		}
		for name := range maps.Keys(docs[i].values) {
			if _, ok := want[name]; !ok {
				t.Errorf("line %d: %s: not expected", i, name)
			}
		}
		for name, x := range want {
			if got, ok := docs[i].values[name]; !ok || math.Abs(got-x) > 1e-9 {
				t.Errorf("line %d: %s: got %v (there: %t), want %v", i, name, got, ok, x)
			}
		}
	}
}

func TestEMFUnits(t *testing.T) {
	t.Parallel()
	for _, d := range writeEMF(t, busyView()) {
		for name, unit := range d.units {
			want := "Count"
			switch {
			case regexp.MustCompile(`Age$|^Since|Duration|Lateness|Skew$`).MatchString(name):
				want = "Seconds"
			case strings.HasSuffix(name, "Percent"):
				want = "Percent"
			case strings.HasSuffix(name, "Ratio"):
				want = "None"
			case name == "RedisMemoryUsed":
				want = "Bytes"
			}
			if unit != want {
				t.Errorf("%s: %s, want %s", name, unit, want)
			}
		}
	}
}

// What this look did not see is in no line: not as zero either.
func TestEMFLeavesOutWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	v := busyView()
	v.Queues[1] = monitor.QueueView{Name: "orders", Err: errors.New("away")}
	docs := writeEMF(t, v)
	if got := docs[1].values; len(got) != 1 || got["ScrapeError"] != 1 {
		t.Errorf("of a queue that was not read: %v", got)
	}
	whole := docs[2].values
	for _, name := range []string{"TasksDue", "FailedTotal", "Unserved", "ConsumersHealthy"} {
		if x, ok := whole[name]; ok {
			t.Errorf("%s is %v: a sum that lacks a queue", name, x)
		}
	}
	if whole["ScrapeError"] != 1 || whole["RedisUp"] != 1 || whole["OldestDueAge"] != 400 || whole["BacklogRatio"] != 0 {
		t.Errorf("%v", whole)
	}

	v = &monitor.View{At: noon, Err: errors.New("refused"), Server: monitor.Server{Err: errors.New("refused")}}
	for _, name := range []string{"mail", "orders"} {
		v.Queues = append(v.Queues, monitor.QueueView{Name: name, Err: v.Err})
	}
	if got, want := writeEMF(t, v)[2].values, map[string]float64{"ScrapeError": 2, "RedisUp": 0, "ScrapeDuration": 0, "QueuesLeftOut": 0}; !maps.Equal(got, want) {
		t.Errorf("without Redis: %v", got)
	}
	v.Queues = nil
	if got := writeEMF(t, v)[0].values; got["ScrapeError"] != 1 || got["RedisUp"] != 0 {
		t.Errorf("without Redis and queues: %v", got)
	}

	v = &monitor.View{At: noon, Server: monitor.Server{MemoryUsed: -1, MemoryMax: -1, Evicted: -1, LastSaveOK: true}}
	for name := range writeEMF(t, v)[0].values {
		if strings.HasPrefix(name, "RedisMemory") || name == "RedisEvictedTotal" {
			t.Errorf("%s, although the server does not tell", name)
		}
	}
}

// A queue whose ledger is away is told of as Redis has it.
func TestEMFKeepsWhatWasReadOfAQueueWithAnError(t *testing.T) {
	t.Parallel()
	v := busyView()
	v.Queues[1].Err, v.Queues[1].RedisOnly = errors.New("database away"), true
	docs := writeEMF(t, v)
	for _, d := range docs[1:] {
		if x, ok := d.values["TasksDead"]; ok {
			t.Errorf("TasksDead of %q is %v: most of them are in the ledger", d.queue, x)
		}
	}
	if docs[1].values["ScrapeError"] != 1 || docs[1].values["TasksDue"] != 30 || docs[2].values["TasksDue"] != 31 {
		t.Errorf("%v\n%v", docs[1], docs[2])
	}
}

func TestEMFTakesHostileNames(t *testing.T) {
	t.Parallel()
	v := busyView()
	v.Queues[0].Name = `a"b\` + strings.Repeat("x", 120) // no queue can be called so; a line must stay one all the same
	if docs := writeEMF(t, v); docs[0].queue != v.Queues[0].Name {
		t.Errorf("%q", docs[0].queue)
	}
}

// Each line is one write, so that those of two writers do not run into each other.
func TestEMFWritesLines(t *testing.T) {
	t.Parallel()
	var w lineWriter
	if err := monitor.WriteEMF(&w, "shop/delayq", busyView()); err != nil || w.writes != 3 || w.torn != nil {
		t.Errorf("%d writes, torn %q, %v", w.writes, w.torn, err)
	}
	w = lineWriter{fail: errors.New("closed")}
	if err := monitor.WriteEMF(&w, "", busyView()); !errors.Is(err, w.fail) || w.writes != 1 {
		t.Errorf("%v after %d writes", err, w.writes)
	}
}

type lineWriter struct {
	writes int
	torn   []byte
	fail   error
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.writes++
	if bytes.Count(p, []byte{'\n'}) != 1 || p[len(p)-1] != '\n' || !bytes.HasPrefix(p, []byte("{")) {
		w.torn = p
	}
	return len(p), w.fail
}

func ExampleWriteEMF() {
	away := errors.New("redis is away")
	v := &monitor.View{At: time.UnixMilli(1764532800123), Took: 4 * time.Millisecond, Server: monitor.Server{Err: away}, Err: away}
	var out strings.Builder
	if err := monitor.WriteEMF(&out, "shop", v); err != nil {
		panic(err)
	}
	fmt.Print(out.String())
	// Output: {"QueuesLeftOut":0,"RedisUp":0,"ScrapeDuration":0.004,"ScrapeError":1,"_aws":{"CloudWatchMetrics":[{"Dimensions":[[]],"Metrics":[{"Name":"ScrapeError","Unit":"Count"},{"Name":"ScrapeDuration","Unit":"Seconds"},{"Name":"QueuesLeftOut","Unit":"Count"},{"Name":"RedisUp","Unit":"Count"}],"Namespace":"shop"}],"Timestamp":1764532800123}}
}

// A queue with a ledger that nobody reconciles is counted, one without is not.
func TestEMFCountsTheUnreconciled(t *testing.T) {
	t.Parallel()
	v := busyView()
	v.Queues[1].Reconciler = nil
	if docs := writeEMF(t, v); docs[1].values["Unreconciled"] != 1 || docs[2].values["Unreconciled"] != 1 {
		t.Errorf("%v", docs)
	}
	v.Queues[1].RedisOnly = true
	for _, d := range writeEMF(t, v) {
		if _, known := d.values["Unreconciled"]; known {
			t.Errorf("known of a ledger that does not answer: %v", d)
		}
	}
}
