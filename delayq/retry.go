package delayq

import (
	"math/rand/v2"
	"time"
)

// A RetryPolicy gives the delay before the next attempt of a task that has failed so many times (1 or more). It should
// contain jitter, so that tasks that failed together do not come back together.
type RetryPolicy func(failed int) time.Duration

// DefaultRetry waits 10 s + 0..5, 30 s + 0..10, 2 min + 0..30 s, then 10 min + 0..2 min for each further attempt.
func DefaultRetry(failed int) time.Duration {
	steps := []struct{ base, jitter time.Duration }{
		{10 * time.Second, 5 * time.Second},
		{30 * time.Second, 10 * time.Second},
		{2 * time.Minute, 30 * time.Second},
		{10 * time.Minute, 2 * time.Minute},
	}
	s := steps[min(max(failed, 1), len(steps))-1]
	return s.base + rand.N(s.jitter+1)
}

// ExponentialRetry doubles from first up to most, with a jitter of 0 to a half on top.
func ExponentialRetry(first, most time.Duration) RetryPolicy {
	return func(failed int) time.Duration {
		d := first
		for i := 1; i < failed && d < most; i++ {
			d *= 2
		}
		d = max(min(d, most), time.Millisecond)
		return d + rand.N(d/2+1)
	}
}
