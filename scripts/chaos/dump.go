package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// dumpLedger adds what the database holds to a history.
func dumpLedger(ctx context.Context, pool *pgxpool.Pool, h *history) error {
	rows, err := readRows(ctx, pool)
	if err != nil {
		return err
	}
	h.rows = rows
	for _, q := range []struct {
		sql  string
		into map[string]int
	}{
		{"select task, count(*) from chaos.effect group by task", h.effects},
		{"select task, count(*) from chaos.orders group by task", h.orders},
	} {
		var id string
		var n int
		found, err := pool.Query(ctx, q.sql)
		if err != nil {
			return err
		}
		if _, err := pgx.ForEachRow(found, []any{&id, &n}, func() error {
			q.into[id] = n
			return nil
		}); err != nil {
			return err
		}
	}
	return readChanges(ctx, pool, h)
}

func readRows(ctx context.Context, pool *pgxpool.Pool) (map[string]row, error) {
	found, err := pool.Query(ctx, `select id, status::text, failed, lost, rev, run_at, cancel_requested,
		coalesce(locked_until, 'epoch'), coalesce(reason, ''), coalesce(locked_by, '') from delayq.task where queue > 0`) // 0 is ballast
	if err != nil {
		return nil, err
	}
	rows := map[string]row{}
	var id []byte
	var r row
	var runAt, until time.Time
	fields := []any{&id, &r.status, &r.failed, &r.lost, &r.rev, &runAt, &r.cancelAsked, &until, &r.reason, &r.lastBy}
	_, err = pgx.ForEachRow(found, fields, func() error {
		r.runAt, r.lockedUntil = runAt.UnixMicro(), until.UnixMicro()
		rows[string(id)] = r
		return nil
	})
	return rows, err
}

func readChanges(ctx context.Context, pool *pgxpool.Pool, h *history) error {
	found, err := pool.Query(ctx, `select task, at, coalesce(old_status::text, ''), coalesce(new_status::text, ''),
		coalesce(old_token::text, ''), coalesce(new_token::text, ''),
		coalesce(old_until, 'epoch'), old_delivery, new_delivery, new_lost > old_lost, coalesce(old_by, ''), coalesce(new_by, '')
		from chaos.change order by n`)
	if err != nil {
		return err
	}
	var id []byte
	var at, until time.Time
	var c change
	var oldBy, newBy string
	_, err = pgx.ForEachRow(found, []any{
		&id, &at, &c.oldStatus, &c.newStatus, &c.oldToken, &c.newToken, &until, &c.oldDelivery, &c.newDelivery, &c.lostMore, &oldBy, &newBy,
	}, func() error {
		c.at, c.oldUntil = at.UnixMicro(), until.UnixMicro()
		c.oldPID, c.pid = pidOf(oldBy), pidOf(newBy)
		h.changes[string(id)] = append(h.changes[string(id)], c)
		return nil
	})
	for _, changes := range h.changes { // n is drawn before the row is locked to nobody else, but let time decide
		slices.SortStableFunc(changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
	}
	return err
}

// An entry is a task in Redis.
type entry struct {
	rev    int64
	places []string // of pending, processing and dead: one
	due    int64    // its score there
	record bool
}

// dumpRedis reads every key of a queue, without any help of the queue's own code.
func dumpRedis(ctx context.Context, rdb *redis.Client, queue string, shards int) (map[string]*entry, error) {
	entries := map[string]*entry{}
	at := func(id string) *entry {
		if entries[id] == nil {
			entries[id] = &entry{}
		}
		return entries[id]
	}
	for shard := range shards {
		prefix := "dq:{" + queue + ":" + strconv.Itoa(shard) + "}:"
		for _, place := range []string{"pending", "processing", "dead"} {
			members, err := rdb.ZRangeWithScores(ctx, prefix+place, 0, -1).Result()
			if err != nil {
				return nil, err
			}
			for _, m := range members {
				e := at(m.Member.(string)) // go-redis gives strings
				e.places, e.due = append(e.places, place), int64(m.Score)
			}
		}
		ids, err := rdb.HKeys(ctx, prefix+"tasks").Result()
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			at(id).record = true
		}
		revs, err := rdb.HGetAll(ctx, prefix+"revs").Result()
		if err != nil {
			return nil, err
		}
		for id, rev := range revs {
			at(id).rev, _ = strconv.ParseInt(rev, 10, 64)
		}
	}
	delete(entries, "") // the sentinels
	return entries, nil
}

// disagree lists on which tasks the ledger and Redis differ (I9, I10). Near the horizon a task may be on either side.
func disagree(rows map[string]row, entries map[string]*entry, horizon time.Duration, now time.Time) []problem {
	var found []problem
	bad := func(id, format string, args ...any) {
		found = append(found, problem{"I10", id, fmt.Sprintf(format, args...)})
	}
	for id, r := range rows {
		e := entries[id]
		ahead := time.UnixMicro(r.runAt).Sub(now)
		switch {
		case r.open() && horizon > 0 && (ahead-horizon).Abs() < 5*time.Second:
		case r.open() && (horizon == 0 || ahead < horizon || r.status == running):
			switch {
			case e == nil:
				bad(id, "open in the ledger, and not in redis")
			case e.rev != r.rev:
				bad(id, "revision %d in the ledger, %d in redis", r.rev, e.rev)
			case !e.record || len(e.places) != 1 || e.places[0] == "dead":
				bad(id, "open in the ledger; in redis record %v, in %v", e.record, e.places)
			case r.status != running && e.places[0] == "pending" && e.due != r.runAt:
				bad(id, "due at %d in the ledger, at %d in redis", r.runAt, e.due)
			}
		case e != nil && r.open():
			bad(id, "due beyond the horizon, and in redis: %v", e.places)
		case e != nil:
			bad(id, "%s in the ledger, and in redis: %v", r.status, e.places)
		}
	}
	for id, e := range entries {
		if _, ok := rows[id]; !ok {
			bad(id, "in redis (%v), and the ledger does not know it", e.places)
		}
	}
	slices.SortFunc(found, func(a, b problem) int { return cmp.Compare(a.task, b.task) })
	return found
}
