//go:build unix

package main

import (
	"errors"
	"os/exec"
	"syscall"
)

// ownGroup starts cmd as the leader of a new process group, so that a signal reaches its children too, and so that
// Ctrl-C in our terminal reaches us alone: we drain, the handler keeps its time.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

func termGroup(leader int) error { return syscall.Kill(-leader, syscall.SIGTERM) }

// killGroup leaves nothing of the group. Usually there is nothing left.
func killGroup(leader int) {
	if syscall.Kill(-leader, syscall.SIGKILL) == nil {
		go reap(leader, 0) // aside, as a process in the middle of a disk operation can take its time to die
	}
}

// groupAlive tells whether anything of the group is left. The kernel gives a group's number to nobody else while it
// has a member.
func groupAlive(leader int) bool {
	reap(leader, syscall.WNOHANG)
	return syscall.Kill(-leader, 0) == nil
}

// reap collects orphans of the group. They are ours only when delayq is process 1, as in a container: nobody else would.
func reap(leader, options int) {
	for {
		pid, err := syscall.Wait4(-leader, nil, options, nil)
		if pid <= 0 && !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

// endedBy names the signal that ended a process, "" for one that exited.
func endedBy(cmd *exec.Cmd) string {
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return ws.Signal().String()
	}
	return ""
}
