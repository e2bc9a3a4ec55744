package functions

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-lambda-go/events"

	"github.com/delayq/toolkit/scripts/servers"
)

const testToken = "a-token-of-the-tests"

// request is an event of a function URL.
func request(method, path string, headers ...string) string {
	r := events.LambdaFunctionURLRequest{Version: "2.0", RawPath: path, Headers: map[string]string{}}
	r.RequestContext.HTTP = events.LambdaFunctionURLRequestContextHTTPDescription{Method: method, Path: path, SourceIP: "192.0.2.1"}
	for pair := range slices.Chunk(headers, 2) {
		r.Headers[pair[0]] = pair[1]
	}
	text, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// ask sends a request and returns what the caller would get.
func ask(t *testing.T, e *environment, event string) (status int, header map[string]string, body string) {
	t.Helper()
	e.startWith(event, 10*time.Second)
	a := e.answer()
	var r events.LambdaFunctionURLResponse
	if a.failure != "" || json.Unmarshal(a.raw, &r) != nil || r.StatusCode == 0 {
		t.Fatalf("answer %s, failure %q", a.raw, a.failure)
	}
	body = r.Body
	if r.IsBase64Encoded {
		raw, err := base64.StdEncoding.DecodeString(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		body = string(raw)
	}
	return r.StatusCode, r.Headers, body
}

func TestTheMonitorServesPrometheus(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_MONITOR_TOKEN="+testToken)
	b.enqueueMany(5)
	e := b.monitor()
	bearer := "Bearer " + testToken
	due := fmt.Sprintf(`delayq_tasks{queue=%q,state="due"} 5`, b.name)

	status, header, body := ask(t, e, request("GET", "/metrics", "authorization", bearer))
	if status != 200 || !strings.Contains(body, due) || !strings.Contains(body, "delayq_up 1") || !strings.HasPrefix(header["Content-Type"], "text/plain; version=0.0.4") ||
		header["Cache-Control"] != "no-store" {
		t.Errorf("%d %v\n%s", status, header, body)
	}
	status, header, body = ask(t, e, request("GET", "/metrics", "authorization", bearer, "accept-encoding", "gzip", "accept", "text/plain;version=0.0.4"))
	if status != 200 || header["Content-Encoding"] != "gzip" {
		t.Fatalf("%d %v", status, header)
	}
	zip, err := gzip.NewReader(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(zip); err != nil || !bytes.Contains(text, []byte(due)) {
		t.Errorf("%v: %s", err, text)
	}

	for name, tt := range map[string]struct {
		event  string
		status int
	}{
		"no token":         {request("GET", "/metrics"), 401},
		"another":          {request("GET", "/metrics", "authorization", bearer+"x"), 401},
		"shorter":          {request("GET", "/metrics", "authorization", bearer[:len(bearer)-1]), 401},
		"another scheme":   {request("GET", "/metrics", "authorization", "Basic "+testToken), 401},
		"bare":             {request("GET", "/metrics", "authorization", testToken), 401},
		"not a path first": {request("GET", "/nothing"), 401},
		"another path":     {request("GET", "/nothing", "authorization", bearer), 404},
		"a path with more": {request("GET", "/metrics/x", "authorization", bearer), 404},
		"a host as path":   {request("GET", "//example.com/metrics", "authorization", bearer), 404},
		"another method":   {request("POST", "/metrics", "authorization", bearer), 405},
		"no method":        {request("G T", "/metrics", "authorization", bearer), 400},
		"a broken path":    {request("GET", "/%zz", "authorization", bearer), 400},
	} {
		status, header, body := ask(t, e, tt.event)
		if status != tt.status || strings.Contains(body, "delayq_") || status == 401 && header["Www-Authenticate"] != "Bearer" {
			t.Errorf("%s: %d %v %s", name, status, header, body)
		}
	}
	if status, _, body := ask(t, e, request("HEAD", "/metrics", "authorization", bearer)); status != 200 || body != "" {
		t.Errorf("HEAD: %d %q", status, body)
	}

	// The same process takes ticks, and any other event is one.
	for _, event := range []string{`{}`, `[]`, `"x"`, `null`, `{"requestContext":"x"}`, `{"headers":7,"requestContext":{"http":{}}}`, `{"source":"aws.scheduler"}`} {
		ev := e.startWith(event, 10*time.Second)
		a := e.answer()
		var got Watched
		if a.failure != "" || json.Unmarshal(a.raw, &got) != nil || got.RequestID != ev.id || got.Queues != 1 {
			t.Errorf("%s: %s %s", event, a.raw, a.failure)
		}
	}
	wantMetrics(t, e, b.name, map[string]any{"TasksDue": 5.})
	if log := e.log.String(); strings.Contains(log, testToken) || strings.Contains(log, "192.0.2.1") {
		t.Error("a token or an address is in the log")
	}

	silent := b.monitor("DELAYQ_MONITOR_TOKEN=")
	for _, headers := range [][]string{nil, {"authorization", "Bearer "}, {"authorization", bearer}} {
		if status, _, body := ask(t, silent, request("GET", "/metrics", headers...)); status != 403 || strings.Contains(body, "delayq_") {
			t.Errorf("without a token to compare with: %d %s", status, body)
		}
	}
}

// What cannot be read is a scrape error, within the time that the scraper has.
func TestTheMonitorServesWithoutRedis(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBench(t, server, "DELAYQ_MONITOR_TOKEN="+testToken)
	proxy := servers.NewProxy(t, server.Addr())
	e := b.monitor("DELAYQ_REDIS_URL=redis://" + proxy.Addr())
	proxy.BlackHole(true)
	start := time.Now()
	status, _, body := ask(t, e, request("GET", "/metrics", "authorization", "Bearer "+testToken, "x-prometheus-scrape-timeout-seconds", "2"))
	if status != 200 || !strings.Contains(body, "delayq_up 0") || strings.Contains(body, "delayq_tasks") ||
		!strings.Contains(body, fmt.Sprintf("delayq_scrape_error{queue=%q} 1", b.name)) {
		t.Errorf("%d %s", status, body)
	}
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("it took %s", took)
	}
}

// Whatever a stranger sends is answered without numbers, and whatever is no request is left to the tick.
func FuzzURLRequest(f *testing.F) {
	for _, event := range []string{
		`{}`, `[]`, `7`, ``, `{"requestContext":{"http":{"method":"GET"}},"rawPath":"/metrics","headers":{"authorization":"Bearer x"}}`,
		request("GET", "/metrics", "Authorization", "Bearer"), request("GET", "//a@b/metrics?x=%zz"), request("", "/metrics"), request("GET", ":"),
		`{"requestContext":{"http":{"method":"GET"}},"rawPath":"","rawQueryString":"%","headers":{"":"","\n":"\r"}}`,
	} {
		f.Add([]byte(event))
	}
	w := &watching{process: &process{cfg: Config{MonitorToken: testToken}}}
	f.Fuzz(func(t *testing.T, event []byte) {
		r, err := urlRequest(t.Context(), event)
		if r == nil || err != nil {
			return
		}
		a := urlAnswer(w.requests(slog.New(slog.DiscardHandler)), r)
		if a.StatusCode != 401 || r.URL.Host != "function" {
			t.Errorf("%d of %s, by %q", a.StatusCode, r.URL, event)
		}
		if _, err := json.Marshal(a); err != nil {
			t.Error(err)
		}
	})
}
