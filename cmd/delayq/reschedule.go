package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newReschedule() *cobra.Command {
	var t target
	var w when
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "reschedule ID --in 30m | --at TIME",
		Short: "Move a waiting task to another time",
		Long: `reschedule gives a waiting task another time; its id and payload stay.

Exit status: 0 moved, 1 not found, running, finished or dead, or Redis failed, 2 wrong usage.`,
		Args: exactly(1, "one task id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if w.at == "" && !cmd.Flags().Changed("in") {
				return usagef("--in or --at: say when")
			}
			at, err := w.parse(cmd)
			if err != nil {
				return err
			}
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				if at.IsZero() {
					err = q.RescheduleIn(cmd.Context(), args[0], w.in)
				} else {
					err = q.Reschedule(cmd.Context(), args[0], at)
				}
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), map[string]any{"id": args[0], "rescheduled": true})
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s  rescheduled\n", printable(args[0]))
				return err
			})
		},
	}
	t.flags(cmd)
	w.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
