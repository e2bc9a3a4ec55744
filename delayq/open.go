package delayq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// openBooked opens a queue that has a ledger. The ledger must answer; Redis need not.
func (q *Queue) openBooked(ctx context.Context) error {
	cfg := q.cfg
	want := LedgerConfig{Shards: cfg.Shards, Retention: cfg.Retention, MaxPayload: cfg.MaxPayload}
	lq, stored, err := cfg.Ledger.OpenQueue(ctx, q.name, want, false)
	if errors.Is(err, ErrNoQueue) && !cfg.NoCreate {
		// A queue that was without a ledger until now keeps what Redis has stored of it.
		if have, known := q.withoutLedger(ctx); known {
			want.Shards, want.Retention, want.MaxPayload = have.shards, have.retention, have.maxPayload
			if cfg.Shards != 0 && cfg.Shards != have.shards {
				return fmt.Errorf("delayq: open %s: %w: the queue has %d, Config.Shards says %d", q.name, ErrShards, have.shards, cfg.Shards)
			}
		}
		lq, stored, err = cfg.Ledger.OpenQueue(ctx, q.name, want, true)
	}
	if err != nil {
		return fmt.Errorf("delayq: open %s: %w", q.name, err)
	}
	q.lq, q.since = lq, stored.Since
	q.maxPayload, q.retention = stored.MaxPayload, stored.Retention
	for i := range stored.Shards {
		q.shards = append(q.shards, &shard{q: q, index: i, keys: keysOf(q.name, i)})
	}
	ctx, cancel := context.WithTimeout(ctx, hungRedis)
	defer cancel()
	if err := q.openShards(ctx); err != nil {
		if !away(err) {
			return err
		}
		q.quiet.Store(time.Now().Add(tellLimit).UnixNano())
		cfg.OnWarning(Warning{"redis_away", "redis does not answer; tasks go into the ledger and will be brought over: " + err.Error()})
	}
	return nil
}

// withoutLedger is what Redis has stored of a queue that the ledger does not know, if it can tell.
func (q *Queue) withoutLedger(ctx context.Context) (storedConfig, bool) {
	ctx, cancel := context.WithTimeout(ctx, hungRedis)
	defer cancel()
	have, err := (&shard{q: q, keys: keysOf(q.name, 0)}).init(ctx, 0, false)
	return have, err == nil
}

// openShards checks the server and makes the shards, or with Config.NoCreate looks at them.
func (q *Queue) openShards(ctx context.Context) error {
	if err := q.checkServer(ctx); err != nil {
		return err
	}
	for i, sh := range q.shards {
		sent := time.Now()
		got, err := sh.init(ctx, len(q.shards), !q.cfg.NoCreate)
		if q.cfg.NoCreate && errors.Is(err, ErrNoQueue) {
			continue // Redis has lost it: the first call that needs it makes it again
		}
		if err != nil {
			return err
		}
		if i == 0 && q.clock() == "0" {
			if err := q.checkSkew(got.now, sent); err != nil {
				return err
			}
		}
	}
	return nil
}

// away reports whether an error means that Redis cannot be used now, not that something is wrong with it.
func away(err error) bool {
	for _, wrong := range []error{ErrShards, ErrSchema, ErrEviction, ErrServerVersion, ErrClockSkew, ErrLedger} {
		if errors.Is(err, wrong) {
			return false
		}
	}
	var reply redis.Error
	return !errors.As(err, &reply) || mayPass(err) || errors.Is(err, ErrFull)
}
