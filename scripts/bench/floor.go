package main

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// floor is the least that a queue with fenced leases can ask of Redis: its reads and writes as plain variadic commands.
// It checks nothing, counts nothing, remembers no finished id and would lose races; it is only there to be compared with.
// Plain means one call a command, as the bar was set; pipelined, the commands of a step share a round trip, which saves Redis
// most of what a call costs and a client the atomicity it has not got anyway.
type floor struct {
	rdb       *redis.Client
	pipelined bool
}

// send sends the commands of one step.
func (f floor) send(ctx context.Context, step func(redis.Pipeliner) error) error {
	p := f.rdb.Pipeline()
	if err := step(p); err != nil {
		return err
	}
	if f.pipelined {
		_, err := p.Exec(ctx)
		return err
	}
	for _, cmd := range p.Cmds() {
		if err := f.rdb.Process(ctx, cmd); err != nil {
			return err
		}
	}
	return nil
}

// The keys of the floor: ids by due time, ids by deadline, id to payload, id to lease token.
const (
	floorPending    = "floor:pending"
	floorProcessing = "floor:processing"
	floorTasks      = "floor:tasks"
	floorState      = "floor:state"
)

func (f floor) enqueue(ctx context.Context, ids []string, payload []byte) error {
	now := time.Now().UnixMicro()
	fields := make([]any, 0, 2*len(ids))
	due := make([]redis.Z, len(ids))
	for i, id := range ids {
		fields = append(fields, id, payload)
		due[i] = redis.Z{Score: float64(now + int64(i)), Member: id} // as delayq does, to keep the order of a batch
	}
	return f.send(ctx, func(p redis.Pipeliner) error {
		p.HSet(ctx, floorTasks, fields...)
		p.ZAdd(ctx, floorPending, due...)
		return nil
	})
}

func (f floor) lease(ctx context.Context, limit int) ([]string, error) {
	now := time.Now()
	//nolint:staticcheck // the bar was set with this command
	ids, err := f.rdb.ZRangeByScore(ctx, floorPending, &redis.ZRangeBy{
		Min: "-inf", Max: strconv.FormatInt(now.UnixMicro(), 10), Count: int64(limit),
	}).Result()
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	deadline := float64(now.Add(30 * time.Second).UnixMicro())
	leased := make([]redis.Z, len(ids))
	state := make([]any, 0, 2*len(ids))
	for i, id := range ids {
		leased[i] = redis.Z{Score: deadline, Member: id}
		state = append(state, id, "a token of 16 B.")
	}
	err = f.send(ctx, func(p redis.Pipeliner) error {
		p.HMGet(ctx, floorTasks, ids...)
		p.ZAdd(ctx, floorProcessing, leased...)
		p.HSet(ctx, floorState, state...)
		p.ZRem(ctx, floorPending, members(ids)...)
		return nil
	})
	return ids, err
}

func (f floor) ack(ctx context.Context, ids []string) error {
	return f.send(ctx, func(p redis.Pipeliner) error {
		p.HDel(ctx, floorTasks, ids...)
		p.ZRem(ctx, floorProcessing, members(ids)...)
		p.HDel(ctx, floorState, ids...)
		return nil
	})
}

func members(ids []string) []any {
	out := make([]any, len(ids))
	for i, id := range ids {
		out[i] = id
	}
	return out
}
