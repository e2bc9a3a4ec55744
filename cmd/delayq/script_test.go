//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) {
	testscript.Main(sharing{m}, map[string]func(){"delayq": main})
}

// sharing stops the servers that tests shared, which testscript knows nothing of.
type sharing struct{ *testing.M }

func (s sharing) Run() int {
	defer servers.StopShared()
	return s.M.Run()
}

// A script finds its server in $DELAYQ_REDIS_URL and has the queues whose names begin with $Q for itself.
func TestScripts(t *testing.T) {
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		runScripts(t, "redis://"+miniredis.RunT(t).Addr(), false)
	})
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		runScripts(t, servers.SharedRedis(t).URL(), false)
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		runScripts(t, servers.SharedCluster(t).Nodes[0].URL(), true, "testdata/enqueue.txtar", "testdata/inspect.txtar", "testdata/work.txtar")
	})
}

// runScripts runs these scripts, all of them if none is named.
func runScripts(t *testing.T, url string, cluster bool, scripts ...string) {
	dir := "testdata"
	if len(scripts) > 0 {
		dir = ""
	}
	testscript.Run(t, testscript.Params{
		Dir:   dir,
		Files: scripts,
		Setup: func(env *testscript.Env) error {
			env.Setenv("DELAYQ_REDIS_URL", url)
			env.Setenv("DELAYQ_REDIS_CLUSTER", strconv.FormatBool(cluster))
			env.Setenv("Q", "cli-"+uuid.NewString())
			env.Setenv("TZ", "UTC")
			env.Setenv("NOWHERE", "redis://:s3cret@127.0.0.1:1")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"await": await,
			"gone":  gone,
			"books": checkBooks,
		},
	})
}

// exits CODE COMMAND... runs a command that must end with this exit status.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

// await FILE waits for a file to be there.
func await(ts *testscript.TestScript, _ bool, args []string) { awaitFile(ts.MkAbs(args[0])) }

// gone FILE waits until the processes that the file lists are no more. Without the file none ever started.
func gone(ts *testscript.TestScript, _ bool, args []string) {
	b, err := os.ReadFile(ts.MkAbs(args[0]))
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	ts.Check(err)
	for _, field := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(field)
		ts.Check(err)
		for running(pid) {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// checkBooks reads a summary of dev from stdout: it must be whole, and add up.
func checkBooks(ts *testscript.TestScript, _ bool, _ []string) {
	out := ts.ReadFile("stdout")
	var sum summary
	dec := json.NewDecoder(strings.NewReader(out))
	dec.DisallowUnknownFields()
	ts.Check(dec.Decode(&sum))
	for _, field := range []string{
		"placed", "paid", "expired", "cancelled", "lost", "early", "duplicate_effects", "stale_refused", "lateness_ms", "p50", "p99", "max",
		"invocations", "redis_calls", "elapsed_s",
	} {
		if !strings.Contains(out, fmt.Sprintf("%q:", field)) {
			ts.Fatalf("the summary lacks %s", field)
		}
	}
	late := sum.Lateness
	switch {
	case !sum.ok():
		ts.Fatalf("lost, early or done twice")
	case sum.Placed == 0 || sum.Placed != sum.Paid+sum.Expired:
		ts.Fatalf("%d placed, but %d paid and %d expired", sum.Placed, sum.Paid, sum.Expired)
	case sum.Cancelled > sum.Paid:
		ts.Fatalf("%d cancelled, but %d paid", sum.Cancelled, sum.Paid)
	case late.P50 < 0 || late.P50 > late.P99 || late.P99 > late.Max:
		ts.Fatalf("lateness %+v", late)
	case sum.Invocations < 1 || sum.RedisCalls < int64(sum.Placed) || sum.ElapsedS <= 0:
		ts.Fatalf("%d invocations, %d Redis calls in %v s", sum.Invocations, sum.RedisCalls, sum.ElapsedS)
	}
}

// A new verb comes with a script.
func TestScriptsCoverEveryVerb(t *testing.T) {
	scripts, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, name := range scripts {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	for _, cmd := range newRoot().Commands() {
		if !strings.Contains(all.String(), "delayq "+cmd.Name()) {
			t.Errorf("no script runs delayq %s", cmd.Name())
		}
	}
}
