//go:build sabotage

package reconciler_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// seeds are the seeded bugs that the walk must find, with the variants of the protocol that they are and the invariants that they
// break. scripts/chaos --sabotage has more, which show only on real processes.
var seeds = map[string]string{
	"claim-skipped":              "OVERLAP, DUP, CANCEL",
	"claim-without-locked-until": "OVERLAP",          // V01, V03
	"ledger-lease-takes-running": "OVERLAP",          // V18
	"claim-refuses-own":          "REPEAT",           // V04
	"claim-without-rev":          "EARLY, PAYLOAD",   // V05, V06
	"token-per-process":          "OVERLAP, STALE",   // V08
	"finish-without-token":       "STALE, DUPTX",     // V09, V10
	"heartbeat-without-token":    "STALE",            // V10
	"heartbeat-redis-only":       "STALE, HEARTBEAT", // V11
	"takeover-ignores-cancel":    "CANCEL",           // V12, V13
	"retry-ignores-cancel":       "CANCEL",           // V29
	"cancel-spares-running":      "CANCEL",           // V28, the other way round
	"complete-ignores-lost":      "DUPTX",            // V16
	"give-back-redis-only":       "CHARGE, OVERLAP",  // V36
	"redis-before-commit":        "P7",               // V22
	"reconcile-only-adds":        "P7",               // P7
	"reconcile-one-way":          "P7",               // D2
	"reconcile-by-max-rev":       "P7, LOSS",         // a cursor that is more than a hint
	// put-ignores-rev shows only in what is refused more often, since claims look at the revision: see scripts/chaos.
	"put-refuses-equal-tomb": "P7", // V20
}

func TestTheWalkFindsSeededBugs(t *testing.T) {
	if os.Getenv("DELAYQ_SABOTAGE") != "" {
		t.Skip("this is one of the bugs")
	}
	walk := func(bug string) (string, error) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestProtocolWalk$", "-protocol.time=30s")
		cmd.Env = append(os.Environ(), "DELAYQ_SABOTAGE="+bug)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := walk(""); err != nil {
		t.Fatalf("without a bug: %v\n%s", err, out)
	}
	for bug, breaks := range seeds {
		t.Run(bug, func(t *testing.T) {
			out, err := walk(bug)
			switch {
			case err == nil:
				t.Errorf("not found; it should break one of %s", breaks)
			case strings.Contains(out, "panic:"):
				t.Errorf("it does not apply any more:\n%s", out)
			}
		})
	}
}
