//go:build !linux

package servers

import (
	"os/exec"
	"strconv"
	"strings"
)

// processState is the one letter that says what a process does (T stopped, Z
// ended but not yet reaped), and its parent; 0 means that there is none.
func processState(pid int) (state byte, parent int) {
	out, err := exec.Command("ps", "-o", "state=,ppid=", "-p", strconv.Itoa(pid)).Output()
	fields := strings.Fields(string(out))
	if err != nil || len(fields) < 2 {
		return 0, 0
	}
	parent, _ = strconv.Atoi(fields[1]) // ps writes a number
	return fields[0][0], parent
}

// childrenOf are the processes whose parent is pid.
func childrenOf(pid int) (children []int) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		return nil // the postmaster's own end ends them
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) != 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(fields[0]); err == nil {
			children = append(children, child)
		}
	}
	return children
}
