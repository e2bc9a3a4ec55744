package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

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
