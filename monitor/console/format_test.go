package console

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/quick"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Any name comes back from an address, and no part of an address means something to a browser.
func TestSegments(t *testing.T) {
	t.Parallel()
	check := func(name string) bool {
		if name == "" {
			return true
		}
		part := segment(name)
		got, ok := unsegment(part)
		return ok && got == name && regexp.MustCompile(`^[A-Za-z0-9_~-][A-Za-z0-9._:~-]*$`).MatchString(part)
	}
	for _, id := range hostile {
		if !check(id) {
			t.Errorf("%q becomes %q", id, segment(id))
		}
	}
	if err := quick.Check(func(b []byte) bool { return check(string(b)) }, nil); err != nil {
		t.Error(err)
	}
	for _, part := range []string{"", "~", "~!", "~Zg=="} {
		if got, ok := unsegment(part); ok {
			t.Errorf("%q is %q", part, got)
		}
	}
}

func TestSpans(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0", time.Microsecond: "< 1 ms", 340 * time.Millisecond: "340 ms", 3400 * time.Millisecond: "3.4 s", 34 * time.Second: "34 s",
		125 * time.Second: "2 min 5 s", 2 * time.Hour: "2 h", 27 * time.Hour: "1 d 3 h", -time.Minute: "−1 min", math.MaxInt64: "> 1 h",
	} {
		if got := span(d); got != want {
			t.Errorf("%d: %q, want %q", d, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 10_000_000: "10,000,000", -1234: "−1,234"} {
		if got := number(n); got != want {
			t.Errorf("%d: %q", n, got)
		}
	}
}

// Every text that a page asks for is in the catalogue, and nothing else is.
func TestCatalogue(t *testing.T) {
	t.Parallel()
	var source strings.Builder
	for _, pattern := range []string{"*.go", "templates/*.html", "static/*.js"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") || strings.Contains(name, ".min.") {
				continue
			}
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(b)
		}
	}
	src := source.String()
	for _, m := range regexp.MustCompile(`\bt(?:ext\()? ?"([a-z0-9_.]+)"`).FindAllStringSubmatch(src, -1) {
		if _, ok := catalogue[m[1]]; !ok && !strings.HasSuffix(m[1], ".") {
			t.Errorf("no text for %s", m[1])
		}
	}
	for _, m := range regexp.MustCompile(`\b(?:n|count\() ?"([a-z0-9_.]+)"`).FindAllStringSubmatch(src, -1) {
		for _, form := range []string{".one", ".other"} {
			if _, ok := catalogue[m[1]+form]; !ok && !strings.HasSuffix(m[1], ".") {
				t.Errorf("no text for %s%s", m[1], form)
			}
		}
	}
	for _, m := range regexp.MustCompile(`\btexts\.([a-z_0-9]+)`).FindAllStringSubmatch(src, -1) {
		if _, ok := catalogue["js."+m[1]]; !ok && m[1] != "go" {
			t.Errorf("no text for js.%s", m[1])
		}
	}
	made := regexp.MustCompile(`^(error|reason|event|state|health|col\.at|task\.at|confirm|done|why|js|format|queue\.none|task\.payload)\.`)
	for key := range catalogue {
		base := strings.TrimSuffix(strings.TrimSuffix(key, ".one"), ".other")
		if !made.MatchString(key) && !strings.Contains(src, `"`+base+`"`) {
			t.Errorf("nobody asks for %s", key)
		}
	}
	for _, reason := range delayq.Reasons() {
		if catalogue["reason."+reason] == "" {
			t.Errorf("no text for the reason %s", reason)
		}
	}
	var order map[string]json.RawMessage
	if err := json.Unmarshal(english, &order); err != nil || len(order) != strings.Count(string(english), "\n  \"") {
		t.Errorf("a key is there twice, or %v", err)
	}
}

func TestPayloadsAreReadable(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string][2]string{
		`{"a":1}`:     {"{\n  \"a\": 1\n}", "json"},
		"plain\x1b[m": {`plain\u001b[m`, "text"},
		"\xff\x00":    {"00000000  ff 00", "hex"},
		"":            {"", "text"},
	} {
		text, kind := showPayload([]byte(payload))
		if kind != want[1] || !strings.HasPrefix(text, want[0]) {
			t.Errorf("%q: %q as %s", payload, text, kind)
		}
	}
	if text, _ := showPayload([]byte(strings.Repeat("x", 1<<20))); len(text) > mostShown+8 {
		t.Errorf("%d bytes shown", len(text))
	}
}

func histogram(counts ...int64) (h delayq.Histogram) {
	for i, n := range counts {
		h.Buckets = append(h.Buckets, delayq.Bucket{UpTo: time.Duration(i+1) * time.Second, Count: n})
		h.Count += n
	}
	return h
}

// Rates and quantiles are of the last minutes, are unknown after a loss, and what is kept is bounded.
func TestSeries(t *testing.T) {
	t.Parallel()
	var s series
	at := time.Unix(1_800_000_000, 0)
	for i := range mostKept + 100 {
		n := int64(i)
		s.add(sample{at: at, created: 20 * n, succeeded: 10 * n, late: histogram(9*n, n)}, mostKept)
		at = at.Add(10 * time.Second)
	}
	if len(s.all) != mostKept {
		t.Errorf("%d samples", len(s.all))
	}
	r := s.recent()
	if r.Done != 1 || r.In != 2 || r.Failed != 0 || r.Late50 != time.Second || r.Late99 != 2*time.Second {
		t.Errorf("%+v", r)
	}
	if s.all[0].late.Buckets != nil || s.all[len(s.all)-1].late.Buckets == nil {
		t.Error("buckets are kept too long, or not at all")
	}
	s.add(sample{at: at, late: histogram(1)}, mostKept) // Redis has lost its data
	if r = s.recent(); r.Done >= 0 || r.Late99 >= 0 {
		t.Errorf("after a loss: %+v", r)
	}
	s.add(sample{at: at.Add(time.Second)}, mostKept) // too close
	if n := len(s.all); !s.all[n-1].at.Equal(at) {
		t.Error("a sample that is too close was taken")
	}
	s.add(sample{at: at.Add(time.Hour)}, mostKept)
	points := s.since(at.Add(-time.Second))
	if len(points) != 3 || points[1][1] != nil {
		t.Errorf("a gap is not shown as one: %v", points)
	}
}

func TestEveryPageHasATemplate(t *testing.T) {
	t.Parallel()
	for name, p := range pages {
		if p.Lookup("main") == nil || p.Lookup("page") == nil {
			t.Errorf("%s lacks a part", name)
		}
	}
}

// What is kept of all queues is bounded: many have a shorter past.
func TestManyQueuesHaveAShorterPast(t *testing.T) {
	t.Parallel()
	for queues, want := range map[int]int{0: mostKept, 1: mostKept, 100: mostKept, 200: mostKept / 2, 10_000: leastKept} {
		if got := kept(queues); got != want {
			t.Errorf("%d queues: %d samples each, want %d", queues, got, want)
		}
	}
	var s series
	at := time.Unix(1_800_000_000, 0)
	for i := range 200 {
		most := mostKept
		if i >= 150 { // more queues have come
			most = leastKept
		}
		n := int64(i)
		s.add(sample{at: at, succeeded: 10 * n, late: histogram(n)}, most)
		at = at.Add(period)
	}
	if len(s.all) != leastKept {
		t.Errorf("%d samples", len(s.all))
	}
	if r := s.recent(); r.Done != 1 || r.Late50 != time.Second {
		t.Errorf("rates need more: %+v", r)
	}
}
