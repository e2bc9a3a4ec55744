package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// num is a number with its noun.
func num[N int | int64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// span is a duration in as many digits as a person reads.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < 48*time.Hour:
		return d.Round(time.Second).String()
	}
	return num(int64(d/(24*time.Hour)), "day", "days")
}

// ahead says of a difference of clocks which way it goes.
func ahead(d time.Duration) string {
	if d < 0 {
		return span(-d) + " behind"
	}
	return span(d) + " ahead of"
}

func percent(part, whole int64) string {
	return fmt.Sprintf("%.0f %%", 100*float64(part)/float64(max(whole, 1)))
}

// few lists names, the first few of many. They come from tasks, so what a terminal would obey is quoted.
func few(names []string) string {
	const most = 5
	var shown []string
	for _, name := range names[:min(len(names), most)] {
		quoted := strconv.Quote(name)
		if quoted != `"`+name+`"` {
			name = quoted
		}
		if len(name) > 60 {
			name = strconv.Quote(name[:50] + "...")
		}
		shown = append(shown, name)
	}
	text := strings.Join(shown, ", ")
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// byNumber are the keys of a count, the most frequent first.
func byNumber(counts map[string]int64) []string {
	names := slices.Sorted(maps.Keys(counts))
	slices.SortStableFunc(names, func(a, b string) int { return int(min(max(counts[b]-counts[a], -1), 1)) })
	return names
}

// counted lists names with their numbers, the most frequent first.
func counted(counts map[string]int64) string {
	var parts []string
	for _, name := range byNumber(counts) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[name], name))
	}
	return few(parts)
}
