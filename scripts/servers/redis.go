// Package servers starts private, real Redis, PostgreSQL and PgBouncer
// processes on loopback for tests, benchmarks and fault injection, and a TCP
// proxy that injects the faults a network can.
//
// An in-process imitation has no eviction, no cluster errors, no script cache
// to lose and a Lua of its own, so what matters is tried on the real server.
// Redis 7.0 or newer is needed. Nothing here touches a process that it did not
// start, and on Linux the kernel kills every server together with the program
// that started it, however that program ends.
package servers

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	startTimeout    = 15 * time.Second // generous: a loaded two-core machine, a large AOF
	shutdownTimeout = 5 * time.Second
	portTries       = 5
	logName         = "redis.log"
)

// errAddrInUse says that another process took the port between our choosing
// it and the server's bind.
var errAddrInUse = errors.New("address already in use")

// Options change how a server is started. The zero value is ready to use.
type Options struct {
	// Args are further redis-server arguments, such as "--appendonly", "yes".
	// They come last, so they win over the defaults: nothing is persisted,
	// and DEBUG is allowed.
	Args []string

	// Env is added to the server's environment (a clock shim by LD_PRELOAD).
	Env []string

	// Dir is the working directory, which Stop then keeps.
	//
	// Defaults to a temporary directory, which Stop removes.
	Dir string

	// Program is the server to run.
	//
	// Defaults to $DELAYQ_REDIS_SERVER, else redis-server: a compatible
	// server such as valkey-server can take its place.
	Program string
}

// A Redis is one redis-server process on a loopback port. It keeps its port
// and directory over Kill, Shutdown and Restart. Its methods must not be
// called concurrently, except Addr, URL, Dir and Log.
type Redis struct {
	opts    Options
	dir     string
	tempDir bool
	port    int
	busPort int // 0 unless a cluster node

	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	paused bool
}

// StartRedis starts a server and returns when it accepts connections.
func StartRedis(opts Options) (*Redis, error) { return start(opts, false) }

func start(opts Options, cluster bool) (*Redis, error) {
	if opts.Program == "" {
		opts.Program = defaultProgram()
	}
	r := &Redis{opts: opts, dir: opts.Dir}
	if r.dir == "" {
		dir, err := os.MkdirTemp("", "delayq-redis-")
		if err != nil {
			return nil, err
		}
		r.dir, r.tempDir = dir, true
	}
	var err error
	for range portTries {
		if r.port, r.busPort, err = freePorts(cluster); err != nil {
			break
		}
		if err = r.launch(); !errors.Is(err, errAddrInUse) {
			break
		}
	}
	if err != nil {
		r.Stop()
		return nil, err
	}
	return r, nil
}

func defaultProgram() string {
	if p := os.Getenv("DELAYQ_REDIS_SERVER"); p != "" {
		return p
	}
	return "redis-server"
}

// freePorts returns a free loopback port, and for a cluster node a second one:
// Redis' own choice for the cluster bus, port + 10000, is often past 65535.
func freePorts(cluster bool) (port, bus int, err error) {
	if port, err = freePort(); err != nil || !cluster {
		return port, 0, err
	}
	bus, err = freePort()
	return port, bus, err
}

