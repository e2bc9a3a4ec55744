package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newCancel() *cobra.Command {
	var t target
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "cancel ID...",
		Short: "Cancel tasks, and say what really happened",
		Long: `cancel takes tasks that wait out of the queue, and tells handlers that run to stop.

Exit status: 0 every task is cancelled or told to stop, 1 one is unknown, finished or dead, or Redis failed, 2 wrong usage.`,
		Args: atLeast(1, "at least one task id"),
		RunE: func(cmd *cobra.Command, ids []string) error {
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				got, err := q.CancelMany(cmd.Context(), ids)
				if printErr := printCancelled(cmd, ids, got, asJSON); err == nil {
					err = printErr
				}
				return err
			})
		},
	}
	t.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of {id, result}")
	return cmd
}

func printCancelled(cmd *cobra.Command, ids []string, got []delayq.Cancellation, asJSON bool) error {
	type row struct {
		ID     string `json:"id"`
		Result string `json:"result"`
	}
	rows := make([]row, 0, len(ids))
	missed := false
	for i, c := range got {
		if c == 0 {
			continue // the call failed, which is told as an error
		}
		rows = append(rows, row{ids[i], c.String()})
		missed = missed || c == delayq.Unknown || c == delayq.Finished || c == delayq.Dead
	}
	var err error
	if asJSON {
		err = printJSON(cmd.OutOrStdout(), rows)
	} else {
		tab := newTable(cmd.OutOrStdout())
		for _, r := range rows {
			fmt.Fprintf(tab, "%s\t%s\n", printable(r.ID), r.Result)
		}
		err = tab.Flush()
	}
	if err == nil && missed {
		err = errReported
	}
	return err
}
