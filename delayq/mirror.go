package delayq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
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

// A Finding is how Redis stands to one row.
type Finding int

// The findings.
const (
	FoundWhole       Finding = iota + 1 // there, at the row's revision
	FoundAbsent                         // not there
	FoundOlder                          // there at an older revision, or at none
	FoundNewer                          // there at a newer revision
	FoundBroken                         // there in pieces; Mend makes an end of it
	FoundQuarantined                    // among the dead letters; Show lifts it
)

var findings = map[int]Finding{
	codeOK: FoundWhole, codeUnknown: FoundAbsent, codeOlder: FoundOlder, codeNewer: FoundNewer, codeBroken: FoundBroken,
	codeQuarantined: FoundQuarantined,
}

// Check compares what Redis has with revisions of the ledger and changes nothing. The answer has one place for each want.
func (m *Mirror) Check(ctx context.Context, wants []LedgerWant) ([]Finding, error) {
	found := make([]Finding, len(wants))
	err := m.eachShard(len(wants), func(i int) string { return wants[i].ID }, func(sh *shard, batch []int) error {
		args := make([]any, 0, 1+2*len(batch))
		args = append(args, len(batch))
		for _, i := range batch {
			args = append(args, wants[i].ID)
		}
		for _, i := range batch {
			args = append(args, wants[i].Rev)
		}
		codes, err := m.codes(ctx, sh, m.q.scripts.check, args, len(batch), 0, nil)
		for k, code := range codes {
			found[batch[k]] = findings[code]
		}
		return err
	})
	return found, err
}

// eachShard calls for each shard concerned with the places of its items, at most maxBatch a call; the first error ends it.
func (m *Mirror) eachShard(n int, id func(int) string, call func(sh *shard, batch []int) error) error {
	places := make([][]int, len(m.q.shards))
	for i := range n {
		s := shardOf(id(i), len(places))
		places[s] = append(places[s], i)
	}
	for s, rest := range places {
		for len(rest) > 0 {
			k := min(len(rest), maxBatch)
			if err := call(m.q.shards[s], rest[:k]); err != nil {
				return err
			}
			rest = rest[k:]
		}
	}
	return nil
}

// Entries pages through the tasks of one shard with their revisions, in no order; one may come twice. The first cursor is empty,
// and next is at the end.
func (m *Mirror) Entries(ctx context.Context, shard int, cursor string) (entries []LedgerWant, next string, err error) {
	_, at, err := m.cursor(shard, cursor, 1)
	if err != nil {
		return nil, "", err
	}
	page, after, err := m.q.rdb.HScan(ctx, m.q.shards[shard].keys[keyRevs], at, "", maxBatch).Result()
	if err != nil {
		return nil, "", m.q.scriptError("entries", err)
	}
	entries = make([]LedgerWant, 0, len(page)/2)
	for i := 0; i+1 < len(page); i += 2 {
		if page[i] != "" {
			rev, _ := strconv.ParseInt(page[i+1], 10, 64) // what is no number is no revision either
			entries = append(entries, LedgerWant{page[i], rev})
		}
	}
	if after != 0 {
		next = fmt.Sprintf("0:%d", after)
	}
	return entries, next, nil
}

// cursor reads "container:position".
func (m *Mirror) cursor(shard int, cursor string, containers int) (container int, position uint64, err error) {
	if shard < 0 || shard >= len(m.q.shards) {
		return 0, 0, &InputError{"shard", fmt.Sprintf("0 to %d", len(m.q.shards)-1), strconv.Itoa(shard)}
	}
	if cursor == "" {
		return 0, 0, nil
	}
	c, p, _ := strings.Cut(cursor, ":")
	container, err1 := strconv.Atoi(c)
	position, err2 := strconv.ParseUint(p, 10, 64)
	if err1 != nil || err2 != nil || container < 0 || container >= containers {
		return 0, 0, &InputError{"cursor", "the next of an earlier page", fmt.Sprintf("%d bytes", len(cursor))}
	}
	return container, position, nil
}

