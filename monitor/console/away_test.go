package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

// While the database is away, queues without a ledger go on in full, and the others with what Redis knows. Nobody blames Redis.
func TestDatabaseGoesAndComesBack(t *testing.T) {
	t.Parallel()
	database := servers.NewPostgres(t)
	url, err := database.CreateDatabase(t.Context(), "delayq")
	if err != nil {
		t.Fatal(err)
	}
	r, led, _ := bookedIn(t, url, Config{})
	shop, plain := r.queue("shop", delayq.Config{Ledger: led}), r.queue("plain", delayq.Config{})
	r.kill(shop, "t", "shop-dead")
	r.kill(plain, "t", "plain-dead", "plain-dead-too", "plain-dead-three")
	r.add(shop, "shop-due", "t", 0)
	r.add(plain, "here", "t", time.Hour)
	fine := func() bool {
		r.c.views.forget()
		page := r.get("/queue/shop", 200)
		return !strings.Contains(page, "cannot be read") && strings.Contains(page, "shop-due")
	}
	if !fine() {
		t.Fatal(r.get("/queue/shop", 200))
	}
	r.get("/queue/plain", 200)
	purge := func(id string) {
		t.Helper()
		const act = "/queue/plain/act"
		r.post(act, r.confirmed(act, map[string][]string{"do": {"purge"}, "from": {"dead"}, "id": {id}}), 200)
		r.wantState(plain, "", id)
	}
	look := func(how string, listed bool) {
		t.Helper()
		r.c.views.forget()
		for path, want := range map[string]struct {
			status int
			texts  string
		}{
			"/":                           {200, `id="row-shop"|id="row-plain"|The ledger cannot be read|1 of 2 queues needs a look`},
			"/queue/plain":                {200, "here"},
			"/queue/plain/dead":           {200, "plain-dead"},
			"/queue/plain/task/here":      {200, "The history cannot be read"},
			"/queue/shop":                 {200, "The ledger cannot be read|Tasks cannot be listed|kept by a ledger"},
			"/queue/shop/dead":            {503, "The database does not answer"},
			"/queue/shop/task/shop-due":   {503, "The database does not answer"},
			"/queue/nobody":               {503, "The database does not answer"},
			"/dead":                       {200, "shop|plain|The ledger cannot be read"},
			"/search?find=here":           {200, "/queue/plain/task/here|could not be asked: shop"},
			"/search?find=nothing":        {200, "1 queue was asked|could not be asked: shop"},
			"/series?queue=plain&since=1": {200, "[["},
		} {
			page := r.get(path, want.status)
			for part := range strings.SplitSeq(want.texts, "|") {
				if !strings.Contains(page, part) {
					t.Errorf("%s: %s lacks %q:\n%s", how, path, part, page)
				}
			}
			if strings.Contains(page, "Redis does not answer") {
				t.Errorf("%s: %s blames Redis", how, path)
			}
			if missing := strings.Contains(page, "has not told its queues"); missing && listed {
				t.Errorf("%s: %s says that queues may be missing", how, path)
			} else if !missing && !listed && (path == "/" || path == "/dead" || strings.HasPrefix(path, "/search")) {
				t.Errorf("%s: %s does not say that queues may be missing", how, path)
			}
		}
	}
	r.ok(database.Pause())
	look("hung", true)
	purge("plain-dead")
	r.ok(database.Resume())
	eventually(r, "the ledger after the hang", fine)
	time.Sleep(spacing)
	r.ok(database.Immediate())
	look("dead", true)
	purge("plain-dead-too")
	for queue, known := range map[string]bool{"plain": true, "shop": false, "": false} {
		var points [][]any
		r.ok(json.Unmarshal([]byte(r.get("/series?queue="+queue, 200)), &points))
		first, last := points[0], points[len(points)-1]
		if len(points) < 2 || first[2] == nil || first[4] == nil || last[1] == nil || (last[2] != nil) != known || (last[4] != nil) != known {
			t.Errorf("charts of %q: first %v, last %v", queue, first, last)
		}
	}
	// One that begins now does not know whether there are more.
	m, err := monitor.New(monitor.Config{Redis: r.rdb, Ledger: led, Timeout: time.Second})
	r.ok(err)
	cfg := r.c.cfg
	cfg.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	r.m = m
	r.c, err = New(m, cfg)
	r.ok(err)
	r.web = httptest.NewServer(r.c)
	t.Cleanup(r.web.Close)
	look("dead, and the console begins", false)
	r.ok(database.Restart())
	eventually(r, "the ledger after the restart", fine)
}

