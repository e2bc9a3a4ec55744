package main

import (
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

var noon = time.Date(2030, 1, 2, 12, 0, 0, 0, time.UTC)

func after(ms int) time.Time { return noon.Add(time.Duration(ms) * time.Millisecond) }

func TestBooksSettleAnOrderOnce(t *testing.T) {
	b := newBooks()
	for _, id := range []string{"paid", "expired", "raced", "void", "open"} {
		b.place(id, after(1000))
	}
	b.void("void")
	if !b.pay("paid", after(500)) {
		t.Error("an open order cannot be paid")
	}
	b.cancelled("paid", delayq.Cancelled)
	if done, known := b.expire("expired", after(1000), after(1002), false); !done || !known {
		t.Error("an open order cannot be expired")
	}
	if b.pay("expired", after(1003)) {
		t.Error("an expired order was paid")
	}
	b.pay("raced", after(999))
	if done, known := b.expire("raced", after(1000), after(1004), false); done || !known {
		t.Error("a paid order was expired")
	}
	b.cancelled("raced", delayq.Running)
	if done, _ := b.expire("void", after(1000), after(1000), false); done {
		t.Error("an order that was never placed was expired")
	}
	if _, known := b.expire("stranger", after(1000), after(1000), false); known {
		t.Error("the books know a stranger")
	}
	if n := b.unpaid(); n != 1 {
		t.Errorf("%d unpaid, want 1", n)
	}
	want := account{
		Placed: 4, Paid: 2, Expired: 1, Cancelled: 1, Lost: 1, StaleRefused: 2,
		Lateness: lateness{P50: 2, P99: 4, Max: 4},
	}
	if got := b.account(); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestBooksFindEarlyRuns(t *testing.T) {
	tests := []struct {
		name       string
		due, began time.Time
		early      int
	}{
		{"at the due time", after(1000), after(1000), 0},
		{"before the due time the task told", after(1001), after(1000), 1},
		{"before the time the shop asked for", after(900), after(950), 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBooks()
			b.place("a", after(1000))
			b.expire("a", tt.due, tt.began, false)
			if got := b.account().Early; got != tt.early {
				t.Errorf("%d early, want %d", got, tt.early)
			}
		})
	}
}

func TestBooksCountASecondRunWithoutACause(t *testing.T) {
	b := newBooks()
	b.place("a", after(1000))
	b.expire("a", after(1000), after(1000), false)
	b.expire("a", after(1000), after(1005), false)
	if got := b.account(); got.DuplicateEffects != 1 || got.Expired != 1 {
		t.Errorf("got %+v", got)
	}
}

func TestBooksTakeLatenessFromTheFirstRun(t *testing.T) {
	b := newBooks()
	b.place("a", after(0))
	b.expire("a", after(0), after(7), false)
	b.expire("a", after(0), after(30_000), true) // its lease had run out
	if got := b.account(); got.Lateness.Max != 7 || got.StaleRefused != 1 {
		t.Errorf("got %+v", got)
	}
}

func TestQuantile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, tt := range []struct {
		sorted []float64
		q      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{3}, 0.5, 3},
		{[]float64{1, 2}, 0.5, 1},
		{hundred, 0.99, 99},
		{hundred, 1, 100},
		{[]float64{1.23456}, 1, 1.235},
	} {
		if got := quantile(tt.sorted, tt.q); got != tt.want {
			t.Errorf("quantile(%v values, %v) = %v, want %v", len(tt.sorted), tt.q, got, tt.want)
		}
	}
}

// With a database the effects are those that were committed there.
func TestBooksOfADatabase(t *testing.T) {
	b := newBooks()
	for _, id := range []string{"paid", "expired", "both", "late", "open", "doubted"} {
		b.place(id, after(1000))
	}
	b.settled("paid", paid, after(500))
	b.learn("paid", paid) // it is known already
	b.settled("expired", expired, after(1000))
	b.delivered("expired", after(1000), after(1003), false)
	b.settled("both", paid, after(999))
	b.settled("both", expired, after(1000))
	b.learn("late", expired)
	b.settled("late", expired, after(1000))
	b.delivered("late", after(1000), after(1001), true)
	b.void("doubted")
	b.settled("doubted", paid, after(700)) // and was placed after all
	if b.has("stranger") || !b.has("open") {
		t.Error("the books know a stranger, or not their own")
	}
	if got := b.open(); len(got) != 1 || got[0] != "open" {
		t.Errorf("open are %q", got)
	}
	want := account{
		Placed: 6, Paid: 3, Expired: 2, Lost: 1, DuplicateEffects: 1, StaleRefused: 1, Lateness: lateness{P50: 1, P99: 3, Max: 3},
	}
	if got := b.account(); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// A clock that is known to be ahead explains a start that is early by another.
func TestBooksAllowForTheClocks(t *testing.T) {
	b := newBooks()
	b.slack = 2 * time.Millisecond
	for id, began := range map[string]int{"within": 998, "beyond": 997} {
		b.place(id, after(1000))
		b.delivered(id, after(1000), after(began), false)
	}
	if got := b.account().Early; got != 1 {
		t.Errorf("%d early, want 1", got)
	}
}
