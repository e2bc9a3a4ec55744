// Chaos proves that nothing is lost: it runs the queue in ledger mode as real processes (redis-server, PostgreSQL, consumers,
// producers, reconcilers), breaks them, and judges what happened by journals that each process keeps outside of the system.
//
//	go run ./scripts/chaos                      every scenario at its full size, about eight minutes
//	go run ./scripts/chaos --quick              every scenario, shortened: under three minutes on two cores
//	go run ./scripts/chaos --scenario massacre  one of them; may be given more than once, and by its letter
//	go run ./scripts/chaos --list               which there are
//	go run ./scripts/chaos --sabotage           for each of a list of bugs: the scenario that catches it
//
// The verdict is that of Jepsen's queue checker: of the tasks whose enqueue was committed some are ok and none may be lost,
// none may run that were not, and those are recovered whose producer never heard an answer. Beside it: effects that happened
// twice, early starts, overlapping leases, stale reports that were refused, and what delayq/ledger/PROTOCOL.md says must hold.
// One seed drives the workload and the faults; real processes are still not deterministic. When a scenario fails, its
// journals, logs and seed are kept, and the exit status is 1.
//
// It needs redis-server, PostgreSQL's server programs, and for one scenario (clocks) a C compiler.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

func main() {
	playRole()
	redis.SetLogger(silent{}) // a server that is away is what this is about
	if err := command(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
}

type silent struct{}

// Printf is called by go-redis.
func (silent) Printf(context.Context, string, ...any) {}

// options are the command line.
type options struct {
	quick, list, sabotage bool
	keep, discard         bool
	scenarios             names
	bugs                  names
	seed                  uint64
	json                  string
	scale                 float64
}

type names []string

func (n *names) String() string { return strings.Join(*n, ",") }

// Set is called by package flag.
func (n *names) Set(v string) error {
	*n = append(*n, strings.Split(v, ",")...)
	return nil
}

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("chaos", flag.ContinueOnError)
	f.BoolVar(&o.quick, "quick", false, "shortened scenarios, under three minutes in all")
	f.BoolVar(&o.list, "list", false, "list the scenarios and the bugs")
	f.BoolVar(&o.sabotage, "sabotage", false, "build with seeded bugs, and show which scenario catches each")
	f.BoolVar(&o.keep, "keep", false, "keep journals and logs of scenarios that pass, too")
	f.BoolVar(&o.discard, "discard", false, "keep nothing, not even of scenarios that fail")
	f.Var(&o.scenarios, "scenario", "play only this one; by name or letter, more than once if you like")
	f.Var(&o.bugs, "bug", "with --sabotage: only this bug")
	f.Uint64Var(&o.seed, "seed", 0, "drives workload and faults; 0 = a random one")
	f.StringVar(&o.json, "json", "", "write the results to this `file`, - for standard output")
	f.Float64Var(&o.scale, "scale", 1, "multiply the number of tasks")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("what is %q? see --help", f.Arg(0))
	}
	for o.seed == 0 {
		o.seed = rand.Uint64() >> 1 //nolint:gosec // which one does not matter, only that it is printed
	}
	return o, nil
}

func (o *options) chosen() ([]*scenario, error) {
	if len(o.scenarios) == 0 {
		return scenarios, nil
	}
	var some []*scenario
	for _, name := range o.scenarios {
		sc := scenarioNamed(name)
		if sc == nil {
			return nil, fmt.Errorf("there is no scenario %q; see --list", name)
		}
		some = append(some, sc)
	}
	return some, nil
}

func (o *options) size(sc *scenario) size {
	z := sc.full
	if o.quick {
		z = sc.quick
	}
	z.tasks = max(int(float64(z.tasks)*o.scale), 10)
	return z
}

func command(args []string) error {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	some, err := o.chosen()
	if err != nil {
		return err
	}
	if o.list {
		list()
		return nil
	}
	if o.sabotage {
		return sabotageAll(ctx, o)
	}
	return playAll(ctx, o, some)
}

func list() {
	for _, sc := range scenarios {
		fmt.Printf("%s  %-15s %s\n", sc.letter, sc.name, sc.about)
	}
	fmt.Println("\nbugs, and the scenarios that catch them:")
	for _, b := range bugs {
		fmt.Printf("   %-28s %-15s %s\n", b.name, b.scenario, b.about)
	}
}

func playAll(ctx context.Context, o *options, some []*scenario) error {
	dir, err := os.MkdirTemp("", "delayq-chaos-")
	if err != nil {
		return err
	}
	kept := false
	defer func() {
		if !kept {
			_ = os.RemoveAll(dir) // a leftover in the temporary directory harms nobody
		}
	}()
	out := io.Writer(os.Stdout)
	if o.json == "-" {
		out = os.Stderr
	}
	began := time.Now()
	fmt.Fprintf(out, "seed %d\n%s\n", o.seed, heading)
	a, err := newArena(dir)
	if err != nil {
		return err
	}
	defer a.pg.Stop()
	var results []*result
	var failed []string
	for _, sc := range some {
		r := a.perform(ctx, sc, o.size(sc), o.seed)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		results = append(results, r)
		fmt.Fprintln(out, r.line())
		if !r.Pass {
			failed = append(failed, sc.name)
			fmt.Fprint(out, r.why(5))
			_ = os.WriteFile(filepath.Join(r.dir, "postgres.log"), []byte(a.pg.Log()), 0o600) // a help, no more
			_ = os.WriteFile(filepath.Join(r.dir, "seed"), fmt.Append(nil, o.seed, "\n", r.why(1000)), 0o600)
			kept = !o.discard
		} else if !o.keep {
			_ = os.RemoveAll(r.dir) // as above
		}
	}
	kept = kept || o.keep
	fmt.Fprintf(out, "%d of %d scenarios passed in %s\n", len(results)-len(failed), len(results), time.Since(began).Round(time.Second))
	if kept {
		fmt.Fprintln(out, "journals, logs and the seed are in", dir)
	}
	if err := o.report(results); err != nil {
		return err
	}
	if len(failed) > 0 {
		return fmt.Errorf("%s failed", strings.Join(failed, ", "))
	}
	return nil
}

func (o *options) report(results []*result) error {
	switch o.json {
	case "":
		return nil
	case "-":
		return writeJSON(os.Stdout, results)
	}
	f, err := os.Create(o.json)
	if err != nil {
		return err
	}
	return errors.Join(writeJSON(f, results), f.Close())
}
