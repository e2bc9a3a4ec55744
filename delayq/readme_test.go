package delayq_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/delayq/toolkit/scripts/servers"
)

// The README's quick start is compiled and run, against a server of the test's own.
func TestReadmeQuickStartRuns(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok1 := strings.Cut(string(readme), "```go\n")
	program, _, ok2 := strings.Cut(rest, "```")
	if !ok1 || !ok2 || !strings.Contains(program, "127.0.0.1:6379") {
		t.Fatal("README.md has no Go program with the usual address of Redis")
	}
	program = strings.Replace(program, "127.0.0.1:6379", servers.NewRedis(t).Addr(), 1)
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "run", file).Output()
	if want := "created <nil>\norder 42 cancelled\n1 idle <nil>\n"; err != nil || string(out) != want {
		t.Errorf("it printed %q, want %q; %v", out, want, err)
	}
}
