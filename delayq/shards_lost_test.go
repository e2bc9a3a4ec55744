package delayq_test

import (
	"errors"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// Redis lost everything, and somebody who does not know the count has made the queue again with one shard: whoever knows
// better hears of it, before tasks go to shards that nobody serves.
func TestALostQueueMadeWithAnotherCountIsAnError(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: servers.NewRedis(t).Addr()})
	defer rdb.Close()
	ctx := t.Context()
	quiet := func(delayq.Warning) {}
	old, err := delayq.Open(ctx, rdb, "q", delayq.Config{Shards: 4, OnWarning: quiet})
	if err != nil {
		t.Fatal(err)
	}
	rdb.FlushAll(ctx)
	if _, err := delayq.Open(ctx, rdb, "q", delayq.Config{OnWarning: quiet}); err != nil {
		t.Fatal(err)
	}
	refused := 0
	for i := range 40 {
		_, err := old.Enqueue(ctx, delayq.Task{ID: string(rune('A' + i)), Type: "t"}, delayq.In(time.Hour))
		if err != nil {
			is(t, err, delayq.ErrShards)
			refused++
		}
	}
	if refused == 0 {
		t.Error("all went in")
	}
	if n := rdb.Exists(ctx, delayq.Keys(old, 1)...).Val(); n != 0 {
		t.Errorf("shard 1 was made again: %d keys", n)
	}
}

// Made again by who knows the count, it is read by who does not.
func TestALostQueueKeepsItsCount(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: servers.NewRedis(t).Addr()})
	defer rdb.Close()
	ctx := t.Context()
	quiet := func(delayq.Warning) {}
	old, err := delayq.Open(ctx, rdb, "q", delayq.Config{Shards: 4, OnWarning: quiet})
	if err != nil {
		t.Fatal(err)
	}
	rdb.FlushAll(ctx)
	id := "A"
	for delayq.ShardOf(old, id) == 0 {
		id += "x"
	}
	if _, err := old.Enqueue(ctx, delayq.Task{ID: id, Type: "t"}); err != nil {
		t.Fatal(err)
	}
	if q, err := delayq.Open(ctx, rdb, "q", delayq.Config{OnWarning: quiet}); err != nil || q.Shards() != 4 {
		t.Errorf("%v, %v", q, err)
	}
	rdb.Del(ctx, delayq.Keys(old, 0)...) // one node of a cluster
	_, err = delayq.Open(ctx, rdb, "q", delayq.Config{OnWarning: quiet})
	is(t, err, delayq.ErrShards)
}

func is(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
}