// Where Strays looks, in this order. The records come last, and only when there are more or fewer of them than revisions: they can
// be scanned only together with their payloads.
var strayKeys = []int{keyPending, keyProcessing, keyDead, keyState, keyErrors, keyTasks}

// Strays pages through the ids in one shard that have no revision: from before the queue had a ledger, or in pieces. An id may come
// more than once. The first cursor is empty, and next is at the end.
func (m *Mirror) Strays(ctx context.Context, shard int, cursor string) (ids []string, next string, err error) {
	at, position, err := m.cursor(shard, cursor, len(strayKeys))
	if err != nil {
		return nil, "", err
	}
	keys, rdb := m.q.shards[shard].keys, m.q.rdb
	key := keys[strayKeys[at]]
	var scan *redis.ScanCmd
	switch strayKeys[at] {
	case keyPending, keyProcessing, keyDead:
		scan = rdb.ZScan(ctx, key, position, "", maxBatch)
	case keyState:
		scan = rdb.HScan(ctx, key, position, "", maxBatch)
	default:
		scan = hashFields(ctx, rdb, key, position)
	}
	page, after, err := scan.Result()
	if err != nil {
		return nil, "", m.q.scriptError("strays", err)
	}
	var all []string
	for i := 0; i+1 < len(page); i += 2 {
		if page[i] != "" {
			all = append(all, page[i])
		}
	}
	for len(all) > 0 {
		n := min(len(all), maxBatch)
		revs, err := rdb.HMGet(ctx, keys[keyRevs], all[:n]...).Result()
		if err != nil {
			return nil, "", m.q.scriptError("strays", err)
		}
		for i, rev := range revs {
			if rev == nil {
				ids = append(ids, all[i])
			}
		}
		all = all[n:]
	}
	if after == 0 {
		at++
	}
	if at < len(strayKeys) && strayKeys[at] == keyTasks && after == 0 {
		sizes, err := m.Sizes(ctx, shard)
		if err != nil {
			return nil, "", err
		}
		if sizes.Tasks == sizes.Revs {
			at++
		}
	}
	if at < len(strayKeys) {
		next = fmt.Sprintf("%d:%d", at, after)
	}
	return ids, next, nil
}

// MirrorSizes are the sizes of one shard at one moment.
type MirrorSizes struct {
	Epoch      string // changes when Redis loses the shard
	Tasks      int64  // records
	Revs       int64  // revisions: as many, when all is well
	Pending    int64  // due or not
	Processing int64  // leases that have run out included
	Dead       int64
	States     int64
	Errors     int64
}

// Ensure makes the shards whole: those that Redis has lost, and the sentinels of containers that were lost alone.
func (m *Mirror) Ensure(ctx context.Context) error {
	for _, sh := range m.q.shards {
		if _, err := sh.init(ctx, len(m.q.shards), true); err != nil {
			return err
		}
	}
	return nil
}

// Sizes reads the sizes of one shard, in a time that hardly depends on them.
func (m *Mirror) Sizes(ctx context.Context, shard int) (MirrorSizes, error) {
	if _, _, err := m.cursor(shard, "", 1); err != nil {
		return MirrorSizes{}, err
	}
	f, err := m.q.shards[shard].stats(ctx, true)
	if err != nil {
		return MirrorSizes{}, err
	}
	n, err := statsNumbers(f)
	if err != nil {
		return MirrorSizes{}, err
	}
	expired := n[14]
	s := MirrorSizes{
		Tasks: n[8], Revs: n[13], Pending: n[2] + n[3] - expired, Processing: n[4] + expired, Dead: n[5], States: n[9], Errors: n[10],
	}
	meta, _ := f[12].([]any)
	for i := 0; i+1 < len(meta); i += 2 {
		if text(meta[i]) == "epoch" {
			s.Epoch = text(meta[i+1])
		}
	}
	return s, nil
}

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
