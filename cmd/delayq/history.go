package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

func newHistory() *cobra.Command {
	var d database
	var queue string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "history ID",
		Short: "Tell a task's life from the ledger",
		Long: `history tells when a task was planned, who ran it, what went wrong and how it ended, as far as the ledger has it: the first event and
the last 50, for as long as the ledger keeps the task. It asks the database alone, so Redis may be away.

Exit status: 0 found, 1 not found or the database failed, 2 wrong usage.`,
		Example: `  delayq history --database postgres://db.example.com/shop --queue orders cancel-order:42`,
		Args:    exactly(1, "one task id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if queue == "" {
				return usagef("--queue: name the queue")
			}
			if err := d.required(); err != nil {
				return err
			}
			led, pool, err := d.open(cmd.Context(), 1)
			if err != nil {
				return err
			}
			defer pool.Close()
			h, err := led.History(cmd.Context(), queue, args[0])
			if errors.Is(err, delayq.ErrNoQueue) {
				return failf("--queue: there is no queue %q in this ledger", queue)
			}
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), newShownLife(h))
			}
			return printLife(cmd.OutOrStdout(), h)
		},
	}
	d.flags(cmd)
	cmd.Flags().StringVar(&queue, "queue", "", "`name` of the queue")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// timeline is a task's life in order. What is still to come is at its end.
func timeline(h *ledger.History) []ledger.Event {
	line := []ledger.Event{{At: h.CreatedAt, Event: "planned"}}
	line = append(line, h.Events...)
	running := h.Status == delayq.LedgerRunning
	if !h.StartedAt.IsZero() { // of the earlier runs only their ends are known
		start := ledger.Event{At: h.StartedAt, Event: "started", By: h.LockedBy}
		if running || h.Status == delayq.LedgerSucceeded {
			start.Attempt = h.Failed + h.Lost + 1
		}
		line = append(line, start)
	}
	switch {
	case running:
		line = append(line, ledger.Event{At: h.LockedUntil, Event: "lease ends"})
	case h.Status == delayq.LedgerSucceeded: // an end of another kind is among the events
		line = append(line, ledger.Event{At: h.EndedAt, Event: "succeeded", By: h.LockedBy})
	case h.Status.Open():
		line = append(line, ledger.Event{At: h.RunAt, Event: "due"})
	}
	slices.SortStableFunc(line, func(a, b ledger.Event) int { return a.At.Compare(b.At) })
	return line
}

// shownLife is a task's life in JSON. Its payload stays out of it, as it may be personal data.
type shownLife struct {
	ID              string              `json:"id"`
	IDBase64        []byte              `json:"id_base64,omitempty"` // of an id that is not UTF-8
	Type            string              `json:"type"`
	Key             string              `json:"key,omitempty"`
	Status          delayq.LedgerStatus `json:"status"`
	CancelRequested bool                `json:"cancel_requested,omitempty"`
	RunAt           time.Time           `json:"run_at"`
	CreatedAt       time.Time           `json:"created_at"`
	StartedAt       time.Time           `json:"started_at,omitzero"`
	LockedUntil     time.Time           `json:"locked_until,omitzero"`
	EndedAt         time.Time           `json:"ended_at,omitzero"`
	By              string              `json:"by,omitempty"`
	Failed          int                 `json:"failed"`
	Lost            int                 `json:"lost"`
	Deliveries      int                 `json:"deliveries"`
	Reason          string              `json:"reason,omitempty"`
	LastError       string              `json:"last_error,omitempty"`
	Timeline        []ledger.Event      `json:"timeline"`
}

func newShownLife(h *ledger.History) shownLife {
	s := shownLife{
		ID: h.ID, Type: h.Type, Key: h.Key, Status: h.Status, CancelRequested: h.CancelRequested, RunAt: h.RunAt, CreatedAt: h.CreatedAt,
		StartedAt: h.StartedAt, EndedAt: h.EndedAt, By: h.LockedBy, Failed: h.Failed, Lost: h.Lost, Deliveries: h.Deliveries,
		Reason: h.Reason, LastError: h.LastError, Timeline: timeline(h),
	}
	if h.Status == delayq.LedgerRunning {
		s.LockedUntil = h.LockedUntil
	}
	if !utf8.ValidString(h.ID) {
		s.IDBase64 = []byte(h.ID)
	}
	return s
}

func printLife(w io.Writer, h *ledger.History) error {
	tab := newTable(w)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(tab, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("id", "%s", printable(h.ID))
	status := string(h.Status)
	if h.CancelRequested && h.Status == delayq.LedgerRunning {
		status += ", told to stop"
	}
	row("status", "%s", status)
	row("type", "%s", printable(h.Type))
	if h.Key != "" {
		row("key", "%s", printable(h.Key))
	}
	row("attempts", "%d failed, %d lost, leased %d times", h.Failed, h.Lost, h.Deliveries)
	if err := tab.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, e := range timeline(h) {
		cells := []string{instant(e.At), e.Event, strings.Join(details(e), ", ")}
		if e.Event == "retry" {
			cells[1] = "failed" // and the next line says when it is due again
		}
		if cells[2] == "" {
			cells = cells[:2]
		}
		fmt.Fprintln(tab, strings.Join(cells, "\t"))
	}
	return tab.Flush()
}

func details(e ledger.Event) []string {
	var all []string
	if e.Attempt > 0 {
		all = append(all, fmt.Sprintf("attempt %d", e.Attempt))
	}
	if e.By != "" {
		all = append(all, "by "+printable(e.By))
	}
	switch {
	case e.Error != "" && e.Reason != "":
		all = append(all, e.Reason+": "+printable(e.Error))
	case e.Error != "":
		all = append(all, printable(e.Error))
	case e.Reason != "":
		all = append(all, e.Reason)
	}
	return all
}
