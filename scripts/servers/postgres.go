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

// Shutdown ends the server in order, cutting connections off, and waits.
func (p *Postgres) Shutdown() error { return p.end(syscall.SIGINT) }

// Immediate ends the server without a checkpoint, as after a crash of a
// backend: it replays its log at the next start.
func (p *Postgres) Immediate() error { return p.end(syscall.SIGQUIT) }

func (p *Postgres) end(s syscall.Signal) error {
	if !p.Running() {
		return nil
	}
	if err := p.Resume(); err != nil {
		return err
	}
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.exited:
		return nil
	case <-time.After(2 * shutdownTimeout):
		p.Kill()
		return fmt.Errorf("servers: postgres on %s did not end within %s", p.Addr(), 2*shutdownTimeout)
	}
}

// Kill ends the postmaster and all its children by SIGKILL, and waits.
func (p *Postgres) Kill() {
	if !p.Running() {
		return
	}
	memory := p.sharedMemory()
	all := append(p.freeze(), p.PID())
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	<-p.exited
	for range 1000 { // until the kernel has buried them: a restart would meet their shared memory
		if !slices.ContainsFunc(all, exists) {
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	removeSegment(memory)
}

// sharedMemory is the id of the System V segment by which a server locks its
// data, empty when it has none. Only an orderly end removes it, and a machine
// has some thousands.
func (p *Postgres) sharedMemory() string { return segment(p.data(), p.PID()) }

func segment(data string, pid int) string {
	text, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return ""
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 7 || lines[0] != strconv.Itoa(pid) {
		return ""
	}
	_, id, _ := strings.Cut(strings.TrimSpace(lines[6]), " ") // key and id
	return strings.TrimSpace(id)
}

func removeSegment(id string) {
	if id != "" {
		_ = exec.Command("ipcrm", "-m", id).Run() // without it the next start reuses the segment, if there is one
	}
}

// freeze stops the postmaster, so that it forks no more, and returns its children.
func (p *Postgres) freeze() []int {
	_ = syscall.Kill(p.PID(), syscall.SIGSTOP) // it may have ended
	for range 500 {                            // it may be amid a fork
		if state, _ := processState(p.PID()); state == 'T' || state == 'Z' || state == 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return childrenOf(p.PID())
}

// exists reports whether pid runs. A zombie does not: where nobody reaps
// orphans it keeps its pid.
func exists(pid int) bool {
	state, _ := processState(pid)
	return state != 0 && state != 'Z'
}

// Pause stops all processes of the server by SIGSTOP: connections stay,
// nothing is answered.
func (p *Postgres) Pause() error {
	if !p.Running() {
		return fmt.Errorf("servers: postgres on %s is not running", p.Addr())
	}
	p.paused = true
	for _, pid := range p.freeze() {
		_ = syscall.Kill(pid, syscall.SIGSTOP) // it may have ended
	}
	return nil
}

// Resume undoes Pause. It does nothing to a server that is not paused.
func (p *Postgres) Resume() error {
	if !p.paused {
		return nil
	}
	p.paused = false
	if !p.Running() {
		return fmt.Errorf("servers: postgres on %s is not running", p.Addr())
	}
	for _, pid := range append(childrenOf(p.PID()), p.PID()) {
		_ = syscall.Kill(pid, syscall.SIGCONT) // it may have ended
	}
	return nil
}

// Restart starts the server again on its port and data. One that still runs is
// killed first.
func (p *Postgres) Restart() error {
	p.Kill()
	// What a killed one leaves; its process id may be another's by now.
	if err := os.Remove(filepath.Join(p.data(), "postmaster.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return p.launch()
}

// Stop ends the server and removes its folder. It is the end of the server,
// and may be called twice.
func (p *Postgres) Stop() {
	_ = p.Immediate()       // at worst it kills
	_ = os.RemoveAll(p.dir) // a leftover in the temporary directory harms nobody
}
