//go:build !linux

package servers

import "syscall"

// dieWithParent changes nothing where the kernel has no parent-death signal:
// there only Stop ends a server.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
