package main

import (
	"math"
	"slices"
)

// turns holds what delayq and a peer measured, one value each a turn.
type turns struct{ delayq, peer []float64 }

func (t *turns) add(delayq, peer float64) {
	t.delayq = append(t.delayq, delayq)
	t.peer = append(t.peer, peer)
}

// ratio is the median of the turns' ratios: a neighbour's burst spoils one turn, not the row.
func (t turns) ratio() float64 {
	ratios := make([]float64, len(t.delayq))
	for i := range ratios {
		ratios[i] = t.delayq[i] / t.peer[i]
	}
	return median(ratios)
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// percentile is the smallest value that at least p percent of the sorted values do not exceed.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	rank := int(math.Ceil(p * float64(len(sorted)) / 100))
	return sorted[max(rank, 1)-1]
}
