package main

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/scripts/servers"
)

// TestMain lets the test binary play the parts of the scenarios' processes, with the race detector if it has that.
func TestMain(m *testing.M) {
	playRole()
	servers.Main(m)
}

// TestScenarios plays three scenarios, small: the shortest form of what the program does.
func TestScenarios(t *testing.T) {
	servers.NeedRedis(t)
	servers.NeedPostgres(t)
	a, err := newArena(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.pg.Stop)
	for _, c := range []struct {
		scenario string
		size     size
	}{
		{"pairs", size{tasks: 35}},
		{"ambiguous", size{200, seconds(4), seconds(1)}},
		{"massacre", size{200, seconds(4), seconds(1)}},
	} {
		r := a.perform(t.Context(), scenarioNamed(c.scenario), c.size, 1)
		t.Logf("%s\n%s", heading, r.line())
		if !r.Pass {
			t.Errorf("%s failed:\n%s%s", c.scenario, r.why(10), logText(r.dir, 2000))
		}
	}
}

// TestSeedsApply: a bug whose text to change is not there any more proves nothing, and says so at its start.
func TestSeedsApply(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "chaos")
	if err := buildSabotaged(t.Context(), program); err != nil {
		t.Fatal(err)
	}
	for _, b := range bugs {
		cmd := exec.Command(program, "--list")
		cmd.Env = append(os.Environ(), "DELAYQ_SABOTAGE="+b.name)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%.500s", b.name, err, out)
		}
	}
}

// TestEveryScenarioIsBroken: one that no bug breaks is decoration, and a bug must be somewhere in the code.
func TestEveryScenarioIsBroken(t *testing.T) {
	t.Parallel()
	broken := map[string]bool{}
	for _, b := range bugs {
		if scenarioNamed(b.scenario) == nil {
			t.Errorf("%s: there is no scenario %s", b.name, b.scenario)
		}
		broken[b.scenario] = true
	}
	for _, sc := range scenarios {
		if !broken[sc.name] {
			t.Errorf("no bug breaks %s", sc.name)
		}
	}
	var code strings.Builder
	for _, dir := range []string{"lua", "delayq", "delayq/ledger", "reconciler"} {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(text)
		}
	}
	for _, b := range bugs {
		if !strings.Contains(code.String(), `"`+b.name+`"`) {
			t.Errorf("no package has the bug %s", b.name)
		}
	}
}

func TestDisagreement(t *testing.T) {
	t.Parallel()
	now := time.Now()
	due := now.Add(time.Hour).UnixMicro()
	waits := row{status: pending, rev: 7, runAt: due}
	there := &entry{rev: 7, places: []string{"pending"}, due: due, record: true}
	for name, c := range map[string]struct {
		row   *row
		entry *entry
		want  string // in the complaint, empty for none
	}{
		"both have it":        {&waits, there, ""},
		"neither has it":      {nil, nil, ""},
		"redis lacks it":      {&waits, nil, "not in redis"},
		"redis has it older":  {&waits, &entry{rev: 6, places: there.places, due: due, record: true}, "revision 7"},
		"redis has it later":  {&waits, &entry{rev: 7, places: there.places, due: due + 1, record: true}, "due at"},
		"redis has no record": {&waits, &entry{rev: 7, places: there.places, due: due}, "record false"},
		"it is in two places": {&waits, &entry{rev: 7, places: []string{"pending", "processing"}, due: due, record: true}, "in [pending processing]"},
		"it is quarantined":   {&waits, &entry{rev: 7, places: []string{"dead"}, due: due, record: true}, "in [dead]"},
		"it has ended":        {&row{status: succeeded, rev: 8}, there, "succeeded in the ledger"},
		"ended for both":      {&row{status: cancelled, rev: 8}, nil, ""},
		"beyond the horizon":  {&row{status: pending, rev: 7, runAt: now.Add(9 * time.Hour).UnixMicro()}, there, "beyond the horizon"},
		"it waits beyond it":  {&row{status: pending, rev: 7, runAt: now.Add(9 * time.Hour).UnixMicro()}, nil, ""},
		"unknown":             {nil, there, "does not know it"},
	} {
		rows, entries := map[string]row{}, map[string]*entry{}
		if c.row != nil {
			rows["t"] = *c.row
		}
		if c.entry != nil {
			entries["t"] = c.entry
		}
		got := disagree(rows, entries, 3*time.Hour, now)
		if (len(got) == 0) != (c.want == "") || len(got) > 0 && !strings.Contains(got[0].detail, c.want) {
			t.Errorf("%s: %v, want %q", name, got, c.want)
		}
	}
}

// TestJournalsSurviveACut: the last line of a killed process may be a part of one, and no other.
func TestJournalsSurviveACut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, err := openJournal(dir, "one")
	if err != nil {
		t.Fatal(err)
	}
	j.write(event{Kind: evStart, Task: "t"})
	j.write(event{Kind: evEnd, Task: "t"})
	j.close()
	name := filepath.Join(dir, "one.jsonl")
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for cut, want := range map[int]int{0: 2, 5: 1} {
		if err := os.WriteFile(name, whole[:len(whole)-cut], 0o600); err != nil {
			t.Fatal(err)
		}
		events, err := readJournals(dir)
		if err != nil || len(events) != want {
			t.Errorf("%d bytes cut off: %d events, %v", cut, len(events), err)
		}
	}
	if err := os.WriteFile(name, append([]byte("{\n"), whole...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readJournals(dir); err == nil {
		t.Error("a broken line in the middle is read over")
	}
}

// TestReportFields: the names that --json promises.
func TestReportFields(t *testing.T) {
	t.Parallel()
	raw, err := json.Marshal(&result{})
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{
		"scenario", "seed", "pass", "tasks", "lost", "unexpected", "recovered", "ok", "duplicate_effects", "early", "overlapping", "stale_refused", "seconds",
	} {
		if _, ok := got[f]; !ok {
			t.Errorf("no %s among %v", f, slices.Sorted(maps.Keys(got)))
		}
	}
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--scenario", "none"}, {"extra"}, {"--no-such-flag"}} {
		if err := command(args); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
	o, err := parse([]string{"--scenario", "massacre,K", "--quick"})
	if err != nil {
		t.Fatal(err)
	}
	some, err := o.chosen()
	if err != nil || len(some) != 2 || some[0].name != "massacre" || some[1].name != "clocks" || o.seed == 0 {
		t.Errorf("%v %v", some, err)
	}
	if z := o.size(some[0]); z != some[0].quick {
		t.Errorf("%+v", z)
	}
	if err := sabotageAll(context.Background(), &options{bugs: names{"none"}}); err == nil {
		t.Error("an unknown bug is accepted")
	}
}
