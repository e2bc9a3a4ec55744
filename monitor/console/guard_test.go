package console

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const token = "0123456789abcdef-token"

// An answer is what came of one request, without following it.
type answer struct {
	StatusCode int
	Header     http.Header
	Cookies    []*http.Cookie
}

// ask sends one request with headers.
func (r *rig) ask(method, path string, headers map[string]string, form url.Values) answer {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), method, r.web.URL+path, strings.NewReader(form.Encode()))
	r.ok(err)
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for k, v := range headers {
		if k == "Host" {
			req.Host = v
			continue
		}
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	r.ok(err)
	defer resp.Body.Close()
	return answer{resp.StatusCode, resp.Header, resp.Cookies()}
}

func TestWhoGetsIn(t *testing.T) {
	t.Parallel()
	bearer := map[string]string{"Authorization": "Bearer " + token}
	for _, c := range []struct {
		name    string
		cfg     Config
		headers map[string]string
		want    int
	}{
		{"this machine", Config{}, nil, 200},
		{"by a name of this machine", Config{}, map[string]string{"Host": "localhost:80"}, 200},
		{"by IPv6", Config{}, map[string]string{"Host": "[::1]:80"}, 200},
		{"a name that a foreign page has pointed here", Config{}, map[string]string{"Host": "evil.example:80"}, 421},
		{"a name that is configured", Config{Hosts: []string{"queues.example"}}, map[string]string{"Host": "Queues.example"}, 200},
		{"by a proxy on this machine, for others", Config{}, map[string]string{"X-Forwarded-For": "192.0.2.1"}, 403},
		{"no token", Config{Token: token}, nil, 303},
		{"the token", Config{Token: token}, bearer, 200},
		{"the token, in another case", Config{Token: token}, map[string]string{"Authorization": "bearer " + token}, 200},
		{"another token", Config{Token: token}, map[string]string{"Authorization": "Bearer " + token + "x"}, 401},
		{"an empty token", Config{Token: token}, map[string]string{"Authorization": "Bearer "}, 401},
		{"not a bearer", Config{Token: token}, map[string]string{"Authorization": "Basic " + token}, 401},
		{"a script without a session", Config{Token: token}, map[string]string{"HX-Request": "true"}, 401},
		{"the proxy, with a user", Config{TrustedProxyHeader: "X-User"}, map[string]string{"X-User": "ann"}, 200},
		{"the proxy, without", Config{TrustedProxyHeader: "X-User"}, nil, 403},
		{"the proxy, with an empty user", Config{TrustedProxyHeader: "X-User"}, map[string]string{"X-User": " "}, 403},
		{
			"the header from elsewhere",
			Config{TrustedProxyHeader: "X-User", TrustedProxies: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
			map[string]string{"X-User": "ann"},
			403,
		},
		{"the header, under a foreign name", Config{TrustedProxyHeader: "X-User"}, map[string]string{"X-User": "ann", "Host": "evil.example"}, 421},
		{"the proxy or a token", Config{TrustedProxyHeader: "X-User", Token: token}, bearer, 200},
		{"neither", Config{TrustedProxyHeader: "X-User", Token: token}, nil, 303},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.cfg)
			resp := r.ask(http.MethodGet, "/search", c.headers, nil)
			if resp.StatusCode != c.want {
				t.Errorf("status %d, want %d", resp.StatusCode, c.want)
			}
			for header, want := range map[string]string{
				"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin", "Cache-Control": "no-store",
				"X-Frame-Options": "DENY",
			} {
				if got := resp.Header.Get(header); got != want {
					t.Errorf("%s: %q", header, got)
				}
			}
		})
	}
}

// A proxy on this machine stands for others: what it passes on is not from here, whatever it adds.
func TestAProxyIsNotThisMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	for _, header := range []string{
		"Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server", "X-Forwarded-Anything", "X-Real-IP",
		"X-Client-IP", "CF-Connecting-IP", "True-Client-IP",
	} {
		for _, value := range []string{"x", ""} {
			if code := r.ask(http.MethodGet, "/search", map[string]string{header: value}, nil).StatusCode; code != http.StatusForbidden {
				t.Errorf("%s: %q: status %d", header, value, code)
			}
		}
	}
	for version, want := range map[string]string{"1.0": "403", "1.1": "200"} {
		conn, err := net.Dial("tcp", r.web.Listener.Addr().String())
		r.ok(err)
		_, err = fmt.Fprintf(conn, "GET /search HTTP/%s\r\nHost: localhost\r\nConnection: close\r\n\r\n", version)
		r.ok(err)
		answer, err := io.ReadAll(conn)
		r.ok(err)
		conn.Close()
		if got := strings.Fields(string(answer))[1]; got != want {
			t.Errorf("HTTP/%s: status %s, want %s", version, got, want)
		}
	}
	// With a token, it may be behind one.
	r = newRig(t, Config{Token: token})
	headers := map[string]string{"Authorization": "Bearer " + token, "X-Forwarded-For": "192.0.2.1"}
	if code := r.ask(http.MethodGet, "/search", headers, nil).StatusCode; code != http.StatusOK {
		t.Errorf("with the token: status %d", code)
	}
}

// Whoever is not on this machine gets nothing without a token, whatever the request says of itself.
func TestOnlyThisMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	req := httptest.NewRequest(http.MethodGet, "http://localhost/search", nil)
	for _, peer := range []string{"192.0.2.1:1234", "[2001:db8::1]:99", "", "@"} {
		req.RemoteAddr = peer
		w := httptest.NewRecorder() // without a local address in its context, as nobody has listened
		r.c.ServeHTTP(w, req)
		if w.Code != http.StatusForbidden {
			t.Errorf("%s: status %d", peer, w.Code)
		}
	}
}

