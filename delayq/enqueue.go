package delayq

import (
	"context"
	"errors"
	"sync"
)

// An entry is one task on its way into the queue.
type entry struct {
	task *Task
	blob []byte
	due  string
}

// cost is an upper estimate of what the entry adds to a call.
func (e *entry) cost() int { return len(e.task.ID) + len(e.blob) + 64 }

// Enqueue adds a task. A known id is no error unless the policy is Reject (ErrConflict): the outcome says where it stands. It
// may be repeated after any error; with the same id the repeat finds the first.
//
// Errors: ErrInvalid (an InputError names field and limit), ErrConflict, ErrFull, and what the connection says; ErrCancelled
// when a call had to be sent twice and the id was cancelled, which may have been before or in between: enqueue again if the
// task shall run.
func (q *Queue) Enqueue(ctx context.Context, t Task, opts ...Option) (Result, error) {
	for _, o := range opts {
		o(&t)
	}
	e, err := q.newEntry(&t)
	if err != nil {
		return Result{ID: t.ID, Err: err}, err
	}
	sh := q.shard(t.ID)
	res := Result{ID: t.ID, Err: ErrBusy}
	if !sh.patience.has(t.ID) {
		res = sh.commit(ctx, e)
	}
	res = sh.patiently(ctx, e, res)
	return res, res.Err
}

// EnqueueMany adds tasks, each on its own: results has one place for each, in order. The error is nil when all went in,
// otherwise a BatchError (for a single task, its own error); tasks without an error in their result are in the queue.
func (q *Queue) EnqueueMany(ctx context.Context, tasks []Task, opts ...Option) ([]Result, error) {
	results := make([]Result, len(tasks))
	byShard := make([][]*entry, len(q.shards))
	at := make(map[*entry]int, len(tasks))
	for i := range tasks {
		t := tasks[i]
		for _, o := range opts {
			o(&t)
		}
		e, err := q.newEntry(&t)
		results[i] = Result{ID: t.ID, Err: err}
		if err == nil {
			at[e] = i
			s := shardOf(t.ID, len(q.shards))
			byShard[s] = append(byShard[s], e)
		}
	}
	var wg sync.WaitGroup
	for s, entries := range byShard {
		if len(entries) == 0 {
			continue
		}
		wg.Go(func() {
			var telling sync.WaitGroup // Redis is told of a call's tasks while the ledger takes the next
			defer telling.Wait()
			var busy []*entry
			for len(entries) > 0 {
				n := fit(entries)
				some, tell := q.shards[s].enqueueing(ctx, entries[:n])
				for i, r := range some {
					if results[at[entries[i]]] = r; errors.Is(r.Err, ErrBusy) {
						busy = append(busy, entries[i])
					}
				}
				entries = entries[n:]
				telling.Wait()
				telling.Go(tell)
			}
			for _, e := range busy {
				results[at[e]] = q.shards[s].patiently(ctx, e, results[at[e]])
			}
		})
	}
	wg.Wait()
	errs := make([]error, len(results))
	for i, r := range results {
		errs[i] = r.Err
	}
	return results, batchError("enqueue", errs)
}

func (q *Queue) newEntry(t *Task) (*entry, error) {
	blob, err := q.prepare(t)
	if err != nil {
		return nil, err
	}
	due, err := dueArg(t.Delay, t.RunAt)
	if err != nil {
		return nil, &TaskError{"enqueue", q.name, t.ID, err}
	}
	return &entry{t, blob, due}, nil
}

// fit says how many of the first entries go into one call: bounded in number and bytes, one policy, and no id twice, so
// that the script needs no look for it.
func fit(entries []*entry) int {
	seen := make(map[string]struct{}, min(len(entries), maxBatch))
	bytes := 0
	for i, e := range entries {
		_, twice := seen[e.task.ID]
		bytes += e.cost()
		if twice || i == maxBatch || i > 0 && (bytes > maxCallBytes || e.task.Conflict != entries[0].task.Conflict) {
			return i
		}
		seen[e.task.ID] = struct{}{}
	}
	return len(entries)
}

// enqueue sends one call's worth of entries.
func (sh *shard) enqueue(ctx context.Context, entries []*entry) []Result {
	results, tell := sh.enqueueing(ctx, entries)
	tell()
	return results
}

// enqueueing is enqueue but for what is left to do when the results stand: with a ledger, to tell Redis.
func (sh *shard) enqueueing(ctx context.Context, entries []*entry) (results []Result, tell func()) {
	if sh.q.lq != nil {
		return sh.q.book(ctx, nil, entries)
	}
	return sh.enqueueInRedis(ctx, entries), func() {}
}

func (sh *shard) enqueueInRedis(ctx context.Context, entries []*entry) []Result {
	n := len(entries)
	policy := entries[0].task.Conflict
	dues := entries
	if sameDue(entries) {
		dues = entries[:1]
	}
	args := make([]any, 0, 5+3*n)
	args = append(args, sh.q.clock(), bit(policy == Replace), "0", n, len(dues))
	for _, e := range entries {
		args = append(args, e.task.ID, e.blob)
	}
	for _, e := range dues {
		args = append(args, e.due)
	}
	var codes []int
	resent := false
	err := sh.withEpoch(ctx, func() error {
		reply, err := sh.run(ctx, sh.q.scripts.enqueue, args, func() { args[2], resent = "1", true })
		if err == nil {
			codes, err = exceptions(reply, n)
		}
		return err
	})
	results := make([]Result, n)
	for i, e := range entries {
		results[i].ID = e.task.ID
		if err != nil {
			results[i].Err = &TaskError{"enqueue", sh.q.name, e.task.ID, err}
			continue
		}
		if codes[i] == codeCancelled {
			results[i].Err = &TaskError{"enqueue", sh.q.name, e.task.ID, ErrCancelled}
			continue
		}
		o := outcomes[codes[i]]
		if policy == Reject && o.Duplicate() && (!resent || o != DuplicateDone) {
			results[i].Err = &TaskError{"enqueue", sh.q.name, e.task.ID, ErrConflict}
		}
		results[i].Outcome = o
	}
	return results
}

func sameDue(entries []*entry) bool {
	for _, e := range entries[1:] {
		if e.due != entries[0].due {
			return false
		}
	}
	return true
}

var outcomes = map[int]Outcome{
	codeOK: Created, codeRepeat: Created, codeReplaced: Replaced, codePending: DuplicatePending,
	codeProcessing: DuplicateProcessing, codeDead: DuplicateDead, codeDone: DuplicateDone,
}
