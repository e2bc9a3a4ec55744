package console

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

var nextPage = regexp.MustCompile(`<a href="([^"]+)" data-next>`)

// A filter that finds little is bounded, says so, and goes on where it was.
func TestFilterIsBounded(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "few", "needle")
	r.kill(q, "many", ids("many", mostLooked+150)...) // the newest come first
	page := r.get("/queue/orders/dead?type=few", 200)
	if !strings.Contains(page, "Looked through 2,000 dead letters, 0 match. There are more") || strings.Contains(page, ">needle<") {
		t.Error(page)
	}
	next := nextPage.FindStringSubmatch(page)
	if next == nil {
		t.Fatal("no next page")
	}
	page = r.get(html.UnescapeString(next[1]), 200)
	if !strings.Contains(page, "Looked through 151 dead letters, 1 match.") || !strings.Contains(page, ">needle<") {
		t.Error(page)
	}
	if nextPage.MatchString(page) {
		t.Error("a page after the last")
	}
}

// Pages of a list have all tasks, each once, on however many shards.
func TestPagesHaveAllTasks(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("a/../b", delayq.Config{Shards: 3})
	for _, id := range ids("task", 130) {
		r.add(q, id, "t", time.Hour)
	}
	seen := map[string]int{}
	row := regexp.MustCompile(`/task/(task-\d+)"`)
	pages := 0
	for path := "/queue/" + segment("a/../b") + "?state=pending"; path != ""; pages++ {
		page := r.get(path, 200)
		for _, m := range row.FindAllStringSubmatch(page, -1) {
			seen[m[1]]++
		}
		path = ""
		if next := nextPage.FindStringSubmatch(page); next != nil {
			path = html.UnescapeString(next[1])
		}
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("%s is there %d times", id, n)
		}
	}
	if len(seen) != 130 || pages != 3 {
		t.Errorf("%d tasks on %d pages", len(seen), pages)
	}
}

func TestSearchAsksEveryQueue(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	for _, name := range []string{"one", "two", "x/y"} {
		r.add(r.queue(name, delayq.Config{}), "the-id", "t", time.Hour)
	}
	page := r.get("/search?find=the-id", 200)
	for _, link := range []string{"/queue/one/task/the-id", "/queue/two/task/the-id", "/queue/" + segment("x/y") + "/task/the-id"} {
		if !strings.Contains(page, link) {
			t.Errorf("no link to %s", link)
		}
	}
	if page = r.get("/search?find=the-i", 200); !strings.Contains(page, "3 queues were asked and none knows") {
		t.Error("a part of an id was found")
	}
	r.get("/search?find="+strings.Repeat("x", 300), 200)
	r.get("/search", 200)
}

// A page has so many queues, the ones that are late before others.
func TestManyQueues(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{}, func(c *monitor.Config) { c.MostQueues = 300 })
	for i := range mostQueues + 5 {
		r.queue(fmt.Sprintf("q%03d", i), delayq.Config{})
	}
	r.add(r.queue("zlate", delayq.Config{}), "one", "t", 0)
	time.Sleep(20 * time.Millisecond) // it is late
	page := r.get("/", 200)
	if n := strings.Count(page, "<tr data-row"); n != mostQueues || !strings.Contains(page, `href="/queue/zlate"`) || !strings.Contains(page, "6 more queues") {
		t.Errorf("%d rows, the late one among them: %t", n, strings.Contains(page, `href="/queue/zlate"`))
	}
	page = r.get("/dead", 200)
	if n := strings.Count(page, "<tr"); n > mostQueues+1 || !strings.Contains(page, "6 more queues") {
		t.Errorf("%d rows on the page of dead letters", n)
	}
}

// However many look, the servers are asked once in a while.
func TestLooksAreShared(t *testing.T) {
	t.Parallel()
	var looks atomic.Int64
	v := newViews(func(context.Context) *monitor.View {
		looks.Add(1)
		time.Sleep(20 * time.Millisecond)
		return &monitor.View{At: time.Now()}
	})
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if _, err := v.now(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := looks.Load(); n > 2 {
		t.Errorf("%d looks", n)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	v.seen = time.Time{}
	if _, err := v.now(gone); err == nil {
		t.Error("who has gone waits on")
	}
}

func TestSeriesIsJSON(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	r.add(r.queue("orders", delayq.Config{}), "one", "t", time.Hour)
	for _, queue := range []string{"", "orders"} {
		var points [][]any
		r.ok(json.Unmarshal([]byte(r.get("/series?queue="+queue, 200)), &points))
		if len(points) != 1 || len(points[0]) != 11 || points[0][2] != 1.0 {
			t.Errorf("%q: %v", queue, points)
		}
	}
	for _, q := range []string{"?queue=nowhere", "?since=9999999999", "?since=x&queue=%00", "?since=NaN", "?since=-1"} {
		var points [][]any
		r.ok(json.Unmarshal([]byte(r.get("/series"+q, 200)), &points))
	}
}

// What tasks carry is hidden until somebody wants it shown. Keys and errors never are: the docs and --show-payloads say so.
func TestWhatIsHidden(t *testing.T) {
	t.Parallel()
	for _, payloads := range []bool{false, true} {
		r := newRig(t, Config{ShowPayloads: payloads})
		r.kill(r.queue("orders", delayq.Config{}), "t", "one")
		page := r.get("/queue/orders/task/one", 200)
		if strings.Contains(page, "onerror=window.pwned=1") != payloads {
			t.Errorf("with payloads %v:\n%s", payloads, page)
		}
		for _, shown := range []string{"key of one", "no such order"} {
			if !strings.Contains(page, shown) {
				t.Errorf("with payloads %v the page lacks %q", payloads, shown)
			}
		}
	}
}

// A failure is told in words: no address, no stack, and nothing is changed.
func TestFailuresTellNothingOfTheInside(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one")
	sure := r.confirmed("/queue/orders/act", url.Values{"do": {"purge"}, "from": {"dead"}, "id": {"one"}})
	r.server.Kill()
	time.Sleep(fresh)
	check := func(page string) {
		t.Helper()
		for _, inside := range []string{r.server.Addr(), "goroutine", "dial tcp", "delayq:"} {
			if strings.Contains(page, inside) {
				t.Errorf("a page tells %q:\n%s", inside, page)
			}
		}
	}
	for _, path := range []string{"/", "/queue/orders", "/queue/orders/dead", "/queue/orders/task/one", "/dead", "/search?find=one"} {
		page := r.get(path, 503)
		check(page)
		if !strings.Contains(page, "Redis does not answer") {
			t.Errorf("%s does not say what is wrong", path)
		}
	}
	check(r.post("/queue/orders/act", sure, 503))
	r.wantLog("do=purge queue=orders ids=[one]", "do=purge queue=orders ok=0 failed=1")
}
