package functions

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

// A tampered ledger is one whose reconciler has before called for each page of rows.
type tampered struct {
	delayq.Ledger
	before func(ctx context.Context, queue string) error
}

func (l tampered) OpenQueue(ctx context.Context, name string, want delayq.LedgerConfig, create bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	lq, cfg, err := l.Ledger.OpenQueue(ctx, name, want, create)
	return tamperedQueue{lq, name, l.before}, cfg, err
}

type tamperedQueue struct {
	delayq.LedgerQueue
	name   string
	before func(ctx context.Context, queue string) error
}

func (q tamperedQueue) Page(ctx context.Context, p delayq.LedgerPage) ([]delayq.LedgerRow, error) {
	if err := q.before(ctx, q.name); err != nil {
		return nil, err
	}
	return q.LedgerQueue.Page(ctx, p)
}

// newReconciling makes a reconciler of three queues in this process, the first of them with 3,000 tasks.
func newReconciling(t *testing.T, before func(context.Context, string) error) (r *reconciling, names []string) {
	t.Helper()
	server := servers.SharedRedis(t)
	_, led, _ := newLedger(t)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), DisableIdentity: true, ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	for i := range 3 {
		names = append(names, queueOf(t))
		q, err := delayq.Open(t.Context(), rdb, names[i], delayq.Config{Ledger: led})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			(&bench{t: t, q: q}).enqueueMany(3000)
		}
	}
	return &reconciling{newProcess([]Option{
		WithRedis(rdb), WithLedger(tampered{led, before}), WithLogger(slog.New(slog.DiscardHandler)),
		WithConfig(Config{Queues: names, Margin: 500 * time.Millisecond}),
	}, true)}, names
}

// minute is a start at which the n-th queue begins.
func minute(n int) time.Time { return time.Unix(int64(60*n), 0) }

func TestTheTimeIsSharedOut(t *testing.T) {
	t.Parallel()
	r, names := newReconciling(t, func(context.Context, string) error {
		time.Sleep(400 * time.Millisecond) // six pages and an empty one are 2.8 s
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second) // of the 7 s to work, a share is 2.3 s
	defer cancel()
	var s Reconciled
	if err := r.run(ctx, minute(0), &s, r.log); err != nil || len(s.Errors) != 0 {
		t.Fatalf("%v %v", err, s.Errors)
	}
	var order []string
	var rows int64
	for _, rep := range s.Queues {
		order = append(order, rep.Queue)
		rows += rep.Rows
	}
	if want := append(slices.Clone(names), names[0]); !slices.Equal(order, want) {
		t.Errorf("turns %v, want %v", order, want)
	}
	if first, last := s.Queues[0], s.Queues[len(s.Queues)-1]; first.Complete || first.Rows == 0 || !last.Complete || rows != 3000 {
		t.Errorf("first %+v\nlast %+v", first, last)
	}
}

func TestAQueueThatHangsTakesItsShareOnly(t *testing.T) {
	t.Parallel()
	var hangs string
	r, names := newReconciling(t, func(ctx context.Context, queue string) error {
		if queue != hangs {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
	hangs = names[0]
	const budget = 4 * time.Second
	for n := range names { // whoever begins
		ctx, cancel := context.WithTimeout(t.Context(), budget)
		var s Reconciled
		begin := time.Now()
		err := r.run(ctx, minute(n), &s, r.log)
		if took := time.Since(begin); took > budget-r.margin()/2 {
			t.Errorf("it took %s", took)
		}
		cancel()
		var complete []string
		for _, rep := range s.Queues {
			if rep.Complete {
				complete = append(complete, rep.Queue)
			}
		}
		slices.Sort(complete)
		if want := slices.Sorted(slices.Values(names[1:])); err != nil || len(s.Errors) != 1 || s.Errors[hangs] == "" || !slices.Equal(complete, want) {
			t.Errorf("%v %v, complete %v", err, s.Errors, complete)
		}
	}
}

func TestNoQueueCouldBeReconciled(t *testing.T) {
	t.Parallel()
	r, names := newReconciling(t, func(context.Context, string) error { return errors.New("no page today") })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := r.invoke(ctx)
	if err == nil || !strings.Contains(err.Error(), "no queue could be reconciled; ") || !strings.Contains(err.Error(), "no page today") ||
		strings.Contains(err.Error(), "\n") || len(s.Errors) != len(names) {
		t.Errorf("%v %v", err, s.Errors)
	}
}

// What ends a process politely is no failure.
func TestAReconcilerIsSentHome(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	r, _ := newReconciling(t, func(context.Context, string) error { cancel(); return ctx.Err() })
	if s, err := r.invoke(ctx); err != nil || len(s.Errors) != 0 {
		t.Errorf("%v %v", err, s.Errors)
	}
}

func TestEachMinuteAnotherQueueBegins(t *testing.T) {
	queues := []string{"a", "b", "c"}
	var first []string
	for n := range 4 {
		turn := inTurn(queues, minute(n).Add(59*time.Second))
		first = append(first, turn[0])
		if slices.Sort(turn); !slices.Equal(turn, queues) {
			t.Errorf("minute %d: %v", n, turn)
		}
	}
	if !slices.Equal(first, []string{"a", "b", "c", "a"}) {
		t.Errorf("begun by %v", first)
	}
}
