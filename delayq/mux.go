package delayq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// A Handler does a task's work. Its error is the verdict: nil for done, see Permanent, RetryAfter, Snooze, Remaining; any
// other error is retried. It must end soon after its context does, and must bear running twice: a lease that runs out hands
// the task on.
type Handler interface {
	HandleTask(ctx context.Context, t *Task) error
}

// HandlerFunc is a function as Handler.
type HandlerFunc func(ctx context.Context, t *Task) error

// HandleTask calls f.
func (f HandlerFunc) HandleTask(ctx context.Context, t *Task) error { return f(ctx, t) }

// A Middleware wraps a handler, as in net/http.
type Middleware func(Handler) Handler

// TypeConfig holds what differs for one task type; zero fields take the worker's.
type TypeConfig struct {
	Lease       time.Duration // from the first heartbeat on
	Timeout     time.Duration
	Stall       time.Duration
	Retry       RetryPolicy
	MaxAttempts int
}

// A Mux sends each task to the handler of its type. Register everything before a worker runs. The zero Mux is ready to use.
type Mux struct {
	routes map[string]route
	wrap   []Middleware
}

type route struct {
	h   Handler
	cfg TypeConfig
}

// NewMux returns an empty Mux.
func NewMux() *Mux { return &Mux{} }

// Use adds middleware around every handler, the first added outermost. It applies to types registered before and after.
func (m *Mux) Use(mw ...Middleware) { m.wrap = append(m.wrap, mw...) }

// Handle registers the handler of a type. It panics when the type is empty or already there or its TypeConfig is out
// of bounds (those of WorkerConfig), as net/http does.
func (m *Mux) Handle(typ string, h Handler, cfg ...TypeConfig) {
	if _, twice := m.routes[typ]; typ == "" || twice || h == nil {
		panic(fmt.Sprintf("delayq: handler for type %q: empty, nil or registered twice", typ))
	}
	if m.routes == nil {
		m.routes = map[string]route{}
	}
	r := route{h: h}
	if len(cfg) > 0 {
		r.cfg = cfg[0]
	}
	if c := r.cfg; c.Lease != 0 && (c.Lease < time.Second || c.Lease > 12*time.Hour) || c.Timeout < 0 || c.Stall < 0 || c.MaxAttempts < 0 {
		panic(fmt.Sprintf("delayq: type %q: TypeConfig out of bounds: Lease 1 s to 12 h, the others not negative: %+v", typ, c))
	}
	m.routes[typ] = r
}

// HandleFunc registers a function as the handler of a type.
func (m *Mux) HandleFunc(typ string, f func(ctx context.Context, t *Task) error, cfg ...TypeConfig) {
	m.Handle(typ, HandlerFunc(f), cfg...)
}

// Handle registers a function that takes the payload decoded from JSON into a T. A payload that cannot be decoded is a
// permanent failure. TaskFrom(ctx) gives the task itself.
func Handle[T any](m *Mux, typ string, f func(context.Context, T) error, cfg ...TypeConfig) {
	m.HandleFunc(typ, func(ctx context.Context, t *Task) error {
		var v T
		if err := json.Unmarshal(t.Payload, &v); err != nil {
			return Permanent(fmt.Errorf("payload of type %s: %w", t.Type, decodeError(err)))
		}
		return f(ctx, v)
	}, cfg...)
}

// HandleTask runs the handler of the task's type, ErrNoHandler if there is none.
func (m *Mux) HandleTask(ctx context.Context, t *Task) error {
	r, ok := m.routes[t.Type]
	if !ok {
		return fmt.Errorf("%w: %s", ErrNoHandler, printable(t.Type))
	}
	h := r.h
	for i := len(m.wrap) - 1; i >= 0; i-- {
		h = m.wrap[i](h)
	}
	return h.HandleTask(ctx, t)
}

// typeConfig is what the worker asks for.
func (m *Mux) typeConfig(typ string) TypeConfig { return m.routes[typ].cfg }

// decodeError says where a payload is wrong without quoting it: payloads do not belong in logs.
func decodeError(err error) error {
	var (
		syntax *json.SyntaxError
		typ    *json.UnmarshalTypeError
	)
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("malformed JSON at byte %d", syntax.Offset)
	case errors.As(err, &typ):
		return fmt.Errorf("JSON at byte %d: field %q wants a %s", typ.Offset, typ.Field, typ.Type)
	}
	return errors.New("malformed JSON")
}
