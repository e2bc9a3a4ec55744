package reconciler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Config tunes a Reconciler. The zero Config is ready to use.
type Config struct {
	// Logger gets a line for each slice that repaired something or failed. Defaults to slog.Default().
	Logger *slog.Logger
	// Progress, if not nil, is told after every page.
	Progress func(Progress)
	// StraysEvery is how often a pass looks for pieces in Redis although the sizes of its containers agree, which costs a walk
	// over all of them. Defaults to 1 hour.
	StraysEvery time.Duration
}

// A Reconciler repairs one queue. It keeps where it stands in the ledger, and may be used by one goroutine at a time; several
// Reconcilers of a queue may work at once.
type Reconciler struct {
	q   *delayq.Queue
	lq  delayq.LedgerQueue
	m   *delayq.Mirror
	cfg Config
}

// New returns a reconciler of a queue. Errors: delayq.ErrNoLedger.
func New(q *delayq.Queue, cfg Config) (*Reconciler, error) {
	lq := q.LedgerQueue()
	if lq == nil {
		return nil, fmt.Errorf("reconciler: %s: %w", q.Name(), delayq.ErrNoLedger)
	}
	cfg.StraysEvery = cmp.Or(cfg.StraysEvery, time.Hour)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Reconciler{q: q, lq: lq, m: q.Mirror(), cfg: cfg}, nil
}

// Counts are what a pass has looked at and done. Drift is what was found to differ; under load a part of it is messages that
// were merely still on their way.
type Counts struct {
	Rows    int64 `json:"rows"`    // of the ledger, checked against Redis
	Entries int64 `json:"entries"` // of Redis, checked against the ledger

	Drift    int64 `json:"drift"`    // tasks on which the two differed
	Repaired int64 `json:"repaired"` // of them, made equal by this pass

	Restored    int64 `json:"restored"`    // put back: Redis did not have them
	Moved       int64 `json:"moved"`       // Redis had an older revision
	Dropped     int64 `json:"dropped"`     // ended in the ledger, or due beyond the horizon
	Quarantined int64 `json:"quarantined"` // unknown to the ledger: now dead letters of reason "unbooked"
	Lifted      int64 `json:"lifted"`      // quarantined before, and known after all
	Adopted     int64 `json:"adopted"`     // from before the queue had a ledger
	Mended      int64 `json:"mended"`      // removed from Redis because it was there in pieces
	// RunningTooLong counts running tasks whose lease has run out: their consumer is gone or stuck. They are leased again and
	// taken over by the next claim, which counts the lost lease.
	RunningTooLong int64 `json:"running_too_long"`
	// Unconfirmed counts tasks that are open in the ledger although Redis was told that they ended: the ledger has lost what it once
	// had, as after a failover or a restore from a backup. They cannot be put back while Redis remembers the end.
	Unconfirmed int64 `json:"unconfirmed"`
	Retired     int64 `json:"retired"` // deleted from the ledger after their retention
}

// A Report is what a call of Pass or Slice did.
type Report struct {
	Queue string `json:"queue"`
	Counts
	// Complete says that this call ended a full pass. Counts of a pass that took several slices are in Pass.
	Complete bool          `json:"complete"`
	Pass     Counts        `json:"pass"`     // since the pass began, this call included
	Coverage float64       `json:"coverage"` // 0 to 1: how far the pass is
	Began    time.Time     `json:"began"`    // the pass
	LastFull time.Time     `json:"last_full,omitzero"`
	Elapsed  time.Duration `json:"elapsed_ns"` // of this call
}

// Progress is told while a pass goes on. Total is an estimate.
type Progress struct {
	Phase       string // "strays", "ledger", "redis", "retention"
	Done, Total int64  // rows and entries of the whole pass
}

// state is where a pass stands, kept in the ledger between slices. Losing it costs nothing but a fresh start.
type state struct {
	Phase      phase     `json:"phase"`
	Mark       mark      `json:"mark"`   // of the ledger phase
	Shard      int       `json:"shard"`  // of the other two
	Cursor     string    `json:"cursor"` // of the other two
	Total      int64     `json:"total"`
	Counts     Counts    `json:"counts"`
	Epochs     []string  `json:"epochs"`
	Began      time.Time `json:"began"`
	LastFull   time.Time `json:"last_full"`
	LastCounts Counts    `json:"last_counts"`
	LastStrays time.Time `json:"last_strays"`
	Sums       Counts    `json:"sums"` // of everything that was ever counted
}

