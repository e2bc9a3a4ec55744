package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions change how a PostgreSQL server is started. The zero value is
// ready to use, for tests: nothing outlives a loss of power.
type PostgresOptions struct {
	// Settings are lines of postgresql.conf, such as "fsync=on". They come
	// last, so they win over the defaults.
	Settings []string
}

// A Postgres is one PostgreSQL server on a loopback port, with the superuser
// postgres and no password. It keeps its port and data over Kill and Restart.
// Its methods must not be called concurrently, except Addr, URL and Log.
type Postgres struct {
	opts PostgresOptions
	bin  string
	dir  string
	port int
	cred *syscall.Credential // of the user it runs as, nil = ours

	cmd    *exec.Cmd
	exited chan struct{}
	paused bool
}

// PostgresPrograms is the folder of PostgreSQL's programs, of the newest
// version that is installed, or an error that says where it has looked.
func PostgresPrograms() (string, error) {
	if dir := os.Getenv("DELAYQ_POSTGRES_BIN"); dir != "" {
		return dir, nil
	}
	if p, err := exec.LookPath("initdb"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil {
			return filepath.Dir(p), nil
		}
	}
	// It comes with the client's headers too, so it may name a folder without a server.
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dir := strings.TrimSpace(string(out))
		if _, err := os.Stat(filepath.Join(dir, "initdb")); err == nil {
			return dir, nil
		}
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // the pattern is right
	slices.SortFunc(found, func(a, b string) int { return versionOf(a) - versionOf(b) })
	if len(found) == 0 {
		return "", errors.New("servers: initdb is neither on the PATH, where pg_config says, nor in /usr/lib/postgresql/*/bin; install PostgreSQL's server programs")
	}
	return filepath.Dir(found[len(found)-1]), nil
}

