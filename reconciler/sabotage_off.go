//go:build !sabotage

package reconciler

import "github.com/delayq/toolkit/delayq"

// sabotage names a seeded bug, see scripts/chaos. Without the build tag it is an empty constant, and every trace of the bugs goes
// at compile time.
const sabotage = ""

func overlook([]delayq.LedgerWant, []delayq.Finding) {}
