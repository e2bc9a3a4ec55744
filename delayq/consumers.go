package delayq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Consumer is one Run of a Worker, or a caller of Lease, as Redis has heard of it. Times are by Redis' clock.
type Consumer struct {
	Name string    `json:"name"`
	Seen time.Time `json:"seen"` // its last call of any kind

	// The rest is what a Worker says of itself every 10 s, until its Run ends; zero for others.
	Beat     time.Time `json:"beat,omitzero"`
	Started  time.Time `json:"started,omitzero"`
	Progress time.Time `json:"progress,omitzero"` // when last a lease call of it was answered with free slots, a handler ended, or reported Progress
	// Running and Stuck (handlers that ignored the end of their context) are of the whole Run, as Concurrency is; OldestRun, how long
	// the oldest of the running handlers had been at it, is of this queue alone.
	Running     int           `json:"running"`
	Concurrency int           `json:"concurrency"`
	Stuck       int           `json:"stuck"`
	OldestRun   time.Duration `json:"oldest_run_ns"`
	Skew        time.Duration `json:"skew_ns"`                  // its clock less Redis', within half the time of a call; 0 until the second beat
	Types       []string      `json:"types,omitempty"`          // that it has handlers for; empty when it takes all
	TypesCut    int           `json:"types_left_out,omitempty"` // how many more it has handlers for: no more than 100 are told, and 2 KiB
}

// live reports whether the last beat is at most two beats late.
func (c *Consumer) live(now time.Time) bool { return !c.Beat.IsZero() && now.Sub(c.Beat) < 3*beatEvery }

// mostConsumers bounds Consumers, and mostBeats what Redis must read for it.
const (
	mostConsumers = 1000
	mostBeats     = 5000
)

// Consumers lists at most limit (1 to 1000) consumers, latest call first. Workers that have not ended come before others that would
// be listed, so that one that was killed is not hidden behind the many short runs after it. Those that have not called for about an
// hour are forgotten.
func (q *Queue) Consumers(ctx context.Context, limit int) ([]Consumer, error) {
	if limit < 1 || limit > mostConsumers {
		return nil, fmt.Errorf("delayq: consumers: %w", &InputError{"limit", "1 to 1000", strconv.Itoa(limit)})
	}
	all, _, err := q.consumers(ctx, limit)
	return all, err
}

// consumers also tells the time in Redis.
func (q *Queue) consumers(ctx context.Context, limit int) (all []Consumer, now time.Time, err error) {
	all, now, err = q.latest(ctx, limit)
	if err != nil || len(all) < limit {
		return all, now, err
	}
	beating, err := q.beating(ctx)
	if err != nil {
		return nil, now, err
	}
	for _, c := range all {
		if _, twice := beating[c.Name]; !twice || !c.Beat.IsZero() {
			beating[c.Name] = c
		}
	}
	all = slices.SortedFunc(maps.Values(beating), func(a, b Consumer) int {
		switch {
		case a.Beat.IsZero() == b.Beat.IsZero():
			return latestFirst(a, b)
		case a.Beat.IsZero():
			return 1
		}
		return -1
	})
	all = all[:min(len(all), limit)]
	slices.SortFunc(all, latestFirst)
	return all, now, nil
}

func latestFirst(a, b Consumer) int {
	return cmp.Or(b.Seen.Compare(a.Seen), cmp.Compare(a.Name, b.Name))
}

// beating are the workers that have not ended.
func (q *Queue) beating(ctx context.Context) (map[string]Consumer, error) {
	keys, found := q.shards[0].keys, map[string]Consumer{}
	for cursor := uint64(0); len(found) < mostBeats; {
		page, next, err := q.rdb.HScan(ctx, keys[keyBeats], cursor, "", maxBatch).Result()
		if err != nil {
			return nil, q.scriptError("consumers", err)
		}
		for i := 0; i+1 < len(page); i += 2 {
			if page[i] == "" {
				continue
			}
			c := Consumer{Name: page[i]}
			c.readBeat(page[i+1])
			c.Seen = c.Beat // of one that beats it is right within a beat, and asking for it would cost as much again
			found[c.Name] = c
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	return found, nil
}

// latest lists those that called last.
func (q *Queue) latest(ctx context.Context, limit int) (all []Consumer, now time.Time, err error) {
	sh := q.shards[0]
	seen := make(map[string]struct{}, limit)
	// More than a page can change between two calls, so one may come twice.
	for skip := 0; skip < limit; skip += maxBatch {
		n := min(limit-skip, maxBatch)
		var f []any
		err := sh.withEpoch(ctx, func() error {
			reply, err := sh.run(ctx, q.scripts.consumers, []any{q.clock(), skip, n}, nil)
			if err != nil {
				return err
			}
			f, err = beatReply(reply)
			if errors.Is(err, errNoEpoch) && q.cfg.NoCreate { // who only looks makes nothing
				f, err = []any{int64(codeOK), time.Now().UnixMicro()}, nil
			}
			return err
		})
		if err != nil {
			return nil, now, err
		}
		us, err := number(f[1])
		if err != nil || len(f)%3 != 2 {
			return nil, now, errReply
		}
		now = time.UnixMicro(us)
		for i := 2; i < len(f); i += 3 {
			c := Consumer{Name: text(f[i]), Seen: scoreTime(text(f[i+1]))}
			if _, twice := seen[c.Name]; twice {
				continue
			}
			seen[c.Name] = struct{}{}
			c.readBeat(text(f[i+2]))
			all = append(all, c)
		}
		if len(f) < 2+3*n {
			break
		}
	}
	return all, now, nil
}

// Queues finds the names of all queues of a Redis by a walk over its keys, on every master of a cluster: not for every request.
// With an error it returns those that it has found until then.
func Queues(ctx context.Context, rdb redis.UniversalClient) ([]string, error) {
	var mu sync.Mutex
	names := map[string]struct{}{}
	// SCAN shows a key twice at times, and two masters may show it while its slot moves.
	scan := func(ctx context.Context, rdb redis.Cmdable) error {
		var cursor uint64
		for {
			page, next, err := rdb.ScanType(ctx, cursor, queueMeta("*"), 1000, "hash").Result()
			if err != nil {
				return err
			}
			mu.Lock()
			for _, key := range page {
				if name, ok := queueOf(key); ok {
					names[name] = struct{}{}
				}
			}
			mu.Unlock()
			if cursor = next; cursor == 0 {
				return nil
			}
		}
	}
	var err error
	switch rdb := rdb.(type) {
	case *redis.ClusterClient:
		err = rdb.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return scan(ctx, c) })
	case *redis.Ring:
		err = rdb.ForEachShard(ctx, func(ctx context.Context, c *redis.Client) error { return scan(ctx, c) })
	default:
		err = scan(ctx, rdb)
	}
	mu.Lock() // a master may still be asked when another has failed
	defer mu.Unlock()
	if err != nil {
		err = fmt.Errorf("delayq: queues: %w", err)
	}
	return slices.Sorted(maps.Keys(names)), err
}

// queueMeta is the key that every queue has once. No letter of a queue's name means anything in a pattern.
func queueMeta(name string) string { return keysOf(name, 0)[keyMeta] }

// queueOf is the queue of which key is the first shard's meta.
func queueOf(key string) (name string, ok bool) {
	before, after, _ := strings.Cut(queueMeta("*"), "*")
	if name, ok = strings.CutPrefix(key, before); !ok {
		return "", false
	}
	name, ok = strings.CutSuffix(name, after)
	return name, ok && validQueue(name) == nil
}
