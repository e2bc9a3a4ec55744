package console

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

// booked is a rig whose queues may have a ledger.
func booked(t *testing.T, cfg Config) (*rig, *ledger.Ledger, *pgxpool.Pool) {
	t.Helper()
	return bookedIn(t, servers.NewDatabase(t), cfg)
}

func bookedIn(t *testing.T, url string, cfg Config) (*rig, *ledger.Ledger, *pgxpool.Pool) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err = migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	led, err := ledger.Open(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	cfg.History = func(ctx context.Context, queue, id string) ([]Event, error) {
		h, err := led.History(ctx, queue, id)
		if err != nil {
			return nil, err
		}
		events := []Event{{At: h.CreatedAt, Name: "planned"}}
		for _, e := range h.Events {
			events = append(events, Event{At: e.At, Name: e.Event, By: e.By, Attempt: e.Attempt, Reason: e.Reason, Error: e.Error})
		}
		return events, nil
	}
	return newRig(t, cfg, func(m *monitor.Config) { m.Ledger, m.Timeout = led, time.Second }), led, pool
}

func TestHistoryAndActionsWithALedger(t *testing.T) {
	t.Parallel()
	r, led, pool := booked(t, Config{})
	q := r.queue("shop", delayq.Config{Ledger: led})
	plain := r.queue("plain", delayq.Config{})
	r.kill(q, "order.cancel", "one", "two", "\xff/..")
	r.add(plain, "here", "t", time.Hour)

	page := r.get("/queue/shop/task/one", 200)
	for _, want := range []string{"Planned", "Dead letter", "no such order", "permanent"} {
		if !strings.Contains(page, want) {
			t.Errorf("the history lacks %q:\n%s", want, page)
		}
	}
	if page = r.get("/queue/plain/task/here", 200); !strings.Contains(page, "Only a ledger keeps") {
		t.Error("a task without a ledger has a history")
	}
	for _, id := range []string{"one", "\xff/.."} {
		form := map[string][]string{"do": {"replay"}, "from": {"task"}, "id": {segment(id)}}
		if page = r.post("/queue/shop/act", r.confirmed("/queue/shop/act", form), 200); !strings.Contains(page, "is due again") {
			t.Error(page)
		}
		r.wantState(q, delayq.StateDue, id)
	}
	form := map[string][]string{"do": {"purge"}, "from": {"dead"}, "id": {"two"}}
	r.post("/queue/shop/act", r.confirmed("/queue/shop/act", form), 200)
	if _, err := q.Get(t.Context(), "two"); !errors.Is(err, delayq.ErrNotFound) {
		t.Errorf("after the purge: %v", err)
	}
	for _, path := range []string{"/", "/queue/shop", "/queue/shop?state=pending", "/queue/shop/dead", "/search?find=one"} {
		r.get(path, 200)
	}
	// Without its database the queue's page says so, and the others go on.
	pool.Close()
	time.Sleep(fresh)
	if page = r.get("/queue/shop/task/one", 503); !strings.Contains(page, "The database does not answer") {
		t.Error(page)
	}
	r.get("/queue/plain", 200)
	r.get("/", 200)
}
