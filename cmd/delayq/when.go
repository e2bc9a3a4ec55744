package main

import (
	"time"

	"github.com/spf13/cobra"
)

// when is an instant given as --in or --at.
type when struct {
	in time.Duration
	at string
}

func (w *when) flags(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&w.in, "in", 0, "this long from now by the clock of Redis, such as 90s or 30m")
	cmd.Flags().StringVar(&w.at, "at", "", "at this `time`, RFC 3339 such as 2030-01-02T15:04:05Z")
}

// parse returns the instant, zero for --in.
func (w *when) parse(cmd *cobra.Command) (time.Time, error) {
	if w.at == "" {
		return time.Time{}, nil
	}
	if cmd.Flags().Changed("in") {
		return time.Time{}, usagef("--in and --at: give one of them")
	}
	at, err := time.Parse(time.RFC3339, w.at)
	if err != nil {
		return time.Time{}, usagef("--at: want RFC 3339 such as 2030-01-02T15:04:05Z")
	}
	return at, nil
}
