package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newQueues() *cobra.Command {
	var redis server
	var led database
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "queues",
		Short: "List the queues that are there",
		Long: `queues lists the names of the queues of a Redis, and with --database those of the ledger. It walks over all keys of Redis, a page at
a time.

Exit status: 0 listed, 1 Redis or the database failed, 2 wrong usage.`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := findQueues(cmd.Context(), &redis, &led)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), struct {
					Queues []string `json:"queues"`
				}{names})
			}
			for _, name := range names {
				fmt.Fprintln(cmd.OutOrStdout(), name)
			}
			return nil
		},
	}
	redis.flags(cmd, redisDefault)
	led.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: {queues}")
	return cmd
}

// findQueues finds the names of queues, in Redis and in the ledger if there is one. With an error come those that were found.
func findQueues(ctx context.Context, s *server, b *database) ([]string, error) {
	if err := s.fromEnv(); err != nil {
		return nil, err
	}
	rdb, err := s.connect()
	if err != nil {
		return nil, err
	}
	defer rdb.Close()
	names, err := delayq.Queues(ctx, rdb)
	if b.fromEnv(); b.url != "" { // the horizon is of no interest here
		pool, poolErr := b.pool(1)
		if poolErr != nil {
			return names, poolErr
		}
		defer pool.Close()
		more, ledgerErr := (&lateLedger{pool: pool}).Queues(ctx)
		names, err = append(names, more...), errors.Join(err, ledgerErr)
	}
	slices.Sort(names)
	return append([]string{}, slices.Compact(names)...), err
}

// completeIn is how long somebody who pressed Tab waits.
const completeIn = time.Second
