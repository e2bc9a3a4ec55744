package delayq

import (
	"context"
	"errors"
	"slices"
)

// A Suspect is a task in Redis that the ledger does not know, as it was seen.
type Suspect struct {
	ID    string
	Rev   int64
	Token string // of the lease under which it was seen; empty = whatever its lease
}

// Quarantine moves tasks to the dead letters that are still as they were seen, and removes those of them that have no record. It
// returns how many.
func (m *Mirror) Quarantine(ctx context.Context, suspects []Suspect, reason, why string) (n int, err error) {
	seen := map[string]bool{}
	suspects = slices.DeleteFunc(slices.Clone(suspects), func(s Suspect) bool {
		twice := seen[s.ID]
		seen[s.ID] = true
		return twice
	})
	err = m.eachShard(len(suspects), func(i int) string { return suspects[i].ID }, func(sh *shard, batch []int) error {
		args := make([]any, 0, 4+3*len(batch))
		args = append(args, m.q.clock(), len(batch), m.q.cfg.DeadCap, errorRecord(settlement{reason: reason, err: errors.New(why)}))
		for _, i := range batch {
			args = append(args, suspects[i].ID)
		}
		for _, i := range batch {
			args = append(args, suspects[i].Rev)
		}
		for _, i := range batch {
			args = append(args, suspects[i].Token)
		}
		codes, err := m.codes(ctx, sh, m.q.scripts.quarantine, args, len(batch), codeRepeat, nil)
		for _, code := range codes {
			if code == codeOK || code == codeBroken {
				n++
			}
		}
		return err
	})
	return n, err
}

// Mend puts right what is in pieces: it removes what cannot run, and makes whole what has its record. It returns how many, and the
// ids of those that are whole but have no revision, which Unbooked describes.
func (m *Mirror) Mend(ctx context.Context, ids []string) (n int, unbooked []string, err error) {
	ids = distinct(ids)
	err = m.eachShard(len(ids), func(i int) string { return ids[i] }, func(sh *shard, batch []int) error {
		args := make([]any, 0, 2+len(batch))
		args = append(args, m.q.clock(), len(batch))
		for _, i := range batch {
			args = append(args, ids[i])
		}
		codes, err := m.codes(ctx, sh, m.q.scripts.mend, args, len(batch), codeUnknown, nil)
		for k, code := range codes {
			switch code {
			case codeOK:
				n++
			case codeUnbooked:
				unbooked = append(unbooked, ids[batch[k]])
			}
		}
		return err
	})
	return n, unbooked, err
}

// Nudge makes workers ask the ledger at once whether their tasks are to stop, in the shards of these ids.
func (m *Mirror) Nudge(ctx context.Context, ids []string) error {
	var errs []error
	done := map[*shard]bool{}
	for _, id := range ids {
		sh := m.q.shard(id)
		if done[sh] {
			continue
		}
		done[sh] = true
		_, err := m.codes(ctx, sh, m.q.scripts.nudge, nil, 0, 0, nil)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Unbooked describes those of the ids that are in Redis without a revision, as tasks from before the queue had a ledger are, and
// those in quarantine.
func (m *Mirror) Unbooked(ctx context.Context, ids []string) ([]Info, error) {
	var infos []Info
	ids = distinct(ids)
	err := m.eachShard(len(ids), func(i int) string { return ids[i] }, func(sh *shard, batch []int) error {
		some := chosen(ids, batch)
		revs, err := m.q.rdb.HMGet(ctx, sh.keys[keyRevs], some...).Result()
		if err != nil {
			return m.q.scriptError("unbooked", err)
		}
		got, err := sh.get(ctx, some)
		for i, in := range got {
			if in != nil && (in.State == StateDead || revs[i] == nil && in.State != StateDone && in.State != StateCancelled) {
				infos = append(infos, *in)
			}
		}
		return err
	})
	return infos, err
}
