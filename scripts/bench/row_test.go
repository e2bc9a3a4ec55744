package main

import (
	"math"
	"strings"
	"testing"
)

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name  string
		bar   bar
		value float64
		want  *bool
	}{
		{"at the limit of a cost", atMost(1.6), 1.6, new(true)},
		{"above the limit of a cost", atMost(1.6), 1.61, new(false)},
		{"at the limit of a rate", atLeast(6), 6, new(true)},
		{"below the limit of a rate", atLeast(6), 5.99, new(false)},
		{"not a number reaches no bar", atMost(1.6), math.NaN(), new(false)},
		{"no bar, no verdict", bar{}, 7, nil},
	} {
		got := c.bar.verdict(c.value)
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%s: %v judged %v", c.name, c.bar, c.value)
		}
	}
}

func TestMissed(t *testing.T) {
	slow := turns{delayq: []float64{20}, peer: []float64{10}}
	for _, c := range []struct {
		name string
		row  Row
		want bool
	}{
		{"a missed bar", compare("cpu", "us", slow, atMost(1.6)), true},
		{"a bar reached", compare("cpu", "us", slow, atMost(2)), false},
		{"a row without a bar", compare("cpu", "us", slow, bar{}), false},
		{"a row left out", leftOut("drain", "tasks/s", "no node"), false},
		{"a value over its bar", single("late", "ms", 21, atMost(20)), true},
	} {
		if got := c.row.missed(); got != c.want {
			t.Errorf("%s: missed = %v", c.name, got)
		}
	}
}

func TestTableSaysWhyARowIsMissing(t *testing.T) {
	var out strings.Builder
	printTable(&out, []Row{leftOut("drain/bullmq", "tasks/s", "no node"), single("idle", "calls/s", 1.98, atMost(2))})
	for _, want := range []string{"left out: no node", "1.98", "<= 2", "pass"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
