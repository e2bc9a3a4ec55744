package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// A tale is a history under construction, all of it about task "t". Times are in milliseconds.
type tale struct {
	events []event
	rules
	effectsOf, ordersOf int
	final               row
	seq                 []change
	failed              int // of the next run
}

func (s *tale) call(n int64, at, ret int64, e event) *tale {
	e.Kind, e.Call, e.At, e.PID, e.Task, e.Due = evCall, n, at*1000, 1, "t", e.Due*1000
	s.events = append(s.events, e)
	if ret > 0 {
		s.events = append(s.events, event{Kind: evRet, Call: n, At: ret * 1000, PID: 1, Task: "t", Outcome: e.Outcome, Answer: e.Answer})
	}
	return s
}

func (s *tale) run(pid int, n, at int64, delivery int, more ...event) *tale {
	s.events = append(s.events, event{Kind: evStart, At: at * 1000, PID: pid, Run: n, Task: "t", Delivery: delivery, Version: 1, Failed: s.failed})
	for _, e := range more {
		e.PID, e.Run, e.Task, e.At = pid, n, "t", e.At*1000
		s.events = append(s.events, e)
	}
	return s
}

func (s *tale) change(c change) *tale {
	c.at *= 1000
	c.oldUntil *= 1000
	s.seq = append(s.seq, c)
	return s
}

// grant is a change that gives the task out.
func (s *tale) grant(at int64, from string, pid, delivery int) *tale {
	return s.change(change{
		at: at, oldStatus: from, newStatus: running, newToken: string(rune('a' + delivery)), newDelivery: delivery, oldDelivery: delivery - 1, pid: pid,
	})
}

func (s *tale) ends(at int64, delivery int, as string) *tale {
	s.final.status = as
	return s.change(change{at: at, oldStatus: running, newStatus: as, oldDelivery: delivery, newDelivery: delivery, oldUntil: at + 1000})
}

func (s *tale) judge() *verdict {
	h := join(s.events)
	h.lease, h.maxFailed, h.maxLost = 2*time.Second, maxFailed, 5
	h.changes["t"] = s.seq
	if s.final.status != "" {
		h.rows["t"] = s.final
	}
	if s.effectsOf > 0 {
		h.effects["t"] = s.effectsOf
	}
	if s.ordersOf > 0 {
		h.orders["t"] = s.ordersOf
	}
	return check(h, s.rules)
}

func enqueued() *tale {
	s := &tale{}
	return s.call(1, 10, 12, event{Op: opEnqueue, Due: 100, Version: 1, Fate: fateOK, Outcome: outDone})
}

