//go:build !sabotage

package delayq

// sabotage names a seeded bug, see scripts/chaos. Without the build tag it is an empty constant, and every trace of the bugs goes
// at compile time.
const sabotage = ""

const processToken = ""
