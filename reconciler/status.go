package reconciler

import (
	"context"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Status is where the reconciler of a queue stands, as it has stored it in the ledger.
type Status struct {
	LastFull time.Time `json:"last_full,omitzero"` // when the last full pass ended
	Last     Counts    `json:"last"`               // of that pass
	Total    Counts    `json:"total"`              // of all passes and slices since the state was first stored: only rises
	Began    time.Time `json:"began,omitzero"`     // the pass that is under way or ended last
	Coverage float64   `json:"coverage"`           // 0 to 1 of it
}

// ReadStatus reads it. A queue that no reconciler has been at has the zero Status.
func ReadStatus(ctx context.Context, lq delayq.LedgerQueue) (Status, error) {
	s, err := stored(ctx, lq)
	if err != nil || s.Began.IsZero() {
		return Status{}, err
	}
	return Status{LastFull: s.LastFull, Last: s.LastCounts, Total: s.Sums, Began: s.Began, Coverage: coverage(&s)}, nil
}
