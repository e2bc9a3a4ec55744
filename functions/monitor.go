package functions

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-lambda-go/events"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// Watched is the answer to a tick of the monitor, and what it logs.
type Watched struct {
	RequestID string `json:"request_id"`
	ColdStart bool   `json:"cold_start"` // the first invocation of this process
	ElapsedMS int64  `json:"elapsed_ms"`

	Queues  int `json:"queues"`             // that were looked at
	LeftOut int `json:"left_out,omitempty"` // queues beyond the most that are watched
	// Errors says what could not be read, by queue; of Redis itself under "redis".
	Errors map[string]string `json:"errors,omitempty"`
}

// WithMetrics sets where the monitor writes its CloudWatch metrics. By default it is standard output, of which CloudWatch reads them.
func WithMetrics(w io.Writer) Option {
	return func(p *process) { p.metrics = w }
}

// A watching is a process that looks at queues.
type watching struct {
	*process

	made    sync.Mutex
	monitor *monitor.Monitor
	handler http.Handler
}

// Monitor returns the handler of a function that looks at queues, to be given to lambda.Start. It serves two kinds of events, which it
// tells apart by their shape, and changes nothing in Redis or the database.
//
// A tick, which is any event that is not a request, is one look at all queues of Config.Queues, whose numbers go to standard output as
// CloudWatch metrics; see monitor.WriteEMF. The answer is a [Watched].
//
// A request of a function URL is answered with the metrics in Prometheus' text format, if it is for /metrics and brings
// "Authorization: Bearer" and Config.MonitorToken. With another token, or none, it is refused with status 401; without a MonitorToken all
// are refused with 403. Nobody is given numbers of an earlier look.
//
// A tick succeeds although Redis or the database is away: it has then written so, as the metrics ScrapeError and RedisUp. It returns an
// error when it can say nothing: the configuration is wrong, less than twice the margin is left (delayq.ErrNoTime), or the metrics could
// not be written. So an alarm on ScrapeError that takes missing data for breaching, as that of template.yaml, fires in any case.
//
// The handler may be called from several goroutines at once.
func Monitor(opts ...Option) func(context.Context, json.RawMessage) (any, error) {
	w := &watching{process: newProcess(opts, false)}
	if w.metrics == nil {
		w.metrics = os.Stdout
	}
	return w.invoke
}

func (w *watching) invoke(ctx context.Context, event json.RawMessage) (any, error) {
	start := time.Now()
	s := Watched{RequestID: requestID(ctx), ColdStart: !w.warm.Swap(true)}
	log := w.log.With("request_id", s.RequestID)
	answer, err := w.answer(ctx, event, &s, log)
	s.ElapsedMS = time.Since(start).Milliseconds()
	switch {
	case err != nil:
		log.ErrorContext(ctx, "monitor could not work", "error", err.Error(), "cold_start", s.ColdStart, "elapsed_ms", s.ElapsedMS)
		return s, err
	case answer != nil: // to a request: a line for each would let strangers fill the log
		log.DebugContext(ctx, "monitor request", "elapsed_ms", s.ElapsedMS)
		return answer, nil
	case len(s.Errors) > 0:
		log.WarnContext(ctx, "monitor run, with errors", "summary", s)
	default:
		log.InfoContext(ctx, "monitor run", "summary", s)
	}
	return s, nil
}

// answer does what the event asks for. The answer is nil to a tick, and the rest is then in s.
func (w *watching) answer(ctx context.Context, event json.RawMessage, s *Watched, log *slog.Logger) (any, error) {
	if w.err != nil {
		return nil, w.err
	}
	if err := w.enoughTime(ctx); err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok { // what was seen until then must still get out
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-w.margin()))
		defer cancel()
	}
	switch r, err := urlRequest(ctx, event); {
	case err != nil: // the caller's fault, and no failure of the function
		return events.LambdaFunctionURLResponse{StatusCode: http.StatusBadRequest}, nil
	case r != nil:
		return urlAnswer(w.requests(log), r), nil
	}
	return nil, w.look(ctx, s)
}

// look is one look at all queues.
func (w *watching) look(ctx context.Context, s *Watched) error {
	m, _, err := w.ready()
	if err != nil {
		return err
	}
	v := m.Look(ctx)
	s.Queues, s.LeftOut = len(v.Queues), v.LeftOut
	if v.Server.Err != nil {
		s.fail("redis", v.Server.Err)
	}
	for _, q := range v.Queues {
		if q.Err != nil {
			s.fail(q.Name, q.Err)
		}
	}
	if err := monitor.WriteEMF(w.metrics, w.cfg.MetricsNamespace, v); err != nil {
		return fmt.Errorf("functions: metrics: %w", err)
	}
	return nil
}

func (s *Watched) fail(what string, err error) {
	if s.Errors == nil {
		s.Errors = map[string]string{}
	}
	s.Errors[what] = err.Error()
}

// requests answers a request, if its sender may ask.
func (w *watching) requests(log *slog.Logger) http.Handler {
	metrics := http.NewServeMux()
	metrics.HandleFunc("GET /metrics", func(rw http.ResponseWriter, r *http.Request) {
		_, handler, err := w.ready()
		if err != nil {
			log.ErrorContext(r.Context(), "monitor request", "error", err.Error())
			http.Error(rw, "the metrics cannot be served; the log says why", http.StatusInternalServerError)
			return
		}
		handler.ServeHTTP(rw, r)
	})
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Cache-Control", "no-store")
		token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		switch {
		case w.cfg.MonitorToken == "":
			http.Error(rw, envPrefix+"MONITOR_TOKEN is not set: nobody is served", http.StatusForbidden)
		case !bearer || !monitor.SameToken(token, string(w.cfg.MonitorToken)):
			rw.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(rw, "a bearer token is needed", http.StatusUnauthorized)
		default:
			metrics.ServeHTTP(rw, r)
		}
	})
}

// ready returns the monitor, and what serves its metrics; nothing is dialled for them.
func (w *watching) ready() (*monitor.Monitor, http.Handler, error) {
	w.made.Lock()
	defer w.made.Unlock()
	if w.monitor != nil {
		return w.monitor, w.handler, nil
	}
	cfg := monitor.Config{
		Redis: w.rdb, Horizon: w.cfg.Horizon, ScriptHeader: w.cfg.ScriptHeader, Queues: w.cfg.Queues, MostQueues: len(w.cfg.Queues),
	}
	if w.led != nil || w.database != nil {
		cfg.Ledger = lateLedger{w.process}
	}
	m, err := monitor.New(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("functions: %w", err)
	}
	w.monitor, w.handler = m, m.Handler()
	return w.monitor, w.handler, nil
}

// A lateLedger is the process' ledger, which is opened when it is first asked for a queue, and again after that failed: the monitor
// then says of a database that is away what it says of one that goes away later.
type lateLedger struct{ p *process }

func (l lateLedger) OpenQueue(ctx context.Context, name string, want delayq.LedgerConfig, create bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	led, err := l.p.ledger(ctx)
	if err != nil {
		return nil, delayq.LedgerConfig{}, err
	}
	return led.OpenQueue(ctx, name, want, create)
}
