package servers

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // a pooler does not keep what is prepared
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func scan[V any](t *testing.T, conn *pgx.Conn, sql string) (v V) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := conn.QueryRow(ctx, sql).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// query is a number, over a connection that ends with the call.
func query(t *testing.T, url, sql string) int {
	t.Helper()
	conn := connect(t, url)
	defer func() { _ = conn.Close(t.Context()) }()
	return scan[int](t, conn, sql)
}

func TestPostgresSettings(t *testing.T) {
	t.Parallel()
	conn := connect(t, NewPostgres(t, "work_mem=7MB", "max_connections=50").URL(""))
	for name, want := range map[string]string{
		"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off", "synchronous_commit": "on",
		"server_encoding": "UTF8", "work_mem": "7MB", "max_connections": "50",
	} {
		if got := scan[string](t, conn, "show "+name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
}

func TestPostgresReportsABadSetting(t *testing.T) {
	t.Parallel()
	NeedPostgres(t)
	_, err := StartPostgres(PostgresOptions{Settings: []string{"no_such_setting=1"}})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("got %v", err)
	}
}

func TestPostgresKeepsWhatIsCommitted(t *testing.T) {
	t.Parallel()
	p := NewPostgres(t)
	conn := connect(t, p.URL(""))
	if _, err := conn.Exec(t.Context(), "create table t (n int); insert into t values (7)"); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func() error{
		"kill":            func() error { p.Kill(); return nil },
		"kill of paused":  func() error { err := p.Pause(); p.Kill(); return err },
		"shutdown":        p.Shutdown,
		"end of paused":   func() error { return errors.Join(p.Pause(), p.Shutdown()) },
		"immediate":       p.Immediate,
		"restart at once": func() error { return nil },
	} {
		addr, pid := p.Addr(), p.PID()
		open := connect(t, p.URL("")) // whose backend must go too
		all := append(childrenOf(pid), pid)
		if !slices.Contains(all, scan[int](t, open, "select pg_backend_pid()")) {
			t.Errorf("%s: %v lacks the backend", name, all)
		}
		if err := end(); err != nil {
			t.Fatal(name, err)
		}
		if name != "restart at once" {
			if p.Running() {
				t.Errorf("%s: it runs", name)
			}
			for _, pid := range all {
				if exists(pid) {
					t.Errorf("%s: process %d is left", name, pid)
				}
			}
		}
		if err := p.Restart(); err != nil {
			t.Fatal(name, err)
		}
		if p.PID() == pid || p.Addr() != addr {
			t.Errorf("%s: process %d on %s before, %d on %s after", name, pid, addr, p.PID(), p.Addr())
		}
		if n := query(t, p.URL(""), "select n from t"); n != 7 {
			t.Errorf("%s: read %d", name, n)
		}
	}
	if !strings.Contains(p.Log(), "was interrupted") {
		t.Error("no start had anything to recover")
	}
}

func TestPostgresPause(t *testing.T) {
	t.Parallel()
	p := NewPostgres(t)
	conn := connect(t, p.URL(""))
	if err := p.Resume(); err != nil {
		t.Error("of one that is not paused:", err)
	}
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if conn, err := pgx.Connect(ctx, p.URL("")); err == nil {
		t.Error("a paused postmaster answered")
		_ = conn.Close(t.Context())
	}
	done := make(chan error, 1)
	go func() { _, err := conn.Exec(t.Context(), "select 1"); done <- err }()
	select {
	case err := <-done:
		t.Fatal("a paused backend answered", err)
	case <-time.After(100 * time.Millisecond):
	}
	if !p.Running() {
		t.Error("a paused server still runs")
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error("the connection did not outlive the pause:", err)
	}
	query(t, p.URL(""), "select 1")
}

func TestPostgresStopLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(*Postgres) error{
		"paused":    (*Postgres).Pause,
		"killed":    func(p *Postgres) error { p.Kill(); return nil },
		"restarted": func(p *Postgres) error { p.Kill(); return p.Restart() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := NewPostgres(t)
			connect(t, p.URL(""))
			all := append(childrenOf(p.PID()), p.PID())
			segments := []string{p.sharedMemory()}
			if segments[0] == "" {
				t.Error("which shared memory is it that must go?")
			}
			if err := before(p); err != nil {
				t.Fatal(err)
			}
			if p.Running() {
				segments = append(segments, p.sharedMemory())
			}
			p.Stop()
			p.Stop()
			for _, pid := range all {
				gone(t, pid)
			}
			if _, err := os.Stat(p.dir); !errors.Is(err, os.ErrNotExist) {
				t.Error("its folder is left:", err)
			}
			if runtime.GOOS != "linux" {
				return
			}
			table, err := os.ReadFile("/proc/sysvipc/shm")
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(table)) {
				if f := strings.Fields(line); slices.Contains(segments, f[1]) {
					t.Errorf("shared memory %s is left", f[1])
				}
			}
		})
	}
}

