package console

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/delayq/toolkit/delayq"
)

type taskData struct {
	Queue                          string
	Task                           *delayq.Info
	Payload                        string // as it is shown
	PayloadKind                    string // "json", "text" or "hex"
	Events                         []Event
	HasHistory, HistoryAway        bool
	Now                            time.Time
	CanCancel, CanMove, CanRequeue bool
}

func (c *Console) task(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	id, ok := unsegment(r.PathValue("id"))
	if !ok {
		c.fail(w, r, errNoTask)
		return
	}
	q, err := c.opened(ctx, r)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	in, err := q.Get(ctx, id)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	d := taskData{Queue: q.Name(), Task: in, Now: time.Now()}
	if c.cfg.History != nil {
		short, cancel := context.WithTimeout(ctx, lookFor) // the task is known already, and its history may be none
		defer cancel()
		d.Events, err = c.cfg.History(short, q.Name(), id)
		switch {
		case err == nil:
			d.HasHistory = true
		case !errors.Is(err, delayq.ErrNotFound) && !errors.Is(err, delayq.ErrNoQueue):
			d.HistoryAway = true
			c.log.Warn("console: no history", "path", r.URL.EscapedPath(), "error", err)
		}
	}
	if c.cfg.ShowPayloads {
		d.Payload, d.PayloadKind = showPayload(in.Payload)
	}
	switch in.State {
	case delayq.StatePending, delayq.StateDue:
		d.CanCancel, d.CanMove = true, true
	case delayq.StateProcessing:
		d.CanCancel = !in.CancelRequested
	case delayq.StateDead:
		d.CanRequeue = true
	}
	c.show(w, r, http.StatusOK, "task", shown(id), d)
}

const mostShown = 64 << 10

// showPayload is what a task carries, for reading.
func showPayload(p []byte) (text, kind string) {
	var pretty bytes.Buffer
	switch {
	case len(p) == 0:
		return "", "text"
	case json.Indent(&pretty, p, "", "  ") == nil && utf8.Valid(p):
		return cut(readable(pretty.String())), "json"
	case utf8.Valid(p):
		return cut(readable(string(p))), "text"
	}
	return hex.Dump(p[:min(len(p), mostShown/4)]), "hex"
}

func cut(s string) string {
	if len(s) <= mostShown {
		return s
	}
	return string(bytes.ToValidUTF8([]byte(s[:mostShown]), nil)) + "…"
}
