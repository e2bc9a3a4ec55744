package main

import (
	"slices"
)

// effectsOnce: what is done in CompleteTx happens once; what is done outside happens again only with a cause (I5).
func (t *taskCheck) effectsOnce() {
	if n := t.effects[t.id]; n > 1 {
		t.duplicateEffects += n - 1
		t.bad("P2", "%d effects of CompleteTx", n)
	}
	completes := slices.ContainsFunc(t.runs, func(r run) bool { return r.completing > 0 })
	switch {
	case completes && t.exists && t.row.status == succeeded && t.effects[t.id] == 0:
		t.bad("P1", "completed in a transaction, and its effect is not there")
	case t.effects[t.id] > 0 && t.exists && t.row.status != succeeded:
		t.bad("P1", "its effect is there, and the ledger says %s", t.row.status)
	}
	startedBy := map[int]bool{}
	had := false
	for i := range t.runs {
		r := &t.runs[i]
		g, ok := grantOf(t.changes, r)
		if !ok {
			t.bad("I4", "run of delivery %d without a grant of the ledger", r.delivery)
			t.duplicateEffects += count(had && r.effect > 0)
			continue
		}
		cause := t.cause(g)
		if startedBy[g] {
			cause = ""
			t.overlapping++
			t.bad("I4", "two runs of one grant, delivery %d", r.delivery)
		}
		startedBy[g] = true
		switch {
		case i > 0 && cause == "":
			t.bad("I5", "runs again without a cause, delivery %d", r.delivery)
			t.duplicateEffects += count(had && r.effect > 0)
		case i > 0:
			t.reruns++
		}
		had = had || r.effect > 0
	}
}

// cause names why a task was given out by a change although it had been before.
func (t *taskCheck) cause(i int) string {
	switch c := &t.changes[i]; {
	case c.expired():
		return "its lease had run out"
	case c.oldStatus == retrying:
		return "it had failed"
	case c.oldStatus == pending:
		for _, before := range t.changes[:i] {
			if before.oldStatus == running && before.newStatus == pending {
				return "it was given back"
			}
		}
		if t.has(func(o *op) bool { return o.kind == opReplace && o.possible() }) {
			return "it was replaced"
		}
	}
	return ""
}

// neverEarly: no start before a due time that may have been in force when the task was given out (I3), and none with a payload
// that was not.
func (t *taskCheck) neverEarly() {
	for i := range t.runs {
		r := &t.runs[i]
		at := r.start
		if g, ok := grantOf(t.changes, r); ok {
			at = t.changes[g].at
		}
		now := r.start
		if t.redisClock { // one of the two servers has called it due, Redis a moment before the grant
			now = max(r.redis, r.db, r.start+t.ahead(at-2_000_000, r.start))
		}
		due, versions := t.inForce(at)
		if len(versions) > 0 && !slices.Contains(versions, r.version) {
			t.bad("I3", "delivery %d has payload %d, in force was one of %v", r.delivery, r.version, versions)
		}
		if now > 0 && due > now && r.failed+r.lost == 0 && !t.givenBack(at) {
			t.early++
			t.bad("I3", "delivery %d started %d us before it was due", r.delivery, due-now)
		}
		if after := t.retryDue(r); now > 0 && !t.redisClock && after > now {
			t.early++
			t.bad("I3", "delivery %d started %d us before its retry was due", r.delivery, after-now)
		}
	}
}

// inForce is the earliest due time and the payloads that may have been in force at an instant. A move of the due time leaves the
// payload as it was, so the two are looked for on their own.
func (t *taskCheck) inForce(at int64) (due int64, versions []int) {
	for i, o := range t.candidates(at, sets) {
		if i == 0 || o.due < due {
			due = o.due
		}
	}
	for _, o := range t.candidates(at, func(o *op) bool { return sets(o) && o.version > 0 }) {
		versions = append(versions, o.version)
	}
	return due, versions
}

// candidates are the calls of a kind whose effect may have been the latest at an instant: the last that surely had one by
// then, and all that nobody can tell the order of.
func (t *taskCheck) candidates(at int64, kind func(*op) bool) []*op {
	sure := int64(-1) // when the last of the sure ones was sent
	for i := range t.ops {
		if o := &t.ops[i]; kind(o) && o.accepted() && o.returned < at {
			sure = max(sure, o.called)
		}
	}
	var some []*op
	for i := range t.ops {
		if o := &t.ops[i]; kind(o) && o.possible() && o.called <= at && (o.returned == 0 || o.returned >= sure) {
			some = append(some, o)
		}
	}
	return some
}

// sets says that a call gives the task a due time. A repeated enqueue does only if it was the first to arrive.
func sets(o *op) bool {
	return o.kind == opEnqueue || o.kind == opReplace || o.kind == opReschedule || o.kind == opRepeat && o.answer == ""
}

// givenBack says that the task had been given back before an instant: it is then due as the handler said, or at once.
func (t *taskCheck) givenBack(at int64) bool {
	return slices.ContainsFunc(t.changes, func(c change) bool { return c.at < at && c.oldStatus == running && c.newStatus == pending })
}

// retryDue is when the retry that a run is may begin at the earliest.
func (t *taskCheck) retryDue(r *run) int64 {
	earliest := int64(0)
	for i := range t.runs {
		if f := &t.runs[i]; f.outcome == runFail && f.failed == r.failed-1 && r.lost == f.lost && f.end < r.start {
			if at := f.end + f.delay; earliest == 0 || at < earliest {
				earliest = at
			}
		}
	}
	if t.has(func(o *op) bool { return (o.kind == opReplace || o.kind == opReschedule) && o.possible() }) {
		return 0
	}
	return earliest
}

