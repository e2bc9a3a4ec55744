package delayq

import (
	"context"
	"errors"
	"sync"
	"time"
)

// tellLimit bounds what telling Redis may cost a caller; after a call without an answer nobody tries for as long.
const tellLimit = time.Second

// warnEvery keeps a Redis that is away from filling the log.
const warnEvery = 10 * time.Second

// tell shows Redis rows as the ledger has them, after tx has committed. It is best-effort: what Redis does not hear the
// reconciler makes up for.
func (q *Queue) tell(ctx context.Context, tx Tx, rows []LedgerRow, counts map[string]int64) {
	if len(rows) == 0 {
		return
	}
	q.after(ctx, tx, func(ctx context.Context) error { return q.teller.tell(ctx, q, rows, counts) })
}

// A teller lets callers that tell Redis at the same time share one call. Whoever finds none under way sends; the others go on at
// once, and what they have to tell is sent when that call is done.
type teller struct {
	mu      sync.Mutex
	sending bool
	rows    []LedgerRow
	bytes   int
	counts  map[string]int64
}

// mostUntold bounds in bytes what waits for a Redis that is slow to answer; the rest is left to the reconciler.
const mostUntold = 8 << 20

func (t *teller) tell(ctx context.Context, q *Queue, rows []LedgerRow, counts map[string]int64) error {
	t.mu.Lock()
	if t.sending {
		if t.bytes < mostUntold {
			t.rows = append(t.rows, rows...)
			for i := range rows {
				t.bytes += len(rows[i].Payload) + 512
			}
			if t.counts == nil {
				t.counts = map[string]int64{}
			}
			for event, n := range counts {
				t.counts[event] += n
			}
		}
		t.mu.Unlock()
		return nil
	}
	t.sending = true
	t.mu.Unlock()
	_, err := q.Mirror().Show(ctx, rows, Showing{Now: time.Now(), Counts: counts})
	if rows, counts := t.next(); len(rows) > 0 {
		go t.rest(context.WithoutCancel(ctx), q, rows, counts) // not at this caller's cost
	}
	return err
}

func (t *teller) rest(ctx context.Context, q *Queue, rows []LedgerRow, counts map[string]int64) {
	for ; len(rows) > 0; rows, counts = t.next() {
		q.message(ctx, func(ctx context.Context) error {
			_, err := q.Mirror().Show(ctx, rows, Showing{Now: time.Now(), Counts: counts})
			return err
		})
	}
}

// next takes what waits, or ends the sending when nothing does.
func (t *teller) next() (rows []LedgerRow, counts map[string]int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows, counts = t.rows, t.counts
	t.rows, t.bytes, t.counts = nil, 0, nil
	t.sending = len(rows) > 0
	return rows, counts
}

// after runs a message to Redis: now when there is no transaction, else after its commit if it can say when that is.
func (q *Queue) after(ctx context.Context, tx Tx, message func(context.Context) error) {
	if tx != nil && sabotage != "redis-before-commit" {
		if hook, ok := tx.(interface {
			AfterCommit(f func(ctx context.Context))
		}); ok {
			hook.AfterCommit(func(ctx context.Context) { q.message(ctx, message) })
		}
		return
	}
	q.message(ctx, message)
}

func (q *Queue) message(ctx context.Context, send func(context.Context) error) {
	if time.Now().UnixNano() < q.quiet.Load() {
		return
	}
	within, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	err := send(within)
	if err == nil || ctx.Err() != nil { // a caller's own haste says nothing of Redis
		return
	}
	if errors.Is(err, context.DeadlineExceeded) || mayHaveRun(err) || isDial(err) {
		q.quiet.Store(time.Now().Add(tellLimit).UnixNano())
	}
	now := time.Now().UnixNano()
	if last := q.warned.Load(); now-last > int64(warnEvery) && q.warned.CompareAndSwap(last, now) {
		q.cfg.Logger.Warn("delayq: redis was not told; the reconciler will", "queue", q.name, "error", err.Error())
	}
}
