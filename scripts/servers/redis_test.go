package servers

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"
)

var (
	_ T = (*testing.T)(nil)
	_ T = (*rapid.T)(nil)
)

func TestMain(m *testing.M) {
	if os.Getenv("DELAYQ_TEST_ORPHAN") != "" {
		orphan()
	}
	Main(m)
}

// orphan is what TestServersDieWithTheirParent runs: it prints the pids of the
// servers it starts and dies without any clean-up.
func orphan() {
	var pids []int
	if os.Getenv("DELAYQ_TEST_ORPHAN") == "redis" {
		r, err := StartRedis(Options{})
		if err != nil {
			panic(err)
		}
		pids = []int{r.PID()}
	} else {
		p, err := StartPostgres(PostgresOptions{})
		if err != nil {
			panic(err)
		}
		b, err := StartPgBouncer(p, 1)
		if err != nil {
			panic(err)
		}
		pids = append(childrenOf(p.PID()), p.PID(), b.PID())
	}
	for _, pid := range pids {
		_, _ = os.Stdout.WriteString(strconv.Itoa(pid) + "\n")
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// client is a client that repeats nothing by itself.
func client(t *testing.T, addr string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

func ping(t *testing.T, addr string, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, ContextTimeoutEnabled: true, DialerRetries: 1})
	defer rdb.Close()
	return rdb.Ping(ctx).Err()
}

func TestRedisListensOnLoopbackAndPersistsNothing(t *testing.T) {
	t.Parallel()
	r := NewRedis(t)
	rdb := client(t, r.Addr())
	for _, want := range [][2]string{
		{"bind", "127.0.0.1"},
		{"save", ""},
		{"appendonly", "no"},
		{"maxmemory-policy", "noeviction"},
	} {
		got, err := rdb.ConfigGet(t.Context(), want[0]).Result()
		if err != nil || got[want[0]] != want[1] {
			t.Errorf("%s = %q, %v; want %q", want[0], got[want[0]], err, want[1])
		}
	}
	if err := rdb.Do(t.Context(), "DEBUG", "SLEEP", "0").Err(); err != nil {
		t.Errorf("DEBUG: %v", err)
	}
	opts, err := redis.ParseURL(r.URL())
	if err != nil || opts.Addr != r.Addr() {
		t.Errorf("URL %s: %v, %v", r.URL(), opts, err)
	}
}

func TestRedisKillAndRestartKeepPortAndDir(t *testing.T) {
	t.Parallel()
	r := NewRedis(t, "--appendonly", "yes")
	rdb := client(t, r.Addr())
	if err := rdb.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	pid := r.PID()
	r.Kill()
	if r.Running() || ping(t, r.Addr(), time.Second) == nil {
		t.Fatal("still answers after Kill")
	}
	for _, args := range [][]string{nil, {"--maxmemory", "10mb"}} {
		if err := r.Restart(args...); err != nil {
			t.Fatal(err)
		}
		if got, err := client(t, r.Addr()).Get(t.Context(), "k").Result(); got != "v" {
			t.Errorf("after restart: %q, %v", got, err)
		}
	}
	if r.PID() == pid {
		t.Error("the pid did not change")
	}
	if got := client(t, r.Addr()).ConfigGet(t.Context(), "maxmemory").Val()["maxmemory"]; got != "10485760" {
		t.Errorf("maxmemory = %s", got)
	}
}

func TestRedisShutdownSaves(t *testing.T) {
	t.Parallel()
	r := NewRedis(t, "--save", "3600 1000000")
	if err := client(t, r.Addr()).Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := r.Shutdown(); err != nil { // of a paused server too
		t.Fatal(err)
	}
	if err := r.Restart(); err != nil {
		t.Fatal(err)
	}
	if got := client(t, r.Addr()).Get(t.Context(), "k").Val(); got != "v" {
		t.Errorf("got %q", got)
	}
}

func TestRedisPause(t *testing.T) {
	t.Parallel()
	r := NewRedis(t)
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := ping(t, r.Addr(), 100*time.Millisecond); err == nil {
		t.Error("a paused server answers")
	}
	if !r.Running() {
		t.Error("a paused server still runs")
	}
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := ping(t, r.Addr(), 5*time.Second); err != nil {
		t.Error(err)
	}
}

func TestRedisLosesAPortRace(t *testing.T) {
	t.Parallel()
	taken := NewRedis(t)
	r := &Redis{opts: Options{Program: defaultProgram()}, dir: t.TempDir(), port: taken.port}
	if err := r.launch(); !errors.Is(err, errAddrInUse) { // and start tries another port
		t.Errorf("got %v", err)
	}
	if r.Running() {
		t.Error("runs")
	}
}

func TestRedisReportsABadArgument(t *testing.T) {
	t.Parallel()
	NeedRedis(t)
	_, err := StartRedis(Options{Args: []string{"--no-such-setting", "1"}})
	if err == nil || !strings.Contains(err.Error(), "no-such-setting") {
		t.Errorf("got %v", err)
	}
}

func TestRedisStopRemovesOnlyItsOwnDir(t *testing.T) {
	t.Parallel()
	NeedRedis(t)
	for _, dir := range []string{"", t.TempDir()} {
		r, err := StartRedis(Options{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		r.Stop()
		r.Stop()
		if _, err := os.Stat(r.Dir()); (err == nil) != (dir != "") {
			t.Errorf("dir %q after Stop: %v", dir, err)
		}
	}
}

func TestServersDieWithTheirParent(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("the kernel has no parent-death signal")
	}
	for kind, need := range map[string]func(T){
		"redis":                  NeedRedis,
		"postgres and pgbouncer": func(t T) { NeedPostgres(t); NeedPgBouncer(t) },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			need(t)
			tmp := openFolder(t) // it gets what the orphan leaves
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "DELAYQ_TEST_ORPHAN="+kind, "TMPDIR="+tmp)
			out, err := cmd.Output() // ends by SIGKILL
			pids := strings.Fields(string(out))
			if len(pids) == 0 {
				t.Fatalf("%v: %s", err, out)
			}
			for _, field := range pids {
				pid, err := strconv.Atoi(field)
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				gone(t, pid)
				found, _ := filepath.Glob(filepath.Join(tmp, "delayq-postgres-*", "data")) // the pattern is right
				for _, data := range found {
					removeSegment(segment(data, pid)) // the one thing that a parent's death leaves outside its folder
				}
			}
		})
	}
}

