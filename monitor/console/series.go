package console

import (
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// A sample is what one look has seen of a queue, as far as charts need it.
type sample struct {
	at                                        time.Time
	due, pending, processing, dead            int64 // pending and dead are below 0 while the ledger, which knows them, is away
	oldest                                    time.Duration
	created, succeeded, failed                int64
	late                                      delayq.Histogram // of the last few minutes' samples alone
	perSecondIn, perSecondDone, perSecondFail float64          // over rateOver; below 0 = unknown
	late50, late99                            time.Duration    // over quantOver; below 0 = nothing ran
}

func sampleOf(at time.Time, q *monitor.QueueView) sample {
	s := q.Stats
	failed := int64(0)
	for _, n := range s.Failed {
		failed += n
	}
	x := sample{
		at: at, due: s.Due, pending: s.Pending, processing: s.Processing, dead: s.Dead, oldest: s.OldestDueAge,
		created: s.Created, succeeded: s.Succeeded, failed: failed, late: s.Lateness,
	}
	if q.RedisOnly && q.Err != nil { // what Redis has of them would be a dip
		x.pending, x.dead = -1, -1
	}
	return x
}

// plus adds a queue to the sum of all.
func (s *sample) plus(o *sample) {
	s.due += o.due
	s.pending = sumKnown(s.pending, o.pending)
	s.processing += o.processing
	s.dead = sumKnown(s.dead, o.dead)
	s.oldest = max(s.oldest, o.oldest)
	s.created += o.created
	s.succeeded += o.succeeded
	s.failed += o.failed
	sum := delayq.Histogram{Count: s.late.Count + o.late.Count, Buckets: slices.Clone(s.late.Buckets)}
	for _, b := range o.late.Buckets {
		i, found := findBucket(sum.Buckets, b.UpTo)
		if !found {
			sum.Buckets = slices.Insert(sum.Buckets, i, delayq.Bucket{UpTo: b.UpTo})
		}
		sum.Buckets[i].Count += b.Count
	}
	s.late = sum
}

// sumKnown is unknown with either.
func sumKnown(a, b int64) int64 {
	if a < 0 || b < 0 {
		return -1
	}
	return a + b
}

func findBucket(all []delayq.Bucket, upTo time.Duration) (int, bool) {
	return slices.BinarySearchFunc(all, upTo, func(b delayq.Bucket, upTo time.Duration) int {
		switch {
		case b.UpTo < upTo:
			return -1
		case b.UpTo > upTo:
			return 1
		}
		return 0
	})
}

// less is what a histogram has gained since an earlier one; false when it has lost, because Redis lost its data.
func less(now, then delayq.Histogram) (delayq.Histogram, bool) {
	gain := delayq.Histogram{Count: now.Count - then.Count, Buckets: slices.Clone(now.Buckets)}
	for _, b := range then.Buckets {
		i, found := findBucket(gain.Buckets, b.UpTo)
		if !found {
			return delayq.Histogram{}, false
		}
		if gain.Buckets[i].Count -= b.Count; gain.Buckets[i].Count < 0 {
			return delayq.Histogram{}, false
		}
	}
	return gain, true
}

// series are the samples of a queue, oldest first.
type series struct{ all []sample }

// add takes in a sample, and keeps no more than most.
func (s *series) add(n sample, most int) {
	if k := len(s.all); k > 0 && n.at.Sub(s.all[k-1].at) < spacing {
		return
	}
	n.perSecondIn, n.perSecondDone, n.perSecondFail = -1, -1, -1
	n.late50, n.late99 = -1, -1
	if then := s.at(n.at.Add(-rateOver)); then != nil {
		if secs := n.at.Sub(then.at).Seconds(); secs > 0 && n.created >= then.created && n.succeeded >= then.succeeded && n.failed >= then.failed {
			n.perSecondIn = float64(n.created-then.created) / secs
			n.perSecondDone = float64(n.succeeded-then.succeeded) / secs
			n.perSecondFail = float64(n.failed-then.failed) / secs
		}
	}
	if then := s.at(n.at.Add(-quantOver)); then != nil {
		if gain, ok := less(n.late, then.late); ok && gain.Count > 0 {
			n.late50, n.late99 = gain.Quantile(0.5), gain.Quantile(0.99)
		}
	}
	if over := len(s.all) + 1 - most; over > 0 {
		s.all = slices.Delete(s.all, 0, over)
	}
	s.all = append(s.all, n)
	for i := range s.all { // only the last few minutes need their buckets
		if n.at.Sub(s.all[i].at) <= quantOver+period {
			break
		}
		s.all[i].late = delayq.Histogram{}
	}
}

// at is the first sample that is not older than t, nil when there is none.
func (s *series) at(t time.Time) *sample {
	i, _ := slices.BinarySearchFunc(s.all, t, func(have sample, t time.Time) int { return have.at.Compare(t) })
	if i == len(s.all) {
		return nil
	}
	return &s.all[i]
}

// recent is the state of affairs in the last minutes; numbers below 0 are unknown.
type recent struct {
	Known            bool
	In, Done, Failed float64 // a second
	Late50, Late99   time.Duration
	Depths           []int64 // due and waiting, the last half hour
	Dues             []int64
}

func (s *series) recent() recent {
	if len(s.all) == 0 {
		return recent{}
	}
	last := s.all[len(s.all)-1]
	r := recent{Known: true, In: last.perSecondIn, Done: last.perSecondDone, Failed: last.perSecondFail, Late50: last.late50, Late99: last.late99}
	for _, x := range s.all {
		if last.at.Sub(x.at) <= 30*time.Minute && x.pending >= 0 {
			r.Depths = append(r.Depths, x.due+x.pending+x.processing)
			r.Dues = append(r.Dues, x.due)
		}
	}
	return r
}

// A point is a sample on its way to the browser: time in Unix seconds, due, pending, processing, dead, age of the oldest in
// seconds, in and done and failed a second, lateness p50 and p99 in seconds. nil is unknown.
type point [11]any

// gap is how far samples are apart when nobody has looked in between.
const gap = 35 * time.Second

func (s *series) since(t time.Time) []point {
	var out []point
	var before time.Time
	for _, x := range s.all {
		if !x.at.After(t) {
			before = x.at
			continue
		}
		if !before.IsZero() && x.at.Sub(before) > gap {
			out = append(out, point{unix(before) + 1})
		}
		before = x.at
		out = append(out, point{
			unix(x.at), x.due, known(x.pending), x.processing, known(x.dead), x.oldest.Seconds(),
			known(x.perSecondIn), known(x.perSecondDone), known(x.perSecondFail), seconds(x.late50), seconds(x.late99),
		})
	}
	return out
}

func unix(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

func known[N int64 | float64](v N) any {
	if v < 0 {
		return nil
	}
	return v
}

// seconds of a quantile; beyond the last bound there is no number.
func seconds(d time.Duration) any {
	if d < 0 || d > 1<<62 {
		return nil
	}
	return d.Seconds()
}
