package delayq

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// Stored reads what Redis has stored of a queue's configuration, whether the queue has a ledger or not. It is for those who look
// at a queue without its ledger. Errors: ErrNoQueue, ErrSchema, ErrInvalid, the connection's.
func Stored(ctx context.Context, rdb redis.UniversalClient, name string) (LedgerConfig, error) {
	if err := validQueue(name); err != nil {
		return LedgerConfig{}, fmt.Errorf("delayq: look at: %w", err)
	}
	q := &Queue{rdb: rdb, name: name, cfg: Config{Ledger: noLedger{}}.withDefaults(), scripts: newScripts(""), clock: func() string { return "0" }}
	stored, err := (&shard{q: q, keys: keysOf(name, 0)}).init(ctx, 0, false)
	if err != nil {
		return LedgerConfig{}, err
	}
	return LedgerConfig{Shards: stored.shards, Retention: stored.retention, MaxPayload: stored.maxPayload, Now: stored.now}, nil
}

// noLedger makes init take a queue that has a ledger as well as one that has none.
type noLedger struct{ Ledger }