type mark struct {
	At time.Time `json:"at"`
	ID []byte    `json:"id"`
}

type phase string

const (
	phaseStrays phase = "strays"
	phaseLedger phase = "ledger"
	phaseRedis  phase = "redis"
	phaseDone   phase = "done"
)

// Pass makes one full pass, from its beginning, whatever another has stored. On an error the report tells what was done.
func (r *Reconciler) Pass(ctx context.Context) (Report, error) {
	return r.work(ctx, true, time.Time{})
}

// Slice goes on with the present pass for at most budget, or begins the next, and stores where it stands. It returns early when
// the pass is complete. After Redis has lost its data it begins anew, with what is due first.
func (r *Reconciler) Slice(ctx context.Context, budget time.Duration) (Report, error) {
	return r.work(ctx, false, time.Now().Add(budget))
}

// Run makes a pass, and the next one every so often after its beginning, until ctx ends. Errors are logged and tried again.
func (r *Reconciler) Run(ctx context.Context, every time.Duration) error {
	if every <= 0 {
		return &delayq.InputError{Field: "every", Limit: "positive", Got: every.String()}
	}
	for {
		next := time.Now().Add(every)
		rep, err := r.Slice(ctx, every)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil && !rep.Complete {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(next)):
		}
	}
}

func (r *Reconciler) work(ctx context.Context, whole bool, until time.Time) (Report, error) {
	began := time.Now()
	s, err := r.load(ctx)
	if err != nil {
		return Report{Queue: r.q.Name()}, err
	}
	before, err := r.begin(ctx, &s, whole)
	for err == nil && s.Phase != phaseDone && (until.IsZero() || time.Now().Before(until)) {
		if err = ctx.Err(); err != nil {
			break
		}
		err = r.step(ctx, &s)
		r.progress(string(s.Phase), &s)
	}
	complete := err == nil && s.Phase == phaseDone
	if complete {
		s.LastFull = time.Now()
		s.LastCounts = s.Counts
	}
	err = errors.Join(err, r.retain(ctx, &s, until)) // also when Redis is away
	saving, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	done := minus(s.Counts, before)
	err = errors.Join(err, r.save(saving, &s, done))
	rep := Report{
		Queue: r.q.Name(), Counts: done, Complete: complete, Pass: s.Counts, Coverage: coverage(&s), Began: s.Began,
		LastFull: s.LastFull, Elapsed: time.Since(began),
	}
	r.log(ctx, &rep, err)
	return rep, err
}

// begin starts a pass when there is none to go on with, and returns what it has counted before.
func (r *Reconciler) begin(ctx context.Context, s *state, whole bool) (Counts, error) {
	sizes := make([]delayq.MirrorSizes, r.q.Shards())
	epochs := make([]string, len(sizes))
	same := len(s.Epochs) == len(sizes)
	var entries int64
	agree := true
	for i := range sizes {
		var err error
		if sizes[i], err = r.m.Sizes(ctx, i); err != nil {
			return s.Counts, err
		}
		n := sizes[i]
		epochs[i] = n.Epoch
		same = same && s.Epochs[i] == n.Epoch
		entries += n.Tasks
		agree = agree && n.Tasks == n.Revs && n.Tasks == n.Pending+n.Processing+n.Dead
	}
	running := s.Phase == phaseStrays || s.Phase == phaseLedger || s.Phase == phaseRedis
	if running && same && !whole {
		return s.Counts, nil
	}
	if err := r.m.Ensure(ctx); err != nil {
		return Counts{}, err
	}
	counts, err := r.lq.Counts(ctx, mostEstimated, r.q.Horizon())
	if err != nil {
		return Counts{}, err
	}
	rows := counts.Open - counts.Later
	if counts.Open == mostEstimated { // or more: then Redis' numbers are the better estimate
		rows = max(rows, entries)
	}
	*s = state{
		Phase: phaseStrays, Total: rows + entries, Epochs: epochs, Began: time.Now(),
		LastFull: s.LastFull, LastCounts: s.LastCounts, LastStrays: s.LastStrays,
		Sums: s.Sums,
	}
	if agree && !whole && time.Since(s.LastStrays) < r.cfg.StraysEvery {
		s.Phase = phaseLedger
	}
	return Counts{}, nil
}

