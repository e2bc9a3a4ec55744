package delayqtest

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// Want describes waiting tasks. Fields that are not set match everything; the zero Want matches any task.
type Want struct {
	ID   string
	Type string
	// DueIn is how far the due time is from now, by the queue's clock, give or take Within. Both zero: at any time.
	DueIn time.Duration
	// Within defaults to one second.
	Within time.Duration
	// Payload says whether a payload is right. Optional.
	Payload func(payload []byte) bool
}

// RequireEnqueued ends the test unless a task as wanted waits in q, due or not yet, and returns the one that is due first. The
// message of a failure lists what q holds, without payloads.
func RequireEnqueued(t testing.TB, q *delayq.Queue, w Want) *delayq.Info {
	t.Helper()
	all := look(t, q)
	if found := all.matching(w); len(found) > 0 {
		return &found[0]
	}
	t.Fatalf("delayqtest: no task waits %s; %s", w, all)
	return nil
}

// RequireNotEnqueued ends the test if a task as described waits in q. With the zero Want nothing at all may wait.
func RequireNotEnqueued(t testing.TB, q *delayq.Queue, w Want) {
	t.Helper()
	all := look(t, q)
	if found := all.matching(w); len(found) > 0 {
		t.Fatalf("delayqtest: a task waits %s, %q; %s", w, found[0].ID, all)
	}
}

// A content is what a queue holds.
type content struct {
	queue string
	now   time.Time
	tasks []delayq.Info
}

func look(t testing.TB, q *delayq.Queue) content {
	t.Helper()
	ctx := context.Background()
	stats, err := q.Stats(ctx)
	if err != nil {
		t.Fatalf("delayqtest: %v", err)
	}
	all := content{queue: q.Name(), now: stats.Now}
	for _, state := range []delayq.State{delayq.StateDue, delayq.StatePending, delayq.StateProcessing, delayq.StateDead} {
		o := delayq.ListOptions{State: state, Limit: 500}
		for {
			page, err := q.List(ctx, o)
			if err != nil {
				t.Fatalf("delayqtest: %v", err)
			}
			all.tasks = append(all.tasks, page.Tasks...)
			if o.Cursor = page.Next; o.Cursor == "" {
				break
			}
		}
	}
	return all
}

func (c content) matching(w Want) (found []delayq.Info) {
	for _, in := range c.tasks {
		off := in.Due.Sub(c.now) - w.DueIn
		switch {
		case in.State != delayq.StatePending && in.State != delayq.StateDue:
		case w.ID != "" && in.ID != w.ID:
		case w.Type != "" && in.Type != w.Type:
		case w.timed() && off.Abs() > w.within():
		case w.Payload != nil && !w.Payload(in.Payload):
		default:
			found = append(found, in)
		}
	}
	return found
}

func (w Want) timed() bool           { return w.DueIn != 0 || w.Within != 0 }
func (w Want) within() time.Duration { return cmp.Or(w.Within, time.Second) }

// String says what is wanted, to be read after "waits".
func (w Want) String() string {
	var parts []string
	if w.ID != "" {
		parts = append(parts, fmt.Sprintf("with id %q", w.ID))
	}
	if w.Type != "" {
		parts = append(parts, fmt.Sprintf("of type %q", w.Type))
	}
	if w.timed() {
		parts = append(parts, fmt.Sprintf("due in %s give or take %s", w.DueIn, w.within()))
	}
	if w.Payload != nil {
		parts = append(parts, "with a payload as asked for")
	}
	if len(parts) == 0 {
		return "at all"
	}
	return strings.Join(parts, ", ")
}

const mostListed = 50

func (c content) String() string {
	if len(c.tasks) == 0 {
		return fmt.Sprintf("queue %s is empty", c.queue)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "queue %s holds %d:", c.queue, len(c.tasks))
	for i, in := range c.tasks {
		if i == mostListed {
			fmt.Fprintf(&b, "\n  and %d more", len(c.tasks)-i)
			break
		}
		fmt.Fprintf(&b, "\n  %-10s id %q, type %q, payload of %d bytes", in.State, in.ID, in.Type, len(in.Payload))
		switch in.State {
		case delayq.StatePending, delayq.StateDue:
			fmt.Fprintf(&b, ", due in %s", in.Due.Sub(c.now).Round(time.Millisecond))
		}
		if in.Failed > 0 {
			fmt.Fprintf(&b, ", failed %d times, the last time with %q", in.Failed, in.Reason)
		}
	}
	return b.String()
}
