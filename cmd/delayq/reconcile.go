package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/reconciler"
)

type reconcile struct {
	redis  server
	booked booked
	queues []string
	once   bool
	every  time.Duration
	json   bool
}

func newReconcile() *cobra.Command {
	var r reconcile
	cmd := &cobra.Command{
		Use:   "reconcile",
		Short: "Repair Redis from the ledger, once or all the time",
		Long: `reconcile compares every open task of the ledger with Redis, and every task in Redis with the ledger, and repairs Redis: it puts
back what is missing, moves what is old, drops what has ended, and quarantines what the ledger does not know, as a dead letter.
It may run at any time, beside workers and beside other reconcilers. Under load a part of the drift it finds is messages that were
still on their way.

With --once it makes one full pass and reports. Without, it makes a pass every so often until Ctrl-C or TERM, and prints each that
has found something, or all of them with --json; a pass that fails is logged and tried again. Both delete tasks that ended longer ago
than the ledger keeps them.

Exit status: 0 done, also when drift was repaired; 1 a pass could not be made, or no such queue; 2 wrong usage.`,
		Example: `  delayq reconcile --once --queue orders
  delayq reconcile --every 1m`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd) },
	}
	r.redis.flags(cmd, redisDefault)
	r.booked.flags(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&r.queues, "queue", nil, "`names` of queues, with commas or as several flags; default all that the ledger has now")
	f.BoolVar(&r.once, "once", false, "make one full pass and report")
	f.DurationVar(&r.every, "every", time.Minute, "from the beginning of one pass to the next")
	f.BoolVar(&r.json, "json", false, "print one JSON object a pass, on a line; durations in ns")
	return cmd
}

func (r *reconcile) run(cmd *cobra.Command) error {
	if r.every < time.Second {
		return usagef("--every: want at least 1s")
	}
	if err := r.booked.required(); err != nil {
		return err
	}
	if err := r.redis.fromEnv(); err != nil {
		return err
	}
	rdb, err := r.redis.connect()
	if err != nil {
		return err
	}
	defer rdb.Close()
	ctx, stop := drainOnSignal(cmd.Context(), func() {})
	defer stop()
	var cfg delayq.Config
	pool, err := r.booked.into(ctx, &cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	queues, err := r.open(ctx, rdb, pool, cfg)
	if err != nil {
		return err
	}
	if r.once {
		return r.passes(ctx, cmd, queues)
	}
	var all sync.WaitGroup
	var printing sync.Mutex
	// What was repaired is reported; the log is for what failed.
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelError}))
	for _, q := range queues {
		rec, err := reconciler.New(q, reconciler.Config{Logger: log})
		if err != nil {
			return err
		}
		all.Go(func() {
			r.watch(ctx, rec, func(rep *reconciler.Report) {
				printing.Lock()
				defer printing.Unlock()
				_ = r.print(cmd.OutOrStdout(), rep)
			})
		})
	}
	all.Wait()
	return nil
}

// open opens the queues that are named, or all that the ledger knows.
func (r *reconcile) open(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool, cfg delayq.Config) ([]*delayq.Queue, error) {
	cfg.NoCreate, cfg.OnWarning = true, warn
	names := r.queues
	if len(names) == 0 {
		var err error
		if names, err = queuesOf(ctx, pool); err != nil {
			return nil, err
		}
	}
	queues := make([]*delayq.Queue, len(names))
	for i, name := range names {
		var err error
		queues[i], err = delayq.Open(ctx, rdb, name, cfg)
		if errors.Is(err, delayq.ErrNoQueue) {
			return nil, failf("--queue: there is no queue %q in this ledger", name)
		}
		if err != nil {
			return nil, err
		}
	}
	return queues, nil
}

