package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// command finds what the runbook tells its reader to type: in the text, and in lines of their own.
var command = regexp.MustCompile("(?m)`delayq ([^`]+)`|^    delayq ([^#\n]+)")

// Whoever is woken at night must not be told to type what the command does not know.
func TestRunbookCommandsExist(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	found := command.FindAllStringSubmatch(string(text), -1)
	if len(found) < 30 {
		t.Fatalf("only %d commands were found", len(found))
	}
	for _, match := range found {
		args := strings.Fields(match[1] + match[2])
		cmd, rest, err := newRoot().Find(args)
		if err != nil || !cmd.HasParent() {
			t.Errorf("delayq %s: no such verb: %v", strings.Join(args, " "), err)
			continue
		}
		if err := cmd.ParseFlags(rest); err != nil {
			t.Errorf("delayq %s: %v", strings.Join(args, " "), err)
		}
	}
}
