package ledger

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// A History is everything the ledger knows of a task.
type History struct {
	delayq.LedgerRow
	MaxFailed int // the limits of the last claim, 0 = none
	MaxLost   int
	Events    []Event   // what happened off the straight path; the first and the last 50 are kept
	Now       time.Time // the database's clock
}

// An Event is something that happened to a task.
type Event struct {
	At      time.Time `json:"at"`
	Event   string    `json:"event"`             // such as "retry", "lost", "rescheduled"
	By      string    `json:"by,omitempty"`      // the consumer whose lease it was
	Attempt int       `json:"attempt,omitempty"` // the number of its run
	Reason  string    `json:"reason,omitempty"`
	Error   string    `json:"error,omitempty"`
}

// History looks a task up. Errors: delayq.ErrNoQueue, delayq.ErrNotFound, the connection's.
func (l *Ledger) History(ctx context.Context, queueName, id string) (*History, error) {
	q := &queue{l: l, name: queueName}
	if _, err := q.read(ctx); err != nil {
		return nil, wrap("history of", queueName, err)
	}
	got, err := fetch(ctx, q, q.alone(), `
SELECT `+rowColumns+`, t.payload, t.max_failed, t.max_lost, coalesce(t.events, '[]')::text, clock_timestamp()
FROM delayq.task t WHERE t.queue = $1::int AND t.id = $2::bytea`, []any{q.id, []byte(id)}, func(rows pgx.Rows) (*History, error) {
		h := new(History)
		var s scanned
		var events string
		if err := rows.Scan(append(s.into(&h.LedgerRow), &h.MaxFailed, &h.MaxLost, &events, &h.Now)...); err != nil {
			return nil, err
		}
		s.finish(&h.LedgerRow)
		return h, json.Unmarshal([]byte(events), &h.Events)
	})
	switch {
	case err != nil:
		return nil, wrap("history of", queueName, err)
	case len(got) == 0:
		return nil, &delayq.TaskError{Op: "history", Queue: queueName, ID: id, Err: delayq.ErrNotFound}
	}
	return got[0], nil
}