// completes is a run that ends well.
func (s *tale) completes(pid int, n, at int64, delivery int) *tale {
	return s.run(pid, n, at, delivery, event{Kind: evEffect, At: at + 5}, event{Kind: evEnd, At: at + 6, Outcome: runOK})
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	end := func(at int64, outcome string) event { return event{Kind: evEnd, At: at, Outcome: outcome} }
	for _, c := range []struct {
		name string
		tale *tale
		set  string // where the task is
		rule string // the first problem's, empty for none
		n    int    // of duplicates, early or overlapping, whichever the rule counts
	}{
		{"a task that runs once is ok", enqueued().grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded), "ok", "", 0},
		{"a committed task without a row is lost", enqueued(), "lost", "I1", 0},
		{"a committed task that is still open is lost", func() *tale { s := enqueued(); s.final.status = pending; return s }(), "lost", "I1", 0},
		{
			"success that no handler tells of is lost",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1).ends(110, 1, succeeded), "lost", "I1", 0,
		},
		{"a cancel that nobody asked for is lost", func() *tale { s := enqueued(); s.final.status = cancelled; return s }(), "lost", "I1", 0},
		{
			"death before the last attempt is lost",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, end(105, runFail)).ends(110, 1, dead), "lost", "I1", 0,
		},
		{
			"a rolled back task that runs is unexpected",
			new(tale).call(1, 10, 12, event{Op: opEnqueue, Outcome: outRolledBack}).grant(100, pending, 7, 1).completes(7, 1, 101, 1), "unexpected", "I2", 0,
		},
		{"a task that nobody enqueued is unexpected", new(tale).grant(100, pending, 7, 1).completes(7, 1, 101, 1), "unexpected", "I2", 0},
		{"an order of a rolled back task is unexpected", func() *tale {
			s := new(tale).call(1, 10, 12, event{Op: opEnqueue, Tx: true, Outcome: outRolledBack})
			s.ordersOf = 1
			return s
		}(), "unexpected", "I2", 0},
		{
			"a task in doubt that runs is recovered",
			new(tale).call(1, 10, 0, event{Op: opEnqueue, Due: 100, Version: 1}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded),
			"recovered", "", 0,
		},
		{"a task in doubt that is nowhere had not committed", new(tale).call(1, 10, 0, event{Op: opEnqueue}), "absent", "", 0},
		{"a rolled back task that is nowhere is as it should be", new(tale).call(1, 10, 12, event{Op: opEnqueue, Outcome: outRolledBack}), "rolled back", "", 0},
		{"a committed transaction without its order", func() *tale {
			s := new(tale).call(1, 10, 12, event{Op: opEnqueue, Tx: true, Due: 100, Version: 1, Outcome: outDone})
			return s.grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded)
		}(), "ok", "I1", 0},

		{"two effects in transactions", func() *tale {
			s := enqueued().grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded)
			s.effectsOf = 2
			return s
		}(), "ok", "P2", 1},
		{"a completed task without its effect", func() *tale {
			return enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evCompleting, At: 103}, end(106, runOK)).ends(104, 1, succeeded)
		}(), "ok", "P1", 0},
		{
			"a second effect after a lost lease has a cause",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEffect, At: 102}).
				change(change{at: 3000, oldStatus: running, oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2, lostMore: true, oldPID: 7}).
				note(event{Kind: evKill, At: 150, PID: 7}).completes(8, 1, 3001, 2).ends(3010, 2, succeeded), "ok", "", 0,
		},
		{
			"a second effect without a cause",
			enqueued().grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded).grant(200, succeeded, 8, 2).completes(8, 1, 201, 2).
				ends(210, 2, succeeded), "ok", "I5", 1,
		},
		{"a run without a grant", enqueued().completes(7, 1, 101, 1).ends(110, 1, succeeded), "ok", "I4", 0},
		{
			"one grant and two runs",
			enqueued().grant(100, pending, 7, 1).completes(7, 1, 101, 1).completes(7, 2, 120, 1).ends(130, 1, succeeded), "ok", "I4", 1,
		},

		{"an early start", enqueued().grant(90, pending, 7, 1).completes(7, 1, 91, 1).ends(110, 1, succeeded), "ok", "I3", 1},
		{
			"a start before the time it was moved to",
			enqueued().call(2, 20, 22, event{Op: opReschedule, Due: 500, Outcome: outDone}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				ends(110, 1, succeeded), "ok", "I3", 1,
		},
		{
			"a move in doubt may not have happened",
			enqueued().call(2, 20, 0, event{Op: opReschedule, Due: 500}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded), "ok", "", 0,
		},
		{
			"a move that was refused has not happened",
			enqueued().call(2, 20, 22, event{Op: opReschedule, Due: 500, Outcome: outRefused}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				ends(110, 1, succeeded), "ok", "", 0,
		},
		{
			"a payload that was replaced",
			enqueued().call(2, 20, 22, event{Op: opReplace, Due: 100, Version: 2, Outcome: outDone}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				ends(110, 1, succeeded), "ok", "I3", 0,
		},
		{
			"a retry before its time",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEnd, At: 105, Outcome: runFail, Delay: 300_000}).ends(106, 1, retrying).
				grant(200, retrying, 7, 2).failedBefore(1).completes(7, 2, 201, 2).ends(210, 2, succeeded), "ok", "I3", 1,
		},

		{
			"a lease given away before its end",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evCut, At: 150}).
				change(change{at: 200, oldStatus: running, oldToken: "a", oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2}).
				completes(8, 1, 201, 2).ends(210, 2, succeeded), "ok", "I5", 1,
		},
		{
			"two handlers at once, though the ledger thought the first was gone",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEffect, At: 4000}, end(4001, runOK)).
				change(change{at: 3000, oldStatus: running, oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2, lostMore: true}).
				completes(8, 1, 3001, 2).ends(3010, 2, succeeded), "ok", "I4", 1,
		},
		{
			"a paused holder holds nothing",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEffect, At: 4000}, end(4001, runOK)).
				note(event{Kind: evPause, At: 150, PID: 7}).note(event{Kind: evResume, At: 3990, PID: 7}).
				change(change{at: 3000, oldStatus: running, oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2, lostMore: true, oldPID: 7}).
				completes(8, 1, 3001, 2).ends(3010, 2, succeeded), "ok", "", 0,
		},

		{
			"a start after its cancel",
			enqueued().call(2, 20, 22, event{Op: opCancel, Outcome: outDone, Answer: "cancelled"}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				ends(110, 1, succeeded), "ok", "I8", 0,
		},
		{
			"a start after it was told to stop",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, end(130, runFail)).
				call(2, 120, 122, event{Op: opCancel, Outcome: outDone, Answer: "running, told to stop"}).ends(131, 1, retrying).
				grant(900, retrying, 7, 2).failedBefore(1).completes(7, 2, 901, 2).ends(910, 2, succeeded), "ok", "I8", 0,
		},
		{
			"a running task that is cancelled may succeed",
			enqueued().grant(100, pending, 7, 1).call(2, 101, 102, event{Op: opCancel, Outcome: outDone, Answer: "running, told to stop"}).
				completes(7, 1, 103, 1).ends(110, 1, succeeded), "ok", "", 0,
		},

		{
			"an ack of somebody else's lease",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEffect, At: 2900}, end(4000, runOK)).
				note(event{Kind: evPause, At: 150, PID: 7}).note(event{Kind: evResume, At: 3990, PID: 7}).
				change(change{at: 3000, oldStatus: running, oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2, lostMore: true, oldPID: 7}).
				run(8, 1, 3001, 2, event{Kind: evEffect, At: 4900}, end(5000, runOK)).ends(4001, 2, succeeded), "ok", "I6", 0,
		},

		{
			"a task given back under its holder",
			enqueued().grant(100, pending, 7, 1).run(7, 1, 101, 1, event{Kind: evEffect, At: 190}, end(200, runOK)).ends(150, 1, pending).
				grant(300, pending, 8, 2).completes(8, 1, 301, 2).ends(310, 2, succeeded), "ok", "I6", 0,
		},
		{"a lost lease that nobody lost", func() *tale {
			s := enqueued().grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				change(change{at: 3000, oldStatus: running, oldUntil: 2100, newStatus: running, newToken: "z", newDelivery: 2, lostMore: true, oldPID: 7}).
				completes(8, 1, 3001, 2).ends(3010, 2, succeeded)
			s.blameless = true
			return s
		}(), "ok", "I7", 0},
		{"poison that succeeds", func() *tale {
			s := new(tale).call(1, 10, 12, event{Op: opEnqueue, Due: 100, Version: 1, Fate: fatePoison, Outcome: outDone})
			return s.grant(100, pending, 7, 1).completes(7, 1, 101, 1).ends(110, 1, succeeded)
		}(), "ok", "I7", 0},
		{
			"a repeated enqueue that makes the task again",
			enqueued().call(2, 20, 21, event{Op: opRepeat, Due: 100, Version: 1, Outcome: outDone}).grant(100, pending, 7, 1).completes(7, 1, 101, 1).
				ends(110, 1, succeeded), "ok", "I12", 0,
		},
		{
			"a repeated enqueue that finds it",
			enqueued().call(2, 20, 21, event{Op: opRepeat, Due: 120, Version: 1, Outcome: outDone, Answer: "pending"}).grant(100, pending, 7, 1).
				completes(7, 1, 101, 1).ends(110, 1, succeeded), "ok", "", 0,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			v := c.tale.judge()
			sets := map[string][]string{"ok": v.ok, "lost": v.lost, "unexpected": v.unexpected, "recovered": v.recovered}
			set := ""
			for name, ids := range sets {
				if slices.Contains(ids, "t") {
					set += name
				}
			}
			if v.absent == 1 {
				set += "absent"
			}
			if v.rolledBack == 1 {
				set += "rolled back"
			}
			if set != c.set {
				t.Errorf("in %q, want %q", set, c.set)
			}
			var rules []string
			for _, p := range v.problems {
				rules = append(rules, p.rule)
			}
			if c.rule == "" && len(rules) > 0 || c.rule != "" && !slices.Contains(rules, c.rule) {
				t.Errorf("problems %v, want %q", v.problems, c.rule)
			}
			if n := v.duplicateEffects + v.early + v.overlapping; n < c.n || c.n == 0 && n > 0 {
				t.Errorf("%d duplicates, %d early, %d overlapping, want %d", v.duplicateEffects, v.early, v.overlapping, c.n)
			}
		})
	}
}

