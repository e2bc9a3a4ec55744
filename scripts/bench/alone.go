package main

import (
	"context"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// measureAlone is the median latency of one caller that enqueues single tasks into an idle queue, where sharing calls
// with other callers must cost nothing. Its peer is one plain script call: the very EVALSHA that Enqueue sends, sent
// without delayq, for another id; a tenth of it is left for encoding and noise. The second row, without a bar, has the
// smallest script that would do as peer, and so shows what everything that delayq's script does costs a lone caller.
func measureAlone(ctx context.Context, b *bench) ([]Row, error) {
	if err := b.wipe(ctx); err != nil {
		return nil, err
	}
	q, err := b.open(ctx, b.rdb)
	if err != nil {
		return nil, err
	}
	call, err := b.enqueueCall(ctx, q.Name())
	if err != nil {
		return nil, err
	}
	if err := plainEnqueue.Load(ctx, b.rdb).Err(); err != nil {
		return nil, err
	}
	var ours, direct, plain []float64
	timed := func(to *[]float64, f func() error) error {
		start := time.Now()
		err := f()
		*to = append(*to, float64(time.Since(start).Nanoseconds())/1_000)
		return err
	}
	for _, id := range ids(b.aloneCalls) { // call by call, so that all see the same neighbours
		err := timed(&ours, func() error {
			_, err := q.Enqueue(ctx, delayq.Task{ID: id, Type: "bench", Payload: b.payload})
			return err
		})
		if err != nil {
			return nil, err
		}
		if err := timed(&direct, func() error { return b.rdb.Do(ctx, call("again-"+id)...).Err() }); err != nil {
			return nil, err
		}
		err = timed(&plain, func() error {
			keys := []string{floorTasks, floorPending, "floor:meta"}
			return plainEnqueue.EvalSha(ctx, b.rdb, keys, id, b.payload, time.Now().UnixMilli()).Err()
		})
		if err != nil {
			return nil, err
		}
	}
	againstDirect := turns{[]float64{median(ours)}, []float64{median(direct)}}
	againstPlain := turns{[]float64{median(ours)}, []float64{median(plain)}}
	return []Row{
		compare("alone", "one caller, against its script called plainly, median us", againstDirect, atMost(1.1)),
		compare("alone/least", "one caller, against the smallest script, median us", againstPlain, bar{}),
	}, nil
}

// enqueueCall returns the arguments of the call by which the named queue enqueues a single task, for any id.
func (b *bench) enqueueCall(ctx context.Context, queue string) (func(id string) []any, error) {
	rdb := redis.NewClient(&redis.Options{Addr: b.server.Addr()})
	defer rdb.Close()
	calls := &callLog{}
	rdb.AddHook(calls)
	q, err := delayq.Open(ctx, rdb, queue, delayq.Config{})
	if err != nil {
		return nil, err
	}
	const first = "first"
	for range 2 { // the first may have to load the script
		if _, err := q.Enqueue(ctx, delayq.Task{ID: first, Type: "bench", Payload: b.payload}); err != nil {
			return nil, err
		}
	}
	sent := calls.last
	return func(id string) []any {
		args := slices.Clone(sent)
		for i, a := range args {
			if a == any(first) {
				args[i] = id
			}
		}
		return args
	}, nil
}

// plainEnqueue is the smallest script that would do: a look for a duplicate, the task, its due time, a counter.
var plainEnqueue = redis.NewScript(`
if redis.call('HGET', KEYS[1], ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('HINCRBY', KEYS[3], 'created', 1)
return 1`)
