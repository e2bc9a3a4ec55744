package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/delayq/toolkit/scripts/servers"
)

// A result is one scenario's line of the report. The fields up to Seconds are a promise; those after may change.
type result struct {
	Scenario         string  `json:"scenario"`
	Seed             uint64  `json:"seed"`
	Pass             bool    `json:"pass"`
	Tasks            int     `json:"tasks"`
	Lost             int     `json:"lost"`
	Unexpected       int     `json:"unexpected"`
	Recovered        int     `json:"recovered"`
	OK               int     `json:"ok"`
	DuplicateEffects int     `json:"duplicate_effects"`
	Early            int     `json:"early"`
	Overlapping      int     `json:"overlapping"`
	StaleRefused     int64   `json:"stale_refused"`
	Seconds          float64 `json:"seconds"`

	RolledBack int            `json:"rolled_back"`
	InDoubt    int            `json:"in_doubt"`   // calls without an answer
	Runs       int            `json:"runs"`       // of handlers
	Reruns     int            `json:"reruns"`     // second runs that had a cause
	Collateral int            `json:"collateral"` // healthy tasks that died with too many of their consumers
	Drift      int64          `json:"drift"`      // found by reconcilers under way
	FromLedger int64          `json:"from_ledger"`
	Faults     int            `json:"faults"`
	Problems   map[string]int `json:"problems,omitempty"` // by rule

	problems []problem
	dir      string
}

// An arena is what scenarios share: a PostgreSQL, each with a database of its own, and a folder.
type arena struct {
	pg     *servers.Postgres
	dir    string
	played int
}

func newArena(dir string) (*arena, error) {
	pg, err := servers.StartPostgres(servers.PostgresOptions{Settings: []string{"max_connections=150", "idle_in_transaction_session_timeout=20s"}})
	if err != nil {
		return nil, err
	}
	return &arena{pg: pg, dir: dir}, nil
}

// perform plays a scenario and judges what it has left.
func (a *arena) perform(ctx context.Context, sc *scenario, z size, seed uint64) *result {
	began := time.Now()
	a.played++
	dir := filepath.Join(a.dir, fmt.Sprintf("%02d-%s", a.played, sc.name))
	r := &result{Scenario: sc.name, Seed: seed, Tasks: z.tasks, Problems: map[string]int{}, dir: dir}
	v, err := a.stage(ctx, sc, z, seed, r)
	if err != nil {
		v.problem("run", "", err.Error())
	}
	r.Lost, r.Unexpected, r.Recovered, r.OK = len(v.lost), len(v.unexpected), len(v.recovered), len(v.ok)
	r.DuplicateEffects, r.Early, r.Overlapping = v.duplicateEffects, v.early, v.overlapping
	r.RolledBack, r.Reruns, r.Collateral = v.rolledBack, v.reruns, v.collateral
	r.Tasks = r.Lost + r.Unexpected + r.Recovered + r.OK
	r.problems = v.problems
	for _, p := range v.problems {
		r.Problems[p.rule]++
	}
	r.Pass = len(v.problems) == 0 && r.Tasks > 0
	r.Seconds = float64(time.Since(began).Round(10*time.Millisecond)) / float64(time.Second)
	return r
}

func (a *arena) stage(ctx context.Context, sc *scenario, z size, seed uint64, r *result) (*verdict, error) {
	empty := &verdict{}
	if err := os.Mkdir(r.dir, 0o700); err != nil {
		return empty, err
	}
	if !a.pg.Running() { // the scenario before has failed with it down
		if err := a.pg.Restart(); err != nil {
			return empty, err
		}
	}
	s, err := setUp(ctx, sc, z, seed, r.dir, a.pg)
	if err != nil {
		return empty, err
	}
	defer s.tearDown()
	if sc.alone != nil {
		err := sc.alone(ctx, s)
		return judgePairs(s.met), err
	}
	err = s.play(ctx)
	if err == nil {
		err = s.rest(ctx)
	}
	if ctx.Err() != nil {
		return empty, ctx.Err()
	}
	problems := s.finish(ctx)
	h, err1 := s.collect(ctx)
	if err1 != nil {
		return empty, errors.Join(err, err1)
	}
	v := check(h, sc.rules)
	v.problems = append(v.problems, problems...)
	if sc.demands != nil && err == nil {
		sc.demands(s, h, v)
	}
	r.count(h)
	return v, err
}

func (r *result) count(h *history) {
	r.StaleRefused, r.Drift, r.Faults, r.InDoubt = h.stale, h.drift, h.faults, h.inDoubt()
	for _, runs := range h.runs {
		r.Runs += len(runs)
	}
	for i := range h.exits {
		r.FromLedger += h.exits[i].FromLedger
	}
}

// why lists a failed scenario's problems, a few of each rule.
func (r *result) why(most int) string {
	var b strings.Builder
	shown := map[string]int{}
	for _, p := range r.problems {
		if shown[p.rule]++; shown[p.rule] <= most {
			fmt.Fprintf(&b, "    %s\n", p)
		}
	}
	for _, rule := range slices.Sorted(maps.Keys(shown)) {
		if n := shown[rule]; n > most {
			fmt.Fprintf(&b, "    %s: %d more\n", rule, n-most)
		}
	}
	return b.String()
}

const heading = "scenario         pass  tasks    ok  recov  lost  unexp  dup  early  overl  stale  rerun  faults  doubt  drift   secs"

func (r *result) line() string {
	pass := "yes"
	if !r.Pass {
		pass = "NO"
	}
	return fmt.Sprintf("%-16s %-4s %6d %5d %6d %5d %6d %4d %6d %6d %6d %6d %7d %6d %6d %6.1f", r.Scenario, pass, r.Tasks, r.OK, r.Recovered, r.Lost,
		r.Unexpected, r.DuplicateEffects, r.Early, r.Overlapping, r.StaleRefused, r.Reruns, r.Faults, r.InDoubt, r.Drift, r.Seconds)
}

func writeJSON(w io.Writer, results []*result) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(results)
}
