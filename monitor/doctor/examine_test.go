package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/reconciler"
)

var now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// well is a queue, and a Redis, that nothing is wrong with.
func well() *Evidence {
	return &Evidence{
		StaleAfter: time.Minute, StuckAfter: 5 * time.Minute, More: map[string]More{},
		Now: &monitor.View{
			At:     now,
			Server: monitor.Server{Version: "7.0.15", MemoryUsed: 10, MemoryMax: 100, Policy: "noeviction", LastSaveOK: true, Uptime: time.Hour},
			Queues: []monitor.QueueView{{
				Name: "orders", Healthy: 1,
				Consumers: []delayq.Consumer{{Name: "w1", Seen: now, Beat: now, Started: now.Add(-time.Hour), Progress: now, Concurrency: 10, Types: []string{"mail"}}},
				Stats:     &delayq.Stats{Queue: "orders", Now: now, Pending: 5, LastRun: now, Failed: map[string]int64{}, Shards: []delayq.ShardStats{{Epoch: "a"}}},
			}},
		},
	}
}

func (e *Evidence) q() *monitor.QueueView { return &e.Now.Queues[0] }

// earlier adds a look of 10 s before with the same figures, and lets change make the later ones of them.
func (e *Evidence) earlier(change func(s *delayq.Stats)) {
	old := *e.q().Stats
	old.Now, old.Failed = now.Add(-10*time.Second), map[string]int64{}
	e.Before = &monitor.View{Queues: []monitor.QueueView{{Name: "orders", Stats: &old}}}
	change(e.q().Stats)
}

// gone leaves the queue without a consumer.
func (e *Evidence) gone() {
	e.q().Consumers, e.q().Healthy = nil, 0
	e.q().Stats.LastRun = now.Add(-4 * time.Minute)
}

func (e *Evidence) booked() *monitor.QueueView {
	e.q().Stats.Mode = "ledger"
	e.q().Reconciler = &reconciler.Status{Began: now.Add(-time.Minute), LastFull: now.Add(-time.Minute), Coverage: 1}
	e.Database = &Database{}
	return e.q()
}

