package delayq

import "context"

// Replay puts dead letters back, due now and with their attempts at zero. Errors are per task: ErrNotFound.
func (q *Queue) Replay(ctx context.Context, ids ...string) error {
	return q.onDead(ctx, "replay", q.scripts.replay, []any{q.clock()}, ids)
}

// Purge deletes dead letters for good; their ids are free at once. Errors are per task: ErrNotFound.
func (q *Queue) Purge(ctx context.Context, ids ...string) error {
	return q.onDead(ctx, "purge", q.scripts.purge, nil, ids)
}

func (q *Queue) onDead(ctx context.Context, op string, s script, head []any, ids []string) error {
	return batchError(op, q.eachBatch(op, ids, func(sh *shard, batch []int) ([]int, error) {
		args := append(append([]any{}, head...), len(batch))
		for _, i := range batch {
			args = append(args, ids[i])
		}
		return sh.batch(ctx, s, args, len(batch), codeUnknown)
	}, func(_, code int) error { return waitingErrors[code] }))
}
