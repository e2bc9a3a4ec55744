// Command delayq feeds, inspects and works delay queues in Redis. "delayq dev" shows the whole system in one process.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Exit codes, as delayq --help tells them.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	err := newRoot().ExecuteContext(context.Background())
	if err != nil && !errors.Is(err, errReported) {
		fmt.Fprintln(os.Stderr, "delayq:", message(err))
	}
	os.Exit(exitCode(err))
}
