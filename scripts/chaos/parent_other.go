//go:build !linux

package main

import "syscall"

// dieWithParent needs Linux; elsewhere children of a killed harness end with their servers.
func dieWithParent() *syscall.SysProcAttr { return nil }
