package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9/logging"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newRoot() *cobra.Command {
	logging.Disable() // the client's own lines for each failed dial: the calls that fail say it too
	root := &cobra.Command{
		Use:   "delayq",
		Short: "Delay queues in Redis: try, feed, inspect and work them",
		Long: `delayq runs delayed tasks out of Redis.

  delayq dev                         the whole system in one process, on a Redis of its own
  delayq enqueue, cancel, reschedule give it tasks and change them
  delayq get, list, stats, audit     look at a queue
  delayq work --exec ./handler       run each due task as a process

Exit status: 0 done, 1 failed or not found, 2 wrong usage or wrong input.
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
	root.AddCommand(newDev(), newEnqueue(), newGet(), newCancel(), newReschedule(), newList(), newStats(), newAudit(), newWork())
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
	return strings.TrimPrefix(err.Error(), "delayq: ")
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
