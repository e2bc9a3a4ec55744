package delayq

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// A settler reports the ends of one source's tasks: while one call is under way the next batch gathers.
type settler struct {
	src    *source
	mu     sync.Mutex
	queue  []report
	closed bool
	more   chan struct{}
}

type report struct {
	task *running
	settlement
	since     time.Time
	notBefore time.Time // of one that is tried again
}

func newSettler(s *source) *settler { return &settler{src: s, more: make(chan struct{}, 1)} }

func (s *settler) push(t *running, what settlement) {
	s.mu.Lock()
	s.queue = append(s.queue, report{task: t, settlement: what, since: time.Now()})
	s.mu.Unlock()
	signal(s.more)
}

// close lets loop return once the queue is empty.
func (s *settler) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	signal(s.more)
}

// loop reports until close, or until ctx ends.
func (s *settler) loop(ctx context.Context) {
	for {
		batch, next, closed := s.take(time.Now())
		if len(batch) > 0 {
			s.report(ctx, batch)
			continue
		}
		if closed && next.IsZero() {
			return
		}
		var later <-chan time.Time
		if !next.IsZero() {
			later = time.After(time.Until(next))
		}
		select {
		case <-s.more:
		case <-later:
		case <-ctx.Done():
			s.giveUp()
			return
		}
	}
}

// take cuts the next call off the queue: reports of one verb, bounded in number and bytes. next is when one that waits may be tried
// again, zero when none does.
func (s *settler) take(now time.Time) (batch []report, next time.Time, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var rest []report
	bytes := 0
	for _, rep := range s.queue {
		switch {
		case rep.notBefore.After(now):
			if next.IsZero() || rep.notBefore.Before(next) {
				next = rep.notBefore
			}
		case len(batch) == 0 || len(batch) < maxBatch && rep.verb == batch[0].verb && bytes+rep.cost() <= maxCallBytes:
			bytes += rep.cost()
			batch = append(batch, rep)
			continue
		}
		rest = append(rest, rep)
	}
	s.queue = rest
	// Leases of one call together: their token then travels once.
	slices.SortStableFunc(batch, func(a, b report) int { return strings.Compare(a.lease.token, b.lease.token) })
	return batch, next, s.closed
}

// report sends one call and repeats it while it is not answered: an ack counts even after the lease's end, as long as nobody
// else has the task. What the ledger has locked is put back, so that the others do not wait for it.
func (s *settler) report(ctx context.Context, batch []report) {
	until := time.Now().Add(2 * s.src.run.cfg.Lease)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		items := make([]settlement, len(batch))
		for i, rep := range batch {
			items[i] = rep.settlement
		}
		call, cancel := s.src.run.call(ctx, s.src.run.cfg.Lease/3, s.src.run.cfg.Margin/8)
		errs := s.src.sh.settle(call, items)
		cancel()
		last := time.Now().After(until) || ctx.Err() != nil
		var left []report
		for i, rep := range batch {
			switch {
			case noAnswer(errs[i]) && !last:
				left = append(left, rep)
			case !s.putBack(ctx, rep, errs[i]):
				s.src.run.settled(rep.task, items[i], errs[i])
			}
		}
		if batch = left; len(batch) == 0 {
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// noAnswer reports whether a report got no answer; ErrBusy is one.
func noAnswer(err error) bool {
	var lost *TaskError
	return errors.As(err, &lost) && !known(lost.Err) && !errors.Is(lost.Err, ErrBusy)
}

// putBack keeps a report that must be tried again.
func (s *settler) putBack(ctx context.Context, rep report, err error) bool {
	if !errors.Is(err, ErrBusy) || ctx.Err() != nil || time.Since(rep.since) > 2*s.src.run.cfg.Lease {
		return false
	}
	rep.notBefore = time.Now().Add(200 * time.Millisecond)
	s.mu.Lock()
	s.queue = append(s.queue, rep)
	s.mu.Unlock()
	return true
}

// known reports whether an error is an answer of Redis.
func known(err error) bool {
	return errors.Is(err, ErrLeaseLost) || errors.Is(err, ErrNotFound) || errors.Is(err, ErrCancelled)
}

// giveUp drops what is left when there is no time any more; the leases run out.
func (s *settler) giveUp() {
	s.mu.Lock()
	left := s.queue
	s.queue = nil
	s.mu.Unlock()
	for _, rep := range left {
		s.src.run.settled(rep.task, rep.settlement, ErrNoTime)
	}
}
