package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// opKind is what a producer calls.
type opKind string

const (
	opEnqueue    opKind = "enqueue"
	opRepeat     opKind = "repeat" // an enqueue of an id that was enqueued before
	opReplace    opKind = "replace"
	opReschedule opKind = "reschedule"
	opCancel     opKind = "cancel"
)

// fate is what a task's payload makes its handler do.
type fate string

const (
	fateOK     fate = "ok"
	fateSlow   fate = "slow"   // takes longer than a lease
	fateFlaky  fate = "flaky"  // fails, and then does not
	fateDoomed fate = "doomed" // fails for good
	fateSnooze fate = "snooze" // puts itself off, once
	fatePoison fate = "poison" // kills its process, every time
	fateParked fate = "parked" // is due long after the scenario: it shows whether Redis and the ledger agree
)

// What a handler returns, as its journal calls it.
const (
	runOK        = "ok"
	runFail      = "fail"
	runPermanent = "permanent"
	runSnooze    = "snooze"
	runCut       = "cut"  // its context had ended
	runLost      = "lost" // CompleteTx said so
)

// Types of tasks.
const (
	typeOrder = "order" // has its effect together with CompleteTx
	typeMail  = "mail"  // has its effect in its journal
)

const (
	maxFailed  = 5
	retryAfter = 300 * time.Millisecond
)

// A mix says how many of a thousand tasks are what, and how far ahead they are due.
type mix struct {
	Tx, RolledBack                        int // the second out of the first
	Slow, Flaky, Doomed, Snoozed, Poison  int
	Cancelled, Moved, Replaced, Repeated  int
	Parked, Dawdling                      int
	Ahead                                 time.Duration // due from now to here
	Work                                  time.Duration // a handler takes up to this long
	SlowWork                              time.Duration
	ParkedFor                             time.Duration // about when parked tasks are due
	ParkedBeyond                          time.Duration // and where some of them are moved: beyond the horizon
	CancelledWithin, MovedWithin, MovedBy time.Duration
	DawdleFor                             time.Duration // what a slow transaction waits before its commit
}

// usual is the mix of most scenarios.
func usual(lease time.Duration) mix {
	return mix{
		Tx: 500, RolledBack: 100, Slow: 10, Flaky: 50, Doomed: 5, Snoozed: 10,
		Cancelled: 50, Moved: 50, Replaced: 30, Repeated: 50, Parked: 50,
		Ahead: 2 * lease, Work: 20 * time.Millisecond, SlowWork: lease * 7 / 4,
		ParkedFor: time.Hour, ParkedBeyond: 5 * time.Hour,
		CancelledWithin: 2 * lease, MovedWithin: lease, MovedBy: lease,
	}
}

// A planned task is what the producer will do about one id.
type planned struct {
	ID       string
	At       time.Duration // since the producer began
	Tx       bool
	RollBack bool
	Stubborn bool // an enqueue in doubt is repeated until it is answered
	Telling  telling
	Absolute bool // the due time is given as an instant
	Delay    time.Duration
	Fate     fate
	Work     time.Duration
	Times    int // that it fails
	Dawdle   time.Duration
	Then     []planned1
}

// telling is how Redis hears of a transaction.
type telling int

const (
	byCommit  telling = iota // the ledger's transaction tells it
	bySync                   // the producer does, after the commit
	byNothing                // the producer is gone: the reconciler finds out
)

// A planned1 is a later call for the same id.
type planned1 struct {
	Op    opKind
	After time.Duration
	Tx    bool
	Delay time.Duration
}

