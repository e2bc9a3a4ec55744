package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A bug is one seeded mistake, by the name in $DELAYQ_SABOTAGE, and the scenario that catches it. The code is in the files
// sabotage_on.go of packages lua, delayq, ledger and reconciler, and where those packages ask for their constant sabotage.
type bug struct {
	name, scenario, about string
	shows                 string // rules that it breaks; one of them must be among the problems
}

// bugs are those of delayq/ledger/PROTOCOL.md and what else breaks queues. Two of the former are none
// here, by design: without tombstones only late deliveries are refused more often (V27), and calls that a client repeats by
// itself change nothing, since every step of ledger mode is safe to repeat.
var bugs = []bug{
	{"claim-without-rev", "ambiguous", "the claim does not look at the revision that Redis leased (V05, V06)", "I3"},
	{"complete-ignores-lost", "ambiguous", "CompleteTx ignores that no row was its own (V16)", "P2 I6 I12"},
	{"no-fallback", "kill-redis", "workers do not lease from the ledger while Redis is away", "bite"},
	{"ledger-lease-takes-running", "kill-redis", "the fallback leases what runs elsewhere (V18)", "I4"},
	{"claim-skipped", "power-loss", "what Redis leases runs without a claim", "I4 I5"},
	{"reconcile-one-way", "power-loss", "what Redis has is not looked up in the ledger", "I10 P7"},
	{"token-per-process", "vandal", "a token for each process, not for each lease (V08)", "I4"},
	{"claim-without-locked-until", "vandal", "the claim takes what runs elsewhere (V01, V03)", "I4"},
	{"reconcile-by-max-rev", "vandal", "the reconciler looks only at what is newer than all it has seen", "I10"},
	{"finish-without-token", "stale-consumer", "a finish does not compare the token (V10)", "I6 P2"},
	{"lease-end-ignored", "stale-consumer", "handlers go on when their lease was not renewed in time", "I4"},
	{"heartbeat-redis-only", "kill-redis", "heartbeats renew only the lease in Redis (V11)", "I4 I7"},
	{"takeover-ignores-limits", "massacre", "a takeover does not count lost leases against their limit (V15)", "I7"},
	{"give-back-redis-only", "massacre", "tasks are given back in Redis only (V36)", "I7"},
	{"lease-by-ttl", "massacre", "leases are keys with a time to live", "I10 I9"},
	{"zrem-before-a-failing-step", "massacre", "lease.lua removes before a step that can fail", "I10 I9"},
	{"redis-before-commit", "postgres", "Redis is told before the transaction commits (V22)", "I10"},
	{"cancel-redis-first", "postgres", "a cancel is answered although the ledger has not heard of it (V17)", "I8"},
	{"now-from-app", "clocks", "leases are judged by the clock of the machine that asks, not by the database's", "I4"},
	{"lease-early", "clocks", "lease.lua takes what falls due in the next 300 ms", "I3"},
	{"enqueue-needs-redis", "errors", "an enqueue fails when Redis does", "run"},
	{"reconcile-only-adds", "pairs", "the reconciler adds what is missing and moves nothing (P7)", "P7"},
	{"claim-refuses-own", "pairs", "the repeat of a claim is refused (V04)", "I12"},
	{"takeover-ignores-cancel", "pairs", "a takeover forgets that the task was told to stop (V12)", "I8"},
	{"retry-ignores-cancel", "pairs", "a failure forgets that the task was told to stop (V29)", "I8"},
	{"cancel-spares-running", "pairs", "a cancel of a running task is answered, and not noted", "I8"},
	{"heartbeat-without-token", "pairs", "a heartbeat renews whoever's lease it is", "I4 I6"},
	{"insert-ignores-stamp", "pairs", "an enqueue that is sent again revives a cancelled task", "I8"},
	{"put-ignores-rev", "pairs", "put.lua lets an older revision win", "I10 P7"},
	{"put-refuses-equal-tomb", "pairs", "what was dropped beyond the horizon does not come back (V20)", "P7"},
}

// tries is how many seeds a bug has to show itself.
const tries = 3

