package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
)

// A vandalism is one way to lose what Redis holds.
type vandalism struct {
	name string
	do   func(ctx context.Context) error
}

func (s *stage) vandalism() []vandalism {
	key := func(name string) string {
		return "dq:{" + s.cfg.Queue + ":" + strconv.Itoa(s.rng.IntN(s.cfg.Shards)) + "}:" + name
	}
	ways := []vandalism{
		{"FLUSHALL", func(ctx context.Context) error { return s.rdb.FlushAll(ctx).Err() }},
		{"FLUSHDB", func(ctx context.Context) error { return s.rdb.FlushDB(ctx).Err() }},
		// The second swap brings back what was there before the first: old revisions of tasks that have moved on.
		{"SWAPDB", func(ctx context.Context) error { return s.rdb.Do(ctx, "SWAPDB", 0, 1).Err() }},
		{"SCRIPT FLUSH", func(ctx context.Context) error { return s.rdb.ScriptFlush(ctx).Err() }},
		{"a tenth of the records are deleted", func(ctx context.Context) error { return s.deleteSome(ctx, key("tasks"), 10) }},
		{"a tenth of the leases' records are deleted", func(ctx context.Context) error { return s.deleteSome(ctx, key("state"), 10) }},
	}
	for _, name := range []string{"pending", "processing", "tasks", "state", "meta", "revs", "req", "consumers", "beats"} {
		ways = append(ways, vandalism{name + " is deleted", func(ctx context.Context) error { return s.rdb.Unlink(ctx, key(name)).Err() }})
	}
	return ways
}

// deleteSome deletes one field in n of a hash.
func (s *stage) deleteSome(ctx context.Context, key string, n int) error {
	fields, err := s.rdb.HKeys(ctx, key).Result()
	if err != nil {
		return err
	}
	var some []string
	for _, f := range fields {
		if f != "" && s.rng.IntN(n) == 0 {
			some = append(some, f)
		}
	}
	if len(some) == 0 {
		return nil
	}
	return s.rdb.HDel(ctx, key, some...).Err()
}

// truncateLast cuts up to n bytes off the end of the newest increment of an AOF, at most half of it.
func truncateLast(dir string, n int64) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.incr.aof"))
	if err != nil || len(files) == 0 {
		return errors.Join(err, errors.New("there is no AOF to cut"))
	}
	last := files[len(files)-1]
	info, err := os.Stat(last)
	if err != nil {
		return err
	}
	return os.Truncate(last, info.Size()-min(n, info.Size()/2))
}

// removeAll deletes the AOF of a stopped server.
func removeAll(dir string) error { return os.RemoveAll(dir) }
