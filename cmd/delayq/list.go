package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newList() *cobra.Command {
	var t target
	var state, cursor string
	var limit int
	var newest, asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the tasks of one state, page by page",
		Long: `list shows the tasks of one state, most overdue first: pending are those not yet due, due those that wait for a worker.
Dead letters come the oldest first, or with --newest the last to die. When there are more, it ends with the cursor of the next page.

Exit status: 0 listed, 1 no such queue or Redis failed, 2 wrong usage.`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts := delayq.ListOptions{State: delayq.State(state), Limit: limit, Cursor: cursor, NewestFirst: newest}
			switch opts.State {
			case delayq.StatePending, delayq.StateDue, delayq.StateProcessing, delayq.StateDead:
			default:
				return usagef("--state: want pending, due, processing or dead")
			}
			if newest && opts.State != delayq.StateDead {
				return usagef("--newest: only with --state dead")
			}
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				page, err := q.List(cmd.Context(), opts)
				if err != nil {
					return err
				}
				if asJSON {
					shown := struct {
						Tasks []shownTask `json:"tasks"`
						Next  string      `json:"next,omitempty"`
					}{make([]shownTask, len(page.Tasks)), page.Next}
					for i, info := range page.Tasks {
						shown.Tasks[i] = newShownTask(info, false)
					}
					return printJSON(cmd.OutOrStdout(), shown)
				}
				return printPage(cmd, page)
			})
		},
	}
	t.flags(cmd)
	cmd.Flags().StringVar(&state, "state", string(delayq.StatePending), "pending, due, processing or dead")
	cmd.Flags().BoolVar(&newest, "newest", false, "of dead letters, the last to die first")
	cmd.Flags().IntVar(&limit, "limit", 100, "tasks a page")
	cmd.Flags().StringVar(&cursor, "cursor", "", "where the page before ended")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: {tasks, next}")
	return cmd
}

func printPage(cmd *cobra.Command, page *delayq.Page) error {
	tab := newTable(cmd.OutOrStdout())
	for _, info := range page.Tasks {
		fmt.Fprintf(tab, "%s\t%s\t%s\t%s\n", printable(info.ID), printable(info.Type), instant(info.At), info.Reason)
	}
	if err := tab.Flush(); err != nil {
		return err
	}
	if page.Next != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "more: --cursor %s\n", page.Next)
	}
	return nil
}