func TestExamine(t *testing.T) {
	unreachable := errors.New("dial tcp 127.0.0.1:1: connect: connection refused")
	for _, c := range []struct {
		name     string
		spoil    func(e *Evidence)
		stage    Stage
		severity Severity
		code     Code
		says     string // a part of What
	}{
		{"nobody asks for work", func(e *Evidence) { e.gone() }, Trigger, Critical, NoRun, "4m0s ago, and 5 tasks wait"},
		{"nobody asks and nothing waits", func(e *Evidence) { e.gone(); e.q().Stats.Pending = 0 }, Trigger, Info, NoRun, "no task waits"},
		{"due without a consumer", func(e *Evidence) { e.gone(); e.q().Stats.Due, e.q().Stats.OldestDueAge = 3, 2*time.Minute }, Trigger, Critical, NoConsumer, "3 tasks are due, the oldest for 2m0s"},
		{"due between two ticks", func(e *Evidence) {
			e.gone()
			e.q().Stats.LastRun, e.q().Stats.Due, e.q().Stats.OldestDueAge = now.Add(-40*time.Second), 1, time.Second
		}, Trigger, Info, NoConsumer, "no consumer is there at this moment"},
		{"queues that cannot be listed", func(e *Evidence) { e.Now.FindErr, e.Now.Queues = errors.New("NOPERM scan"), nil }, State, Critical, NotListed, "none was looked at: NOPERM scan"},
		{"queues that cannot all be listed", func(e *Evidence) { e.Now.FindErr = unreachable }, State, Critical, NotListed, "not all be listed"},
		{"silent consumer", func(e *Evidence) {
			e.q().Consumers = append(e.q().Consumers, delayq.Consumer{Name: "w2", Seen: now.Add(-2 * time.Minute), Beat: now.Add(-2 * time.Minute)})
		}, Trigger, Warning, StaleConsumers, "w2 (2m0s ago)"},
		{
			"type without a consumer", func(e *Evidence) {
				e.More["orders"] = More{Due: []delayq.Info{{Task: delayq.Task{Type: "pay"}}, {Task: delayq.Task{Type: "mail"}}}}
			},
			Trigger, Warning, NoTypeHandler, "1 pay, of the 2 most overdue",
		},

		{"Redis refuses", func(e *Evidence) { e.Now.Server.Err = unreachable }, State, Critical, RedisDown, "connection refused"},
		{"Redis hangs", func(e *Evidence) { e.Now.Server.Err = context.DeadlineExceeded }, State, Critical, RedisDown, "does not answer in time"},
		{"old Redis", func(e *Evidence) { e.Now.Server.Version = "6.0.9" }, State, Critical, RedisOld, "6.0.9"},
		{"skew", func(e *Evidence) { e.Now.Server.Skew = -2 * time.Second }, State, Warning, RedisSkew, "2s behind"},
		{"bad skew", func(e *Evidence) { e.Now.Server.Skew = time.Minute }, State, Critical, RedisSkew, "1m0s ahead of"},
		{"eviction", func(e *Evidence) { e.Now.Server.Policy = "allkeys-lru" }, State, Critical, Eviction, "allkeys-lru"},
		{"evicted", func(e *Evidence) { e.Now.Server.Policy, e.Now.Server.Evicted = "allkeys-lru", 7 }, State, Critical, Evicted, "7 keys"},
		{"policy not told", func(e *Evidence) { e.Now.Server.Policy = "" }, State, Info, Eviction, "does not tell"},
		{"memory high", func(e *Evidence) { e.Now.Server.MemoryUsed = 85 }, State, Warning, Memory, "85 %"},
		{"memory full", func(e *Evidence) { e.Now.Server.MemoryUsed = 99 }, State, Critical, Memory, "99 %"},
		{"save failed", func(e *Evidence) { e.Now.Server.LastSaveOK = false }, State, Critical, SaveFailed, "could not save"},
		{"queue missing", func(e *Evidence) {
			e.q().Stats, e.q().Err, e.Known = nil, delayq.ErrNoQueue, []string{"mail", "order"}
		}, State, Critical, QueueMissing, "there is order"},
		{"schema", func(e *Evidence) { e.q().Stats, e.q().Err = nil, delayq.ErrSchema }, State, Critical, SchemaMismatch, "another version"},
		{"ledger not given", func(e *Evidence) { e.q().RedisOnly, e.q().Stats.Mode = true, "ledger" }, State, Warning, NeedsLedger, "none was given"},
		{"wrong ledger", func(e *Evidence) { e.q().RedisOnly, e.q().Err = true, delayq.ErrLedger }, State, Critical, NeedsLedger, "does not know the queue"},
		{"overdue", func(e *Evidence) { e.q().Stats.Due, e.q().Stats.OldestDueAge = 9, 5*time.Minute }, State, Warning, Overdue, "5m0s, although consumers are healthy"},
		{"growing", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Due, s.Leased = 100, 50 }) }, State, Warning, BacklogGrowing, "from 0 to 100 in 10s, while 1 consumer is healthy: 15.0/s"},
		{"lost while watched", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Shards = []delayq.ShardStats{{Epoch: "b"}} }) }, State, Critical, DataLost, "lost the data"},
		{"shards lost", func(e *Evidence) { e.booked().Stats.Shards[0].Epoch = "" }, State, Critical, DataLost, "1 of 1 shards"},
		{"records missing now", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Missing = 2 }) }, State, Critical, RecordsMissing, "2 tasks were gone"},
		{"records missing once", func(e *Evidence) { e.q().Stats.Missing = 2 }, State, Info, RecordsMissing, "none lately"},
		{"large shard", func(e *Evidence) { e.q().Stats.Shards[0].Pending = 2e6 }, State, Warning, ShardLarge, "2000000"},
		{"audit", func(e *Evidence) {
			e.More["orders"] = More{Audit: &delayq.AuditReport{Violations: []delayq.Violation{{Invariant: "I1", ID: "a"}}, Omitted: 4}}
		}, State, Critical, AuditViolations, "5 contradictions"},
		{"no queue at all", func(e *Evidence) { e.Now.Queues = nil }, State, Info, NoQueues, "no queue"},
		{"left out", func(e *Evidence) { e.Now.LeftOut = 3 }, State, Warning, LeftOut, "3 queues were not"},

		{"all stuck", func(e *Evidence) { e.q().Healthy, e.q().Stuck, e.q().Stats.Due = 0, 2, 4 }, Execution, Critical, StuckConsumers, "all consumers that live (2)"},
		{"one stuck", func(e *Evidence) { e.q().Stuck = 1 }, Execution, Warning, StuckConsumers, "1 consumer is stuck"},
		{"stuck handler", func(e *Evidence) { e.q().Consumers[0].Stuck = 2 }, Execution, Warning, StuckHandlers, "2 handlers"},
		{"long run", func(e *Evidence) { e.q().Stats.OldestProcessingAge = 2 * time.Hour }, Execution, Warning, LongRun, "2h0m0s"},
		{"consumer skew", func(e *Evidence) { e.q().Consumers[0].Skew = -9 * time.Second }, Execution, Warning, ConsumerSkew, "w1 is 9s behind"},
		{"failures", func(e *Evidence) {
			e.earlier(func(s *delayq.Stats) { s.Failed = map[string]int64{"error": 6, "panic": 2}; s.Succeeded = 92 })
		}, Execution, Warning, FailureRate, "8 % of the attempts of the last 10s failed: 6 error, 2 panic; 92 succeeded"},
		{"mostly failures", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Failed = map[string]int64{"error": 6} }) }, Execution, Critical, FailureRate, "100 %"},
		{"no handler", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Failed = map[string]int64{"no_handler": 1} }) }, Execution, Warning, NoHandler, "1 attempt failed"},
		{"dead lately", func(e *Evidence) {
			e.q().Stats.Dead = 3
			e.More["orders"] = More{Dead: []delayq.Info{{Task: delayq.Task{Type: "pay"}, Reason: "error", At: now}, {Task: delayq.Task{Type: "old"}, At: now.Add(-time.Hour)}}}
		}, Execution, Warning, DeadRising, "1 of its 3 dead letters died in the last 15m0s: by reason 1 error; by type 1 pay"},
		{"many dead lately", func(e *Evidence) {
			e.q().Stats.Dead = 2
			e.More["orders"] = More{Dead: []delayq.Info{{Task: delayq.Task{Type: "pay"}, Reason: "error", At: now}}}
		}, Execution, Warning, DeadRising, "at least 1 of its 2 dead letters died"},
		{"dead of old", func(e *Evidence) {
			e.q().Stats.Dead = 2
			e.More["orders"] = More{Dead: []delayq.Info{{At: now.Add(-time.Hour)}}}
		}, Execution, Info, DeadRising, "2 dead letters, none of the last 15m0s"},
		{"dead and not read", func(e *Evidence) {
			e.earlier(func(s *delayq.Stats) { s.Dead = 2 })
			e.More["orders"] = More{Err: unreachable}
		}, Execution, Warning, DeadRising, "2 dead letters, of which 0 could be looked at: whether some are new is not known, but none came in the last 10s"},
		{"not read", func(e *Evidence) { e.More["orders"] = More{Err: context.DeadlineExceeded} }, State, Warning, NotRead, "in time"},
		{"trimmed", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Trimmed = 1 }) }, Execution, Critical, DeadTrimmed, "1 old dead letter"},
		{"nearly trimmed", func(e *Evidence) { e.q().Stats.Shards[0].Dead = 95_000 }, Execution, Warning, DeadTrimmed, "95000"},
		{"lost leases", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Expired = 3 }) }, Execution, Warning, LostLeases, "3 leases ran out"},
		{"stale calls", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Stale = 30 }) }, Execution, Warning, StaleCalls, "30 calls"},

		{"timeouts", func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Failed = map[string]int64{"timeout": 1} }) }, Downstream, Warning, Timeouts, "1 handler was"},
		{"slow", func(e *Evidence) {
			e.q().Stats.Duration = delayq.Histogram{Count: 100, Sum: time.Second}
			e.earlier(func(s *delayq.Stats) { s.Duration = delayq.Histogram{Count: 110, Sum: 11 * time.Second} })
		}, Downstream, Warning, Slow, "1s on average now, and 10ms before"},
		{"database down", func(e *Evidence) { e.booked(); e.Database.Err = unreachable }, Downstream, Critical, DatabaseDown, "connection refused"},
		{"database without schema", func(e *Evidence) { e.booked(); e.Database.Err = delayq.ErrSchema }, Downstream, Critical, DatabaseSchema, "schema"},
		{"database skew", func(e *Evidence) { e.booked(); e.Database.Skew = 3 * time.Second }, Downstream, Warning, DatabaseSkew, "3s ahead of"},
		{"never reconciled", func(e *Evidence) { e.booked().Reconciler = nil }, Downstream, Warning, NoReconcile, "no reconciler has ever"},
		{"reconciled long ago", func(e *Evidence) { e.booked().Reconciler.LastFull = now.Add(-2 * time.Hour) }, Downstream, Warning, NoReconcile, "2h0m0s ago"},
		{"not repaired", func(e *Evidence) { e.booked().Reconciler.Last = reconciler.Counts{Drift: 5, Repaired: 2} }, Downstream, Warning, Unrepaired, "could not mend 3"},
		{"unconfirmed", func(e *Evidence) { e.booked().Reconciler.Last.Unconfirmed = 1 }, Downstream, Critical, Unconfirmed, "1 task as ended"},
		{"drift", func(e *Evidence) {
			e.booked()
			e.More["orders"] = More{Ledger: &delayq.LedgerCounts{Open: 80, Later: 10}}
		}, Downstream, Warning, Drift, "70 open tasks for Redis to hold, and Redis has 5"},
		{"quarantine", func(e *Evidence) {
			e.booked()
			e.More["orders"] = More{Dead: []delayq.Info{{Reason: delayq.ReasonUnbooked, At: now}}}
		}, Downstream, Warning, Quarantined, "1 task is set aside"},
		{"quarantine cut off", func(e *Evidence) {
			e.booked().Stats.Shards[0].Dead = 9
			e.More["orders"] = More{Dead: []delayq.Info{{Reason: delayq.ReasonUnbooked, At: now}}}
		}, Downstream, Warning, Quarantined, "at least 1 task is set aside"},
		{"quarantine out of sight", func(e *Evidence) { e.booked().Stats.Shards[0].Dead = 9 }, Downstream, Warning, Quarantined, "Redis alone has 9 dead letters"},
		{"Redis away, the ledger there", func(e *Evidence) {
			e.booked()
			e.Now.Server.Err, e.More["orders"] = unreachable, More{Ledger: &delayq.LedgerCounts{Open: 3}}
		}, Downstream, Info, Drift, "3 open tasks: they are safe"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := well()
			c.spoil(e)
			findings := Examine(*e)
			for _, f := range findings {
				if f.Code == c.code && f.Severity == c.severity && f.Stage == c.stage && strings.Contains(f.What, c.says) {
					if c.severity >= Warning && f.Do == "" {
						t.Error("it does not say what to do")
					}
					return
				}
			}
			t.Errorf("no %s %s %s that says %q in\n%s", c.stage, c.severity, c.code, c.says, listed(findings))
		})
	}
}

