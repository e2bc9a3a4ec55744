package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9/logging"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newRoot() *cobra.Command {
	logging.Disable() // the client's own lines for each failed dial: the calls that fail say it too
	root := &cobra.Command{
		Use:   "delayq",
		Short: "Delay queues in Redis, with a ledger in PostgreSQL or without: try, feed, inspect and work them",
		Long: `delayq runs delayed tasks out of Redis.

  delayq dev                         the whole system in one process, on a Redis of its own
  delayq enqueue, cancel, reschedule give it tasks and change them
  delayq get, list, stats, audit     look at a queue
  delayq replay, purge               put dead letters back, or delete them
  delayq work --exec ./handler       run each due task as a process
  delayq monitor                     serve the metrics of all queues to Prometheus

When something is wrong, or to see that nothing is:

  delayq doctor                      what is wrong, in plain words, and what to do
  delayq top, queues                 all queues, live, or their names

A queue with a ledger keeps every task in PostgreSQL too, and loses none when Redis loses its data. Each verb takes --database then.

  delayq migrate                     make or update the schema of the ledger
  delayq reconcile                   repair Redis from the ledger, once or all the time
  delayq history ID                  what has happened to a task

Exit status: 0 done, 1 failed or not found, 2 wrong usage or wrong input; of doctor also 3 warnings, 4 critical.
"delayq completion bash" (zsh, fish, powershell) prints completion for a shell, names of queues included; --help says how to load it.
An id that begins with "-" goes after "--":  delayq get --queue orders -- -1`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q; delayq --help lists them", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(newDev(), newEnqueue(), newGet(), newCancel(), newReschedule(), newList(), newStats(), newAudit(), newWork(),
		newMigrate(), newReconcile(), newHistory(), newDoctor(), newTop(), newQueues(), newReplay(), newPurge(), newMonitor())
	completeFlags(root)
	return root
}

// statusError is an error with an exit status.
type statusError struct {
	code int
	err  error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &statusError{exitUsage, fmt.Errorf(format, args...)}
}

func failf(format string, args ...any) error {
	return &statusError{exitFailed, fmt.Errorf(format, args...)}
}

// errReported ends with status 1; the verb has already said what was wrong.
var errReported = &statusError{exitFailed, errors.New("")}

// message is what a person is told: of wrong input the field and the limit, not where they were found wrong.
func message(err error) string {
	var input *delayq.InputError
	if errors.As(err, &input) {
		err = input
	}
	text := strings.TrimPrefix(strings.ReplaceAll(strings.Join(distinctLines(err), " "), ": delayq: ", ": "), "delayq: ")
	if errors.Is(err, delayq.ErrLedger) {
		text += ": add --database, with the URL of the ledger, or set " + databaseVar
	}
	return text
}

// distinctLines is the text of an error. That of a connection to PostgreSQL has a line for each address and way it has tried, often
// the same, and one without TLS may come after one with.
func distinctLines(err error) []string {
	var lines []string
	for line := range strings.Lines(err.Error()) {
		line = strings.TrimSpace(line)
		if !slices.Contains(lines, line) && !strings.HasSuffix(line, "server refused TLS connection") {
			lines = append(lines, line)
		}
	}
	return lines
}

func exitCode(err error) int {
	var status *statusError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return status.code
	case errors.Is(err, delayq.ErrInvalid):
		return exitUsage
	}
	return exitFailed
}

// exactly and atLeast are cobra's argument counts as usage errors.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return usagef("want %s, got %d arguments", what, len(args))
		}
		return nil
	}
}

func atLeast(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < n {
			return usagef("want %s, got %d arguments", what, len(args))
		}
		return nil
	}
}
