package main

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

// What a shell completes. Cobra adds the verb completion, which prints the script for a shell.

var states = []string{string(delayq.StatePending), string(delayq.StateDue), string(delayq.StateProcessing), string(delayq.StateDead)}

// completeFlags makes the flags of all verbs complete their values.
func completeFlags(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		for name, values := range map[string]cobra.CompletionFunc{
			"queue": completeQueues, "state": fixed(states), "reason": fixed(delayq.Reasons()), "type": completeTypes,
			"redis": cobra.NoFileCompletions, "database": cobra.NoFileCompletions,
		} {
			if cmd.Flags().Lookup(name) != nil {
				_ = cmd.RegisterFlagCompletionFunc(name, values) // fails for a flag that is not there alone
			}
		}
		if cmd.ValidArgsFunction == nil {
			cmd.ValidArgsFunction = cobra.NoFileCompletions // ids are no files
		}
	}
}

func fixed(values []string) cobra.CompletionFunc {
	return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
}

// completeQueues finds the names in Redis, those that are found until it takes too long, or fails. Of that it says nothing.
func completeQueues(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeIn)
	defer cancel()
	s := given(cmd)
	names, _ := findQueues(ctx, s, &database{url: noDatabase})
	done, last := "", typed // of names with commas the last is being typed
	if i := strings.LastIndex(typed, ","); i >= 0 && cmd.Flags().Lookup("queue").Value.Type() == "stringSlice" {
		done, last = typed[:i+1], typed[i+1:]
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, last) })
	for i := range names {
		names[i] = done + names[i]
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeTypes offers the types among the newest dead letters of the queue that is named.
func completeTypes(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeIn)
	defer cancel()
	queue, err := cmd.Flags().GetString("queue")
	if err != nil || queue == "" || cmd.Flags().Lookup("reason") == nil { // a type of a new task may be any
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	t := target{server: *given(cmd), queue: queue}
	t.booked.url, _ = cmd.Flags().GetString("database")
	var types []string
	_ = t.inspect(ctx, func(q *delayq.Queue) error { // what was found until an error is offered
		o := delayq.ListOptions{State: delayq.StateDead, Limit: 500, NewestFirst: true}
		for range 4 { // as many as somebody waits for
			page, err := q.List(ctx, o)
			if err != nil {
				return err
			}
			for i := range page.Tasks {
				if typ := page.Tasks[i].Type; strings.HasPrefix(typ, typed) && printable(typ) == typ {
					types = append(types, typ)
				}
			}
			if o.Cursor = page.Next; o.Cursor == "" {
				return nil
			}
		}
		return nil
	})
	slices.Sort(types)
	return slices.Compact(types), cobra.ShellCompDirectiveNoFileComp
}

// given is the Redis that the flags typed so far name.
func given(cmd *cobra.Command) *server {
	var s server
	s.url, _ = cmd.Flags().GetString("redis") // every verb with a queue has them
	s.cluster, _ = cmd.Flags().GetBool("cluster")
	return &s
}