func TestPostgresLosesAPortRace(t *testing.T) {
	t.Parallel()
	p := NewPostgres(t)
	if err := p.Shutdown(); err != nil {
		t.Fatal(err)
	}
	p.port = SharedPostgres(t).port
	if err := p.launch(); !errors.Is(err, errAddrInUse) { // and StartPostgres tries another port
		t.Errorf("got %v", err)
	}
	if p.Running() {
		t.Error("runs")
	}
}

func TestPostgresSaysWhichFolderItCannotEnter(t *testing.T) {
	t.Parallel()
	closed := filepath.Join(openFolder(t), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	inner := filepath.Join(closed, "inner")
	if err := os.Mkdir(inner, 0o755); err != nil { //nolint:gosec // that the outer one is closed is the point
		t.Fatal(err)
	}
	stranger := &syscall.Credential{Uid: 65533, Gid: 65533}
	if err := enterable(inner, stranger); err == nil || !strings.Contains(err.Error(), closed+";") {
		t.Errorf("got %v", err)
	}
	if err := enterable(filepath.Dir(closed), stranger); err != nil {
		t.Error(err)
	}
}

func TestNewDatabaseIsEmptyAndGoes(t *testing.T) {
	t.Parallel()
	var url string
	t.Run("one", func(t *testing.T) {
		url = NewDatabase(t)
		if other := NewDatabase(t); other == url {
			t.Error("the same twice")
		}
		if n := query(t, url, "select count(*) from information_schema.tables where table_schema = 'public'"); n != 0 {
			t.Error(n)
		}
		connect(t, url) // does not keep it
	})
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		t.Error("the database is left")
		_ = conn.Close(t.Context())
	}
}

func TestPostgresDatabaseNames(t *testing.T) {
	t.Parallel()
	p, name := SharedPostgres(t), `odd "name"/?`+QueueName(t)
	for range 2 { // dropped, it can be made again
		url, err := p.CreateDatabase(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if got := scan[string](t, connect(t, url), "select current_database()"); got != name {
			t.Errorf("got %s", got)
		}
		if err := p.DropDatabase(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPgBouncerPoolsByTransaction(t *testing.T) {
	t.Parallel()
	b := NewPgBouncer(t, SharedPostgres(t), 2)
	one, two := connect(t, b.URL("")), connect(t, b.URL("postgres"))
	const backend = "select pg_backend_pid()"
	if one, two := scan[int](t, one, backend), scan[int](t, two, backend); one != two {
		t.Error("two idle clients have servers of their own: the pool is not by transaction")
	}
	tx, err := one.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	held := scan[int](t, tx.Conn(), backend)
	if scan[int](t, two, backend) == held {
		t.Error("a transaction shares its server")
	}
	if scan[int](t, tx.Conn(), backend) != held {
		t.Error("a transaction changed its server")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestPgBouncerOutlivesItsServer(t *testing.T) {
	t.Parallel()
	p := NewPostgres(t)
	b := NewPgBouncer(t, p, 2)
	query(t, b.URL(""), "select 1")
	p.Kill()
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithDeadline(t.Context(), deadline)
		conn, err := pgx.Connect(ctx, b.URL(""))
		cancel()
		if err == nil {
			_ = conn.Close(t.Context())
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	pid := b.PID()
	b.Stop()
	b.Stop()
	gone(t, pid)
	if _, err := os.Stat(b.dir); !errors.Is(err, os.ErrNotExist) {
		t.Error("its folder is left:", err)
	}
}

func TestNeedPostgresFailsWhereServersAreRequired(t *testing.T) {
	find := func() (string, error) { return "", errors.New("missing") }
	for env, want := range map[string]string{"": "skip ", "1": "fatal "} {
		t.Setenv("DELAYQ_REQUIRE_SERVERS", env)
		r := &refusal{T: t}
		need(r, find)
		if r.said != want {
			t.Errorf("DELAYQ_REQUIRE_SERVERS=%q: %q, want %q", env, r.said, want)
		}
	}
}
