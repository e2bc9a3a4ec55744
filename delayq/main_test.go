package delayq_test

import (
	"testing"

	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }
