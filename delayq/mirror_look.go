package delayq

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

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
