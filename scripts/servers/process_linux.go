package servers

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// processState is the one letter that says what a process does (T stopped, Z
// ended but not yet reaped), and its parent; 0 means that there is none. It is
// read from /proc, as small containers have no ps.
func processState(pid int) (state byte, parent int) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0
	}
	at := strings.LastIndex(string(stat), ") ") // a name may hold anything
	if at < 0 {
		return 0, 0
	}
	fields := strings.Fields(string(stat[at+2:]))
	if len(fields) < 2 {
		return 0, 0
	}
	parent, _ = strconv.Atoi(fields[1]) // the kernel writes a number
	return fields[0][0], parent
}

// childrenOf are the processes whose parent is pid.
func childrenOf(pid int) (children []int) {
	found, _ := filepath.Glob("/proc/[0-9]*") // the pattern is right
	for _, dir := range found {
		child, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		if _, parent := processState(child); parent == pid {
			children = append(children, child)
		}
	}
	return children
}
