// Bench measures delayq beside its peers on a private Redis and says whether it reaches its bars.
//
// Absolute times say little on a shared machine, so almost every row is a ratio: delayq and a peer take turns in
// the same run, each turn gives one ratio, and the row shows the median of them (the values beside it are medians
// too). A ratio is delayq divided by the peer: below 1 is good for costs, above 1 for rates, and the bar says which.
// The peers are asynq, BullMQ (when node and npm are there; otherwise its rows are left out and say so) and "the
// floor": the writes that any fenced queue must make, sent as plain variadic commands. delayq runs through its
// public API with everything on. With a ledger the peer is River, on the same private PostgreSQL, which keeps what it
// commits: its defaults for what is durable are on, for both sides. Without PostgreSQL these rows are left out.
//
//	go -C scripts/bench run . [--quick] [--only ROW] [--json FILE] [--seed N]
//
// The bars are those of the full run (about half an hour, 6 GB of memory, 20 GB of disk); --quick takes about two
// minutes and is noisier. ROW is the name of a row, or the first parts of the names of several. The exit status is 1 when
// a bar is missed. FILE is relative to this folder when it is run with -C. This is a module of its own to keep the
// peers out of delayq's go.mod.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"
)

// families in the order they run: those that want a small, fresh server come first.
var families = []struct {
	name    string
	measure func(context.Context, *bench) ([]Row, error)
}{
	{"cpu", measureCPU},
	{"drain", measureDrain},
	{"enqueue", measureEnqueue},
	{"alone", measureAlone},
	{"memory", measureMemory},
	{"lateness", measureLateness},
	{"idle", measureIdle},
	{"depth", measureDepth},
	{"ledger/batch", measureLedgerBatch},
	{"ledger/enqueue", measureLedgerEnqueue},
	{"ledger/depth", measureLedgerDepth},
	{"reconcile", measureReconcile},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == reconcileChild {
		if err := reconcileHere(context.Background(), os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	quick := flag.Bool("quick", false, "small sizes, about two minutes in all")
	only := flag.String("only", "", "measure one row or family: "+familyNames())
	file := flag.String("json", "", "also write the rows to this `FILE`, as a JSON array")
	seed := flag.Uint64("seed", 1, "seed of payloads and due times")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	rows, err := run(ctx, *only, *quick, *seed)
	printTable(os.Stdout, rows)
	if *file != "" {
		err = errors.Join(err, writeJSON(*file, rows))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
	if err != nil || slices.ContainsFunc(rows, Row.missed) {
		os.Exit(1)
	}
}

// run measures the families that only names (all when it is empty). It returns what it has when one of them fails.
func run(ctx context.Context, only string, quick bool, seed uint64) ([]Row, error) {
	b, err := newBench(quick, seed)
	if err != nil {
		return nil, err
	}
	defer b.close()

	var rows []Row
	for _, f := range families {
		if !within(f.name, only) && !within(only, f.name) {
			continue
		}
		b.progress("%s", f.name)
		start := time.Now()
		got, err := f.measure(ctx, b)
		if err != nil {
			return rows, fmt.Errorf("%s: %w", f.name, err)
		}
		b.progress("%s took %s", f.name, time.Since(start).Round(100*time.Millisecond))
		rows = append(rows, got...)
	}
	rows = slices.DeleteFunc(rows, func(r Row) bool { return !within(r.Name, only) }) // a family measures several together
	if len(rows) == 0 {
		return nil, fmt.Errorf("no row %q: %s", only, familyNames())
	}
	return rows, nil
}

// within reports whether name is the other one or, by its first parts, belongs to it; all names belong to the empty one.
func within(name, other string) bool {
	return other == "" || name == other || strings.HasPrefix(name, other+"/")
}

func familyNames() string {
	var names []string
	for _, f := range families {
		names = append(names, f.name)
	}
	return strings.Join(names, ", ")
}

func writeJSON(file string, rows []Row) error {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false) // a bar reads "<= 1.6"
	enc.SetIndent("", "  ")
	if err := enc.Encode(rows); err != nil {
		return err
	}
	return os.WriteFile(file, out.Bytes(), 0o644)
}
