package servers

import "syscall"

// dieWithParent has the kernel kill the child when its parent is gone, so that
// a test binary that panics or is killed leaves no server behind. In a process
// group of its own it does not hear a Ctrl-C, which is its parent's to handle.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
