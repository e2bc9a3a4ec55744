package delayq

import "context"

// Replay puts dead letters back, due now and with their attempts at zero. Errors are per task: ErrNotFound.
func (q *Queue) Replay(ctx context.Context, ids ...string) error {
	if q.lq != nil {
		return q.replayBooked(ctx, ids)
	}
	return q.onDead(ctx, "replay", q.scripts.replay, []any{q.clock()}, ids)
}

// Purge deletes dead letters for good; their ids are free at once. Errors are per task: ErrNotFound.
func (q *Queue) Purge(ctx context.Context, ids ...string) error {
	if q.lq != nil {
		return q.purgeBooked(ctx, ids)
	}
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

func (q *Queue) replayBooked(ctx context.Context, ids []string) error {
	return batchError("replay", q.eachBatch("replay", ids, func(_ *shard, batch []int) ([]int, error) {
		some := chosen(ids, batch)
		changes, err := q.lq.Replay(ctx, nil, some)
		if err != nil {
			return nil, err
		}
		codes := notFound(q.waitingBooked(ctx, nil, changes, "e:replayed"))
		for k, c := range changes {
			if c.Row == nil { // perhaps quarantined: then this is an operator's word that it shall run
				adopted, err := q.adopt(ctx, some[k:k+1], func(in *Info) bool { return in.State == StateDead })
				if err != nil {
					return nil, err
				}
				if len(adopted) > 0 {
					codes[k] = codeOK
				}
			}
		}
		return codes, nil
	}, func(_, code int) error { return waitingErrors[code] }))
}

// purgeBooked deletes dead letters from the ledger, and from Redis those that are only there: the quarantined.
func (q *Queue) purgeBooked(ctx context.Context, ids []string) error {
	return batchError("purge", q.eachBatch("purge", ids, func(sh *shard, batch []int) ([]int, error) {
		changes, err := q.lq.Purge(ctx, nil, chosen(ids, batch))
		if err != nil {
			return nil, err
		}
		codes := make([]int, len(batch))
		var left []int
		for k, c := range changes {
			codes[k] = codeOK
			if !c.Applied {
				codes[k] = codeUnknown
				if c.Row == nil {
					left = append(left, k)
				}
			}
		}
		if len(left) == 0 {
			return codes, nil
		}
		args := []any{len(left)}
		for _, k := range left {
			args = append(args, ids[batch[k]])
		}
		inRedis, err := sh.batch(ctx, q.scripts.purge, args, len(left), codeUnknown)
		for i, k := range left {
			if err == nil {
				codes[k] = inRedis[i]
			}
		}
		return codes, err
	}, func(_, code int) error { return waitingErrors[code] }))
}

// notFound makes every refusal the one that replay and purge have: there is no such dead letter.
func notFound(codes []int) []int {
	for i, code := range codes {
		if code != codeOK {
			codes[i] = codeUnknown
		}
	}
	return codes
}
