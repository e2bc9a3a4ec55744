//go:build sabotage

package delayq

import (
	"fmt"
	"os"
)

var sabotage = os.Getenv("DELAYQ_SABOTAGE")

var processToken = fmt.Sprintf("%016d", os.Getpid())