// mostEstimated bounds the count that progress and coverage are measured against: it comes before the first page.
const mostEstimated = 100_000

func (r *Reconciler) step(ctx context.Context, s *state) error {
	switch s.Phase {
	case phaseStrays:
		return r.strays(ctx, s)
	case phaseLedger:
		return r.ledgerPage(ctx, s)
	default:
		return r.redisPage(ctx, s)
	}
}

func (r *Reconciler) load(ctx context.Context) (state, error) { return stored(ctx, r.lq) }

func stored(ctx context.Context, lq delayq.LedgerQueue) (state, error) {
	var s state
	raw, err := lq.State(ctx)
	if err != nil {
		return s, err
	}
	if len(raw) > 0 && json.Unmarshal(raw, &s) != nil {
		s = state{} // of another version: begin anew
	}
	return s, nil
}

// save stores where the pass stands, and adds done to what the sums are by now: another reconciler may have added to them.
func (r *Reconciler) save(ctx context.Context, s *state, done Counts) error {
	now, err := r.load(ctx)
	if err != nil {
		return err
	}
	s.Sums = plus(now.Sums, done)
	raw, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return r.lq.SetState(ctx, raw)
}

// retain deletes what has ended long ago, with what is left of the time but for at least a second.
func (r *Reconciler) retain(ctx context.Context, s *state, until time.Time) error {
	budget := time.Minute
	if !until.IsZero() {
		budget = max(time.Until(until), time.Second)
	}
	if end, ok := ctx.Deadline(); ok {
		budget = min(budget, time.Until(end)-time.Second)
	}
	if budget <= 0 {
		return nil
	}
	r.progress("retention", s)
	n, _, err := r.lq.Retain(ctx, budget)
	s.Counts.Retired += n
	return err
}

func (r *Reconciler) progress(phase string, s *state) {
	if r.cfg.Progress != nil {
		done := s.Counts.Rows + s.Counts.Entries
		r.cfg.Progress(Progress{Phase: phase, Done: done, Total: max(s.Total, done)})
	}
}

func coverage(s *state) float64 {
	if s.Phase == phaseDone || s.Total == 0 {
		return 1
	}
	return min(float64(s.Counts.Rows+s.Counts.Entries)/float64(s.Total), 0.999)
}

func (r *Reconciler) log(ctx context.Context, rep *Report, err error) {
	switch c := rep.Counts; {
	case err != nil && ctx.Err() == nil:
		r.cfg.Logger.Error("reconciler: stopped", "queue", rep.Queue, "error", err.Error())
	case c.Drift > 0 || c.RunningTooLong > 0:
		level := slog.LevelWarn
		if c.RunningTooLong == 0 && c.Dropped+c.Moved == c.Repaired && c.Repaired == c.Drift {
			level = slog.LevelInfo // that of a busy queue: messages on their way
		}
		r.cfg.Logger.Log(ctx, level, "reconciler: redis and the ledger differed", "queue", rep.Queue, "drift", c.Drift, "repaired", c.Repaired,
			"restored", c.Restored, "moved", c.Moved, "dropped", c.Dropped, "quarantined", c.Quarantined, "lifted", c.Lifted,
			"adopted", c.Adopted, "mended", c.Mended, "running_too_long", c.RunningTooLong, "unconfirmed", c.Unconfirmed)
	}
}

func minus(a, b Counts) Counts {
	return Counts{
		Rows: a.Rows - b.Rows, Entries: a.Entries - b.Entries, Drift: a.Drift - b.Drift, Repaired: a.Repaired - b.Repaired,
		Restored: a.Restored - b.Restored, Moved: a.Moved - b.Moved, Dropped: a.Dropped - b.Dropped,
		Quarantined: a.Quarantined - b.Quarantined, Lifted: a.Lifted - b.Lifted, Adopted: a.Adopted - b.Adopted,
		Mended: a.Mended - b.Mended, RunningTooLong: a.RunningTooLong - b.RunningTooLong, Unconfirmed: a.Unconfirmed - b.Unconfirmed,
		Retired: a.Retired - b.Retired,
	}
}

func plus(a, b Counts) Counts { return minus(a, minus(Counts{}, b)) }
