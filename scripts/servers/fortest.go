package servers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
)

// T is what this package needs of a *testing.T, *testing.B or *rapid.T.
type T interface {
	Helper()
	Name() string
	Cleanup(func())
	Failed() bool
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// NeedRedis skips the test where no server is installed. With
// DELAYQ_REQUIRE_SERVERS=1, which scripts/test sets, the test fails instead:
// a skip that nobody looks at is a guarantee that nobody checks.
func NeedRedis(t T) {
	t.Helper()
	program := defaultProgram()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("DELAYQ_REQUIRE_SERVERS") == "1" {
		t.Fatalf("%s is not on the PATH; install Redis 7.0 or newer", program)
	}
	t.Skipf("%s is not on the PATH; install Redis 7.0 or newer to run this test", program)
}

// NewRedis starts a server of the test's own, for tests that break it. It is
// stopped with the test, and a failed test shows its log.
func NewRedis(t T, args ...string) *Redis {
	t.Helper()
	NeedRedis(t)
	r, err := StartRedis(Options{Args: args})
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() { stop(t, r) })
	return r
}

// NewCluster is NewRedis for a cluster of n masters.
func NewCluster(t T, n int, args ...string) *Cluster {
	t.Helper()
	NeedRedis(t)
	c, err := StartCluster(n, Options{Args: args})
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() { stop(t, c.Nodes...) })
	return c
}

func stop(t T, nodes ...*Redis) {
	for _, r := range nodes {
		if t.Failed() {
			t.Logf("log of %s:\n%s", r.Addr(), r.Log())
		}
		r.Stop()
	}
}

// NeedPostgres is NeedRedis for PostgreSQL's server programs.
func NeedPostgres(t T) { t.Helper(); need(t, PostgresPrograms) }

// NeedPgBouncer is NeedRedis for PgBouncer.
func NeedPgBouncer(t T) { t.Helper(); need(t, pgBouncerProgram) }

func need(t T, find func() (string, error)) {
	t.Helper()
	_, err := find()
	switch {
	case err == nil:
	case os.Getenv("DELAYQ_REQUIRE_SERVERS") == "1":
		t.Fatalf("%v", err)
	default:
		t.Skipf("%v", err)
	}
}

// NewPostgres starts a PostgreSQL of the test's own, for tests that break it.
func NewPostgres(t T, settings ...string) *Postgres {
	t.Helper()
	NeedPostgres(t)
	p, err := StartPostgres(PostgresOptions{Settings: settings})
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of postgres on %s:\n%s", p.Addr(), p.Log())
		}
		p.Stop()
	})
	return p
}

// SharedPostgres is the one PostgreSQL of this test binary. Tests keep apart
// by NewDatabase, and must not stop, pause or configure it.
func SharedPostgres(t T) *Postgres {
	t.Helper()
	NeedPostgres(t)
	return shared(t, sharedPostgres)
}

// NewDatabase makes an empty database on the shared PostgreSQL and returns its
// URL. It goes with the test.
func NewDatabase(t T) string {
	t.Helper()
	p := SharedPostgres(t)
	name := strings.ReplaceAll(QueueName(t), "-", "_")
	url, err := p.CreateDatabase(context.Background(), name)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if err := p.DropDatabase(context.Background(), name); err != nil {
			t.Logf("database %s stays: %v", name, err)
		}
	})
	return url
}

// NewPgBouncer starts a PgBouncer in front of target, with at most poolSize
// connections to each database, that ends with the test.
func NewPgBouncer(t T, target *Postgres, poolSize int) *PgBouncer {
	t.Helper()
	NeedPgBouncer(t)
	b, err := StartPgBouncer(target, poolSize)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of pgbouncer:\n%s", b.Log())
		}
		b.Stop()
	})
	return b
}

// NeedPrometheus is NeedRedis for the programs of Prometheus.
func NeedPrometheus(t T) {
	t.Helper()
	need(t, prometheusProgram)
	need(t, PromtoolProgram)
}

// NewPrometheus starts a Prometheus with that configuration, and files beside it, that ends with the test.
func NewPrometheus(t T, config string, files map[string]string) *Prometheus {
	t.Helper()
	NeedPrometheus(t)
	p, err := StartPrometheus(config, files)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of prometheus:\n%s", p.Log())
		}
		p.Stop()
	})
	return p
}

// NewProxy starts a proxy in front of target that ends with the test.
func NewProxy(t T, target string) *Proxy {
	t.Helper()
	p, err := StartProxy(target)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// The shared servers of a test binary: started by the first test that asks,
// since a start for each of some hundred tests is what makes a suite slow.
var (
	sharedRedis   = share(func() (*Redis, error) { return StartRedis(Options{}) })
	sharedCluster = share(func() (*Cluster, error) { return StartCluster(3, Options{}) })
	sharedStrict  = share(func() (*Cluster, error) { return StartCluster(1, Options{}) })

	sharedPostgres = share(func() (*Postgres, error) { return StartPostgres(PostgresOptions{}) })

	sharedMu   sync.Mutex
	sharedStop []func()
)

func share[S interface{ Stop() }](start func() (S, error)) func() (S, error) {
	return sync.OnceValues(func() (S, error) {
		s, err := start()
		if err == nil {
			sharedMu.Lock()
			defer sharedMu.Unlock()
			sharedStop = append(sharedStop, s.Stop)
		}
		return s, err
	})
}

func shared[S any](t T, get func() (S, error)) S {
	t.Helper()
	s, err := get()
	if err != nil {
		t.Fatalf("%v", err)
	}
	return s
}

// QueueName is a fresh name made from the test's, valid as a queue name and as
// a key. The test's name alone would meet its own leftovers on a shared
// server under -count=2.
func QueueName(t T) string {
	name := strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			return c
		}
		return '-'
	}, strings.ToLower(t.Name()))
	return fmt.Sprintf("%.40s-%08x", name, rand.Uint32())
}

// SharedRedis is the one server of this test binary. Tests keep apart by
// QueueName, and must not flush, pause, kill or configure it.
func SharedRedis(t T) *Redis { t.Helper(); NeedRedis(t); return shared(t, sharedRedis) }

// SharedCluster is the one cluster of three masters of this test binary, under
// the rules of SharedRedis. Its first use takes two seconds.
func SharedCluster(t T) *Cluster { t.Helper(); NeedRedis(t); return shared(t, sharedCluster) }

// SharedStrict is the one cluster of a single node of this test binary, under
// the rules of SharedRedis: it refuses what a script must not do with its
// keys, if the script starts with a "#!lua" line. Its first use takes two seconds.
func SharedStrict(t T) *Cluster { t.Helper(); NeedRedis(t); return shared(t, sharedStrict) }

// StopShared stops the shared servers. A test binary calls it from TestMain
// after its tests: without, the kernel still kills the servers on Linux, but
// their temporary directories stay.
func StopShared() {
	sharedMu.Lock()
	defer sharedMu.Unlock()
	for _, stop := range sharedStop {
		stop()
	}
	sharedStop = nil
}

// Main runs the tests of m, stops the shared servers and ends the process:
//
//	func TestMain(m *testing.M) { servers.Main(m) }
func Main(m interface{ Run() int }) {
	code := m.Run()
	StopShared()
	os.Exit(code)
}
