package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

// giveUp is how long past KILL a handler's end may take to be noticed before its task is given up.
const giveUp = 2 * time.Second

type work struct {
	target
	exec   string
	config delayq.WorkerConfig
	runFor time.Duration
	json   bool
}

func newWork() *cobra.Command {
	var w work
	cmd := &cobra.Command{
		Use:   "work --exec PROGRAM [-- ARG...]",
		Short: "Run each due task as a process",
		Long: `work leases the tasks that are due and runs a process for each one.

The process gets the payload on stdin and the rest in its environment: DELAYQ_TASK_ID, DELAYQ_TASK_TYPE, DELAYQ_KEY,
DELAYQ_QUEUE, DELAYQ_ATTEMPT (1 the first time), DELAYQ_DUE (RFC 3339). A task whose id, type or key holds a NUL byte, which
no variable can carry, ends in dead. The exit status is the verdict:

  0      done
  75     EX_TEMPFAIL: again later
  65     EX_DATAERR: never again, the task goes to the dead letters
  124    as timeout(1) ends: like 75, and recorded as a timeout
  other  again later, like 75, and to the dead letters after --attempts

The last 1 KiB of stderr is kept as the task's last error. stdout and stderr go through to delayq's own.

A process that outlives --timeout gets TERM, and after --grace KILL, together with all of its process group; that is recorded as
a timeout, not a failure. What a process leaves running in its group when it ends is killed; setsid(1) lets it live.
The first Ctrl-C or TERM stops leasing. Processes that have not ended by themselves after --grace and 2 s are ended like that too,
and their tasks given back at no cost to their attempts. A second one ends delayq and all processes at once.

Exit status: 0 stopped as asked, 1 Redis failed, 2 wrong usage.`,
		Example: `  delayq work --queue orders --exec ./handler --concurrency 8 --timeout 1m
  delayq work --queue orders --exec python3 -- handler.py`,
	}
	w.flags(cmd)
	f := cmd.Flags()
	f.StringVar(&w.exec, "exec", "", "the `program` to run for each task; its arguments follow --")
	f.IntVar(&w.config.Concurrency, "concurrency", 4, "processes at once")
	f.DurationVar(&w.config.Lease, "lease", 30*time.Second, "how long a task stays out of others' reach when this worker dies")
	f.DurationVar(&w.config.Timeout, "timeout", 5*time.Minute, "longest run of a process")
	f.DurationVar(&w.config.Grace, "grace", 5*time.Second, "between TERM and KILL")
	f.IntVar(&w.config.MaxAttempts, "attempts", 5, "runs of a task that fails, before it is dead")
	f.DurationVar(&w.runFor, "for", 0, "stop after this time; 0 runs until told to stop")
	f.DurationVar(&w.config.IdleExit, "idle-exit", 0, "stop when nothing falls due within this time; 0 never does")
	f.BoolVar(&w.json, "json", false, "print the counts of the run as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return w.run(cmd, args) }
	return cmd
}

func (w *work) run(cmd *cobra.Command, args []string) error {
	if w.exec == "" {
		return usagef("--exec: name the program that handles a task")
	}
	path, err := exec.LookPath(w.exec)
	if err != nil {
		return usagef("--exec: no program %s", w.exec)
	}
	if w.config.Grace <= 0 {
		return usagef("--grace: must be positive, got %s", w.config.Grace)
	}
	if w.runFor < 0 {
		return usagef("--for: must not be negative, got %s", w.runFor)
	}
	handler := &process{path: path, args: args, grace: w.config.Grace, stdout: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr()}
	ctx, stop := drainOnSignal(cmd.Context(), handler.killAll)
	defer stop()
	return w.open(ctx, delayq.Config{}, func(q *delayq.Queue) error {
		worker := delayq.NewWorker(handler, q)
		worker.WorkerConfig = w.config
		worker.Grace = w.config.Grace + giveUp
		worker.Logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
		if w.runFor > 0 {
			timer := time.AfterFunc(w.runFor, stop)
			defer timer.Stop()
		}
		stats, err := worker.Run(ctx)
		handler.killAll() // what was given up must not outlive us, its task is on its way to others
		if err != nil {
			return err
		}
		return printRun(cmd, stats, w.json)
	})
}

// drainOnSignal returns a context that the first Ctrl-C or TERM ends. The second one ends the process, after last.
func drainOnSignal(ctx context.Context, last func()) (context.Context, context.CancelFunc) {
	ctx, stop := context.WithCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		stop()
		<-signals
		last()
		os.Exit(exitFailed)
	}()
	return ctx, stop
}

func printRun(cmd *cobra.Command, s delayq.RunStats, asJSON bool) error {
	if asJSON {
		return printJSON(cmd.OutOrStdout(), s)
	}
	ledger := ""
	if s.Refused+s.FromLedger > 0 {
		ledger = fmt.Sprintf(", %d refused by the ledger, %d leased from it", s.Refused, s.FromLedger)
	}
	_, err := fmt.Fprintf(cmd.ErrOrStderr(), "%d done, %d to retry, %d timed out, %d dead, %d cancelled, %d given back%s in %s\n",
		s.Succeeded, s.Retried, s.TimedOut, s.Dead, s.Cancelled, s.Released, ledger, brief(s.Elapsed))
	return err
}
