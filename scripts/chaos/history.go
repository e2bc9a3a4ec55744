package main

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// A history is everything that a scenario has left behind, joined by task: what producers asked for and were told, what
// consumers did, every change of a ledger row as a trigger saw it, and the rows, effects and Redis entries at the end. Times
// are microseconds of the one wall clock.
type history struct {
	lease              time.Duration
	maxFailed, maxLost int

	ops     map[string][]op     // in the order of their calls
	runs    map[string][]run    // in the order of their starts
	changes map[string][]change // in the order in which the database made them
	rows    map[string]row
	effects map[string]int // committed together with a completion
	orders  map[string]int // committed together with an enqueue

	stalls map[int][]span // of a process: it did not run
	deaths map[int]int64  // of a process: it was killed
	terms  map[int]int64  // of a process: it was asked to end
	stale  int64          // reports that were refused because the lease was another's
	mended int64          // tasks that a reconciler found in pieces in Redis
	drift  int64          // tasks on which they found that Redis and the ledger differed
	exits  []delayq.RunStats
	clocks []step // of Redis' clock
	faults int
}

// A step is what Redis' clock was set to: so much ahead, in microseconds.
type step struct{ at, ahead int64 }

// ahead is the most that Redis' clock was ahead between two instants.
func (h *history) ahead(from, to int64) int64 {
	most, before := int64(0), int64(0)
	for _, s := range h.clocks {
		switch {
		case s.at < from:
			before = s.ahead
		case s.at <= to:
			most = max(most, s.ahead)
		}
	}
	return max(most, before)
}

type span struct{ from, to int64 }

// An op is one call of a producer.
type op struct {
	kind             opKind
	tx               bool
	called, returned int64 // the latter 0 when nothing was heard of it
	outcome, answer  string
	due              int64
	version          int
	fate             fate
}

// accepted says that the call has surely had its effect.
func (o *op) accepted() bool { return o.outcome == outDone }

// possible says that the call may have had its effect.
func (o *op) possible() bool { return o.outcome != outRolledBack && o.outcome != outRefused }

// A run is one execution of a handler. Times are 0 for what did not happen.
type run struct {
	pid                    int
	delivery, failed, lost int
	version                int
	start, redis, db       int64
	effect, completing     int64
	cut, dying, end        int64
	outcome, completed     string
	delay                  int64
}

// A change is what one statement made of a row.
type change struct {
	at                       int64
	oldStatus, newStatus     string // empty for none: the row was made or deleted
	oldToken, newToken       string
	oldUntil                 int64
	oldDelivery, newDelivery int
	lostMore                 bool // a lost lease was counted
	pid                      int  // of the holder after it, from the name under which it claims
	oldPID                   int
}

const (
	running   = "running"
	succeeded = "succeeded"
	cancelled = "cancelled"
	dead      = "dead"
	retrying  = "retry"
	pending   = "pending"
)

// granted says that the change gave the task to a holder.
func (c *change) granted() bool {
	return c.newStatus == running && (c.oldStatus != running || c.newToken != c.oldToken || c.newDelivery != c.oldDelivery)
}

// expired says that the change took the task from a holder whose lease had run out.
func (c *change) expired() bool { return c.oldStatus == running && c.oldUntil <= c.at }

// seized says that the change took the task from a holder whose lease had not run out.
func (c *change) seized() bool { return c.granted() && c.oldStatus == running && c.oldUntil > c.at }

// A row is a task in the ledger at the end.
type row struct {
	status         string
	failed, lost   int
	rev            int64
	runAt          int64
	cancelAsked    bool
	lockedUntil    int64
	reason, lastBy string
}

func (r row) open() bool { return r.status == pending || r.status == retrying || r.status == running }

