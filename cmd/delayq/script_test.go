//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
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

// A script finds its server in $DELAYQ_REDIS_URL and has the queues whose names begin with $Q for itself. All of them run on a real
// Redis; what is in the process for dev alone gets those that show that a verb works on it at all.
func TestScripts(t *testing.T) {
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		runScripts(t, "redis://"+miniredis.RunT(t).Addr(), false, "testdata/dev.txtar", "testdata/enqueue.txtar", "testdata/inspect.txtar",
			"testdata/dead.txtar")
	})
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		runScripts(t, servers.SharedRedis(t).URL(), false)
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		runScripts(t, servers.SharedCluster(t).Nodes[0].URL(), true, "testdata/enqueue.txtar", "testdata/inspect.txtar", "testdata/work.txtar",
			"testdata/doctor.txtar", "testdata/dead.txtar")
	})
}

// With a ledger it finds an empty database in $DELAYQ_DATABASE_URL, whose URL for a user who owns nothing is $WEAK, and a folder for
// what dev starts in $TMPDIR.
func TestScriptsWithALedger(t *testing.T) {
	for _, dir := range []string{"ledger", "flush", "lost"} { // the latter two empty their Redis, so nobody shares it
		t.Run(dir, func(t *testing.T) {
			t.Parallel()
			servers.NeedPostgres(t)
			server := servers.NewRedis(t)
			runIn(t, testscript.Params{Dir: filepath.Join("testdata", dir)}, func(env *testscript.Env) error {
				database := servers.NewDatabase(t)
				weak := "weak-" + uuid.NewString()
				if err := inDatabase(database, fmt.Sprintf("CREATE ROLE %q LOGIN", weak)); err != nil {
					return err
				}
				tmp := t.TempDir()
				for dir := tmp; dir != os.TempDir(); dir = filepath.Dir(dir) { // PostgreSQL may run as another user
					if err := os.Chmod(dir, 0o755); err != nil {
						return err
					}
				}
				env.Setenv("TMPDIR", tmp)
				env.Setenv("DELAYQ_DATABASE_URL", database)
				env.Setenv("WEAK", strings.Replace(database, "postgres@", weak+"@", 1))
				env.Setenv("DELAYQ_REDIS_URL", server.URL())
				return nil
			})
		})
	}
}

func inDatabase(url, command string) error {
	conn, err := pgx.Connect(context.Background(), url)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	_, err = conn.Exec(context.Background(), command)
	return err
}

// runScripts runs these scripts, all of them if none is named.
func runScripts(t *testing.T, url string, cluster bool, scripts ...string) {
	params := testscript.Params{Files: scripts}
	if len(scripts) == 0 {
		params.Dir = "testdata"
	}
	runIn(t, params, func(env *testscript.Env) error {
		env.Setenv("DELAYQ_REDIS_URL", url)
		env.Setenv("DELAYQ_REDIS_CLUSTER", strconv.FormatBool(cluster))
		return nil
	})
}

func runIn(t *testing.T, params testscript.Params, setup func(*testscript.Env) error) {
	testscript.Run(t, testscript.Params{
		Dir:   params.Dir,
		Files: params.Files,
		Setup: func(env *testscript.Env) error {
			env.Setenv("Q", "cli-"+uuid.NewString())
			env.Setenv("TZ", "UTC")
			env.Setenv("GORACE", "atexit_sleep_ms=20") // or each process of a test with the race detector takes a second to end
			env.Setenv("NOWHERE", "redis://:s3cret@127.0.0.1:1")
			return setup(env)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"await": await,
			"gone":  gone,
			"books": checkBooks,
			"sql":   runSQL,
			"flush": flush,
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

// sql STATEMENT runs in the script's database.
func runSQL(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(inDatabase(ts.Getenv("DELAYQ_DATABASE_URL"), args[0]))
}

// flush empties the script's Redis as soon as ten tasks wait there.
func flush(ts *testscript.TestScript, _ bool, _ []string) {
	opt, err := redis.ParseURL(ts.Getenv("DELAYQ_REDIS_URL"))
	ts.Check(err)
	rdb := redis.NewClient(opt)
	defer rdb.Close()
	ctx := context.Background()
	for rdb.ZCard(ctx, "dq:{"+ts.Getenv("Q")+":0}:pending").Val() < 10 {
		time.Sleep(5 * time.Millisecond)
	}
	ts.Check(rdb.FlushAll(ctx).Err())
}

// checkBooks reads a summary of dev from stdout: it must be whole, and add up. Its argument says what of a ledger it must have.
func checkBooks(ts *testscript.TestScript, _ bool, args []string) {
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
	case slices.Contains(args, "ledger") != (sum.Booked != nil):
		ts.Fatalf("stock_errors in the summary: %t", sum.Booked != nil)
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
	more, _ := filepath.Glob("testdata/*/*.txtar") // the pattern is right
	if err != nil {
		t.Fatal(err)
	}
	scripts = append(scripts, more...)
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
