package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/console"
)

// tokenVar is the token that a scraper must show, for where a file is not at hand.
const tokenVar = "DELAYQ_MONITOR_TOKEN"

type monitoring struct {
	redis     server
	booked    booked
	config    monitor.Config
	listen    string
	tokenFile string
	noToken   bool
	process   bool
	pusher    pusher
	console   consoling
}

func newMonitor() *cobra.Command {
	var m monitoring
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "Serve the metrics of queues to Prometheus, and a web console",
		Long: `monitor reads the state of queues from Redis, and from the ledger if there is one, whenever it is asked:

  /         a web console to see queues, tasks and dead letters, and to mend them; docs/console.md tells who may
  /metrics  for Prometheus; docs/metrics.md lists the metrics
  /healthz  200 while the process lives
  /readyz   200 while Redis answers, else 503

Of itself it changes nothing, and starts although Redis or the database is away: that shows in the metrics. Several may run at once.

An address that others can reach needs a token, which /metrics then wants as "Authorization: Bearer TOKEN": from --token-file, or from
$` + tokenVar + `. /healthz and /readyz tell nothing and want none. The console has a token of its own, from --console-token-file or
$` + consoleTokenVar + `, and without it answers only this machine. Put TLS in front where the network is not trusted.

Exit status: 0 stopped as asked, 1 it cannot listen, 2 wrong usage.`,
		Example: `  delayq monitor --redis redis://127.0.0.1:6379
  delayq monitor --queue orders --listen 0.0.0.0:9464 --token-file /run/secrets/delayq-token
  delayq monitor --listen off --push http://pushgateway:9091 --push-every 30s`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return m.run(cmd) },
	}
	m.redis.flags(cmd, redisDefault)
	m.booked.flags(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&m.config.Queues, "queue", nil, "`names` of queues, with commas or as several flags; "+
		"default all that there are, looked for every minute")
	f.IntVar(&m.config.MostQueues, "most-queues", 100, "watch no more than these, the first by name; the rest are counted as left out")
	f.DurationVar(&m.config.Timeout, "timeout", 5*time.Second, "longest wait for the servers' answers at a scrape")
	f.DurationVar(&m.config.StaleAfter, "stale-after", time.Minute, "a consumer that is silent for so long is stale")
	f.DurationVar(&m.config.StuckAfter, "stuck-after", 5*time.Minute, "a consumer that lives without progress for so long is stuck")
	f.StringVar(&m.listen, "listen", "127.0.0.1:9464", "`address` to serve at; off to serve nothing")
	f.StringVar(&m.tokenFile, "token-file", "", "`file` with the token that a scraper must show; default $"+tokenVar)
	f.BoolVar(&m.noToken, "insecure-no-token", false, "serve the metrics without a token, under any name: whoever reaches the address may read")
	f.BoolVar(&m.process, "process-metrics", false, "add the go_ and process_ metrics of this process")
	m.pusher.flags(cmd)
	m.console.flags(f)
	return cmd
}

func (m *monitoring) run(cmd *cobra.Command) error {
	if m.listen == "off" && m.pusher.url == "" && os.Getenv(pushVar) == "" {
		return usagef("--listen: off leaves nothing to do; give --push")
	}
	token, err := m.token()
	if err != nil {
		return err
	}
	if m.listen != "off" && token == "" && !m.noToken && !loopback(m.listen) {
		return usagef("--listen: %s can be reached by others; give --token-file, or set %s", m.listen, tokenVar)
	}
	pushTo, err := m.pusher.open()
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	m.config.Logger = log
	watcher, done, err := m.open()
	if err != nil {
		return err
	}
	defer done()
	ctx, stop := drainOnSignal(cmd.Context(), func() {})
	defer stop()
	if pushTo != nil {
		pushing := make(chan struct{})
		go func() { defer close(pushing); m.pusher.run(ctx, pushTo.Collector(watcher.Collector()), log) }()
		defer func() { stop(); <-pushing }()
	}
	if m.listen == "off" {
		<-ctx.Done()
		return nil
	}
	routes := m.routes(watcher, token)
	if m.console.on {
		page, err := m.page(watcher, log)
		if err != nil {
			return err
		}
		go page.Run(ctx)
		routes.Handle("/", page)
	}
	return m.serve(ctx, cmd.ErrOrStderr(), routes)
}

