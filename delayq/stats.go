package delayq

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Stats describes a queue at one moment. Counters and histograms count since the queue's data began; they live in Redis, so
// short-lived consumers lose nothing. With a ledger they count what Redis was told of, which is nearly all.
type Stats struct {
	Queue string    `json:"queue"`
	Mode  string    `json:"mode,omitempty"` // "ledger", or empty
	Now   time.Time `json:"now"`            // by Redis' clock

	Pending    int64 `json:"pending"` // not yet due
	Due        int64 `json:"due"`     // expired leases included
	Processing int64 `json:"processing"`
	Later      int64 `json:"later,omitempty"` // part of Pending: beyond Config.Horizon, in the ledger alone; counted up to 100,000
	Dead       int64 `json:"dead"`            // with a ledger its dead letters, counted up to 100,000, and the quarantined
	// OldestDueAge is how long the most overdue task has been due, 0 when none is.
	OldestDueAge time.Duration `json:"oldest_due_age_ns"`
	// OldestProcessingAge is how long the oldest lease has been held, heartbeats included: of each shard's 200 that end next and, when
	// there are more, of all that live workers told of in their last beat, up to 10 s before; 0 when there is none.
	OldestProcessingAge time.Duration `json:"oldest_processing_age_ns"`
	Consumers           int64         `json:"consumers"`             // that called within about an hour
	LastRun             time.Time     `json:"last_run,omitzero"`     // the last call of a consumer: a lease call or a beat
	LastSuccess         time.Time     `json:"last_success,omitzero"` // the last ack

	Created     int64 `json:"created"`
	Replaced    int64 `json:"replaced"`
	Duplicates  int64 `json:"duplicates"` // enqueues of a known id, left alone
	Leased      int64 `json:"leased"`
	Succeeded   int64 `json:"succeeded"`
	Retried     int64 `json:"retried"`
	Released    int64 `json:"released"`
	Buried      int64 `json:"buried"`
	Cancelled   int64 `json:"cancelled"`
	Expired     int64 `json:"expired"` // leases that ran out
	Stale       int64 `json:"stale"`   // calls refused because the lease was not the caller's
	Missing     int64 `json:"missing"` // tasks whose record was gone
	Trimmed     int64 `json:"trimmed"` // dead letters deleted by the cap
	Replayed    int64 `json:"replayed"`
	Purged      int64 `json:"purged"`
	Rescheduled int64 `json:"rescheduled"`
	Quarantined int64 `json:"quarantined,omitempty"` // unknown to the ledger

	// Failed counts failed attempts, retried or buried, by reason.
	Failed map[string]int64 `json:"failed"`
	// Lateness is from due time to lease, Duration from lease to ack.
	Lateness Histogram `json:"lateness"`
	Duration Histogram `json:"duration"`

	Shards []ShardStats `json:"shards"`
}

// ShardStats are the sizes of one shard.
type ShardStats struct {
	Epoch      string `json:"epoch"` // changes when Redis loses the shard
	Pending    int64  `json:"pending"`
	Due        int64  `json:"due"`
	Processing int64  `json:"processing"`
	Dead       int64  `json:"dead"`
	Tasks      int64  `json:"tasks"` // records
	States     int64  `json:"states"`
	Errors     int64  `json:"errors"`
	Revs       int64  `json:"revs,omitempty"` // with a ledger: as many as records
	Tombstones int64  `json:"tombstones"`

	balance int64 // records made less records removed: must equal Tasks
}

// A Histogram counts durations by upper bounds.
type Histogram struct {
	Buckets []Bucket      `json:"buckets"` // rising, not cumulative
	Sum     time.Duration `json:"sum_ns"`  // whole milliseconds
	Count   int64         `json:"count"`
}

// A Bucket counts durations up to UpTo and above the bucket before; the last has no bound, UpTo is then math.MaxInt64.
type Bucket struct {
	UpTo  time.Duration `json:"up_to_ns"`
	Count int64         `json:"count"`
}

// Quantile is the upper bound of the bucket in which the q-th part of all lies, 0 when there is nothing.
func (h Histogram) Quantile(q float64) time.Duration {
	rest := int64(math.Ceil(q * float64(h.Count)))
	for _, b := range h.Buckets {
		if rest -= b.Count; rest <= 0 {
			return b.UpTo
		}
	}
	return 0
}

func (h *Histogram) add(bound string, n int64) {
	if bound == "sum" {
		h.Sum += time.Duration(n) * time.Millisecond
		return
	}
	up := time.Duration(math.MaxInt64)
	if v, err := strconv.ParseInt(bound, 10, 64); err == nil {
		up = time.Duration(v) * time.Millisecond
	}
	h.Count += n
	i, found := slices.BinarySearchFunc(h.Buckets, up, func(b Bucket, up time.Duration) int { return int(min(max(b.UpTo-up, -1), 1)) })
	if !found {
		h.Buckets = slices.Insert(h.Buckets, i, Bucket{UpTo: up})
	}
	h.Buckets[i].Count += n
}

// MostCounted bounds what Stats counts in a ledger: a number of it that is as large means at least so many.
const MostCounted = 100_000