// sabotageAll builds the program with the bugs in it and plays, for each, the scenario that catches it, and each of those
// without any.
func sabotageAll(ctx context.Context, o *options) error {
	some := bugs
	if len(o.bugs) > 0 {
		some = slices.DeleteFunc(slices.Clone(bugs), func(b bug) bool { return !slices.Contains(o.bugs, b.name) })
		if len(some) < len(o.bugs) {
			return fmt.Errorf("not all of %s are bugs; see --list", o.bugs.String())
		}
	}
	dir, err := os.MkdirTemp("", "delayq-chaos-sabotage-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s := &saboteur{options: o, dir: dir, program: filepath.Join(dir, "chaos")}
	if err := buildSabotaged(ctx, s.program); err != nil {
		return err
	}
	began := time.Now()
	fmt.Printf("seed %d\n%-28s %-16s %-8s %s\n", o.seed, "bug", "scenario", "caught", "by")
	var bad []string
	clean := map[string]bool{}
	for _, b := range some {
		if !clean[b.scenario] {
			clean[b.scenario] = true
			r, err := s.play(ctx, "", b.scenario, o.seed)
			if err != nil {
				return err
			}
			fmt.Printf("%-28s %-16s %-8s %s\n", "(none)", b.scenario, map[bool]string{true: "-", false: "FAILS"}[r.Pass], rulesOf(r))
			if !r.Pass {
				bad = append(bad, b.scenario+" without a bug")
			}
		}
		caught, by, err := s.catch(ctx, b)
		if err != nil {
			return err
		}
		fmt.Printf("%-28s %-16s %-8s %s\n", b.name, b.scenario, map[bool]string{true: "yes", false: "NO"}[caught], by)
		if !caught {
			bad = append(bad, b.name)
		}
	}
	fmt.Printf("%d bugs in %s\n", len(some), time.Since(began).Round(time.Second))
	if len(bad) > 0 {
		return fmt.Errorf("not as it should be: %s", strings.Join(bad, ", "))
	}
	return nil
}

// buildSabotaged builds this program with the bugs in it.
func buildSabotaged(ctx context.Context, program string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", "sabotage", "-o", program, "github.com/delayq/toolkit/scripts/chaos")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("building with the bugs: %w\n%s", err, out)
	}
	return nil
}

type saboteur struct {
	*options
	dir, program string
}

// catch plays a bug's scenario until it fails as it should.
func (s *saboteur) catch(ctx context.Context, b bug) (caught bool, by string, err error) {
	for try := range tries {
		r, err := s.play(ctx, b.name, b.scenario, s.seed+uint64(try)) //nolint:gosec // not negative
		if err != nil {
			return false, "", err
		}
		by = rulesOf(r)
		for rule := range r.Problems {
			if slices.Contains(strings.Fields(b.shows), rule) {
				return true, by, nil
			}
		}
	}
	return false, by, nil
}

// play runs one scenario in a process of its own.
func (s *saboteur) play(ctx context.Context, bug, scenario string, seed uint64) (*result, error) {
	report := filepath.Join(s.dir, "report.json")
	_ = os.Remove(report) // of the one before
	args := []string{"--quick", "--scenario", scenario, "--seed", fmt.Sprint(seed), "--json", report, "--scale", fmt.Sprint(s.scale), "--discard"}
	cmd := exec.CommandContext(ctx, s.program, args...)
	cmd.Env = append(os.Environ(), "DELAYQ_SABOTAGE="+bug)
	cmd.SysProcAttr = dieWithParent()
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	raw, err1 := os.ReadFile(report)
	if err1 != nil {
		return nil, fmt.Errorf("%s in %s: %w\n%s", bug, scenario, errors.Join(err, err1), out)
	}
	var results []*result
	if err := json.Unmarshal(raw, &results); err != nil || len(results) != 1 {
		return nil, fmt.Errorf("%s in %s: no report: %w", bug, scenario, err)
	}
	return results[0], nil
}

func rulesOf(r *result) string {
	var b strings.Builder
	rules := make([]string, 0, len(r.Problems))
	for rule := range r.Problems {
		rules = append(rules, rule)
	}
	slices.Sort(rules)
	for _, rule := range rules {
		fmt.Fprintf(&b, "%s x%d  ", rule, r.Problems[rule])
	}
	return strings.TrimSpace(b.String())
}
