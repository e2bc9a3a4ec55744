package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/reconciler"
)

// A handle is a queue that is kept open.
type handle struct {
	mu    sync.Mutex
	seen  *delayq.Queue // for looking at Redis alone; nothing else is done with it
	epoch string        // of its shard 0 when it was opened: another means that the queue was made anew
	lq    delayq.LedgerQueue
	whole *delayq.Queue // for Monitor.Queue
}

func (m *Monitor) handle(name string) *handle {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.handles[name]
	if h == nil {
		h = &handle{}
		m.handles[name] = h
	}
	return h
}

// forget drops the handles of queues that are no longer watched.
func (m *Monitor) forget(watched []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.handles {
		if _, ok := slices.BinarySearch(watched, name); !ok {
			delete(m.handles, name)
		}
	}
}

// redisPart is what Redis tells of a queue.
type redisPart struct {
	stats     *delayq.Stats
	consumers []delayq.Consumer
}

const mostConsumers = 1000

// inRedis reads a queue's numbers from Redis alone, of a ledger's queue too.
func (m *Monitor) inRedis(ctx context.Context, name string) (redisPart, error) {
	h := m.handle(name)
	for try := 0; ; try++ {
		q, epoch, err := m.opened(ctx, h, name)
		if err != nil {
			return redisPart{}, err
		}
		p := redisPart{}
		if p.stats, err = q.Stats(ctx); err == nil && p.stats.Shards[0].Epoch != "" {
			p.consumers, err = q.Consumers(ctx, mostConsumers)
		}
		if err == nil && (epoch == "" || epoch == p.stats.Shards[0].Epoch) {
			h.mu.Lock()
			if h.seen == q {
				h.epoch = p.stats.Shards[0].Epoch
			}
			h.mu.Unlock()
			return p, nil
		}
		if err != nil && !errors.Is(err, delayq.ErrNoQueue) {
			return redisPart{}, err
		}
		// It is gone, or another one by now, perhaps of other shards.
		h.mu.Lock()
		if h.seen == q {
			h.seen, h.epoch, h.whole = nil, "", nil
		}
		h.mu.Unlock()
		if try > 0 {
			return redisPart{}, cmp.Or(err, fmt.Errorf("monitor: queue %s: %w: it is made anew all the time", name, delayq.ErrNoQueue))
		}
	}
}

// opened opens the queue for looking, if it is not.
func (m *Monitor) opened(ctx context.Context, h *handle, name string) (*delayq.Queue, string, error) {
	h.mu.Lock()
	q, epoch := h.seen, h.epoch
	h.mu.Unlock()
	if q != nil {
		return q, epoch, nil
	}
	stored, err := delayq.Stored(ctx, m.cfg.Redis, name)
	if errors.Is(err, delayq.ErrNoQueue) && m.cfg.Ledger != nil {
		// Redis has lost it, and the ledger may know it.
		if _, known, lerr := m.cfg.Ledger.OpenQueue(ctx, name, delayq.LedgerConfig{}, false); lerr == nil {
			stored, err = known, nil
		}
	}
	if err != nil {
		return nil, "", err
	}
	q, err = delayq.Open(ctx, m.cfg.Redis, name, delayq.Config{
		NoCreate: true, Ledger: redisAlone{stored: stored}, AllowEviction: true, MaxSkew: math.MaxInt64, OnWarning: func(delayq.Warning) {},
		ScriptHeader: m.cfg.ScriptHeader,
	})
	if err != nil {
		return nil, "", err
	}
	h.mu.Lock()
	h.seen, h.epoch = q, ""
	h.mu.Unlock()
	return q, "", nil
}

// redisAlone stands in for a queue's ledger, so that Stats and Consumers tell what Redis knows. No other method may be called.
type redisAlone struct {
	delayq.LedgerQueue
	stored delayq.LedgerConfig
}

func (r redisAlone) OpenQueue(context.Context, string, delayq.LedgerConfig, bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	return r, r.stored, nil
}

func (redisAlone) Counts(context.Context, int, time.Duration) (delayq.LedgerCounts, error) {
	return delayq.LedgerCounts{}, nil
}

// ledgerPart is what the ledger tells of a queue.
type ledgerPart struct {
	known  bool
	counts delayq.LedgerCounts
	status *reconciler.Status
}

func (m *Monitor) inLedger(ctx context.Context, name string) (p ledgerPart, err error) {
	if m.cfg.Ledger == nil {
		return p, nil
	}
	h := m.handle(name)
	h.mu.Lock()
	lq := h.lq
	h.mu.Unlock()
	if lq == nil {
		lq, _, err = m.cfg.Ledger.OpenQueue(ctx, name, delayq.LedgerConfig{}, false)
		if errors.Is(err, delayq.ErrNoQueue) {
			return p, nil
		}
		if err != nil {
			return p, err
		}
		h.mu.Lock()
		h.lq = lq
		h.mu.Unlock()
	}
	p.known = true
	if p.counts, err = lq.Counts(ctx, delayq.MostCounted, m.cfg.Horizon); err != nil {
		return p, err
	}
	status, err := reconciler.ReadStatus(ctx, lq)
	if err == nil && !status.Began.IsZero() {
		p.status = &status
	}
	return p, err
}

