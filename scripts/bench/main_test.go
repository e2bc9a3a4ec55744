package main

import "testing"

func TestOnlyTakesWholePartsOfNames(t *testing.T) {
	for _, c := range []struct {
		name, other string
		want        bool
	}{
		{"ledger/batch/cpu", "", true},
		{"ledger/batch/cpu", "ledger", true},
		{"ledger/batch/cpu", "ledger/batch", true},
		{"ledger/batch", "ledger/batch", true},
		{"ledger/batch", "ledger/batch/cpu", false},
		{"ledger/batch", "ledger/bat", false},
		{"depth", "ledger/depth", false},
	} {
		if got := within(c.name, c.other); got != c.want {
			t.Errorf("%q within %q: %v", c.name, c.other, got)
		}
	}
}
