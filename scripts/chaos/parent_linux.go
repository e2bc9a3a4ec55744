package main

import "syscall"

// dieWithParent has the kernel kill a child whose parent has died: a stopped one could not end by itself.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