// Network errors of both servers look alike; pages must not mix them up.
func TestWhoIsBlamed(t *testing.T) {
	t.Parallel()
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}
	of := func(err error) error { return fmt.Errorf("monitor: %w", &delayq.LedgerError{Op: "open x", Err: err}) }
	for name, c := range map[string]struct {
		err  error
		want *refusal
	}{
		"redis refused":                    {refused, errRedis},
		"redis is silent":                  {context.DeadlineExceeded, errRedis},
		"the database refused":             {of(refused), errDatabase},
		"the database is silent":           {of(context.DeadlineExceeded), errDatabase},
		"all hosts of the database":        {of(errors.Join(refused, refused)), errDatabase},
		"both":                             {errors.Join(refused, of(refused)), errRedis},
		"the database, of both":            {errors.Join(nil, of(refused)), errDatabase},
		"the ledger knows no such queue":   {of(delayq.ErrNoQueue), errNoQueue},
		"the ledger has another schema":    {of(delayq.ErrSchema), errQueueWrong},
		"a ledger's queue without one":     {delayq.ErrLedger, errQueueWrong},
		"something that nobody thought of": {errors.New("x"), errServers},
	} {
		if got := asRefusal(c.err); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func eventually(r *rig, what string, is func() bool) {
	r.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("never came: %s", what)
		}
	}
}

// forget makes the next page look anew.
func (v *views) forget() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seen = time.Time{}
}

// The charts go by what Redis tells; sums and goodbyes need all queues.
func TestWhatChartsKeep(t *testing.T) {
	t.Parallel()
	at := time.Now()
	stats := func(n int64) *delayq.Stats { return &delayq.Stats{Due: n, Pending: n, Dead: n} }
	away := &delayq.LedgerError{Op: "page", Err: errors.New("refused")}
	v := newViews(nil)
	keep := func(view *monitor.View) {
		at = at.Add(period)
		view.At = at
		v.keep(view)
	}
	count := func(queue string) int { return len(v.points(queue, at.Add(-time.Hour))) }
	check := func(how string, all, a, b int) {
		t.Helper()
		if count("") != all || count("a") != a || count("b") != b {
			t.Errorf("%s: %d of all, %d of a, %d of b; want %d, %d, %d", how, count(""), count("a"), count("b"), all, a, b)
		}
	}
	a, b := monitor.QueueView{Name: "a", Stats: stats(1)}, monitor.QueueView{Name: "b", Stats: stats(2)}
	keep(&monitor.View{Listed: true, Queues: []monitor.QueueView{a, b}})
	check("all is well", 1, 1, 1)
	keep(&monitor.View{Queues: []monitor.QueueView{a}, Err: away})
	check("the database has not told its queues", 1, 2, 1)
	keep(&monitor.View{Listed: true, Queues: []monitor.QueueView{a, {Name: "b", Err: errors.New("refused")}}})
	check("one is silent", 1, 3, 1)
	keep(&monitor.View{Listed: true, Err: away, Queues: []monitor.QueueView{a, {Name: "b", Stats: stats(2), RedisOnly: true, Err: away}}})
	check("the database is away", 2, 4, 2)
	if p := v.points("", at.Add(-time.Second))[0]; p[1] != int64(3) || p[2] != nil || p[4] != nil {
		t.Errorf("the sum is %v, want 3 due, and what the ledger knows unknown", p)
	}
	keep(&monitor.View{Listed: true, Server: monitor.Server{Err: errors.New("refused")}, Queues: []monitor.QueueView{a, b}})
	check("Redis is away", 2, 4, 2)
	keep(&monitor.View{Listed: true, Queues: []monitor.QueueView{a}})
	check("b is gone", 3, 5, 0)
}
