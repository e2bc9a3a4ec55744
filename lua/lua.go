// Package lua holds the queue's scripts. One script is one verb is one file; README.md describes the keys, the state machine
// and the codes. A script's header lists every KEYS and ARGV slot it reads; a test holds it to that.
package lua

import (
	"embed"
	"fmt"
	"regexp"
)

//go:embed *.lua include/*.lua
var files embed.FS

var include = regexp.MustCompile(`(?m)^--- @include "([a-z_]+)"\n`)

// The scripts, with their includes expanded.
var (
	Init       = load("init")
	Enqueue    = load("enqueue")
	Lease      = load("lease")
	Extend     = load("extend")
	Ack        = load("ack")
	Retry      = load("retry")
	Release    = load("release")
	Bury       = load("bury")
	Cancel     = load("cancel")
	Reschedule = load("reschedule")
	Replay     = load("replay")
	Purge      = load("purge")
	Stats      = load("stats")
	Get        = load("get")
	List       = load("list")
	Audit      = load("audit")
	Beat       = load("beat")
	Consumers  = load("consumers")

	Put        = load("put")
	Drop       = load("drop")
	Quarantine = load("quarantine")
	Check      = load("check")
	Mend       = load("mend")
	Nudge      = load("nudge")
)

// load panics on a missing file: that is a mistake of the build, not of a caller.
func load(verb string) string {
	text := include.ReplaceAllStringFunc(read(verb+".lua"), func(line string) string {
		return read("include/" + include.FindStringSubmatch(line)[1] + ".lua")
	})
	if sabotage != "" {
		text = seeded(verb, text)
	}
	return text
}

func read(name string) string {
	b, err := files.ReadFile(name)
	if err != nil {
		panic(fmt.Sprintf("lua: %v", err))
	}
	return string(b)
}