// note adds an event of the nemesis.
func (s *tale) note(e event) *tale {
	e.At *= 1000
	s.events = append(s.events, e)
	return s
}

// failedBefore is what the next run is told of its past.
func (s *tale) failedBefore(n int) *tale {
	s.failed = n
	return s
}

func TestPiecesAreNobodysFaultOnlyWithAVandal(t *testing.T) {
	t.Parallel()
	for _, vandal := range []bool{true, false} {
		h := join([]event{{Kind: evPass, Mended: 2}})
		if v := check(h, rules{vandal: vandal}); (len(v.problems) == 0) != vandal {
			t.Errorf("vandal %v: %v", vandal, v.problems)
		}
	}
}

func TestAClockIsAheadUntilItIsSet(t *testing.T) {
	t.Parallel()
	h := join([]event{{Kind: evClock, At: 100, Delay: 600}, {Kind: evClock, At: 200, Delay: -600}, {Kind: evClock, At: 300}})
	for _, c := range [][3]int64{{0, 50, 0}, {0, 150, 600}, {110, 120, 600}, {150, 250, 600}, {210, 220, 0}, {250, 400, 0}} {
		if got := max(h.ahead(c[0], c[1]), 0); got != c[2] {
			t.Errorf("between %d and %d: %d, want %d", c[0], c[1], got, c[2])
		}
	}
}