// openFolder is t.TempDir that other users can enter.
func openFolder(t *testing.T) string {
	dir, err := os.MkdirTemp("", "delayq-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// gone waits until a process has ended.
func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); exists(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is left", pid)
		}
	}
}

// refusal records what NeedRedis says.
type refusal struct {
	T
	said string
}

func (r *refusal) Fatalf(string, ...any) { r.said += "fatal " }
func (r *refusal) Skipf(string, ...any)  { r.said += "skip " }

func TestNeedRedisFailsWhereServersAreRequired(t *testing.T) {
	t.Setenv("DELAYQ_REDIS_SERVER", "no-such-server")
	for env, want := range map[string]string{"": "skip ", "1": "fatal skip "} { // a real Fatalf does not return
		t.Setenv("DELAYQ_REQUIRE_SERVERS", env)
		r := &refusal{T: t}
		NeedRedis(r)
		if r.said != want {
			t.Errorf("DELAYQ_REQUIRE_SERVERS=%q: %q, want %q", env, r.said, want)
		}
	}
}

func TestSharedServersAreStartedOnce(t *testing.T) {
	t.Parallel()
	if a, b := SharedRedis(t), SharedRedis(t); a != b {
		t.Errorf("two servers: %s and %s", a.Addr(), b.Addr())
	}
}

func TestQueueNamesAreFreshAndPlain(t *testing.T) {
	t.Run("With Spaces, {braces} and a name that is much too long", func(t *testing.T) {
		a, b := QueueName(t), QueueName(t)
		if a == b || len(a) > 49 || strings.ContainsAny(a, "{} /,") {
			t.Errorf("%s, %s", a, b)
		}
	})
}