// ofLedger marks an error as the ledger's, where that has not done so itself.
func ofLedger(op string, err error) error {
	var led *delayq.LedgerError
	if err == nil || errors.As(err, &led) {
		return err
	}
	return &delayq.LedgerError{Op: op, Err: err}
}

// merge makes one view of what both servers told.
func (m *Monitor) merge(name string, r part[redisPart], l part[ledgerPart]) QueueView {
	v := QueueView{Name: name, Err: r.err}
	l.err = ofLedger("look at "+name, l.err)
	if l.err == nil {
		v.Reconciler = l.got.status
	}
	if r.err != nil {
		if l.err != nil {
			v.Err = errors.Join(r.err, l.err)
		}
		return v
	}
	s := r.got.stats
	v.Stats, v.Consumers = s, r.got.consumers
	booked := s.Mode == "ledger"
	switch {
	case l.err != nil && (booked || l.got.known):
		v.Err, v.RedisOnly = l.err, true
	case l.got.known:
		s.Mode = "ledger"
		s.Dead += l.got.counts.Dead
		s.Later = l.got.counts.Later
		s.Pending += l.got.counts.Later
	case booked && m.cfg.Ledger != nil:
		v.Err, v.RedisOnly = fmt.Errorf("monitor: queue %s: %w: and this one does not know it", name, delayq.ErrLedger), true
	case booked:
		v.RedisOnly = true
	case s.Shards[0].Epoch == "":
		v.Err, v.Stats = fmt.Errorf("monitor: queue %s: %w", name, delayq.ErrNoQueue), nil
	}
	if v.Stats != nil {
		m.Tally(&v)
	}
	return v
}

// Tally counts v's consumers by their health at v.Stats.Now.
func (m *Monitor) Tally(v *QueueView) {
	v.Healthy, v.Stale, v.Stuck = 0, 0, 0
	for i := range v.Consumers {
		switch m.Health(&v.Consumers[i], v.Stats.Now) {
		case Stale:
			v.Stale++
		case Stuck:
			v.Stuck++
		case Healthy:
			v.Healthy++
		}
	}
}

// Queue gives the queue of that name for reading and for an operator's changes, opened without creating it. While the ledger does not
// answer it gives those that Redis alone keeps.
//
// Errors: delayq.ErrNoQueue; delayq.ErrLedger when it has a ledger and the monitor none; a delayq.LedgerError when it has one that does
// not answer, or may have; those of delayq.Open.
func (m *Monitor) Queue(ctx context.Context, name string) (*delayq.Queue, error) {
	if !validName(name) {
		return nil, fmt.Errorf("monitor: queue %.140q: %w", name, delayq.ErrNoQueue)
	}
	m.mu.Lock()
	h := m.handles[name]
	m.mu.Unlock()
	if h != nil {
		h.mu.Lock()
		q := h.whole
		h.mu.Unlock()
		if q != nil {
			return q, nil
		}
	}
	q, keep, err := m.whole(ctx, name)
	if err == nil && keep && h != nil {
		h.mu.Lock()
		h.whole = q
		h.mu.Unlock()
	}
	return q, err
}

// whole opens a queue with its ledger, if it has one. keep is false for one of which the ledger could not be asked: it may know the
// queue all the same.
func (m *Monitor) whole(ctx context.Context, name string) (q *delayq.Queue, keep bool, err error) {
	cfg := delayq.Config{NoCreate: true, AllowEviction: true, OnWarning: func(delayq.Warning) {}, ScriptHeader: m.cfg.ScriptHeader}
	if m.cfg.Ledger == nil {
		q, err = delayq.Open(ctx, m.cfg.Redis, name, cfg)
		return q, true, err
	}
	booked := cfg
	booked.Ledger, booked.Horizon = m.cfg.Ledger, m.cfg.Horizon
	bounded, cancel := ctx, context.CancelFunc(func() {})
	if end, ok := ctx.Deadline(); ok { // a database that hangs must leave time for Redis
		bounded, cancel = context.WithTimeout(ctx, time.Until(end)/4)
	}
	q, err = delayq.Open(bounded, m.cfg.Redis, name, booked)
	cancel()
	if err == nil {
		return q, true, nil
	}
	alone, err2 := delayq.Open(ctx, m.cfg.Redis, name, cfg) // Redis says of each queue whether a ledger keeps it
	switch {
	case err2 == nil:
		return alone, errors.Is(err, delayq.ErrNoQueue), nil
	case errors.Is(err, delayq.ErrNoQueue):
		return nil, false, err2
	case errors.Is(err2, delayq.ErrLedger), errors.Is(err2, delayq.ErrNoQueue):
		return nil, false, ofLedger("open "+name, err)
	}
	return nil, false, err2
}
