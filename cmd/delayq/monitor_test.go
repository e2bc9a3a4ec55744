package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

// A served monitor is the verb itself, in this process.
type served struct {
	*testing.T
	url  string
	said *said
	end  func() error
}

// said is what the verb has printed.
type said struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

var servedAt = regexp.MustCompile(`http://(\S+)/metrics`)

// begin runs delayq monitor until the test ends.
func begin(t *testing.T, args ...string) (out *said, end func() error) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	out = &said{}
	root := newRoot()
	root.SetArgs(append([]string{"monitor"}, args...))
	root.SetOut(out)
	root.SetErr(out)
	ended := make(chan error, 1)
	go func() { ended <- root.ExecuteContext(ctx) }()
	var once sync.Once
	var err error
	end = func() error {
		once.Do(func() { stop(); err = <-ended })
		return err
	}
	t.Cleanup(func() { _ = end() })
	return out, end
}

func serveMonitor(t *testing.T, args ...string) *served {
	t.Helper()
	out, end := begin(t, append([]string{"--listen", "127.0.0.1:0"}, args...)...)
	s := &served{T: t, said: out, end: end}
	for until := time.Now().Add(10 * time.Second); s.url == ""; time.Sleep(5 * time.Millisecond) {
		if at := servedAt.FindStringSubmatch(out.String()); at != nil {
			s.url = "http://" + at[1]
		} else if time.Now().After(until) {
			t.Fatalf("it does not serve: %s %v", out, end())
		}
	}
	return s
}

func (s *served) get(path, authorization string) (int, string) {
	s.Helper()
	req, err := http.NewRequestWithContext(s.Context(), http.MethodGet, s.url+path, nil)
	if err != nil {
		s.Fatal(err)
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		s.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.Fatal(err)
	}
	return res.StatusCode, string(body)
}

func queueOn(t *testing.T, server *servers.Redis, name string) {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Enqueue(t.Context(), delayq.Task{ID: "a", Type: "t", Payload: []byte("p")}); err != nil {
		t.Fatal(err)
	}
}

func TestMonitorServes(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	queueOn(t, server, "orders")
	const token = "s3cret-token"
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := serveMonitor(t, "--redis", server.URL(), "--token-file", file, "--timeout", "500ms", "--process-metrics")
	for _, shown := range []string{"", token, "Bearer", "Bearer ", "Bearer wrong", "Basic " + token, "Bearer " + token + "x", "Bearer  " + token} {
		if code, body := m.get("/metrics", shown); code != http.StatusUnauthorized || strings.Contains(body, "delayq_") {
			t.Errorf("%q: %d %s", shown, code, body)
		}
	}
	code, body := m.get("/metrics", "bearer "+token) // the scheme is in any case
	for _, want := range []string{`delayq_tasks{queue="orders",state="due"} 1`, "delayq_up 1", "go_goroutines ", "process_start_time_seconds "} {
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%d, without %s: %s", code, want, body)
		}
	}
	healthy := func(want int) {
		t.Helper()
		if code, body := m.get("/healthz", ""); code != http.StatusOK {
			t.Errorf("/healthz: %d %s", code, body)
		}
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) { // its answer is kept for a second
			code, body := m.get("/readyz", "")
			if strings.Contains(body, "127.0.0.1") {
				t.Errorf("/readyz tells where Redis is: %s", body)
			}
			if code == want {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("/readyz: %d %s", code, body)
			}
		}
	}
	healthy(http.StatusOK)
	if err := server.Pause(); err != nil {
		t.Fatal(err)
	}
	healthy(http.StatusServiceUnavailable)
	if code, body := m.get("/metrics", "Bearer "+token); code != http.StatusOK || !strings.Contains(body, "delayq_up 0") || strings.Contains(body, "delayq_tasks{") {
		t.Errorf("%d %s", code, body)
	}
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	healthy(http.StatusOK)
	if code, _ := m.get("/debug/pprof/", "Bearer "+token); code != http.StatusNotFound {
		t.Errorf("what is not there: %d", code)
	}
	if err := m.end(); err != nil {
		t.Errorf("the end: %v", err)
	}
	if strings.Contains(m.said.String(), token) {
		t.Errorf("the token is told: %s", m.said)
	}
}

// A page in a browser of this machine can make its own name point to the monitor.
func TestMonitorIsCalledByItsAddress(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	queueOn(t, server, "orders")
	asked := func(m *served, host string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, m.url+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		if host != "" {
			req.Host = host
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode
	}
	m := serveMonitor(t, "--redis", server.URL())
	for host, want := range map[string]int{
		"": 200, "localhost": 200, "localhost:9464": 200, "127.0.0.1": 200, "[::1]:80": 200, "[::1]": 200, "evil.example:9464": 403, "10.0.0.1": 403,
	} {
		if got := asked(m, host); got != want {
			t.Errorf("called %q: %d, want %d", host, got, want)
		}
	}
	if got := asked(serveMonitor(t, "--redis", server.URL(), "--insecure-no-token"), "monitor.internal"); got != http.StatusOK {
		t.Errorf("under any name: %d", got)
	}
}

func TestReadinessIsAskedForOnceASecond(t *testing.T) {
	t.Parallel()
	asked := 0
	r := readiness{ask: func(context.Context) error { asked++; return nil }}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 1000 {
		if err := r.is(gone); err != nil {
			t.Fatal(err)
		}
	}
	if asked > 100 { // a second each
		t.Errorf("asked %d times", asked)
	}
}

func TestMonitorStartsWhileServersAreAway(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	queueOn(t, server, "orders")
	m := serveMonitor(t, "--redis", server.URL(), "--database", "postgres://nobody:s3cret@127.0.0.1:1/none", "--timeout", "3s")
	if code, body := m.get("/metrics", ""); code != http.StatusOK || !strings.Contains(body, `delayq_tasks{queue="orders",state="due"} 1`) {
		t.Errorf("without the database: %d %s", code, body)
	}
	m = serveMonitor(t, "--redis", "redis://:s3cret@127.0.0.1:1", "--queue", "orders,more", "--timeout", "1s")
	if code, body := m.get("/metrics", ""); code != http.StatusOK || !strings.Contains(body, `delayq_scrape_error{queue="more"} 1`) || !strings.Contains(body, "delayq_up 0") {
		t.Errorf("without Redis: %d %s", code, body)
	}
	if strings.Contains(m.said.String(), "s3cret") {
		t.Errorf("the password is told: %s", m.said)
	}
}

func TestMonitorPushes(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	queueOn(t, server, "orders")
	pushed := make(chan string, 100)
	var fail sync.Once
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refused := false
		fail.Do(func() { refused = true })
		if refused {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		user, password, _ := r.BasicAuth()
		body, _ := io.ReadAll(r.Body)
		pushed <- r.Method + " " + r.URL.Path + " " + user + ":" + password + " " + string(body)
	}))
	defer gateway.Close()
	to := strings.Replace(gateway.URL, "://", "://me:s3cret@", 1)
	out, end := begin(t, "--listen", "off", "--redis", server.URL(), "--push", to, "--push-every", "1s")
	select {
	case got := <-pushed:
		if !strings.HasPrefix(got, "PUT /metrics/job/delayq me:s3cret ") || !strings.Contains(got, "orders") {
			t.Errorf("pushed %q", got)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nothing is pushed")
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if said := out.String(); !strings.Contains(said, "push failed") || strings.Contains(said, "s3cret") {
		t.Errorf("the refused push: %s", said)
	}
}
