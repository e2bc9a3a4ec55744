package delayq

import (
	"context"
	"encoding/binary"
	"errors"
	"time"
)

// LedgerQueue is the queue's side of its ledger, nil when it has none. It is for package reconciler and for tools.
func (q *Queue) LedgerQueue() LedgerQueue { return q.lq }

// Horizon is Config.Horizon.
func (q *Queue) Horizon() time.Duration { return q.cfg.Horizon }

// InRedis reports whether Redis should have the task of a row. One that runs it always has, however far the end of its lease
// is: that is how the task comes back when its consumer dies.
func (q *Queue) InRedis(row *LedgerRow, now time.Time) bool {
	return row.Status == LedgerRunning || row.Status.Waiting() && (q.cfg.Horizon == 0 || !row.RunAt.After(now.Add(q.cfg.Horizon)))
}

// dueInRedis is when Redis should lease a task: one that runs, when its lease has run out.
func (row *LedgerRow) dueInRedis() time.Time {
	if row.Status == LedgerRunning && row.LockedUntil.After(row.RunAt) {
		return row.LockedUntil
	}
	return row.RunAt
}

// adoptSlack allows for the clocks of producers, which stamp tasks.
const adoptSlack = time.Minute

// Adopt takes tasks that wait in Redis without a revision into the ledger, if they were enqueued before the queue had one. It
// returns how many, and the ids of those that are none of it: unknown to the ledger and of no earlier time. Tasks that still run
// are left for later.
func (q *Queue) Adopt(ctx context.Context, ids []string) (adopted int, unknown []string, err error) {
	latest := q.since.Add(adoptSlack)
	left := map[string]bool{}
	got, err := q.adopt(ctx, ids, func(in *Info) bool {
		switch {
		case in.State == StateDead || in.State == StateProcessing:
			left[in.ID] = true
			return false
		case in.Type == "" || len(in.ID) > maxID || in.EnqueuedAt.After(latest):
			unknown = append(unknown, in.ID)
			return false
		}
		return true
	})
	return len(got), unknown, err
}

// adopt inserts tasks of Redis into the ledger, those that want chooses, and shows Redis their rows.
func (q *Queue) adopt(ctx context.Context, ids []string, want func(*Info) bool) (adopted []string, err error) {
	infos, err := q.Mirror().Unbooked(ctx, ids)
	if err != nil {
		return nil, err
	}
	var tasks []LedgerTask
	for i := range infos {
		in := &infos[i]
		if !want(in) || in.Type == "" || len(in.ID) > maxID {
			continue
		}
		// With the stamp of its record: a row that it once had, cancelled since, is then not revived.
		due := LedgerDue{At: in.At}
		if in.State == StateDead {
			due = LedgerDue{}
		}
		tasks = append(tasks, LedgerTask{ID: in.ID, Type: in.Type, Key: in.Key, Payload: in.Payload, Stamp: in.stamp, Due: due})
	}
	if len(tasks) == 0 {
		return nil, nil
	}
	changes, err := q.lq.Insert(ctx, nil, tasks, false)
	if err != nil {
		return nil, err
	}
	var rows []LedgerRow
	for _, c := range changes {
		if c.Row != nil { // known after all: Redis learns of it all the same
			rows = append(rows, *c.Row)
			adopted = append(adopted, c.Row.ID)
		}
	}
	_, err = q.Mirror().Show(ctx, rows, Showing{Now: time.Now()})
	if errors.Is(err, ErrFull) {
		err = nil // they are in the ledger
	}
	return adopted, err
}

// stampTime is the time in a stamp, zero when it is none.
func stampTime(stamp []byte) time.Time {
	if len(stamp) != stampSize {
		return time.Time{}
	}
	var eight [8]byte
	copy(eight[2:], stamp[:6])
	return time.UnixMilli(int64(binary.BigEndian.Uint64(eight[:])))
}