// open makes the monitor; nothing is dialled yet.
func (m *monitoring) open() (watcher *monitor.Monitor, done func(), err error) {
	if err := m.limits(); err != nil {
		return nil, nil, err
	}
	if err := m.redis.fromEnv(); err != nil {
		return nil, nil, err
	}
	if m.config.Redis, err = m.redis.connect(); err != nil {
		return nil, nil, err
	}
	var pool *pgxpool.Pool
	done = func() {
		m.config.Redis.Close()
		if pool != nil {
			pool.Close()
		}
	}
	pool, m.config.Horizon, err = m.booked.late()
	if pool != nil {
		m.config.Ledger = &lateLedger{pool: pool}
	}
	if err == nil {
		watcher, err = monitor.New(m.config)
		if in := (*delayq.InputError)(nil); errors.As(err, &in) && in.Field == "Config.Queues" {
			err = usagef("--queue: must be %s, not %s", in.Limit, in.Got)
		}
	}
	if err != nil {
		done()
		return nil, nil, err
	}
	return watcher, done, nil
}

// limits checks what monitor.New would take 0 for the default of.
func (m *monitoring) limits() error {
	switch c := &m.config; {
	case c.MostQueues < 1 || c.MostQueues > 10_000:
		return usagef("--most-queues: want 1 to 10000, not %d", c.MostQueues)
	case c.Timeout < 10*time.Millisecond:
		return usagef("--timeout: want at least 10ms, not %s", c.Timeout)
	case c.StaleAfter < time.Second:
		return usagef("--stale-after: want at least 1s, not %s", c.StaleAfter)
	case c.StuckAfter < time.Second:
		return usagef("--stuck-after: want at least 1s, not %s", c.StuckAfter)
	}
	return nil
}

// page is the console. It has a guard of its own.
func (m *monitoring) page(watcher *monitor.Monitor, log *slog.Logger) (*console.Console, error) {
	cfg, err := m.console.config(log)
	if err != nil {
		return nil, err
	}
	if led, ok := m.config.Ledger.(*lateLedger); ok {
		cfg.History = historyOf(led.open)
	}
	return console.New(watcher, cfg)
}

// routes is what is served beside the console.
func (m *monitoring) routes(watcher *monitor.Monitor, token string) *http.ServeMux {
	mux := http.NewServeMux()
	var more []prometheus.Gatherer
	if m.process {
		own := prometheus.NewRegistry()
		own.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		more = append(more, own)
	}
	metrics := watcher.Handler(more...)
	switch {
	case token != "":
		metrics = guarded(token, metrics)
	case !m.noToken:
		metrics = calledByAddress(metrics)
	}
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	ready := readiness{ask: func(ctx context.Context) error { return watcher.Server(ctx).Err }}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if ready.is(r.Context()) != nil { // what it says may hold an address
			http.Error(w, "redis does not answer", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// readiness asks Redis once a second at most, however many ask here: anybody may.
type readiness struct {
	ask func(context.Context) error
	mu  sync.Mutex
	at  time.Time
	err error
}

func (r *readiness) is(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.at) > time.Second {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second) // the answer is for others too
		defer cancel()
		r.err = r.ask(ctx)
		r.at = time.Now()
	}
	return r.err
}

// calledByAddress guards what only this machine reaches against a page in its browser whose name is made to point here.
func calledByAddress(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		if !loopback(net.JoinHostPort(strings.Trim(host, "[]"), "0")) {
			http.Error(w, "without a token, call this machine by 127.0.0.1 or localhost", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// guarded lets those in who show the token.
func guarded(token string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, shown, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") || !monitor.SameToken(shown, token) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="delayq"`)
			http.Error(w, "a token is wanted", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func (m *monitoring) token() (string, error) {
	token := os.Getenv(tokenVar)
	if m.tokenFile != "" {
		b, err := os.ReadFile(m.tokenFile)
		if err != nil {
			return "", usagef("--token-file: %w", err)
		}
		token = string(b)
	}
	token = strings.TrimSpace(token)
	if m.tokenFile != "" && token == "" {
		return "", usagef("--token-file: %s is empty", m.tokenFile)
	}
	return token, nil
}

// loopback reports whether only this machine reaches an address.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (m *monitoring) serve(ctx context.Context, w io.Writer, h http.Handler) error {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", m.listen)
	if err != nil {
		return failf("--listen: %w", err)
	}
	fmt.Fprintf(w, "delayq monitor: http://%s/metrics\n", listener.Addr())
	if m.console.on {
		fmt.Fprintf(w, "delayq monitor: http://%s/ is the console\n", listener.Addr())
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(listener) }()
	select {
	case err := <-served:
		return failf("%w", err)
	case <-ctx.Done():
	}
	// Scrapes under way get their answer.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.config.Timeout+time.Second)
	defer cancel()
	if err := srv.Shutdown(ending); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return failf("%w", err)
	}
	return nil
}
