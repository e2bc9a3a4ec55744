package main

import (
	"fmt"
	"slices"
	"strings"
)

// A verdict is what the checker says of a history. The four sets are those of Jepsen's queue checker.
type verdict struct {
	lost       []string // committed, and did not come to an end that the journals bear out
	unexpected []string // ran or exists, though its transaction rolled back or never was
	recovered  []string // its producer was left in doubt, and it came to an end
	ok         []string
	absent     int // in doubt and never seen: it had not committed
	rolledBack int

	duplicateEffects int
	early            int
	overlapping      int
	reruns           int // second runs with a cause: the price of at-least-once
	collateral       int // healthy tasks that died with their consumers too often
	problems         []problem
}

// A problem is one broken rule.
type problem struct{ rule, task, detail string }

func (p problem) String() string { return strings.TrimSpace(p.rule + " " + p.task + ": " + p.detail) }

// rules are what depends on a scenario.
type rules struct {
	redisClock bool // due times are judged by the servers' clocks, since this scenario moves one
	blameless  bool // consumers and the database are well: a lease is lost only by a process that died or stalled
	vandal     bool // somebody breaks what Redis holds, so what is found in pieces is no fault of ours
}

// check judges a history.
func check(h *history, r rules) *verdict {
	v := &verdict{}
	ids := map[string]bool{}
	for id := range h.ops {
		ids[id] = true
	}
	for id := range h.runs {
		ids[id] = true
	}
	for id := range h.rows {
		ids[id] = true
	}
	for id := range h.effects {
		ids[id] = true
	}
	for id := range h.orders {
		ids[id] = true
	}
	sorted := make([]string, 0, len(ids))
	for id := range ids {
		sorted = append(sorted, id)
	}
	slices.Sort(sorted)
	for _, id := range sorted {
		t := &taskCheck{history: h, verdict: v, rules: r, id: id, ops: h.ops[id], runs: h.runs[id], changes: h.changes[id]}
		t.row, t.exists = h.rows[id]
		t.classify()
		t.effectsOnce()
		t.neverEarly()
		t.neverOverlapping()
		t.cancelHolds()
		t.holdersOnly()
		t.withinLimits()
		t.answersAgree()
	}
	if h.mended > 0 && !r.vandal {
		v.problem("I10", "", fmt.Sprintf("reconcilers found %d tasks in pieces in redis, and nobody had deleted anything", h.mended))
	}
	return v
}

func (v *verdict) problem(rule, task, detail string) {
	v.problems = append(v.problems, problem{rule, task, detail})
}

// A taskCheck is everything about one task.
type taskCheck struct {
	*history
	*verdict
	rules
	id      string
	ops     []op
	runs    []run
	changes []change
	row     row
	exists  bool
}

func (t *taskCheck) bad(rule, format string, args ...any) {
	t.problem(rule, t.id, fmt.Sprintf(format, args...))
}

func enqueues(o *op) bool { return o.kind == opEnqueue || o.kind == opRepeat }

// has reports whether any call is as f says.
func (t *taskCheck) has(f func(*op) bool) bool {
	for i := range t.ops {
		if f(&t.ops[i]) {
			return true
		}
	}
	return false
}

// classify puts the task into one of the four sets (I1, I2).
func (t *taskCheck) classify() {
	committed := t.has(func(o *op) bool { return enqueues(o) && o.accepted() })
	doubt := t.has(func(o *op) bool { return enqueues(o) && o.possible() })
	seen := t.exists || len(t.runs) > 0 || t.effects[t.id] > 0 || t.orders[t.id] > 0
	switch {
	case !committed && !doubt && seen:
		t.unexpected = append(t.unexpected, t.id)
		t.bad("I2", "never committed, but row %v, %d runs, %d effects, %d orders", t.exists, len(t.runs), t.effects[t.id], t.orders[t.id])
		return
	case !committed && !doubt:
		t.rolledBack++
		return
	case !committed && !seen:
		t.absent++
		return
	case !t.exists:
		t.lost = append(t.lost, t.id)
		t.bad("I1", "committed, and the ledger has no row")
		return
	}
	if why := t.unproven(); why != "" {
		t.lost = append(t.lost, t.id)
		t.bad("I1", "%s", why)
		return
	}
	if tx := t.has(func(o *op) bool { return enqueues(o) && o.tx && o.possible() }); tx && t.orders[t.id] != 1 {
		t.bad("I1", "enqueued in a transaction together with an order, and there are %d orders", t.orders[t.id])
	}
	if committed {
		t.ok = append(t.ok, t.id)
	} else {
		t.recovered = append(t.recovered, t.id)
	}
}

// unproven says why the task's end is not one that the journals bear out, empty when it is.
func (t *taskCheck) unproven() string {
	switch t.row.status {
	case succeeded:
		if !slices.ContainsFunc(t.runs, func(r run) bool { return r.outcome == runOK || r.completing > 0 }) {
			return "succeeded, and no handler says that it has"
		}
	case cancelled:
		if !t.has(func(o *op) bool { return o.kind == opCancel && o.possible() }) {
			return "cancelled, and nobody asked for it"
		}
	case dead:
		return t.unprovenDeath()
	default:
		return fmt.Sprintf("still %s after all has come to rest", t.row.status)
	}
	return ""
}

func (t *taskCheck) unprovenDeath() string {
	failed, lost, permanent := 0, 0, false
	for i := range t.runs {
		failed += count(t.runs[i].outcome == runFail)
		permanent = permanent || t.runs[i].outcome == runPermanent
	}
	for i := range t.changes {
		lost += count(t.changes[i].lostMore)
	}
	if !permanent && failed < t.maxFailed && lost < t.maxLost {
		return fmt.Sprintf("dead before its time: %d failed runs of %d, %d lost leases of %d", failed, t.maxFailed, lost, t.maxLost)
	}
	return ""
}

func count(yes bool) int {
	if yes {
		return 1
	}
	return 0
}
