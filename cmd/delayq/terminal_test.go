package main

import (
	"strings"
	"testing"
)

func TestLiveRedrawsInPlace(t *testing.T) {
	t.Setenv("TTY_FORCE", "1") // or lipgloss leaves out what only a terminal understands
	t.Setenv("TERM", "xterm")
	var out strings.Builder
	l := live{w: &out}
	l.draw("a\nb\n")
	out.Reset()
	if _, err := l.Write([]byte("log\n")); err != nil {
		t.Fatal(err)
	}
	// Two lines up, all below erased, the log line, and the block again.
	if got, want := out.String(), "\x1b[2A\r\x1b[Jlog\na\nb\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	l.draw("")
	out.Reset()
	l.draw("c\n")
	if got := out.String(); got != "c\n" {
		t.Errorf("after an empty block: got %q", got)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"cancel-order:42":    "cancel-order:42",
		"世界":                 "世界",
		"}{ %s":              "}{ %s",
		"":                   `""`,
		" a":                 `" a"`,
		`say "hi"`:           `"say \"hi\""`,
		"two\nlines":         `"two\nlines"`,
		"\x1b[31mred":        `"\x1b[31mred"`,
		"\u202Ereversed":     `"\u202ereversed"`,
		"\xff":               `"\xff"`,
		"zero\u200Bwidth":    `"zero\u200bwidth"`,
		"tab\tand\u00a0nbsp": `"tab\tand\u00a0nbsp"`,
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %s, want %s", in, got, want)
		}
	}
}
