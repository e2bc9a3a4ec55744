package main

import (
	"math"
	"slices"
	"sync"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// books are the shop's own records: what was ordered, what became of it, and every effect with its time. The summary
// comes from here, so that the queue is judged by records it has no hand in. All times are by the clock of Redis.
type books struct {
	mu     sync.Mutex
	orders map[string]*order // by the id of the task that cancels the order
	slack  time.Duration     // how far the clock that starts tasks may be ahead of the one that times them here
}

// order is one order. It is unpaid until its first effect.
type order struct {
	notBefore  time.Time // the earliest instant at which it may be expired
	void       bool      // its task could not be enqueued, so it was never placed
	effects    []effect  // one, if all is well
	deliveries []delivery
	answer     *delayq.Cancellation // what the queue said when the shop cancelled the task of a paid order
}

type effect struct {
	kind   string // paid or expired
	at     time.Time
	learnt bool // from the order itself, as nobody had told yet
}

// delivery is one run of an order's task.
type delivery struct {
	due, began time.Time
	refused    bool // the order was settled already: nothing was done
}

const (
	unpaid  = "open"
	paid    = "paid"
	expired = "expired"
)

func newBooks() *books { return &books{orders: map[string]*order{}} }

// place opens an order. It comes before the task is enqueued: the task may run before the enqueue call has returned.
func (b *books) place(id string, notBefore time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.orders[id] = &order{notBefore: notBefore}
}

// void takes an order back whose task could not be enqueued.
func (b *books) void(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.orders[id].void = true
}

// pay settles an order, unless it has expired: then the customer is too late.
func (b *books) pay(id string, at time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.orders[id].settle(paid, at)
}

// cancelled notes what the queue said about the task of a paid order.
func (b *books) cancelled(id string, answer delayq.Cancellation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.orders[id].answer = &answer
}

// expire is what the task of an unpaid order does. known is false for a task that is none of the shop's.
// redelivered says that an earlier lease ran out, which names the cause of a second run; without it, a run of a task
// that has expired its order already is the effect a second time, which a shop without these books would have had.
func (b *books) expire(id string, due, began time.Time, redelivered bool) (done, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o, known := b.orders[id]
	if !known {
		return false, false
	}
	done = o.settle(expired, began)
	if !done && !o.void && !redelivered && o.effects[0].kind == expired {
		o.effects = append(o.effects, effect{kind: expired, at: began})
	}
	o.deliveries = append(o.deliveries, delivery{due: due, began: began, refused: !done})
	return done, true
}

func (o *order) settle(kind string, at time.Time) bool {
	if o.void || len(o.effects) > 0 {
		return false
	}
	o.effects = append(o.effects, effect{kind: kind, at: at})
	return true
}

// The orders of a shop with a database are in its tables, and these enter what was committed there.

// settled enters an effect, whatever was there before: more than one is what the books are to find.
func (b *books) settled(id, kind string, at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.orders[id]
	o.void = false // it was placed after all
	if n := len(o.effects); n == 1 && o.effects[0].learnt && o.effects[0].kind == kind {
		o.effects = nil // the same one, told at last
	}
	o.effects = append(o.effects, effect{kind: kind, at: at})
}

// learn enters an effect of which nobody was told.
func (b *books) learn(id, kind string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o := b.orders[id]; len(o.effects) == 0 {
		o.effects = append(o.effects, effect{kind: kind, learnt: true})
	}
}

// has reports whether the shop has ever tried to place the order.
func (b *books) has(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.orders[id] != nil
}

// delivered enters a run of an order's task.
func (b *books) delivered(id string, due, began time.Time, refused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.orders[id]
	o.deliveries = append(o.deliveries, delivery{due: due, began: began, refused: refused})
}

// open lists the orders that are neither paid nor expired.
func (b *books) open() []string {
	var ids []string
	for id, status := range b.statuses() {
		if status == unpaid {
			ids = append(ids, id)
		}
	}
	return ids
}

// statuses are those of all orders that were placed.
func (b *books) statuses() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make(map[string]string, len(b.orders))
	for id, o := range b.orders {
		switch {
		case o.void:
		case len(o.effects) == 0:
			all[id] = unpaid
		default:
			all[id] = o.effects[0].kind
		}
	}
	return all
}

// unpaid counts the orders that are neither paid nor expired.
func (b *books) unpaid() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, o := range b.orders {
		if !o.void && len(o.effects) == 0 {
			n++
		}
	}
	return n
}

// lateness is in milliseconds, from the due time to the start of the handler.
type lateness struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// account is what the books add up to.
type account struct {
	Placed           int      `json:"placed"`
	Paid             int      `json:"paid"`
	Expired          int      `json:"expired"`
	Cancelled        int      `json:"cancelled"`         // tasks of paid orders that never ran
	Lost             int      `json:"lost"`              // neither paid nor expired
	Early            int      `json:"early"`             // runs before their time
	DuplicateEffects int      `json:"duplicate_effects"` // effects beyond one an order
	StaleRefused     int      `json:"stale_refused"`     // runs that found their order settled, and left it alone
	Lateness         lateness `json:"lateness_ms"`
}

func (b *books) account() account {
	b.mu.Lock()
	defer b.mu.Unlock()
	var a account
	var late []float64
	for _, o := range b.orders {
		if !o.void {
			a.Placed++
		}
		if o.answer != nil && (*o.answer == delayq.Cancelled || *o.answer == delayq.AlreadyCancelled) {
			a.Cancelled++ // already: an earlier try whose reply was lost
		}
		switch {
		case len(o.effects) == 0 && !o.void:
			a.Lost++
		case len(o.effects) > 0 && o.effects[0].kind == paid:
			a.Paid++
		case len(o.effects) > 0:
			a.Expired++
		}
		a.DuplicateEffects += max(0, len(o.effects)-1)
		for i, d := range o.deliveries {
			if began := d.began.Add(b.slack); began.Before(d.due) || began.Before(o.notBefore) {
				a.Early++
			}
			if d.refused {
				a.StaleRefused++
			}
			if i == 0 { // a retry has a due time of its own
				late = append(late, float64(d.began.Sub(d.due))/float64(time.Millisecond))
			}
		}
	}
	slices.Sort(late)
	a.Lateness = lateness{P50: quantile(late, 0.50), P99: quantile(late, 0.99), Max: quantile(late, 1)}
	return a
}

// quantile of sorted values by nearest rank, to the microsecond.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := max(1, int(math.Ceil(q*float64(len(sorted)))))
	return math.Round(sorted[rank-1]*1000) / 1000
}
