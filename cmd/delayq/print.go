package main

import (
	"encoding/json"
	"io"
	"strconv"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"
)

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// printable quotes text that would upset a terminal or a table: ids may hold any bytes, even escape sequences.
func printable(s string) string {
	for _, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError || r == '"' {
			return strconv.Quote(s)
		}
	}
	if s == "" || s[0] == ' ' || s[len(s)-1] == ' ' {
		return strconv.Quote(s)
	}
	return s
}

func newTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// instant is a time for people: to the millisecond, with how far away it is.
func instant(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	const layout = "2006-01-02T15:04:05.000Z07:00"
	d := time.Until(t)
	if d < 0 {
		return t.Format(layout) + "  (" + brief(-d) + " ago)"
	}
	return t.Format(layout) + "  (in " + brief(d) + ")"
}

// brief is a duration in as many digits as a person reads.
func brief(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