func TestPlansRepeatWithTheirSeed(t *testing.T) {
	t.Parallel()
	m := usual(2 * time.Second)
	a, b, c := plan(1, 2000, time.Second, m), plan(1, 2000, time.Second, m), plan(2, 2000, time.Second, m)
	same := func(x, y []planned) bool {
		return slices.EqualFunc(x, y, func(p, q planned) bool {
			return p.ID == q.ID && p.Tx == q.Tx && p.Delay == q.Delay && p.Fate == q.Fate && slices.Equal(p.Then, q.Then)
		})
	}
	if !same(a, b) || same(a, c) {
		t.Error("a plan must follow from its seed")
	}
	fates, ops, rolled := map[fate]int{}, map[opKind]int{}, 0
	for _, p := range a {
		fates[p.Fate]++
		rolled += count(p.RollBack)
		kinds := ""
		for _, then := range p.Then {
			ops[then.Op]++
			kinds += string(then.Op) + " "
		}
		if strings.Contains(kinds, string(opCancel)) && (strings.Contains(kinds, string(opRepeat)) || strings.Contains(kinds, string(opReplace))) {
			t.Errorf("%s is cancelled and made again: %s", p.ID, kinds)
		}
	}
	for _, f := range []fate{fateOK, fateSlow, fateFlaky, fateDoomed, fateSnooze, fateParked} {
		if fates[f] == 0 {
			t.Errorf("no task is %s", f)
		}
	}
	for _, k := range []opKind{opCancel, opReschedule, opReplace, opRepeat} {
		if ops[k] == 0 {
			t.Errorf("no %s", k)
		}
	}
	if rolled == 0 {
		t.Error("nothing is rolled back")
	}
}
