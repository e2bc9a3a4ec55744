package servers

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func query(t *testing.T, url, sql string) (n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	if err := conn.QueryRow(ctx, sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestPostgresKeepsWhatIsCommitted(t *testing.T) {
	p := NewPostgres(t)
	query(t, p.URL(""), "with x as (select 1) select count(*) from x")
	conn, err := pgx.Connect(t.Context(), p.URL(""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "create table t (n int); insert into t values (7)"); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func() error{
		"kill": func() error { p.Kill(); return nil }, "shutdown": p.Shutdown, "immediate": p.Immediate,
	} {
		children := p.children()
		if len(children) == 0 {
			t.Fatal("a server without children")
		}
		if err := end(); err != nil {
			t.Fatal(name, err)
		}
		for _, pid := range children {
			if exists(pid) {
				t.Errorf("%s: process %d is left", name, pid)
			}
		}
		if err := p.Restart(); err != nil {
			t.Fatal(name, err)
		}
		if n := query(t, p.URL(""), "select n from t"); n != 7 {
			t.Errorf("%s: read %d", name, n)
		}
	}
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if conn, err := pgx.Connect(ctx, p.URL("")); err == nil {
		t.Error("a paused server answered")
		conn.Close(t.Context())
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	if n := query(t, p.URL(""), "select n from t"); n != 7 {
		t.Error(n)
	}
	dir := p.dir
	p.Stop()
	p.Stop()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Error("its folder is left:", err)
	}
}

func TestNewDatabaseIsEmptyAndGoes(t *testing.T) {
	var url string
	t.Run("one", func(t *testing.T) {
		url = NewDatabase(t)
		if other := NewDatabase(t); other == url {
			t.Error("the same twice")
		}
		if n := query(t, url, "select count(*) from information_schema.tables where table_schema = 'public'"); n != 0 {
			t.Error(n)
		}
	})
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		t.Error("the database is left")
		conn.Close(t.Context())
	}
}

func TestPgBouncerPoolsByTransaction(t *testing.T) {
	p := NewPostgres(t)
	b := NewPgBouncer(t, p, 1)
	cfg, err := pgx.ParseConfig(b.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	backend := func(conn *pgx.Conn) (pid int) {
		if err := conn.QueryRow(t.Context(), "select pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	one, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close(t.Context())
	two, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close(t.Context())
	if backend(one) != backend(two) {
		t.Error("two idle clients have servers of their own: the pool is not by transaction")
	}
}