func TestSession(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{Token: token})
	r.queue("orders", delayq.Config{})
	resp := r.ask(http.MethodPost, "/login", nil, url.Values{"token": {token}, "next": {"/queue/orders"}})
	if resp.StatusCode != http.StatusSeeOther || resp.Header.Get("Location") != "/queue/orders" {
		t.Fatalf("login: %d to %q", resp.StatusCode, resp.Header.Get("Location"))
	}
	cookie := resp.Cookies[0]
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Secure || strings.Contains(cookie.Value, token) {
		t.Errorf("cookie %v", cookie)
	}
	with := func(value string) int {
		return r.ask(http.MethodGet, "/search", map[string]string{"Cookie": cookie.Name + "=" + value}, nil).StatusCode
	}
	ends, sig, _ := strings.Cut(cookie.Value, ".")
	for value, want := range map[string]int{
		cookie.Value: 200, "": 303, ends + ".": 303, "9" + ends + "." + sig: 303, ends + "." + sig + "x": 303, token: 303, "." + sig: 303,
	} {
		if got := with(value); got != want {
			t.Errorf("%q: status %d, want %d", value, got, want)
		}
	}
	r.c.now = func() time.Time { return time.Now().Add(sessionLife + time.Minute) }
	if got := with(cookie.Value); got != http.StatusSeeOther {
		t.Errorf("after its life: status %d", got)
	}
	// A proxy that speaks TLS to the browser gets a cookie that never leaves TLS.
	resp = r.ask(http.MethodPost, "/login", map[string]string{"X-Forwarded-Proto": "https"}, url.Values{"token": {token}})
	if c := resp.Cookies[0]; !c.Secure || !strings.HasPrefix(c.Name, "__Host-") {
		t.Errorf("cookie %v", c)
	}
	if strings.Contains(r.log.String(), token) {
		t.Error("the token is in the log")
	}
}

func TestLoginGoesNowhereElse(t *testing.T) {
	t.Parallel()
	for next, want := range map[string]string{
		"/queue/a?b=c": "/queue/a?b=c", "//evil.example": "/", "https://evil.example": "/", "/\\evil.example": "/", "": "/", "/\t/evil.example": "/",
		"javascript:alert(1)": "/",
	} {
		if got := localPath(next); got != want {
			t.Errorf("%q goes to %q, want %q", next, got, want)
		}
	}
}

// Guesses are held up, and who knows the token is not locked out meanwhile.
func TestGuessesAreSlow(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{Token: token})
	r.c.penalty = 300 * time.Millisecond
	var guesses sync.WaitGroup
	var mu sync.Mutex
	codes := map[int]int{}
	began := time.Now()
	for range 3 * mostSlow {
		guesses.Go(func() {
			code := r.ask(http.MethodPost, "/login", nil, url.Values{"token": {"a wrong guess of it"}}).StatusCode
			mu.Lock()
			defer mu.Unlock()
			codes[code]++
		})
	}
	if code := r.ask(http.MethodPost, "/login", nil, url.Values{"token": {token}}).StatusCode; code != http.StatusSeeOther {
		t.Errorf("the right token meanwhile: status %d", code)
	}
	if d := time.Since(began); d > r.c.penalty {
		t.Errorf("the right token took %s", d)
	}
	guesses.Wait()
	if codes[401] < mostSlow || codes[429] == 0 || codes[401]+codes[429] != 3*mostSlow {
		t.Errorf("statuses %v", codes)
	}
	r.wantLog("console: wrong token")
}

func TestWritesFromElsewhereAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one")
	form := r.confirmed("/queue/orders/act", url.Values{"do": {"purge"}, "from": {"dead"}, "id": {"one"}})
	for name, headers := range map[string]map[string]string{
		"another site":   {"Sec-Fetch-Site": "cross-site"},
		"a sibling host": {"Sec-Fetch-Site": "same-site"},
		"another origin": {"Origin": "https://evil.example"},
		"no origin":      {"Origin": "null"},
	} {
		if code := r.ask(http.MethodPost, "/queue/orders/act", headers, form).StatusCode; code != http.StatusForbidden {
			t.Errorf("%s: status %d", name, code)
		}
	}
	if code := r.ask(http.MethodGet, "/queue/orders/act?"+form.Encode(), nil, nil).StatusCode; code != http.StatusNotFound && code != http.StatusMethodNotAllowed {
		t.Errorf("GET: status %d", code)
	}
	r.wantState(q, delayq.StateDead, "one")
	if code := r.ask(http.MethodPost, "/queue/orders/act", map[string]string{"Sec-Fetch-Site": "same-origin"}, form).StatusCode; code != http.StatusSeeOther {
		t.Errorf("from here: status %d", code)
	}
	r.wantState(q, "", "one")
}

func TestReadOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{ReadOnly: true})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one")
	for _, path := range []string{"/queue/orders/dead", "/queue/orders/task/one"} {
		if strings.Contains(r.get(path, 200), "/act") {
			t.Errorf("%s offers changes", path)
		}
	}
	r.post("/queue/orders/act", url.Values{"do": {"purge"}, "id": {"one"}}, http.StatusForbidden)
	r.post("/queue/orders/act", url.Values{"do": {"purge"}, "id": {"one"}, "sure": {"x"}, "ends": {"9999999999"}}, http.StatusForbidden)
	r.wantState(q, delayq.StateDead, "one")
	r.wantLog("read-only")
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{{Token: "short"}, {TrustedProxyHeader: "X-User: x"}} {
		if _, err := New(nil, cfg); !errors.Is(err, delayq.ErrInvalid) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}
