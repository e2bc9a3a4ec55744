package servers

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
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
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // the pattern is right
	slices.SortFunc(found, func(a, b string) int { return versionOf(a) - versionOf(b) })
	if len(found) == 0 {
		return "", errors.New("servers: initdb is neither on the PATH nor in /usr/lib/postgresql/*/bin; install PostgreSQL's server programs")
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
	if err == nil && cred != nil {
		err = os.Chown(dir, int(cred.Uid), int(cred.Gid))
	}
	return dir, err
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
	return "postgres://postgres@" + p.Addr() + "/" + database + "?sslmode=disable"
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
	all := append(p.children(), p.PID())
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	<-p.exited
	for range 1000 { // until the kernel has buried them: a restart would meet their shared memory
		if !slices.ContainsFunc(all, exists) {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// exists reports whether pid runs. A zombie does not: where nobody reaps
// orphans it keeps its pid.
func exists(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// children are the server's processes besides the postmaster.
func (p *Postgres) children() []int {
	pid := strconv.Itoa(p.PID())
	out, err := exec.Command("ps", "-o", "pid=", "--ppid", pid).Output()
	if err != nil {
		return nil // none, or no ps: the postmaster's own death ends them
	}
	var pids []int
	for field := range strings.FieldsSeq(string(out)) {
		if n, err := strconv.Atoi(field); err == nil {
			pids = append(pids, n)
		}
	}
	return pids
}

// Pause stops all processes of the server by SIGSTOP: connections stay,
// nothing is answered.
func (p *Postgres) Pause() error {
	p.paused = true
	return p.signalAll(syscall.SIGSTOP)
}

// Resume undoes Pause. It does nothing to a server that is not paused.
func (p *Postgres) Resume() error {
	if !p.paused {
		return nil
	}
	p.paused = false
	return p.signalAll(syscall.SIGCONT)
}

func (p *Postgres) signalAll(s syscall.Signal) error {
	if !p.Running() {
		return fmt.Errorf("servers: postgres on %s is not running", p.Addr())
	}
	if err := p.cmd.Process.Signal(s); err != nil { // the postmaster first: it forks no more
		return err
	}
	for _, pid := range p.children() {
		_ = syscall.Kill(pid, s) // it may have ended
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
	p.Kill()
	_ = os.RemoveAll(p.dir) // a leftover in the temporary directory harms nobody
}
