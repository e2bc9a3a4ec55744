//go:build !sabotage

package ledger

// sabotage names a seeded bug, see scripts/chaos. Without the build tag it is an empty constant, and every trace of the bugs goes
// at compile time.
const sabotage = ""

func seeded(sql string) string { return sql }
