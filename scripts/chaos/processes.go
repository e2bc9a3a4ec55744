package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/delayq/toolkit/scripts/servers"
)

// A process is this program, playing a part. Only its own harness signals it, by the handle it was started with.
type process struct {
	roleConfig
	j      *journal // the nemesis'
	cmd    *exec.Cmd
	exited chan struct{}
	killed bool
	paused bool

	toPostgres *servers.Proxy // of a scenario that gives each consumer its own
}

// spawn starts a process.
func spawn(c roleConfig, j *journal) (*process, error) {
	file := c.file()
	raw, err := json.Marshal(c)
	if err == nil {
		err = os.WriteFile(file, raw, 0o600)
	}
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(c.Dir, c.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the child has its own descriptor
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{roleConfig: c, j: j, cmd: exec.Command(self), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), roleEnv+"="+file)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = dieWithParent()
	started := make(chan error)
	go func() { // the parent's death is that of the thread, so one is kept for the child's life
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // its exit status is asked for later
			close(p.exited)
		}
	}()
	return p, <-started
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// signal writes the event first: from then on the process may be what the signal makes of it.
func (p *process) signal(kind string, s syscall.Signal) {
	p.j.write(event{Kind: kind, PID: p.pid(), Note: p.Name})
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.j.write(event{Kind: evFault, Note: "signal: " + err.Error()})
	}
}

func (p *process) kill() {
	if p.running() {
		p.killed = true
		p.signal(evKill, syscall.SIGKILL)
		<-p.exited
	}
}

func (p *process) pause() {
	p.paused = true
	p.signal(evPause, syscall.SIGSTOP)
}

// resume is written down after the signal: until then the process did not run.
func (p *process) resume() {
	if p.paused {
		p.paused = false
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		p.j.write(event{Kind: evResume, PID: p.pid(), Note: p.Name})
	}
}

// terminate asks the process to end and says how it did (I13).
func (p *process) terminate(grace time.Duration) error {
	if !p.running() {
		return p.how()
	}
	p.resume()
	for until := time.Now().Add(5 * time.Second); p.running() && time.Now().Before(until); time.Sleep(time.Millisecond) {
		if _, err := os.Stat(p.file()); err != nil {
			break // it catches the signal
		}
	}
	p.signal(evTerm, syscall.SIGTERM)
	select {
	case <-p.exited:
		return p.how()
	case <-time.After(grace):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // its stacks go to its log
		select {
		case <-p.exited:
		case <-time.After(time.Second):
			p.kill()
		}
		return fmt.Errorf("%s did not end within %s of SIGTERM", p.Name, grace)
	}
}

// how is nil for a process that ended well, or was killed by us or by its own poison.
func (p *process) how() error {
	state := p.cmd.ProcessState
	status, ok := state.Sys().(syscall.WaitStatus)
	if state.Success() || p.killed || ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("%s ended with %s: %s", p.Name, state, p.lastWords())
}

func (p *process) lastWords() string {
	text, err := os.ReadFile(filepath.Join(p.Dir, p.Name+".log"))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}