func versionOf(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

// StartPostgres makes a database cluster in a temporary folder and starts a
// server on it. It returns when the server accepts connections.
func StartPostgres(opts PostgresOptions) (*Postgres, error) {
	bin, err := PostgresPrograms()
	if err != nil {
		return nil, err
	}
	p := &Postgres{opts: opts, bin: bin}
	if p.cred, err = unprivileged(); err != nil {
		return nil, err
	}
	if p.dir, err = ownFolder("delayq-postgres-", p.cred); err != nil {
		return nil, err
	}
	if err := p.initdb(); err != nil {
		p.Stop()
		return nil, err
	}
	for range portTries {
		if p.port, err = freePort(); err != nil {
			break
		}
		if err = p.launch(); !errors.Is(err, errAddrInUse) {
			break
		}
	}
	if err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

// unprivileged is whom to run a program as that refuses to run as root: nil
// for ourselves, when we are not.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("servers: PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")
}

// ownFolder makes a temporary folder that belongs to cred.
func ownFolder(prefix string, cred *syscall.Credential) (string, error) {
	dir, err := os.MkdirTemp("", prefix)
	if err != nil || cred == nil {
		return dir, err
	}
	err = os.Chown(dir, int(cred.Uid), int(cred.Gid))
	if err == nil {
		err = enterable(filepath.Dir(dir), cred)
	}
	if err != nil {
		_ = os.Remove(dir) // it is empty
	}
	return dir, err
}

// enterable names the folder that keeps cred out of dir. The programs would
// say no more than "permission denied".
func enterable(dir string, cred *syscall.Credential) error {
	for ; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		var enter os.FileMode = 0o001
		switch st, ok := info.Sys().(*syscall.Stat_t); {
		case ok && st.Uid == cred.Uid:
			enter = 0o100
		case ok && st.Gid == cred.Gid:
			enter = 0o010
		}
		if info.Mode()&enter == 0 {
			return fmt.Errorf("servers: uid %d, whom PostgreSQL runs as, cannot enter %s; set TMPDIR to a folder that it can", cred.Uid, dir)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

func (p *Postgres) initdb() error {
	cmd := exec.Command(filepath.Join(p.bin, "initdb"), "-D", p.data(), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.Dir = p.dir // ours may be closed to that user
	cmd.SysProcAttr = dieWithParent()
	cmd.SysProcAttr.Credential = p.cred
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("servers: initdb: %w:\n%s", err, out)
	}
	conf := []string{
		"listen_addresses='127.0.0.1'", "unix_socket_directories=''", "max_connections=200", "fsync=off", "full_page_writes=off",
		"shared_buffers=128MB", "max_wal_size=2GB", "log_line_prefix='%m [%p] '",
		// In the folder, which goes: what a killed server has in /dev/shm stays until the machine is restarted.
		"dynamic_shared_memory_type=mmap",
	}
	f, err := os.OpenFile(filepath.Join(p.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, "\n"+strings.Join(append(conf, p.opts.Settings...), "\n"))
	return errors.Join(err, f.Close())
}

func (p *Postgres) data() string { return filepath.Join(p.dir, "data") }

func (p *Postgres) launch() error {
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	at, err := log.Seek(0, 2)
	if err != nil {
		return err
	}
	cmd := exec.Command(filepath.Join(p.bin, "postgres"), "-D", p.data(), "-p", strconv.Itoa(p.port))
	cmd.Dir = p.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	cmd.SysProcAttr.Credential = p.cred
	exited := make(chan struct{})
	if err := run(cmd, exited); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	p.cmd, p.exited, p.paused = cmd, exited, false
	if err := p.waitReady(at); err != nil {
		p.Kill()
		return err
	}
	return nil
}

func (p *Postgres) waitReady(at int64) error {
	deadline := time.After(4 * startTimeout) // it may have a log to replay
	for {
		ended := false
		select {
		case <-p.exited:
			ended = true
		case <-deadline:
			return fmt.Errorf("servers: postgres not ready in time:\n%s", p.Log())
		case <-time.After(5 * time.Millisecond):
		}
		text, err := os.ReadFile(p.logPath())
		if err != nil {
			return err
		}
		switch text = text[min(int(at), len(text)):]; {
		case ended && bytes.Contains(text, []byte("Address already in use")):
			return fmt.Errorf("servers: port %d: %w", p.port, errAddrInUse)
		case ended:
			return fmt.Errorf("servers: postgres ended at its start:\n%s", text)
		case bytes.Contains(text, []byte("database system is ready to accept connections")):
			return nil
		}
	}
}

func (p *Postgres) logPath() string { return filepath.Join(p.dir, "postgres.log") }

// Addr is the server's host:port.
func (p *Postgres) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)) }

// URL is the address of a database as pgx takes it; empty means the one that
// is always there.
func (p *Postgres) URL(database string) string {
	if database == "" {
		database = "postgres"
	}
	return postgresURL(p.Addr(), database)
}

func postgresURL(addr, database string) string {
	return "postgres://postgres@" + addr + "/" + url.PathEscape(database) + "?sslmode=disable"
}

// CreateDatabase makes an empty database and returns its URL.
func (p *Postgres) CreateDatabase(ctx context.Context, name string) (string, error) {
	return p.URL(name), p.exec(ctx, "create database "+pgx.Identifier{name}.Sanitize())
}

// DropDatabase removes a database, and breaks the connections to it.
func (p *Postgres) DropDatabase(ctx context.Context, name string) error {
	return p.exec(ctx, "drop database if exists "+pgx.Identifier{name}.Sanitize()+" with (force)")
}

func (p *Postgres) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, p.URL(""))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }() // it has done its work
	_, err = conn.Exec(ctx, sql)
	return err
}

// PID is the id of the postmaster; Restart changes it.
func (p *Postgres) PID() int { return p.cmd.Process.Pid }

// Log is everything the server has printed, over all its restarts.
func (p *Postgres) Log() string {
	text, err := os.ReadFile(p.logPath())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// Running reports whether the postmaster lives; a paused one does.
func (p *Postgres) Running() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}
