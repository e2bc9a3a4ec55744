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
}

func newSettler(s *source) *settler { return &settler{src: s, more: make(chan struct{}, 1)} }

func (s *settler) push(t *running, what settlement) {
	s.mu.Lock()
	s.queue = append(s.queue, report{t, what})
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
		batch, closed := s.take()
		if len(batch) == 0 {
			if closed {
				return
			}
			select {
			case <-s.more:
			case <-ctx.Done():
				s.giveUp()
				return
			}
			continue
		}
		s.report(ctx, batch)
	}
}

// take cuts the next call off the queue: reports of one verb, bounded in number and bytes.
func (s *settler) take() (batch []report, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var rest []report
	bytes := 0
	for i, rep := range s.queue {
		bytes += rep.cost()
		if len(batch) == maxBatch || len(batch) > 0 && bytes > maxCallBytes {
			rest = append(rest, s.queue[i:]...)
			break
		}
		if len(batch) > 0 && rep.verb != batch[0].verb {
			rest = append(rest, rep)
			bytes -= rep.cost()
			continue
		}
		batch = append(batch, rep)
	}
	s.queue = rest
	// Leases of one call together: their token then travels once.
	slices.SortStableFunc(batch, func(a, b report) int { return strings.Compare(a.lease.token, b.lease.token) })
	return batch, s.closed
}

// report sends one call and repeats it while Redis does not answer: an ack counts even after the lease's end, as long as
// nobody else has the task.
func (s *settler) report(ctx context.Context, batch []report) {
	items := make([]settlement, len(batch))
	for i, rep := range batch {
		items[i] = rep.settlement
	}
	until := time.Now().Add(2 * s.src.run.cfg.Lease)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		call, cancel := s.src.run.call(ctx, s.src.run.cfg.Lease/3, s.src.run.cfg.Margin/8)
		errs := s.src.sh.settle(call, items)
		cancel()
		var lost *TaskError
		unanswered := errors.As(errs[0], &lost) && !known(lost.Err)
		if !unanswered || time.Now().After(until) || ctx.Err() != nil {
			for i, rep := range batch {
				s.src.run.settled(rep.task, items[i], errs[i])
			}
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
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
