package servers

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A PgBouncer is one PgBouncer process that pools connections to a server by
// transaction: a session does not outlive a transaction, so nothing that is
// kept in one (SET, prepared statements, advisory locks) can be relied on.
type PgBouncer struct {
	dir    string
	port   int
	cred   *syscall.Credential // of the user it runs as, nil = ours
	cmd    *exec.Cmd
	exited chan struct{}
}

func pgBouncerProgram() (string, error) {
	if p, err := exec.LookPath("pgbouncer"); err == nil {
		return p, nil
	}
	if _, err := os.Stat("/usr/sbin/pgbouncer"); err == nil { // not on every user's PATH
		return "/usr/sbin/pgbouncer", nil
	}
	return "", errors.New("servers: pgbouncer is not on the PATH")
}

// StartPgBouncer starts one in front of a server, with at most poolSize
// connections to each database.
func StartPgBouncer(target *Postgres, poolSize int) (*PgBouncer, error) {
	program, err := pgBouncerProgram()
	if err != nil {
		return nil, err
	}
	b := &PgBouncer{}
	if b.cred, err = unprivileged(); err != nil {
		return nil, err
	}
	if b.dir, err = ownFolder("delayq-pgbouncer-", b.cred); err != nil {
		return nil, err
	}
	for range portTries {
		if b.port, err = freePort(); err != nil {
			break
		}
		ini := filepath.Join(b.dir, "pgbouncer.ini")
		text := fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%d user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
server_login_retry = 1
`, target.port, b.port, poolSize)
		if err = os.WriteFile(ini, []byte(text), 0o644); err != nil { //nolint:gosec // another user reads it, and it holds no secret
			break
		}
		if err = b.launch(program, ini); !errors.Is(err, errAddrInUse) {
			break
		}
	}
	if err != nil {
		b.Stop()
		return nil, err
	}
	return b, nil
}

func (b *PgBouncer) launch(program, ini string) error {
	log, err := os.Create(b.logPath())
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(program, ini)
	cmd.Dir = b.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	cmd.SysProcAttr.Credential = b.cred
	exited := make(chan struct{})
	if err := run(cmd, exited); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	b.cmd, b.exited = cmd, exited
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		ended := false
		select {
		case <-exited:
			ended = true
		default:
		}
		text, err := os.ReadFile(b.logPath())
		switch {
		case err != nil:
			return err
		case ended && bytes.Contains(bytes.ToLower(text), []byte(errAddrInUse.Error())):
			return fmt.Errorf("servers: port %d: %w", b.port, errAddrInUse)
		case ended:
			return fmt.Errorf("servers: pgbouncer ended at its start:\n%s", text)
		case bytes.Contains(text, []byte("process up")):
			return nil
		}
	}
	return fmt.Errorf("servers: pgbouncer not ready in time:\n%s", b.Log())
}

func (b *PgBouncer) logPath() string { return filepath.Join(b.dir, "pgbouncer.log") }

// Addr is its host:port.
func (b *PgBouncer) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(b.port)) }

// URL is the address of a database through the pool; empty means the one that
// is always there.
func (b *PgBouncer) URL(database string) string {
	if database == "" {
		database = "postgres"
	}
	return postgresURL(b.Addr(), database)
}

// PID is the id of its process.
func (b *PgBouncer) PID() int { return b.cmd.Process.Pid }

// Log is everything that it has printed.
func (b *PgBouncer) Log() string {
	text, err := os.ReadFile(b.logPath())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// Stop kills it and removes its folder. It may be called twice.
func (b *PgBouncer) Stop() {
	if b.cmd != nil {
		_ = b.cmd.Process.Kill() // it may have ended
		<-b.exited
	}
	_ = os.RemoveAll(b.dir) // a leftover in the temporary directory harms nobody
}
