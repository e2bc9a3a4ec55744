package delayq_test

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/lua"
	"github.com/redis/go-redis/v9"
)

// A stage is one Redis and its clients under fake time: sleeping costs nothing, and Redis' TIME moves with it.
type stage struct {
	*testing.T
	redis *miniredis.Miniredis
	rdb   *redis.Client
	wire  *wire
	log   *safeBuffer
	calls *callLog

	queues []*delayq.Queue
}

// onStage runs a test in a bubble of its own, which fails when a goroutine is left behind. At the end every queue must keep
// its invariants.
func onStage(t *testing.T, test func(t *testing.T, s *stage)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		s := &stage{T: t, redis: m, wire: &wire{dial: m.Dial}, log: &safeBuffer{}, calls: &callLog{}}
		s.rdb = s.client()
		defer m.Close()
		defer time.Sleep(2 * time.Second) // a pool that could not dial tries once a second, and ends then
		defer s.rdb.Close()
		test(t, s)
		for _, q := range s.queues {
			report, err := q.Audit(t.Context(), delayq.AuditOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range report.Violations {
				t.Errorf("queue %s: %+v", q.Name(), v)
			}
		}
	})
}

func (s *stage) client() *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  "127.0.0.1:6379", // never dialled, but a name would be looked up, outside the bubble
		Dialer:                func(context.Context, string, string) (net.Conn, error) { return s.wire.connect() },
		ContextTimeoutEnabled: true,
		DialerRetries:         1,
	})
	rdb.AddHook(s.calls)
	return rdb
}

func (s *stage) queue(name string, cfg delayq.Config) *delayq.Queue {
	s.Helper()
	cfg.OnWarning = func(delayq.Warning) {}
	q, err := delayq.Open(s.Context(), s.rdb, name, cfg)
	if err != nil {
		s.Fatal(err)
	}
	s.queues = append(s.queues, q)
	return q
}

// add enqueues a task of type "t" unless an option says otherwise.
func (s *stage) add(q *delayq.Queue, id string, opts ...delayq.Option) {
	s.Helper()
	if _, err := q.Enqueue(s.Context(), delayq.Task{ID: id, Type: "t"}, opts...); err != nil {
		s.Fatal(err)
	}
}

func ofType(typ string) delayq.Option { return func(t *delayq.Task) { t.Type = typ } }

func carrying(payload string) delayq.Option {
	return func(t *delayq.Task) { t.Payload = []byte(payload) }
}

func (s *stage) get(q *delayq.Queue, id string) *delayq.Info {
	s.Helper()
	in, err := q.Get(s.Context(), id)
	if err != nil {
		s.Fatal(err)
	}
	return in
}

// list pages through all tasks of a state.
func (s *stage) list(q *delayq.Queue, state delayq.State) (all []delayq.Info) {
	s.Helper()
	for cursor := ""; ; {
		page, err := q.List(s.Context(), delayq.ListOptions{State: state, Limit: 500, Cursor: cursor})
		if err != nil {
			s.Fatal(err)
		}
		all = append(all, page.Tasks...)
		if cursor = page.Next; cursor == "" {
			return all
		}
	}
}

func (s *stage) stats(q *delayq.Queue) *delayq.Stats {
	s.Helper()
	st, err := q.Stats(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	return st
}

// worker is a Worker that logs into the stage.
func (s *stage) worker(h delayq.Handler, queues ...*delayq.Queue) *delayq.Worker {
	w := delayq.NewWorker(h, queues...)
	w.Logger = slog.New(slog.NewTextHandler(s.log, nil))
	return w
}

// A started is a Worker.Run under way.
type started struct {
	s     *stage
	stop  context.CancelFunc
	done  chan struct{}
	stats delayq.RunStats
	err   error
}

func (s *stage) start(w *delayq.Worker) *started { return s.startIn(context.Background(), w) }

func (s *stage) startIn(ctx context.Context, w *delayq.Worker) *started {
	ctx, stop := context.WithCancel(ctx)
	r := &started{s: s, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.stats, r.err = w.Run(ctx)
	}()
	return r
}

func (r *started) returned() bool {
	synctest.Wait()
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// wait waits for Run to come back without an error.
func (r *started) wait() delayq.RunStats {
	r.s.Helper()
	<-r.done
	r.stop()
	if r.err != nil {
		r.s.Fatal(r.err)
	}
	return r.stats
}

// halt cancels Run's context and waits.
func (r *started) halt() delayq.RunStats {
	r.s.Helper()
	r.stop()
	return r.wait()
}

// drain runs what is due now and comes back.
func (s *stage) drain(w *delayq.Worker) delayq.RunStats {
	s.Helper()
	w.IdleExit = time.Second
	return s.start(w).wait()
}

// A wire carries connections until it is cut (dialling is refused) or hangs (nothing arrives and nothing comes back).
type wire struct {
	dial func() (net.Conn, error)

	mu     sync.Mutex
	isCut  bool
	isHung bool
	conns  []*wireConn
}

type wireConn struct {
	net.Conn
	w *wire
}

func (w *wire) connect() (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isCut {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}
	}
	c, err := w.dial()
	if err != nil {
		return nil, err
	}
	wc := &wireConn{c, w}
	w.conns = append(w.conns, wc)
	return wc, nil
}

func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = true
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.conns = nil
}

