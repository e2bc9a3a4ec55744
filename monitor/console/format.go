package console

import (
	"encoding/base64"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// plainSegment is what stands in an address as it is. No "." at its start: browsers take ".." and "%2e%2e" for the folder above.
var plainSegment = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._:-]*$`)

// segment puts a name of any bytes into one part of an address: as it is, or as "~" and base64url.
func segment(name string) string {
	if plainSegment.MatchString(name) {
		return name
	}
	return "~" + base64.RawURLEncoding.EncodeToString([]byte(name))
}

// unsegment is the name that a part of an address stands for.
func unsegment(part string) (string, bool) {
	code, encoded := strings.CutPrefix(part, "~")
	if !encoded {
		return part, part != ""
	}
	raw, err := base64.RawURLEncoding.DecodeString(code)
	return string(raw), err == nil && len(raw) > 0
}

// shown is text for a page: as it is, or quoted when a reader could not see what it is. Ids may hold any bytes.
func shown(s string) string {
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

// readable is text of several lines, with what cannot be seen made visible.
func readable(s string) string {
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(s, "\uFFFD") {
		switch {
		case r == '\n' || r == '\t' || unicode.IsPrint(r):
			b.WriteRune(r)
		case r == '\r':
		default:
			fmt.Fprintf(&b, "\\u%04x", r)
		}
	}
	return b.String()
}

// number is a whole number with its digits in groups.
func number[N int | int64](n N) string {
	s := strconv.FormatInt(int64(n), 10)
	sign := ""
	if n < 0 {
		sign, s = "−", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + text("format.group") + s[i:]
	}
	return sign + s
}

// rate is a number a second; unknown below 0.
func rate(v float64) string {
	switch {
	case v < 0:
		return text("format.unknown")
	case v == 0:
		return "0"
	case v < 0.1:
		return text("format.less", "0.1")
	case v < 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return number(int64(math.Round(v)))
}

// span is a duration in as many digits as a person reads.
func span(d time.Duration) string {
	sign := ""
	if d < 0 {
		sign, d = "−", -d
	}
	unit := func(n time.Duration, key string) string { return text("format."+key, int64(n)) }
	two := func(big time.Duration, a string, small time.Duration, b string) string {
		s := unit(d/big, a)
		if rest := d % big / small; rest > 0 {
			s += " " + unit(rest, b)
		}
		return sign + s
	}
	switch {
	case d == math.MaxInt64:
		return text("format.beyond")
	case d == 0:
		return "0"
	case d < time.Millisecond:
		return text("format.less", unit(1, "ms"))
	case d < time.Second:
		return sign + unit(d.Round(time.Millisecond)/time.Millisecond, "ms")
	case d < 10*time.Second:
		return sign + text("format.s1", d.Seconds())
	case d < time.Minute:
		return sign + unit(d/time.Second, "s")
	case d < time.Hour:
		return two(time.Minute, "min", time.Second, "s")
	case d < 24*time.Hour:
		return two(time.Hour, "h", time.Minute, "min")
	}
	return two(24*time.Hour, "d", time.Hour, "h")
}

// ago is how far away an instant is.
func ago(d time.Duration) string {
	switch {
	case d < -time.Second:
		return text("format.ago", span(-d))
	case d > time.Second:
		return text("format.in", span(d))
	}
	return text("format.just_now")
}

// quantile is a span, of which there may be none.
func quantile(d time.Duration) string {
	if d < 0 {
		return text("format.unknown")
	}
	if d == math.MaxInt64 {
		return text("format.beyond")
	}
	return "≤ " + span(d)
}

func bytesOf(n int64) string {
	switch {
	case n < 0:
		return text("format.unknown")
	case n < 1<<10:
		return number(n) + " B"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
}
