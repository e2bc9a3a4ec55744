// Package doctor says in plain words what is wrong with delay queues and what to do about it. It walks from the trigger over the
// state and the execution to what lies downstream, since what comes later is often only the consequence.
package doctor

import (
	"cmp"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// A Stage is a step of the walk.
type Stage string

// The stages, in the order of the walk.
const (
	Trigger    Stage = "trigger"    // does anybody ask for work?
	State      Stage = "state"      // where are the tasks, and is what holds them well?
	Execution  Stage = "execution"  // what do runs end with?
	Downstream Stage = "downstream" // the ledger, and what handlers call
)

// Stages are all of them, in order.
var Stages = []Stage{Trigger, State, Execution, Downstream}

// A Severity says how bad a finding is.
type Severity int

// The severities.
const (
	OK       Severity = iota // looked at, and well
	Info                     // worth knowing; nothing to do
	Warning                  // somebody must look in working hours
	Critical                 // tasks are late or lost now, or nobody can tell
)

var severities = [...]string{"ok", "info", "warning", "critical"}

func (s Severity) String() string { return severities[s] }

// MarshalText makes severities readable in JSON.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Finding is one thing that was looked at, well or not.
type Finding struct {
	Stage    Stage    `json:"stage"`
	Severity Severity `json:"severity"`
	Code     Code     `json:"code"`
	Queue    string   `json:"queue,omitempty"`   // empty when it is about a server
	What     string   `json:"what"`              // in plain words, with the figures
	Do       string   `json:"do,omitempty"`      // what to do, with what to type
	Runbook  string   `json:"runbook,omitempty"` // page and anchor
}

// A Report is what one visit of the doctor found.
type Report struct {
	At       time.Time     `json:"at"`
	Took     time.Duration `json:"took_ns"`
	Watched  time.Duration `json:"watched_ns"` // between the two looks; 0 when there was one
	Worst    Severity      `json:"worst"`
	Queues   []string      `json:"queues"`
	Findings []Finding     `json:"findings"` // by stage, then the worst first
}

// Evidence is what a diagnosis is made from. Only Now is needed.
type Evidence struct {
	Now *monitor.View
	// Before is an earlier view, for what is only seen in a difference; nil for none.
	Before *monitor.View
	// Database is how the ledger's database is, when one was given and asked.
	Database *Database
	// More is by queue what a View does not hold.
	More map[string]More
	// Known are the names of queues that are there, for one that is not.
	Known []string
	// StaleAfter and StuckAfter are those of the monitor.
	StaleAfter, StuckAfter time.Duration
}

// Database is what the ledger's database answered.
type Database struct {
	Err  error
	Skew time.Duration // its clock less this machine's
}

// More is what is read of a queue beyond a View, in bounded reads. Nil fields were not read.
type More struct {
	Due     []delayq.Info // the first page of due tasks
	Dead    []delayq.Info // the newest dead letters, the last to die first, as far as a bounded walk came
	DeadAll bool          // it came to the oldest
	Ledger  *delayq.LedgerCounts
	Audit   *delayq.AuditReport
	Err     error // of these reads
}

// Examine makes the findings of the evidence. It asks nobody.
func Examine(e Evidence) []Finding {
	b := &book{}
	v := e.Now
	if e.server(b) { // else all else is unknown, not well
		for i := range v.Queues {
			c := e.chart(&v.Queues[i])
			c.state(b)
			if c.q.Stats == nil {
				continue
			}
			c.trigger(b)
			c.execution(b)
			c.downstream(b)
		}
		e.unlisted(b)
		if len(v.Queues) == 0 && v.FindErr == nil {
			b.add(State, Info, NoQueues, "", "there is no queue on this Redis", "Is it the right server and database number? Enqueue something, or name --redis.")
		}
		if v.LeftOut > 0 {
			b.add(State, Warning, LeftOut, "", num(v.LeftOut, "queue was", "queues were")+" not looked at",
				"Name those that matter with --queue. So many queues are mostly a mistake: one queue takes all customers and days.")
		}
	} else {
		for i := range v.Queues {
			e.chart(&v.Queues[i]).ledgerOnly(b)
		}
	}
	e.database(b)
	slices.SortStableFunc(b.findings, func(x, y Finding) int {
		return cmp.Or(cmp.Compare(slices.Index(Stages, x.Stage), slices.Index(Stages, y.Stage)), cmp.Compare(y.Severity, x.Severity))
	})
	return b.findings
}

// Worst is the worst severity among findings.
func Worst(findings []Finding) (worst Severity) {
	for _, f := range findings {
		worst = max(worst, f.Severity)
	}
	return worst
}

// book takes findings down.
type book struct{ findings []Finding }

func (b *book) add(stage Stage, severity Severity, code Code, queue, what, do string) {
	f := Finding{Stage: stage, Severity: severity, Code: code, Queue: queue, What: what, Do: do}
	if anchor := anchors[code]; severity > OK && anchor != "" {
		f.Runbook = runbook + "#" + anchor
	}
	b.findings = append(b.findings, f)
}

// ok takes down what was looked at and is well.
func (b *book) ok(stage Stage, code Code, queue, what string) {
	b.add(stage, OK, code, queue, what, "")
}
