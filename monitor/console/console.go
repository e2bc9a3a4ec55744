// Package console is a web page to watch delay queues and to mend them: queues and their consumers, tasks, dead letters.
//
// It is served as it is, without a build step and without anything from elsewhere. Reading never scans a queue: each page costs
// what its rows cost. See docs/console.md for what it does to be safe.
package console

import (
	"context"
	"embed"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// Config says who may use the console, and for what. The zero Config is for one's own machine: it answers only requests that come
// from it, to an address of it.
type Config struct {
	// Token opens the console to whoever knows it: on the login page, or as "Authorization: Bearer". At least 16 bytes.
	// Without it and without TrustedProxyHeader only this machine is answered; a proxy on this machine would let everybody in.
	Token string
	// TrustedProxyHeader is a header in which a proxy says who the user is, after it has made sure, such as "X-Forwarded-User".
	// The proxy must drop what clients send under that name. The name stands in the audit lines.
	TrustedProxyHeader string
	// TrustedProxies are where that proxy may be. Defaults to this machine alone.
	TrustedProxies []netip.Prefix
	// Hosts are the names under which the console is reached, as in the browser's address, without a port. Loopback names always
	// work, and with Token alone any name does: a page that points its own name here has no session under it.
	Hosts []string
	// ReadOnly leaves out everything that changes something.
	ReadOnly bool
	// ShowPayloads lets all users see what tasks carry, which may be personal data. Ids, keys and the texts of errors are always shown.
	ShowPayloads bool
	// History tells what has happened to a task, oldest first; nil when the queues have no ledger. Errors: delayq.ErrNotFound and
	// delayq.ErrNoQueue when the ledger does not know it.
	History func(ctx context.Context, queue, id string) ([]Event, error)
	// Logger gets a line for every change and for every refusal. Defaults to slog.Default().
	Logger *slog.Logger
}

// An Event is something that has happened to a task, or will.
type Event struct {
	At      time.Time
	Name    string // such as "retry", "lost", "rescheduled"
	By      string // the consumer whose lease it was
	Attempt int    // the number of its run
	Reason  string
	Error   string
}

// A Console is an http.Handler for the root of a server. It is safe for concurrent use.
type Console struct {
	m       *monitor.Monitor
	cfg     Config
	log     *slog.Logger
	views   *views
	key     []byte // signs sessions, confirmations and notices
	slow    chan struct{}
	handler http.Handler
	now     func() time.Time
	penalty time.Duration
}

// New returns the console of what a monitor watches. Errors: delayq.ErrInvalid.
func New(m *monitor.Monitor, cfg Config) (*Console, error) {
	switch {
	case cfg.Token != "" && len(cfg.Token) < LeastToken:
		return nil, &delayq.InputError{Field: "Config.Token", Limit: fmt.Sprintf("at least %d bytes", LeastToken), Got: fmt.Sprintf("%d", len(cfg.Token))}
	case strings.ContainsAny(cfg.TrustedProxyHeader, " :\r\n\t"):
		return nil, &delayq.InputError{Field: "Config.TrustedProxyHeader", Limit: "the name of a header", Got: "other bytes"}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if len(cfg.TrustedProxies) == 0 {
		cfg.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	}
	c := &Console{
		m: m, cfg: cfg, log: cfg.Logger, views: newViews(m.Look), key: keyOf(cfg.Token), slow: make(chan struct{}, mostSlow),
		now: time.Now, penalty: time.Second,
	}
	c.handler = c.routes()
	return c, nil
}

// Run looks at the queues every 10 s until ctx ends, so that the charts have a past when somebody opens them. Without it they
// have what was seen while somebody looked.
func (c *Console) Run(ctx context.Context) { c.views.run(ctx) }

// ServeHTTP serves the console.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.handler.ServeHTTP(w, r) }

//go:embed static/*
var static embed.FS

func (c *Console) routes() http.Handler {
	inside := http.NewServeMux()
	inside.HandleFunc("GET /{$}", c.overview)
	inside.HandleFunc("GET /series", c.series)
	inside.HandleFunc("GET /queue/{queue}", c.queue)
	inside.HandleFunc("GET /queue/{queue}/task/{id}", c.task)
	inside.HandleFunc("GET /queue/{queue}/dead", c.deadLetters)
	inside.HandleFunc("GET /dead", c.deadQueues)
	inside.HandleFunc("GET /search", c.search)
	inside.HandleFunc("POST /queue/{queue}/act", c.act)
	inside.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { c.fail(w, r, errNoPage) })

	outside := http.NewServeMux()
	outside.HandleFunc("GET /static/"+assetsVersion+"/{file}", serveAsset)
	outside.HandleFunc("GET /login", c.loginPage)
	outside.HandleFunc("POST /login", c.login)
	outside.HandleFunc("POST /logout", c.logout)
	outside.Handle("/", c.onlyUsers(inside))
	return withHeaders(c.sameOrigin(outside))
}