func listed(findings []Finding) string {
	var b strings.Builder
	for _, f := range findings {
		b.WriteString(string(f.Stage) + " " + f.Severity.String() + " " + string(f.Code) + " " + f.What + "\n")
	}
	return b.String()
}

func TestNothingWrong(t *testing.T) {
	for name, spoil := range map[string]func(*Evidence){
		"one look":  func(*Evidence) {},
		"two looks": func(e *Evidence) { e.earlier(func(s *delayq.Stats) { s.Succeeded = 100 }) },
		"ledger":    func(e *Evidence) { e.booked(); e.More["orders"] = More{Ledger: &delayq.LedgerCounts{Open: 6}} },
		"ended by itself": func(e *Evidence) { // a function that took its beat away is no consumer that died
			e.q().Consumers = append(e.q().Consumers, delayq.Consumer{Name: "w2", Seen: now.Add(-10 * time.Minute)})
		},
		"dead letters of before the ledger": func(e *Evidence) {
			e.booked().Stats.Shards[0].Dead = 9
			e.More["orders"] = More{Ledger: &delayq.LedgerCounts{Open: 6}, DeadAll: true}
		},
		"takes every type": func(e *Evidence) {
			e.q().Consumers[0].Types = nil
			e.More["orders"] = More{Due: []delayq.Info{{Task: delayq.Task{Type: "pay"}}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := well()
			spoil(e)
			if findings := Examine(*e); Worst(findings) > OK || len(findings) < 10 {
				t.Errorf("found\n%s", listed(findings))
			}
		})
	}
}

// Findings come in the order of the walk, and within a stage the worst first.
func TestOrder(t *testing.T) {
	e := well()
	e.gone()
	e.booked().Reconciler = nil
	e.Now.Server.Policy, e.Now.Server.MemoryUsed = "allkeys-lru", 85
	var last Finding
	at := map[Stage]int{}
	for i, s := range Stages {
		at[s] = i
	}
	for _, f := range Examine(*e) {
		if at[f.Stage] < at[last.Stage] || f.Stage == last.Stage && f.Severity > last.Severity {
			t.Errorf("%s %s after %s %s", f.Stage, f.Severity, last.Stage, last.Severity)
		}
		last = f
	}
}

// Every section that a finding points to is there.
func TestAnchors(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "runbook.md"))
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if title, ok := strings.CutPrefix(line, "### "); ok {
			sections[strings.ToLower(strings.TrimSpace(title))] = true
		}
	}
	for code, anchor := range anchors {
		if !sections[anchor] {
			t.Errorf("%s: no section %s", code, anchor)
		}
	}
}

// Ids and types are anybody's; a terminal must not obey them.
func TestHostileNames(t *testing.T) {
	e := well()
	e.More["orders"] = More{Due: []delayq.Info{{Task: delayq.Task{Type: "\x1b[2J" + strings.Repeat("x", 300)}}}}
	for _, f := range Examine(*e) {
		if strings.ContainsRune(f.What, 0x1b) || len(f.What) > 400 {
			t.Errorf("%q", f.What)
		}
	}
}
