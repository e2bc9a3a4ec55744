package delayq_test

import (
	"os/exec"
	"strings"
	"testing"
)

// A program that only enqueues must not link a cloud's kit, a metrics library or a database driver. river #1342 is how a test
// library once reached everybody's binaries.
func TestDelayqLinksLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	allowed := []string{"github.com/delayq/toolkit/", "github.com/redis/go-redis/v9", "github.com/google/uuid", "github.com/cespare/xxhash/v2", "go.uber.org/atomic", "golang.org/x/sys/cpu"}
	for dep := range strings.FieldsSeq(string(out)) {
		first, _, _ := strings.Cut(dep, "/")
		if !strings.Contains(first, ".") && dep != "database/sql" { // the standard library
			continue
		}
		ok := false
		for _, a := range allowed {
			ok = ok || strings.HasPrefix(dep, a)
		}
		if strings.HasPrefix(dep, "github.com/delayq/toolkit/") {
			ok = dep == "github.com/delayq/toolkit/delayq" || dep == "github.com/delayq/toolkit/lua"
		}
		if !ok {
			t.Errorf("delayq links %s", dep)
		}
	}
}
