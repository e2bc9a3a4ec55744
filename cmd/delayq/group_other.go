//go:build !unix

package main

import (
	"os"
	"os/exec"
)

// Without process groups only the handler itself can be ended; its children outlive it.

func ownGroup(*exec.Cmd) {}

func termGroup(leader int) error {
	p, err := os.FindProcess(leader)
	if err != nil {
		return err
	}
	return p.Kill()
}

func killGroup(int) {}

func groupAlive(int) bool { return false }

func endedBy(*exec.Cmd) string { return "" }
