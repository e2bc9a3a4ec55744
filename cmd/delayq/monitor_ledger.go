package main

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// lateLedger opens the ledger when somebody first asks, and as often as it takes: a monitor must start while the database is away.
type lateLedger struct {
	pool *pgxpool.Pool
	mu   sync.Mutex
	led  *ledger.Ledger
}

func (l *lateLedger) open(ctx context.Context) (*ledger.Ledger, error) {
	l.mu.Lock()
	led := l.led
	l.mu.Unlock()
	if led != nil {
		return led, nil
	}
	led, err := ledger.Open(ctx, l.pool)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.led = led
	return led, nil
}

// OpenQueue is for delayq.Open.
func (l *lateLedger) OpenQueue(ctx context.Context, name string, want delayq.LedgerConfig, create bool) (delayq.LedgerQueue, delayq.LedgerConfig, error) {
	led, err := l.open(ctx)
	if err != nil {
		return nil, delayq.LedgerConfig{}, err
	}
	return led.OpenQueue(ctx, name, want, create)
}

// Queues is for the monitor.
func (l *lateLedger) Queues(ctx context.Context) ([]string, error) {
	led, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	return led.Queues(ctx)
}

// late is the pool for a ledger that need not answer yet, nil for none, and the horizon.
func (b *booked) late() (*pgxpool.Pool, time.Duration, error) {
	horizon, err := b.bound()
	if err != nil || b.url == "" {
		return nil, 0, err
	}
	pool, err := b.pool(4)
	return pool, horizon, err
}