// Stats reads the queue's state in a time that hardly depends on its size.
func (q *Queue) Stats(ctx context.Context) (*Stats, error) {
	s := &Stats{Queue: q.name, Failed: map[string]int64{}}
	counters := map[string]*int64{
		"created": &s.Created, "replaced": &s.Replaced, "duplicate": &s.Duplicates, "retried": &s.Retried, "released": &s.Released,
		"buried": &s.Buried, "cancelled": &s.Cancelled, "expired": &s.Expired, "stale": &s.Stale, "missing": &s.Missing,
		"trimmed": &s.Trimmed, "replayed": &s.Replayed, "purged": &s.Purged, "rescheduled": &s.Rescheduled,
		"succeeded": &s.Succeeded, "quarantined": &s.Quarantined,
	}
	for _, sh := range q.shards {
		f, err := sh.stats(ctx, !q.cfg.NoCreate)
		if err != nil {
			return nil, err
		}
		if err := s.addShard(f, counters); err != nil {
			return nil, err
		}
	}
	s.Leased = s.Lateness.Count
	if err := q.olderRuns(ctx, s); err != nil {
		return nil, err
	}
	if q.lq != nil {
		counts, err := q.lq.Counts(ctx, MostCounted, q.cfg.Horizon)
		if err != nil {
			return nil, err
		}
		s.Dead += counts.Dead
		s.Later = counts.Later
		s.Pending += counts.Later
	}
	return s, nil
}

// mostTimed is how many leases of a shard stats.lua looks at.
const mostTimed = 200

// olderRuns asks the workers for their oldest task when stats.lua has not seen all leases.
func (q *Queue) olderRuns(ctx context.Context, s *Stats) error {
	if !slices.ContainsFunc(s.Shards, func(sh ShardStats) bool { return sh.Processing > mostTimed }) {
		return nil
	}
	all, now, err := q.consumers(ctx, mostConsumers)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.live(now) {
			s.OldestProcessingAge = max(s.OldestProcessingAge, c.OldestRun)
		}
	}
	return nil
}

// stats runs stats.lua and checks the shape of its answer. Without create it makes nothing: a shard that Redis has lost is then
// ErrNoQueue, or empty and without epoch where a ledger knows of it.
func (sh *shard) stats(ctx context.Context, create bool) (f []any, err error) {
	err = sh.withEpoch(ctx, func() error {
		reply, err := sh.run(ctx, sh.q.scripts.stats, []any{sh.q.clock()}, nil)
		if err != nil {
			return err
		}
		var ok bool
		if f, ok = reply.([]any); !ok || len(f) == 0 {
			return errReply
		}
		switch {
		case f[0] == int64(codeNoEpoch) && create:
			return errNoEpoch
		case f[0] == int64(codeNoEpoch) && sh.q.lq == nil:
			return fmt.Errorf("delayq: stats %s: %w", sh.q.name, ErrNoQueue)
		case f[0] == int64(codeNoEpoch):
			f = nothing(time.Now())
		}
		if len(f) != 17 {
			return errReply
		}
		return nil
	})
	return f, err
}

// nothing is what stats.lua would answer of an empty shard.
func nothing(now time.Time) []any {
	f := []any{int64(codeOK), now.UnixMicro(), int64(0), int64(0), int64(0), int64(0), int64(-1)}
	f = append(f, int64(0), int64(0), int64(0), int64(0), int64(0), []any{})
	return append(f, int64(0), int64(0), int64(-1), int64(-1))
}

// statsNumbers are the numbers of an answer of stats.lua; place 12 is not one and stays 0.
func statsNumbers(f []any) (n [17]int64, err error) {
	for i := range n {
		if i == 12 {
			continue
		}
		if n[i], err = number(f[i]); err != nil {
			return n, err
		}
	}
	return n, nil
}

func (s *Stats) addShard(f []any, counters map[string]*int64) error {
	n, err := statsNumbers(f)
	if err != nil {
		return err
	}
	meta, ok := f[12].([]any)
	if !ok {
		return errReply
	}
	now := time.UnixMicro(n[1])
	if now.After(s.Now) {
		s.Now = now
	}
	shard := ShardStats{Pending: n[2], Due: n[3], Processing: n[4], Dead: n[5], Tasks: n[8], States: n[9], Errors: n[10], Tombstones: n[11], Revs: n[13]}
	s.Pending += n[2]
	s.Due += n[3]
	s.Processing += n[4]
	s.Dead += n[5]
	s.Consumers = max(s.Consumers, n[7])
	if n[15] >= 0 {
		s.OldestProcessingAge = max(s.OldestProcessingAge, now.Sub(time.UnixMilli(n[15])))
	}
	if called := time.UnixMicro(n[16]); n[16] >= 0 && called.After(s.LastRun) {
		s.LastRun = called
	}
	if n[6] >= 0 {
		s.OldestDueAge = max(s.OldestDueAge, now.Sub(time.UnixMicro(n[6])))
	}
	for i := 0; i+1 < len(meta); i += 2 {
		field, value := text(meta[i]), text(meta[i+1])
		family, name, _ := strings.Cut(field, ":")
		switch field {
		case "epoch":
			shard.Epoch = value
		case "mode":
			s.Mode = value
		case "at:ok":
			if at := scoreTime(value); at.After(s.LastSuccess) {
				s.LastSuccess = at
			}
		}
		if family != "c" && family != "e" && family != "f" && family != "l" && family != "d" {
			continue
		}
		v, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return fmt.Errorf("delayq: counter %s: %w", field, errReply)
		}
		switch family {
		case "c", "e":
			if c := counters[name]; c != nil {
				*c += v
			}
			switch field {
			case "c:created", "e:shown":
				shard.balance += v
			case "c:cancelled", "c:missing", "c:trimmed", "c:purged", "e:dropped":
				shard.balance -= v
			case "e:timed": // among the d: buckets, and not acked in Redis
				shard.balance += v
				s.Succeeded -= v
			}
		case "f":
			s.Failed[name] += v
		case "l":
			s.Lateness.add(name, v)
		case "d":
			s.Duration.add(name, v)
			if name != "sum" {
				shard.balance -= v
				s.Succeeded += v
			}
		}
	}
	s.Shards = append(s.Shards, shard)
	return nil
}