func (w *wire) hang() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isHung = true
}

// mend makes everything well again; what hung meanwhile is dead.
func (w *wire) mend() {
	w.cut()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut, w.isHung = false, false
}

func (c *wireConn) Write(b []byte) (int, error) {
	c.w.mu.Lock()
	hung := c.w.isHung
	c.w.mu.Unlock()
	if hung {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// A callLog notes every script call that a client sends.
type callLog struct {
	mu   sync.Mutex
	list []scriptCall
	slow map[string]time.Duration // verb -> how long its reply takes
}

type scriptCall struct {
	at       time.Time
	verb     string
	shard    string // "name:index"
	consumer string // of a lease
	max      int    // of a lease
}

var verbs = func() map[string]string {
	m := map[string]string{}
	for verb, text := range map[string]string{
		"lease": lua.Lease, "extend": lua.Extend, "ack": lua.Ack, "retry": lua.Retry, "release": lua.Release, "bury": lua.Bury,
		"beat": lua.Beat,
	} {
		sum := sha1.Sum([]byte(text))
		m[hex.EncodeToString(sum[:])] = verb
	}
	return m
}()

// note returns how long the reply is to take.
func (l *callLog) note(cmd redis.Cmder) time.Duration {
	a := cmd.Args()
	if len(a) < 4 || a[0] != "evalsha" {
		return 0
	}
	sha, _ := a[1].(string)
	key, _ := a[3].(string)
	_, key, _ = strings.Cut(key, "{")
	shard, _, _ := strings.Cut(key, "}")
	c := scriptCall{at: time.Now(), verb: verbs[sha], shard: shard}
	if n, _ := a[2].(int); c.verb == "lease" {
		c.max, _ = a[3+n+2].(int)
		c.consumer, _ = a[3+n+4].(string)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, c)
	return l.slow[c.verb]
}

func (l *callLog) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *callLog) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		wait := l.note(cmd)
		err := next(ctx, cmd)
		time.Sleep(wait)
		return err
	}
}

func (l *callLog) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			l.note(cmd)
		}
		return next(ctx, cmds)
	}
}

// of returns the calls of one verb so far.
func (l *callLog) of(verb string) []scriptCall {
	l.mu.Lock()
	defer l.mu.Unlock()
	var some []scriptCall
	for _, c := range l.list {
		if c.verb == verb {
			some = append(some, c)
		}
	}
	return some
}

func (l *callLog) slowDown(verb string, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slow = map[string]time.Duration{verb: d}
}

func (l *callLog) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = nil
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A diary notes what handlers see.
type diary struct {
	mu   sync.Mutex
	runs []diaryRun
}

type diaryRun struct {
	at   time.Time
	task delayq.Task
}

func (d *diary) note(t *delayq.Task) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.runs = append(d.runs, diaryRun{time.Now(), *t})
}

func (d *diary) all() []diaryRun {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]diaryRun(nil), d.runs...)
}

func (d *diary) of(id string) []diaryRun {
	var some []diaryRun
	for _, e := range d.all() {
		if e.task.ID == id {
			some = append(some, e)
		}
	}
	return some
}

// noting is a handler that notes each run and then does what f says; nil succeeds.
func (d *diary) noting(f delayq.HandlerFunc) delayq.Handler {
	return delayq.HandlerFunc(func(ctx context.Context, t *delayq.Task) error {
		d.note(t)
		if f == nil {
			return nil
		}
		return f(ctx, t)
	})
}

// taking is a handler that needs d and heeds the end of its context.
func taking(d time.Duration) delayq.HandlerFunc {
	return func(ctx context.Context, _ *delayq.Task) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var errHandler = errors.New("no luck")

func failing(context.Context, *delayq.Task) error { return errHandler }

// between reports whether d lies in [low, high].
func between(d, low, high time.Duration) bool { return d >= low && d <= high }

func tasksNamed(prefix string, n int) []delayq.Task {
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = delayq.Task{ID: fmt.Sprintf("%s-%d", prefix, i), Type: "t"}
	}
	return tasks
}

func (s *stage) addAll(q *delayq.Queue, tasks []delayq.Task, opts ...delayq.Option) {
	s.Helper()
	if _, err := q.EnqueueMany(s.Context(), tasks, opts...); err != nil {
		s.Fatal(err)
	}
}

// A client that cannot reach its server says so again and again; these tests cut the wire on purpose.
func init() { redis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
