// Package reconciler repairs Redis from the ledger, in both directions, for queues that have one.
//
//	r, err := reconciler.New(q, reconciler.Config{})
//	err = r.Run(ctx, time.Minute)                 // a server
//	report, err := r.Slice(ctx, 50*time.Second)   // a function that a schedule invokes
//	report, err := r.Pass(ctx, nil)               // a full pass, by hand
//
// A pass has three phases. Strays: what is in Redis in pieces is removed, and tasks from before the queue had a ledger are
// adopted. Ledger: every open task that is due within the horizon must be in Redis at its revision; what is missing is put
// there, what is old is moved. Redis: every task in Redis must be open in the ledger; what has ended is dropped, what the
// ledger does not know is quarantined among the dead letters, and never run.
//
// Every step is safe at any time: beside live consumers, beside other reconcilers, and cut off in the middle. What is written
// to Redis carries the revision it was read at, and Redis keeps the newer one, so a step that comes late changes nothing. No
// step holds a lock or a session, so connections may be pooled by transaction.
package reconciler
