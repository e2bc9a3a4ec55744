package main

import (
	"math"
	"testing"
)

func TestRatioIsTheMedianOfTheTurns(t *testing.T) {
	var got turns
	got.add(15, 10)
	got.add(90, 10) // a neighbour woke up
	got.add(14, 10)
	if r := got.ratio(); r != 1.5 {
		t.Errorf("ratio %v, want 1.5", r)
	}
}

func TestMedian(t *testing.T) {
	if m := median([]float64{4, 1, 3, 2}); m != 2.5 {
		t.Errorf("median of four %v, want 2.5", m)
	}
	if m := median(nil); !math.IsNaN(m) {
		t.Errorf("median of nothing %v, want NaN", m)
	}
}

func TestPercentile(t *testing.T) {
	thousand := make([]float64, 1000)
	for i := range thousand {
		thousand[i] = float64(i + 1)
	}
	for p, want := range map[float64]float64{0: 1, 50: 500, 99: 990, 99.9: 999, 100: 1000} {
		if got := percentile(thousand, p); got != want {
			t.Errorf("p%v = %v, want %v", p, got, want)
		}
	}
	if got := percentile([]float64{7}, 99); got != 7 {
		t.Errorf("p99 of one value %v, want it", got)
	}
}