// plan is the workload of a seed: n tasks over a time.
func plan(seed uint64, n int, over time.Duration, m mix) []planned {
	rng := rand.New(rand.NewPCG(seed, 0x706c616e)) //nolint:gosec // a workload is to be repeatable
	within := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(max(d, 1)))) }
	tasks := make([]planned, n)
	for i := range tasks {
		t := &tasks[i]
		*t = planned{
			ID: fmt.Sprintf("t%06d", i), At: over * time.Duration(i) / time.Duration(n), Tx: rng.IntN(1000) < m.Tx,
			Stubborn: rng.IntN(4) > 0, Telling: telling(rng.IntN(3)), Absolute: rng.IntN(2) == 0, Delay: within(m.Ahead), Work: within(m.Work),
			Fate: fateOK,
		}
		t.RollBack = t.Tx && rng.IntN(1000) < m.RolledBack
		k := rng.IntN(1000)
		for _, f := range []struct {
			fate fate
			of   int
		}{
			{fateSlow, m.Slow}, {fateFlaky, m.Flaky}, {fateDoomed, m.Doomed}, {fateSnooze, m.Snoozed}, {fatePoison, m.Poison}, {fateParked, m.Parked},
		} {
			if k >= 0 && k < f.of {
				t.Fate = f.fate
			}
			k -= f.of
		}
		switch t.Fate {
		case fateSlow:
			t.Work = m.SlowWork
		case fateFlaky:
			t.Times = 1 + rng.IntN(2)
		case fatePoison:
			t.Delay /= 4 // it takes long to end
		}
		if !t.RollBack {
			t.follow(rng, m)
		}
		if t.Tx && rng.IntN(1000) < m.Dawdling {
			t.Dawdle = m.DawdleFor
		}
	}
	return tasks
}

// follow plans later calls. The odds of each are those of the mix, and no more than two fall on one task.
func (t *planned) follow(rng *rand.Rand, m mix) {
	within := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(max(d, 1)))) }
	add := func(p planned1) {
		p.Tx = rng.IntN(2) == 0
		t.Then = append(t.Then, p)
	}
	if t.Fate == fateParked {
		t.Delay = m.ParkedFor + within(m.ParkedFor/2)
		if rng.IntN(4) == 0 {
			t.Delay = m.ParkedBeyond
		}
		for range rng.IntN(3) {
			to := m.ParkedFor + within(m.ParkedFor/2)
			if rng.IntN(3) == 0 {
				to = m.ParkedBeyond
			}
			add(planned1{Op: opReschedule, After: 100*time.Millisecond + within(m.CancelledWithin), Delay: to})
		}
		if rng.IntN(5) == 0 {
			add(planned1{Op: opCancel, After: 100*time.Millisecond + within(m.CancelledWithin)})
		}
	} else {
		// Half of the moves come when the task is just about to be leased, where a message that is lost does most harm.
		when := func() time.Duration {
			if rng.IntN(2) == 0 {
				return within(m.MovedWithin)
			}
			return max(t.Delay-20*time.Millisecond-within(300*time.Millisecond), 0)
		}
		if rng.IntN(1000) < m.Moved {
			add(planned1{Op: opReschedule, After: when(), Delay: within(m.MovedBy)})
		}
		replaced := rng.IntN(1000) < m.Replaced
		if replaced {
			add(planned1{Op: opReplace, After: when(), Delay: within(m.MovedBy)})
		}
		if rng.IntN(1000) < m.Cancelled && t.Fate != fatePoison && !replaced {
			add(planned1{Op: opCancel, After: within(m.CancelledWithin)})
		}
	}
	// An enqueue of a cancelled id makes a new task, so ids that are cancelled are neither replaced nor repeated.
	if rng.IntN(1000) < m.Repeated && !slices.ContainsFunc(t.Then, func(p planned1) bool { return p.Op == opCancel }) {
		add(planned1{Op: opRepeat, After: within(m.CancelledWithin)})
	}
	slices.SortFunc(t.Then, func(a, b planned1) int { return int(a.After - b.After) })
}

// A payload is what the handler gets.
type payload struct {
	Version int    `json:"v"`
	Fate    fate   `json:"fate"`
	Work    int64  `json:"work"` // microseconds
	Times   int    `json:"times,omitempty"`
	Padding string `json:"padding"`
}

// body is the payload of a version, about 200 bytes.
func (t *planned) body(version int) []byte {
	p := payload{Version: version, Fate: t.Fate, Work: t.Work.Microseconds(), Times: t.Times, Padding: strings.Repeat("x", 130)}
	raw, _ := json.Marshal(p) // strings and numbers: it cannot fail
	return raw
}