// neverOverlapping: at most one holder at a time (I4). A process that does not run holds nothing.
func (t *taskCheck) neverOverlapping() {
	for i := range t.changes {
		if c := &t.changes[i]; c.seized() {
			t.overlapping++
			t.bad("I4", "delivery %d was given out %d us before the lease of delivery %d ended", c.newDelivery, c.oldUntil-c.at, c.oldDelivery)
		}
	}
	for i := range t.runs {
		a := &t.runs[i]
		for k := i + 1; k < len(t.runs); k++ {
			b := &t.runs[k]
			over := a.end
			if a.cut > 0 && (over == 0 || a.cut < over) {
				over = a.cut
			}
			if over > 0 && over <= b.start || t.stalledAt(a.pid, b.start) || t.completedBefore(a, b.start) {
				continue
			}
			t.overlapping++
			t.bad("I4", "delivery %d starts while delivery %d still runs", b.delivery, a.delivery)
		}
	}
}

// completedBefore: after CompleteTx a handler holds nothing any more.
func (t *taskCheck) completedBefore(r *run, at int64) bool {
	return r.completing > 0 && r.completing < at && r.completed == outDone
}

// cancelHolds: nobody starts a task after its cancel was accepted (I8).
func (t *taskCheck) cancelHolds() {
	for i := range t.ops {
		o := &t.ops[i]
		if o.kind != opCancel || !o.accepted() {
			continue
		}
		told := o.answer == "cancelled" || o.answer == "already cancelled"
		if !told && o.answer != "running, told to stop" {
			continue
		}
		for k := range t.changes {
			if c := &t.changes[k]; c.granted() && c.at > o.returned {
				t.bad("I8", "given out %d us after its cancel was answered %q", c.at-o.returned, o.answer)
			}
		}
		if told && t.exists && t.row.status != cancelled {
			t.bad("I8", "its cancel was answered %q, and it ended as %s", o.answer, t.row.status)
		}
		if !told && t.row.status == dead && t.row.reason != "permanent" {
			t.bad("I8", "its cancel was answered %q, and it ended as dead", o.answer)
		}
	}
}

// holdersOnly: a lease is ended by its holder, who says so in its journal before (I6).
func (t *taskCheck) holdersOnly() {
	for i := range t.changes {
		c := &t.changes[i]
		if c.oldStatus != running || c.newStatus == running {
			continue
		}
		if c.expired() && (c.newStatus == cancelled || c.newStatus == dead) && (c.lostMore || c.newStatus == cancelled) {
			continue // a takeover, or a cancel of what nobody holds
		}
		var holder *run
		for k := range t.runs {
			if r := &t.runs[k]; r.delivery == c.oldDelivery && r.start <= c.at {
				holder = r
			}
		}
		said := ""
		switch {
		case holder == nil:
		case holder.end > 0 && holder.end <= c.at:
			said = holder.outcome
		case holder.completing > 0 && holder.completing <= c.at:
			said = runOK
		}
		ok := true
		switch c.newStatus {
		case succeeded:
			ok = said == runOK
		case retrying:
			ok = said == runFail
		case dead:
			ok = said == runFail || said == runPermanent
		case pending:
			ok = holder == nil || said == runSnooze || said == runCut || said == runFail || said == runLost || holder.cut > 0 && holder.cut <= c.at
		}
		if !ok {
			t.bad("I6", "delivery %d was ended as %s while its holder had said %q", c.oldDelivery, c.newStatus, said)
		}
	}
}

// withinLimits: attempts, and nobody is charged for what did not happen (I7).
func (t *taskCheck) withinLimits() {
	afresh := t.has(func(o *op) bool { return o.kind == opReplace && o.possible() })
	failed, lost := 0, 0
	for i := range t.changes {
		c := &t.changes[i]
		failed += count(c.granted() && c.oldStatus == retrying)
		lost += count(c.granted() && c.lostMore)
		if c.lostMore && t.blameless && !t.troubled(c.oldPID, t.grantedAt(i), c.at) {
			t.bad("I7", "a lost lease was counted at delivery %d, and its holder was well", c.oldDelivery)
		}
	}
	if !afresh && (failed >= t.maxFailed || lost >= t.maxLost) {
		t.bad("I7", "given out again after %d failed runs and %d lost leases; the limits are %d and %d", failed, lost, t.maxFailed, t.maxLost)
	}
	if !t.exists || t.row.open() {
		return
	}
	var want fate
	for i := range t.ops {
		if o := &t.ops[i]; o.fate != "" && o.possible() {
			want = o.fate
		}
	}
	switch {
	case t.row.status == cancelled:
	case (want == fatePoison || want == fateDoomed) && t.row.status != dead:
		t.bad("I7", "%s, and it ended as %s", want, t.row.status)
	case want != fatePoison && want != fateDoomed && want != "" && t.row.status == dead:
		if lost+1 < t.maxLost {
			t.bad("I7", "healthy (%s), and it ended as dead", want)
		} else {
			t.collateral++
		}
	}
}

// grantedAt is when the lease that change i ended had begun.
func (t *taskCheck) grantedAt(i int) int64 {
	for k := i - 1; k >= 0; k-- {
		if t.changes[k].granted() {
			return t.changes[k].at
		}
	}
	return 0
}

// answersAgree: a call that is repeated gets the answer of the first (I12).
func (t *taskCheck) answersAgree() {
	for i := range t.ops {
		o := &t.ops[i]
		if o.kind != opRepeat || !o.accepted() {
			continue
		}
		before := false
		for k := range t.ops[:i] {
			before = before || enqueues(&t.ops[k]) && t.ops[k].accepted() && t.ops[k].returned < o.called
		}
		if before && o.answer == "" {
			t.bad("I12", "enqueued before, and a repeat made it again")
		}
	}
}
