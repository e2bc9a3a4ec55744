package delayq

import (
	"context"
	"errors"
	"strconv"
	"time"
)

// A Mirror is the Redis side of a queue that has a ledger: every entry carries the revision of its row, and whatever is
// written applies only if it is newer, so messages may be lost, late, swapped and repeated. It is for package reconciler and
// for tools; applications use Queue.
//
// Every method may be called at any time and repeated. A shard that Redis has lost is made again on the way.
type Mirror struct{ q *Queue }

// Mirror gives low-level access to what Redis holds of a queue with a ledger.
func (q *Queue) Mirror() *Mirror { return &Mirror{q} }

// maxRev is the highest revision: scripts compare them as doubles. With an epoch in the bits from 40 on it leaves room for 8192 of
// them.
const maxRev = 1 << 53

// maxDue is the latest due time in us, before the sentinel's.
const maxDue = 1<<53 - 2

// Showing says how rows are shown.
type Showing struct {
	// Now judges Config.Horizon.
	Now time.Time
	// Counts are events to add to the queue's counters, "e:created" and the like and "f:<reason>". They go with the first call
	// that is sent, so they are lost if that is, and are never counted twice.
	Counts map[string]int64
	// Durations notes how long those rows were leased that go: they have succeeded.
	Durations bool
}

// Shown says what became of rows.
type Shown struct {
	Put     int // wait in Redis now
	Dropped int // are not, or no longer, in Redis
	Current int // were in Redis as they should be
	Newer   int // Redis has, or has dropped, a newer revision
}

// Show makes Redis show rows as they are: open ones within the horizon wait there, with Payload, which must have been read; all
// others are taken out. Of rows with one id the highest revision is shown.
//
// Errors: ErrFull (calls with rows that are new to Redis; the others go through), ErrInvalid (of single rows), the
// connection's, which end it.
func (m *Mirror) Show(ctx context.Context, rows []LedgerRow, s Showing) (Shown, error) {
	var shown Shown
	var errs []error
	latest := map[string]int64{}
	for i := range rows {
		if rev, ok := latest[rows[i].ID]; !ok || rows[i].Rev > rev {
			latest[rows[i].ID] = rows[i].Rev
		}
	}
	put, drop := make([][]*LedgerRow, len(m.q.shards)), make([][]*LedgerRow, len(m.q.shards))
	for i := range rows {
		row := &rows[i]
		shard, in := shardOf(row.ID, len(m.q.shards)), m.q.InRedis(row, s.Now)
		rev, first := latest[row.ID]
		switch {
		case !first || row.Rev < rev:
			continue
		case row.ID == "" || row.Rev < 1 || row.Rev > maxRev:
			errs = append(errs, m.invalid(row.ID, "LedgerRow.Rev", "1 to 2^53", strconv.FormatInt(row.Rev, 10)))
		case in && (row.Payload == nil || len(row.Stamp) != stampSize):
			errs = append(errs, m.invalid(row.ID, "LedgerRow.Payload", "read, with a stamp of 12 bytes", "nil"))
		case in:
			put[shard] = append(put[shard], row)
		default:
			drop[shard] = append(drop[shard], row)
		}
		delete(latest, row.ID)
	}
	counts := s.Counts
	for i, sh := range m.q.shards {
		for _, open := range []bool{true, false} {
			some := drop[i]
			if open {
				some = put[i]
			}
			for len(some) > 0 {
				n, err := m.show(ctx, sh, some, open, s.Durations, counts, &shown)
				errs = append(errs, err)
				if err != nil && !errors.Is(err, ErrFull) {
					return shown, errors.Join(errs...)
				}
				some, counts = some[n:], nil
			}
		}
	}
	return shown, errors.Join(errs...)
}

func (m *Mirror) invalid(id, field, limit, got string) error {
	return &TaskError{"show", m.q.name, id, &InputError{field, limit, got}}
}

// show sends as many of the rows as fit into one call of put or drop, and returns how many.
func (m *Mirror) show(ctx context.Context, sh *shard, rows []*LedgerRow, open, durations bool, counts map[string]int64, shown *Shown) (int, error) {
	q, n, bytes := m.q, 0, 0
	var records []any
	for ; n < len(rows) && n < maxBatch; n++ {
		row := rows[n]
		cost := len(row.ID) + 64
		if open {
			cost += len(row.Payload) + len(row.Type) + len(row.Key)
		}
		if bytes += cost; n > 0 && bytes > maxCallBytes {
			break
		}
		if open {
			records = append(records, encodeStamped(row.Stamp, row.Type, row.Key, row.Payload))
		}
	}
	rows = rows[:n]
	args := make([]any, 0, 4+2*len(counts)+4*n)
	args = append(args, q.clock(), n)
	if !open {
		args = append(args, bit(durations))
	}
	args = append(args, len(counts))
	firstCount := len(args)
	for field, k := range counts {
		args = append(args, field, k)
	}
	for _, row := range rows {
		args = append(args, row.ID)
	}
	for _, row := range rows {
		args = append(args, row.Rev)
	}
	sc := q.scripts.drop
	if open {
		sc = q.scripts.put
		for _, row := range rows {
			args = append(args, min(max(row.dueInRedis().UnixMicro(), 0), maxDue))
		}
		args = append(args, records...)
	}
	codes, err := m.codes(ctx, sh, sc, args, n, codeRepeat, func() {
		for i := range len(counts) { // the first send may have counted them
			args[firstCount+2*i+1] = 0
		}
	})
	for _, code := range codes {
		switch {
		case code == codeRepeat:
			shown.Current++
		case code == codeNewer:
			shown.Newer++
		case open:
			shown.Put++
		default:
			shown.Dropped++
		}
	}
	return n, err
}

// codes runs a script of ledger mode over n items. again is as in shard.batch, 0 for none; resent, if not nil, is called before
// a resend that may be the second.
func (m *Mirror) codes(ctx context.Context, sh *shard, sc script, args []any, n, again int, resent func()) (codes []int, err error) {
	twice := false
	err = sh.withEpoch(ctx, func() error {
		reply, err := sh.run(ctx, sc, args, func() {
			twice = true
			if resent != nil {
				resent()
			}
		})
		if err == nil {
			codes, err = exceptions(reply, n)
		}
		return err
	})
	for i, code := range codes {
		if twice && code == again {
			codes[i] = codeOK
		}
	}
	return codes, err
}
