package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newAudit() *cobra.Command {
	var t target
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Check that a queue's data agree with each other",
		Long: `audit reads through a queue and reports what cannot be: a task in two states at once, one without a record, and so on.
It only reads, a page at a time, and may run while the queue is in use.

Exit status: 0 all is well, 1 something is wrong or Redis failed, 2 wrong usage.`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				bar := newBar(cmd.ErrOrStderr(), -1, "entries")
				report, err := q.Audit(cmd.Context(), delayq.AuditOptions{Progress: func(done, total int64) {
					bar.ChangeMax64(max(total, done))
					_ = bar.Set64(done)
				}})
				bar.done()
				if err != nil {
					return err
				}
				return printAudit(cmd, report, asJSON)
			})
		},
	}
	t.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printAudit(cmd *cobra.Command, report *delayq.AuditReport, asJSON bool) error {
	out := cmd.OutOrStdout()
	var err error
	if asJSON {
		err = printJSON(out, report)
	} else {
		for _, v := range report.Violations {
			fmt.Fprintf(out, "%s  shard %d  %s  %s\n", v.Invariant, v.Shard, printable(v.ID), v.Detail)
		}
		_, err = fmt.Fprintf(out, "%d entries checked, %d violations\n", report.Checked, len(report.Violations))
	}
	if err == nil && len(report.Violations) > 0 {
		err = errReported
	}
	return err
}
