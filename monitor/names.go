package monitor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// A walk over all keys of a Redis takes longer than a look may, where there are many: so it goes on beside the looks, and only the
// first has to wait for it. While there is no queue at all, somebody is about to make one and wants to see it: then each look finds anew,
// but for walks that take so long that Redis would feel it.
const (
	findEvery   = time.Minute
	findTimeout = time.Minute
	findPart    = 50 // one in so many parts of the time may be walks
)

// A finder knows the names of the queues of one server. Names may be a minute old, numbers never.
type finder struct {
	walk func(ctx context.Context) ([]string, error) // nil: there is nothing to find

	mu    sync.Mutex
	names []string
	at    time.Time     // when the last walk that succeeded began; zero before the first
	took  time.Duration // that walk
	err   error         // of the last walk
	done  chan struct{} // of the walk that is under way, nil if none is
}

// queues returns the names to look at, by name, how many there are beyond MostQueues, and whether each server has told its own.
func (m *Monitor) queues(ctx context.Context) (names []string, leftOut int, listed bool, err error) {
	listed = true
	if names = m.cfg.Queues; len(names) == 0 {
		none := m.inRedisNames.none() && m.inLedgerNames.none()
		inRedis, err1 := m.inRedisNames.find(ctx, true, none)
		inLedger, err2 := m.inLedgerNames.find(ctx, false, none)
		names = slices.Concat(inRedis, inLedger)
		names = slices.DeleteFunc(names, func(name string) bool { return !validName(name) }) // anybody can write a key
		slices.Sort(names)
		names = slices.Compact(names)
		listed = m.inRedisNames.told() && m.inLedgerNames.told()
		err = errors.Join(err1, ofLedger("list queues", err2))
		m.forget(names)
	}
	if n := len(names) - m.cfg.MostQueues; n > 0 {
		names, leftOut = names[:m.cfg.MostQueues], n
	}
	return names, leftOut, listed, err
}

// find returns what was found last, with the error of a later walk if that failed, and sees to it that walks are made. Without names it
// waits for the first: as long as it may where nothing can be looked at without them, else for a part of the time. So it does after
// a walk that failed, since the next may succeed, and with eager, when each call makes one.
func (f *finder) find(ctx context.Context, needed, eager bool) ([]string, error) {
	if f.walk == nil {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if age := time.Since(f.at); f.done == nil && (f.err != nil || age > findEvery || eager && age > findPart*f.took) {
		f.done = make(chan struct{})
		go f.run(context.WithoutCancel(ctx))
	}
	first := f.at.IsZero()
	if done := f.done; done != nil && (first || f.err != nil || eager) {
		f.mu.Unlock()
		waiting, cancel := ctx, context.CancelFunc(func() {})
		if end, ok := ctx.Deadline(); ok && (!first || !needed) {
			waiting, cancel = context.WithTimeout(ctx, time.Until(end)/4)
		}
		select {
		case <-done:
		case <-waiting.Done():
		}
		cancel()
		f.mu.Lock()
		if f.done == done && f.err == nil && first { // still under way
			return f.names, fmt.Errorf("monitor: the queues are not found yet: %w", context.DeadlineExceeded)
		}
	}
	return f.names, f.err
}

// none reports whether no queue is known here.
func (f *finder) none() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.names) == 0
}

// told reports whether a walk has ever succeeded.
func (f *finder) told() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.walk == nil || !f.at.IsZero()
}

func (f *finder) run(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, findTimeout)
	defer cancel()
	began := time.Now()
	names, err := f.walk(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch f.err = err; {
	case err == nil:
		f.names, f.at, f.took = names, began, time.Since(began)
	case f.at.IsZero(): // some are better than none
		f.names = names
	}
	close(f.done)
	f.done = nil
}

// finders are the ones of Redis and of the ledger, if that can list its queues.
func (m *Monitor) finders() {
	m.inRedisNames.walk = func(ctx context.Context) ([]string, error) { return delayq.Queues(ctx, m.cfg.Redis) }
	if led, ok := m.cfg.Ledger.(interface {
		Queues(ctx context.Context) ([]string, error)
	}); ok {
		m.inLedgerNames.walk = led.Queues
	}
}

// validName is as delayq has it.
func validName(name string) bool {
	ok := len(name) > 0 && len(name) <= 128
	for i := range len(name) {
		c := name[i]
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-' || c == ':' || c == '/')
	}
	return ok
}
