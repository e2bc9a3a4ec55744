//go:build sabotage

package reconciler

import (
	"os"

	"github.com/delayq/toolkit/delayq"
)

var sabotage = os.Getenv("DELAYQ_SABOTAGE")

// newest is the highest revision that has been looked at.
var newest int64

// overlook calls whole what the bug does not see.
func overlook(wants []delayq.LedgerWant, found []delayq.Finding) {
	seen := newest
	for i, w := range wants {
		newest = max(newest, w.Rev)
		switch {
		case sabotage == "reconcile-only-adds" && found[i] == delayq.FoundOlder, sabotage == "reconcile-by-max-rev" && w.Rev <= seen:
			found[i] = delayq.FoundWhole
		}
	}
}