func queuesOf(ctx context.Context, pool *pgxpool.Pool) ([]string, error) {
	rows, err := pool.Query(ctx, `SELECT name FROM delayq.queue ORDER BY name`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// passes makes one full pass of each queue. One that fails does not keep the others from theirs.
func (r *reconcile) passes(ctx context.Context, cmd *cobra.Command, queues []*delayq.Queue) error {
	var failed []error
	for _, q := range queues {
		progress := newPassProgress(cmd.ErrOrStderr(), q.Name())
		rec, err := reconciler.New(q, reconciler.Config{Logger: slog.New(slog.DiscardHandler), Progress: progress.show})
		if err != nil {
			return err
		}
		rep, err := rec.Pass(ctx)
		progress.bar.done()
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: no full pass: %w", q.Name(), err))
			if rep.Rows+rep.Entries == 0 {
				continue // there is nothing to report
			}
		}
		if err := r.print(cmd.OutOrStdout(), &rep); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// watch makes pass after pass until ctx ends. The reconciler logs what fails, and it is tried again.
func (r *reconcile) watch(ctx context.Context, rec *reconciler.Reconciler, report func(*reconciler.Report)) {
	for {
		next := time.Now().Add(r.every)
		rep, err := rec.Slice(ctx, r.every)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && !rep.Complete:
			continue
		case err == nil:
			rep.Counts = rep.Pass
			if r.json || rep.Drift > 0 || rep.RunningTooLong > 0 {
				report(&rep)
			}
		}
		if !sleep(ctx, time.Until(next)) {
			return
		}
	}
}

// passProgress shows how far a pass is: a bar on a terminal, elsewhere a line now and then.
type passProgress struct {
	w     io.Writer
	bar   *bar
	plain bool
	queue string
	next  time.Time
}

func newPassProgress(w io.Writer, queue string) *passProgress {
	_, terminal := terminalWidth(w)
	return &passProgress{w: w, bar: newBar(w, -1, "tasks"), plain: !terminal, queue: queue, next: time.Now().Add(report)}
}

func (p *passProgress) show(at reconciler.Progress) {
	if !p.plain {
		p.bar.ChangeMax64(max(at.Total, 1))
		_ = p.bar.Set64(at.Done)
		p.bar.Describe(p.queue + " " + at.Phase)
		return
	}
	if now := time.Now(); now.After(p.next) {
		p.next = now.Add(report)
		fmt.Fprintf(p.w, "%s: %s, %d of about %d\n", p.queue, at.Phase, at.Done, at.Total)
	}
}

// print is the report of one pass.
func (r *reconcile) print(w io.Writer, rep *reconciler.Report) error {
	if r.json {
		return printJSON(w, rep)
	}
	verdict := "no drift"
	if rep.Drift > 0 {
		verdict = fmt.Sprintf("drift %d, %d repaired", rep.Drift, rep.Repaired)
	}
	whole := "full pass"
	if !rep.Complete {
		whole = fmt.Sprintf("pass cut short at %.0f %%", 100*rep.Coverage)
	}
	if _, err := fmt.Fprintf(w, "%s: %s in %s, %s\n", rep.Queue, whole, brief(rep.Elapsed), verdict); err != nil {
		return err
	}
	tab := newTable(w)
	fmt.Fprintf(tab, "  checked\t%d\trows of the ledger, %d entries of Redis\n", rep.Rows, rep.Entries)
	for _, row := range []struct {
		n          int64
		name, what string
	}{
		{rep.Restored, "restored", "Redis did not have them"},
		{rep.Moved, "moved", "Redis had an older version"},
		{rep.Dropped, "dropped", "ended in the ledger, or beyond the horizon"},
		{rep.Quarantined, "quarantined", "the ledger does not know them; delayq list --state dead shows them"},
		{rep.Lifted, "lifted", "quarantined before, and known after all"},
		{rep.Adopted, "adopted", "from before the queue had a ledger"},
		{rep.Mended, "mended", "in Redis in pieces"},
		{rep.RunningTooLong, "running too long", "their lease has run out; they will be taken over"},
		{rep.Retired, "retired", "ended long ago, deleted from the ledger"},
	} {
		if row.n > 0 {
			fmt.Fprintf(tab, "  %s\t%d\t%s\n", row.name, row.n, row.what)
		}
	}
	return tab.Flush()
}