// join reads journals into a history; the ledger's part is added by the caller.
func join(events []event) *history {
	h := &history{
		ops: map[string][]op{}, runs: map[string][]run{}, changes: map[string][]change{}, rows: map[string]row{},
		effects: map[string]int{}, orders: map[string]int{}, stalls: map[int][]span{}, deaths: map[int]int64{}, terms: map[int]int64{},
	}
	type key struct {
		pid int
		n   int64
	}
	calls := map[key]*op{}
	callOf := map[key]string{}
	runs := map[key]*run{}
	runOf := map[key]string{}
	paused := map[int]int64{}
	for _, e := range events {
		k := key{e.PID, e.Call}
		r := runs[key{e.PID, e.Run}]
		switch e.Kind {
		case evCall:
			calls[k] = &op{kind: e.Op, tx: e.Tx, called: e.At, outcome: outDoubt, due: e.Due, version: e.Version, fate: e.Fate}
			callOf[k] = e.Task
		case evRet:
			if o := calls[k]; o != nil {
				o.returned, o.outcome, o.answer = e.At, e.Outcome, e.Answer
				if e.Outcome == outDoubt {
					o.returned = 0 // it may still come to have its effect
				}
			}
		case evStart:
			runs[key{e.PID, e.Run}] = &run{
				pid: e.PID, delivery: e.Delivery, failed: e.Failed, lost: e.Lost, version: e.Version, start: e.At, redis: e.Redis, db: e.DB,
			}
			runOf[key{e.PID, e.Run}] = e.Task
		case evStall:
			h.stalls[e.PID] = append(h.stalls[e.PID], span{e.From, e.At})
		case evExit:
			h.stale += e.Count
			var stats delayq.RunStats
			if json.Unmarshal([]byte(e.Note), &stats) == nil {
				h.exits = append(h.exits, stats)
			}
		case evPass:
			h.drift += e.Count
			h.mended += e.Mended
		case evFault:
			h.faults += max(int(e.Count), 1)
		case evClock:
			h.clocks = append(h.clocks, step{e.At, e.Delay})
		case evKill:
			h.deaths[e.PID] = e.At
		case evTerm:
			h.terms[e.PID] = e.At
		case evPause:
			paused[e.PID] = e.At
		case evResume:
			h.stalls[e.PID] = append(h.stalls[e.PID], span{paused[e.PID], e.At})
			delete(paused, e.PID)
		default:
			if r != nil {
				r.note(e)
			}
			if e.Kind == evDying {
				h.deaths[e.PID] = e.At
			}
		}
	}
	for pid, at := range paused { // never resumed
		h.stalls[pid] = append(h.stalls[pid], span{at, 1 << 62})
	}
	for k, o := range calls {
		h.ops[callOf[k]] = append(h.ops[callOf[k]], *o)
	}
	for k, r := range runs {
		h.runs[runOf[k]] = append(h.runs[runOf[k]], *r)
	}
	for _, ops := range h.ops {
		slices.SortFunc(ops, func(a, b op) int { return int(a.called - b.called) })
	}
	for _, runs := range h.runs {
		slices.SortFunc(runs, func(a, b run) int { return int(a.start - b.start) })
	}
	return h
}

func (r *run) note(e event) {
	switch e.Kind {
	case evEffect:
		r.effect = e.At
	case evCompleting:
		if r.completing == 0 { // a later one is a repeat after a commit in doubt
			r.completing = e.At
		}
	case evCompleted:
		r.completed = e.Outcome
	case evCut:
		r.cut = e.At
	case evDying:
		r.dying = e.At
	case evEnd:
		r.end, r.outcome, r.delay = e.At, e.Outcome, e.Delay
	}
}

// consumerName is the name under which a consumer claims; it tells its process.
func consumerName(pid int) string { return "chaos-" + strconv.Itoa(pid) }

func pidOf(consumer string) int {
	pid, _ := strconv.Atoi(strings.TrimPrefix(consumer, "chaos-"))
	return pid
}

// grantOf is the change that allowed a run: the last one before it that gave out its delivery.
func grantOf(changes []change, r *run) (int, bool) {
	for i := len(changes) - 1; i >= 0; i-- {
		c := &changes[i]
		if c.granted() && c.newDelivery == r.delivery && c.at <= r.start {
			return i, true
		}
	}
	return 0, false
}

// stalledAt says that a process did not run at an instant, or had begun to again only just before.
func (h *history) stalledAt(pid int, at int64) bool {
	if died, ok := h.deaths[pid]; ok && died <= at {
		return true
	}
	const waking = 150_000 // until the timers of a process that runs again have fired
	for _, s := range h.stalls[pid] {
		if s.from <= at && at <= s.to+waking && s.to-s.from >= h.lease.Microseconds()/10 {
			return true
		}
	}
	return false
}

// troubled says that a holder died, stalled or was asked to end between two instants.
func (h *history) troubled(pid int, from, to int64) bool {
	if died, ok := h.deaths[pid]; ok && died <= to {
		return true
	}
	for _, s := range h.stalls[pid] {
		if s.from <= to && s.to >= from && s.to-s.from >= h.lease.Microseconds()/10 {
			return true
		}
	}
	return false
}

// inDoubt is how many calls were left without an answer.
func (h *history) inDoubt() int {
	n := 0
	for _, ops := range h.ops {
		for i := range ops {
			n += count(ops[i].outcome == outDoubt)
		}
	}
	return n
}

// sum adds up what the workers that ended in order had counted.
func (h *history) sum(of func(s *delayq.RunStats) int64) int64 {
	n := int64(0)
	for i := range h.exits {
		n += of(&h.exits[i])
	}
	return n
}
