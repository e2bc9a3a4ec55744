package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

func newGet() *cobra.Command {
	var t target
	var asJSON, payload bool
	cmd := &cobra.Command{
		Use:   "get ID",
		Short: "Show one task",
		Long: `get shows one task. Its payload is shown with --payload only, as it may be personal data.

Exit status: 0 found, 1 not found or Redis failed, 2 wrong usage.`,
		Args: exactly(1, "one task id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return t.inspect(cmd.Context(), func(q *delayq.Queue) error {
				info, err := q.Get(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), newShownTask(*info, payload))
				}
				return printTask(cmd, info, payload)
			})
		},
	}
	t.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; with --payload a payload that is JSON as it is, another as payload_base64")
	cmd.Flags().BoolVar(&payload, "payload", false, "show the payload too")
	return cmd
}

// shownTask is a task in JSON, named as in a task file. Bytes that JSON cannot hold are in base64.
type shownTask struct {
	delayq.Info
	IDBase64      []byte          `json:"id_base64,omitempty"` // of an id that is not UTF-8
	Payload       json.RawMessage `json:"payload,omitempty"`   // takes the place of Info's
	PayloadBase64 []byte          `json:"payload_base64,omitempty"`
}

func newShownTask(info delayq.Info, payload bool) shownTask {
	s := shownTask{Info: info}
	if !utf8.ValidString(info.ID) {
		s.IDBase64 = []byte(info.ID)
	}
	switch {
	case !payload:
	case json.Valid(info.Payload) && utf8.Valid(info.Payload):
		s.Payload = info.Payload
	default:
		s.PayloadBase64 = info.Payload
	}
	return s
}

func printTask(cmd *cobra.Command, info *delayq.Info, payload bool) error {
	tab := newTable(cmd.OutOrStdout())
	row := func(name, value string) { fmt.Fprintf(tab, "%s\t%s\n", name, value) }
	row("id", printable(info.ID))
	row("state", string(info.State))
	if info.Type != "" { // of a finished task only the state is left
		row("type", printable(info.Type))
		row("attempt", fmt.Sprintf("%d (failed %d, lost %d, leased %d times)", info.Attempt, info.Failed, info.Lost, info.Deliveries))
		row("enqueued", instant(info.EnqueuedAt))
	}
	if info.Key != "" {
		row("key", printable(info.Key))
	}
	switch info.State {
	case delayq.StatePending, delayq.StateDue:
		row("due", instant(info.At))
	case delayq.StateProcessing:
		row("leased", instant(info.LeasedAt))
		row("lease ends", instant(info.At))
	case delayq.StateDead:
		row("died", instant(info.At))
	}
	if info.CancelRequested {
		row("cancel", "told to stop")
	}
	if info.Reason != "" {
		row("reason", info.Reason)
	}
	if info.LastError != "" {
		row("last error", printable(info.LastError))
	}
	if payload && info.Type != "" {
		row("payload", printablePayload(info.Payload))
	}
	return tab.Flush()
}

// printablePayload shows text as it is and other bytes in base64.
func printablePayload(b []byte) string {
	for _, r := range string(b) {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return "base64 " + base64.StdEncoding.EncodeToString(b)
		}
	}
	return string(b)
}
