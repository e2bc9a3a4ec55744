package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newStats() *cobra.Command {
	var t target
	var asJSON, watch bool
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Show the numbers of a queue",
		Long: `stats shows how many tasks stand where, and what has happened since the queue's data began.

Exit status: 0 shown, 1 no such queue or Redis failed, 2 wrong usage.`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, terminal := terminalWidth(cmd.OutOrStdout()); watch && (!terminal || asJSON) {
				return usagef("--watch: wants a terminal, and no --json")
			}
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				if watch {
					return watchStats(cmd, q)
				}
				stats, err := q.Stats(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), stats)
				}
				return printStats(cmd.OutOrStdout(), stats)
			})
		},
	}
	t.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; durations in ns")
	cmd.Flags().BoolVar(&watch, "watch", false, "show them again every second, until Ctrl-C")
	return cmd
}

func watchStats(cmd *cobra.Command, q *delayq.Queue) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
	defer stop()
	screen := live{w: cmd.OutOrStdout()}
	for {
		stats, err := q.Stats(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		var text bytes.Buffer
		if err := printStats(&text, stats); err != nil {
			return err
		}
		screen.draw(text.String())
		if !sleep(ctx, time.Second) {
			return nil
		}
	}
}

func printStats(w io.Writer, s *delayq.Stats) error {
	tab := newTable(w)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(tab, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("queue", "%s, %d shards, %d consumers lately", s.Queue, len(s.Shards), s.Consumers)
	row("pending", "%d", s.Pending)
	if s.Due > 0 {
		row("due", "%d, the oldest for %s", s.Due, brief(s.OldestDueAge))
	} else {
		row("due", "0")
	}
	row("processing", "%d", s.Processing)
	row("dead", "%d", s.Dead)
	if s.Mode == "ledger" {
		row("ledger", "%d of the pending ones beyond the horizon, %d quarantined since Redis' data began", s.Later, s.Quarantined)
	}
	row("enqueued", "%d created, %d replaced, %d duplicates", s.Created, s.Replaced, s.Duplicates)
	row("finished", "%d succeeded, %d cancelled, %d buried", s.Succeeded, s.Cancelled, s.Buried)
	row("leases", "%d, %d retried, %d released, %d expired, %d stale calls refused", s.Leased, s.Retried, s.Released, s.Expired, s.Stale)
	if len(s.Failed) > 0 {
		var reasons []string
		for _, reason := range slices.Sorted(maps.Keys(s.Failed)) {
			reasons = append(reasons, fmt.Sprintf("%d %s", s.Failed[reason], reason))
		}
		row("failed", "%s", strings.Join(reasons, ", "))
	}
	row("lateness", "p50 %s, p99 %s", upTo(s.Lateness, 0.5), upTo(s.Lateness, 0.99))
	row("duration", "p50 %s, p99 %s", upTo(s.Duration, 0.5), upTo(s.Duration, 0.99))
	return tab.Flush()
}

// upTo is a quantile of a histogram, which knows bounds only.
func upTo(h delayq.Histogram, q float64) string {
	switch d := h.Quantile(q); d {
	case 0:
		return "-"
	case math.MaxInt64:
		return "beyond the last bucket"
	default:
		return "at most " + d.String()
	}
}