// freePort prefers ports below 32768, where Linux' own choices begin: the
// client's end of some connection could sit on one of those just when a killed
// server comes back to it.
func freePort() (int, error) {
	for range 20 {
		port := 10000 + rand.IntN(22768)
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			return port, l.Close()
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// launch starts the process on the ports already chosen and waits until it is ready.
func (r *Redis) launch() error {
	log, err := os.OpenFile(filepath.Join(r.dir, logName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own descriptor
	at, err := log.Seek(0, 2)
	if err != nil {
		return err
	}

	cmd := exec.Command(r.opts.Program, r.args()...)
	cmd.Env = append(os.Environ(), r.opts.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	exited := make(chan struct{})
	if err := run(cmd, exited); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	r.cmd, r.exited, r.paused = cmd, exited, false
	if err := r.waitReady(at); err != nil {
		r.Kill()
		return err
	}
	return nil
}

func (r *Redis) args() []string {
	args := []string{
		"--port", strconv.Itoa(r.port), "--bind", "127.0.0.1", "--dir", r.dir,
		"--daemonize", "no", "--save", "", "--appendonly", "no",
		"--enable-debug-command", "yes",
	}
	if r.busPort != 0 {
		args = append(
			args, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(r.busPort),
			// Low, but not so low that a busy machine looks like a dead node.
			"--cluster-node-timeout", "5000",
		)
	}
	return append(args, r.opts.Args...)
}

// run starts cmd and closes exited when it has ended. The kernel sends the
// parent-death signal when the thread that forked ends, not the process, so a
// goroutine holds that thread for the life of the child.
func run(cmd *exec.Cmd, exited chan<- struct{}) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log; a kill is not an error here
			close(exited)
		}
	}()
	return <-started
}

// waitReady waits for the server's own word in its log from byte at on. A
// connection would prove less: on a lost port race another server answers it.
func (r *Redis) waitReady(at int64) error {
	deadline := time.After(startTimeout)
	for {
		var ended bool
		select {
		case <-r.exited:
			ended = true
		case <-deadline:
			return fmt.Errorf("servers: %s not ready within %s:\n%s", r.opts.Program, startTimeout, r.Log())
		case <-time.After(2 * time.Millisecond):
		}
		text, err := os.ReadFile(filepath.Join(r.dir, logName))
		if err != nil {
			return err
		}
		switch text = text[min(int(at), len(text)):]; {
		case ended && bytes.Contains(bytes.ToLower(text), []byte(errAddrInUse.Error())):
			return fmt.Errorf("servers: port %d: %w", r.port, errAddrInUse)
		case ended:
			return fmt.Errorf("servers: %s ended at its start:\n%s", r.opts.Program, text)
		case bytes.Contains(text, []byte("Ready to accept connections")):
			return nil
		}
	}
}

// Addr is the server's host:port.
func (r *Redis) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(r.port)) }

// URL is the server's address as redis.ParseURL takes it.
func (r *Redis) URL() string { return "redis://" + r.Addr() }

// PID is the id of the current process; Restart changes it.
func (r *Redis) PID() int { return r.cmd.Process.Pid }

// Dir is the working directory, where an AOF or RDB file lies.
func (r *Redis) Dir() string { return r.dir }

// Log is everything the server has printed, over all its restarts.
func (r *Redis) Log() string {
	text, err := os.ReadFile(filepath.Join(r.dir, logName))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// Running reports whether the process lives; a paused one does.
func (r *Redis) Running() bool {
	if r.cmd == nil {
		return false
	}
	select {
	case <-r.exited:
		return false
	default:
		return true
	}
}

// Kill ends the process by SIGKILL, as a crash would, and waits for its end.
// What write(2) has taken survives in the page cache, so this is no power loss.
func (r *Redis) Kill() {
	if r.Running() {
		_ = r.cmd.Process.Kill() // fails only when it has just ended by itself
		<-r.exited
	}
}

// Shutdown ends the process by SIGTERM, so that it saves what it is told to
// save, and waits for its end. A server that does not end in time is killed.
func (r *Redis) Shutdown() error {
	if !r.Running() {
		return nil
	}
	if err := r.Resume(); err != nil {
		return err
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-r.exited:
		return nil
	case <-time.After(shutdownTimeout):
		r.Kill()
		return fmt.Errorf("servers: %s did not end within %s of SIGTERM", r.Addr(), shutdownTimeout)
	}
}

// Pause stops the process by SIGSTOP: connections stay, nothing is answered.
func (r *Redis) Pause() error { return r.signal(syscall.SIGSTOP, true) }

// Resume undoes Pause. It does nothing to a server that is not paused.
func (r *Redis) Resume() error {
	if !r.paused {
		return nil
	}
	return r.signal(syscall.SIGCONT, false)
}

func (r *Redis) signal(s syscall.Signal, paused bool) error {
	if !r.Running() {
		return fmt.Errorf("servers: %s is not running", r.Addr())
	}
	if err := r.cmd.Process.Signal(s); err != nil {
		return err
	}
	r.paused = paused
	return nil
}

// Restart starts the server again on its port and in its directory, with args
// added to its arguments from now on. A server that still runs is killed first.
func (r *Redis) Restart(args ...string) error {
	r.Kill()
	r.opts.Args = append(r.opts.Args[:len(r.opts.Args):len(r.opts.Args)], args...)
	return r.launch()
}

// Stop kills the server and removes its directory if that was a temporary one.
// It is the end of the server, and may be called twice.
func (r *Redis) Stop() {
	r.Kill()
	if r.tempDir {
		_ = os.RemoveAll(r.dir) // a leftover in the temporary directory harms nobody
	}
}
