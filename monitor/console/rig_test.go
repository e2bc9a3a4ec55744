package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

// hostile are ids that break pages that are not careful. Each is valid.
var hostile = []string{
	`<script>window.pwned=1</script>`, `"><img src=x onerror=window.pwned=1>`, `..`, `.`, `../../login`, `a/b/c`, `%2e%2e%2f`, `~dGVzdA`,
	"\xff\xfe\x00\x01", "line\nbreak\r\ttab", "\u202egnp.exe", `{{.Data}}`, `javascript:window.pwned=1`, ` leading and trailing `, `?cursor=1#x&y=z`,
	strings.Repeat("x", 256), `日本語 🚀`, `'; DROP TABLE task; --`,
}

const hostilePayload = `{"a":"</pre><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"}`

// A lines is a log that tests read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A rig is a console on a real Redis of its own.
type rig struct {
	*testing.T
	server *servers.Redis
	rdb    *redis.Client
	m      *monitor.Monitor
	c      *Console
	web    *httptest.Server
	log    *lines
	client *http.Client
	zone   string // of browsers
}

func newRig(t *testing.T, cfg Config, watch ...func(*monitor.Config)) *rig {
	t.Helper()
	r := &rig{zone: "Asia/Kathmandu", T: t, server: servers.NewRedis(t), log: &lines{}}
	r.rdb = redis.NewClient(&redis.Options{
		Addr: r.server.Addr(), DialTimeout: time.Second, ReadTimeout: time.Second, MaxRetries: -1, ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { r.rdb.Close() })
	mc := monitor.Config{Redis: r.rdb}
	for _, w := range watch {
		w(&mc)
	}
	var err error
	r.m, err = monitor.New(mc)
	r.ok(err)
	cfg.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	r.c, err = New(r.m, cfg)
	r.ok(err)
	r.c.penalty = 20 * time.Millisecond
	r.web = httptest.NewServer(r.c)
	t.Cleanup(r.web.Close)
	jar, err := cookiejar.New(nil)
	r.ok(err)
	r.client = &http.Client{Jar: jar}
	return r
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) queue(name string, cfg delayq.Config) *delayq.Queue {
	r.Helper()
	cfg.OnWarning = func(delayq.Warning) {}
	q, err := delayq.Open(r.Context(), r.rdb, name, cfg)
	r.ok(err)
	return q
}

func (r *rig) add(q *delayq.Queue, id, typ string, in time.Duration) {
	r.Helper()
	_, err := q.Enqueue(r.Context(), delayq.Task{ID: id, Type: typ, Key: "key of " + shown(id), Payload: []byte(hostilePayload), Delay: in})
	r.ok(err)
}

// kill makes dead letters of ids.
func (r *rig) kill(q *delayq.Queue, typ string, ids ...string) {
	r.Helper()
	for _, id := range ids {
		r.add(q, id, typ, 0)
	}
	r.work(q, func(context.Context, *delayq.Task) error {
		return delayq.Permanent(errors.New("no such order\nat <script>window.pwned=1</script>"))
	})
}

// work runs all that is due.
func (r *rig) work(q *delayq.Queue, f func(context.Context, *delayq.Task) error) {
	r.Helper()
	w := delayq.NewWorker(delayq.HandlerFunc(f), q)
	w.WorkerConfig = delayq.WorkerConfig{IdleExit: 50 * time.Millisecond, MaxPoll: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
	_, err := w.Run(r.Context())
	r.ok(err)
}

// get reads a page and expects its status.
func (r *rig) get(path string, want int) string {
	r.Helper()
	return r.do(http.MethodGet, path, nil, want)
}

func (r *rig) post(path string, form url.Values, want int) string {
	r.Helper()
	return r.do(http.MethodPost, path, form, want)
}

func (r *rig) do(method, path string, form url.Values, want int) string {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), method, r.web.URL+path, strings.NewReader(form.Encode()))
	r.ok(err)
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	body, code := r.send(req)
	if code != want {
		r.Fatalf("%s %s: status %d, want %d\n%s", method, path, code, want, body)
	}
	return body
}

func (r *rig) send(req *http.Request) (string, int) {
	r.Helper()
	resp, err := r.client.Do(req)
	r.ok(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	r.ok(err)
	return string(body), resp.StatusCode
}

// state is where a task stands, "" when it is nowhere.
func (r *rig) state(q *delayq.Queue, id string) delayq.State {
	r.Helper()
	in, err := q.Get(r.Context(), id)
	if errors.Is(err, delayq.ErrNotFound) {
		return ""
	}
	r.ok(err)
	return in.State
}

func (r *rig) wantState(q *delayq.Queue, want delayq.State, ids ...string) {
	r.Helper()
	for _, id := range ids {
		if got := r.state(q, id); got != want {
			r.Errorf("%q is %q, want %q", id, got, want)
		}
	}
}

func (r *rig) wantLog(parts ...string) {
	r.Helper()
	for _, p := range parts {
		if !strings.Contains(r.log.String(), p) {
			r.Errorf("the log lacks %q:\n%s", p, r.log)
		}
	}
}

func ids(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s-%03d", prefix, i)
	}
	return all
}

func encode(s string) string { return url.QueryEscape(s) }

// workOne runs one task whose handler waits to be told to stop.
func (r *rig) workOne(q *delayq.Queue, started chan struct{}) {
	w := delayq.NewWorker(delayq.HandlerFunc(func(ctx context.Context, _ *delayq.Task) error {
		close(started)
		<-ctx.Done()
		return context.Cause(ctx)
	}), q)
	w.WorkerConfig = delayq.WorkerConfig{IdleExit: 50 * time.Millisecond, MaxPoll: 20 * time.Millisecond, Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}
	_, err := w.Run(r.Context())
	if err != nil {
		r.Error(err)
	}
}
