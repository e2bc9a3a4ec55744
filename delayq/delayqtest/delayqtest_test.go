package delayqtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/delayqtest"
)

func enqueue(t *testing.T, q *delayq.Queue, id, typ string, opts ...delayq.Option) {
	t.Helper()
	if _, err := q.Enqueue(t.Context(), delayq.Task{ID: id, Type: typ, Payload: []byte("secret")}, opts...); err != nil {
		t.Fatal(err)
	}
}

var errNoLuck = errors.New("no luck")

func TestRetriesFallDueByAdvanceAlone(t *testing.T) {
	h := delayqtest.New(t)
	enqueue(t, h.Queue, "a", "t")
	runs := 0
	failing := delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
		runs++
		return errNoLuck
	})
	// The longest delays of the default curve.
	for i, wait := range []time.Duration{0, 15 * time.Second, 40 * time.Second, 150 * time.Second, 12 * time.Minute} {
		h.Advance(wait)
		stats := h.RunDue(failing)
		if runs != i+1 || stats.Retried+stats.Dead != 1 {
			t.Fatalf("after %d attempts and %s: %d runs, %+v", i, wait, runs, stats)
		}
		if stats = h.RunDue(failing); stats.Leased != 0 {
			t.Fatalf("a retry came without its delay: %+v", stats)
		}
	}
	in, err := h.Queue.Get(t.Context(), "a")
	if err != nil || in.State != delayq.StateDead {
		t.Errorf("ended as %+v, %v", in, err)
	}
}

func TestRunDueRunsNothingThatIsNotDue(t *testing.T) {
	h := delayqtest.New(t)
	began := h.Now()
	enqueue(t, h.Queue, "in", "t", delayq.In(time.Hour))
	enqueue(t, h.Queue, "at", "t", delayq.At(began.Add(time.Hour)))
	done := delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil })
	h.Advance(time.Hour - 50*time.Millisecond)
	if stats := h.RunDue(done); stats.Leased != 0 {
		t.Errorf("before the time: %+v", stats)
	}
	h.Advance(50 * time.Millisecond)
	if stats := h.RunDue(done); stats.Succeeded != 2 {
		t.Errorf("at the time: %+v", stats)
	}
	if moved := h.Now().Sub(began); moved < time.Hour || moved > time.Hour+50*time.Millisecond {
		t.Errorf("the clock moved by %s", moved)
	}
}

func TestRunDueRunsWhatHandlersMakeDue(t *testing.T) {
	h := delayqtest.New(t)
	h.Worker.Retry = func(int) time.Duration { return 0 }
	enqueue(t, h.Queue, "5", "countdown")
	for i := range 300 {
		enqueue(t, h.Queue, fmt.Sprint("other-", i), "other")
	}
	mux := delayq.NewMux()
	mux.HandleFunc("other", func(context.Context, *delayq.Task) error { return nil })
	mux.HandleFunc("countdown", func(ctx context.Context, task *delayq.Task) error {
		if task.Failed < 2 {
			return errNoLuck
		}
		if next := task.ID[0] - 1; next > '0' {
			_, err := h.Queue.Enqueue(ctx, delayq.Task{ID: string(next), Type: "countdown"})
			return err
		}
		return nil
	})
	if stats := h.RunDue(mux); stats.Succeeded != 305 || stats.Retried != 10 {
		t.Errorf("stats: %+v", stats)
	}
	delayqtest.RequireNotEnqueued(t, h.Queue, delayqtest.Want{})
}

func TestRequireEnqueuedFindsByEachField(t *testing.T) {
	h := delayqtest.New(t)
	enqueue(t, h.Queue, "a", "one", delayq.In(time.Minute))
	enqueue(t, h.Queue, "b", "two", delayq.In(time.Hour))
	enqueue(t, h.Queue, "c", "two")
	is := func(want string) func([]byte) bool { return func(p []byte) bool { return string(p) == want } }
	for _, c := range []struct {
		want  delayqtest.Want
		found string
	}{
		{delayqtest.Want{ID: "b"}, "b"},
		{delayqtest.Want{Type: "one"}, "a"},
		{delayqtest.Want{Type: "two"}, "c"},
		{delayqtest.Want{Type: "two", DueIn: time.Hour}, "b"},
		{delayqtest.Want{DueIn: 59 * time.Minute, Within: 2 * time.Minute}, "b"},
		{delayqtest.Want{Within: time.Second}, "c"},
		{delayqtest.Want{Type: "two", Payload: is("secret")}, "c"},
		{delayqtest.Want{}, "c"},
		{delayqtest.Want{ID: "a", Type: "two"}, ""},
		{delayqtest.Want{ID: "a", DueIn: time.Hour}, ""},
		{delayqtest.Want{ID: "a", DueIn: 62 * time.Second}, ""},
		{delayqtest.Want{ID: "a", Payload: is("other")}, ""},
		{delayqtest.Want{ID: "d"}, ""},
	} {
		if c.found == "" {
			delayqtest.RequireNotEnqueued(t, h.Queue, c.want)
			if msg := fatal(func(t testing.TB) { delayqtest.RequireEnqueued(t, h.Queue, c.want) }); msg == "" {
				t.Errorf("%s: found", c.want)
			}
			continue
		}
		if in := delayqtest.RequireEnqueued(t, h.Queue, c.want); in.ID != c.found {
			t.Errorf("%s: found %s, want %s", c.want, in.ID, c.found)
		}
		if msg := fatal(func(t testing.TB) { delayqtest.RequireNotEnqueued(t, h.Queue, c.want) }); msg == "" {
			t.Errorf("%s: not found", c.want)
		}
	}
}

func TestFailureListsWhatTheQueueHoldsWithoutPayloads(t *testing.T) {
	h := delayqtest.New(t)
	want := delayqtest.Want{ID: "x", Type: "t", DueIn: time.Minute}
	require := func(t testing.TB) { delayqtest.RequireEnqueued(t, h.Queue, want) }
	msg := fatal(require)
	if msg != `delayqtest: no task waits with id "x", of type "t", due in 1m0s give or take 1s; queue test is empty` {
		t.Error(msg)
	}
	enqueue(t, h.Queue, "dead", "t")
	h.RunDue(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return delayq.Permanent(errNoLuck) }))
	enqueue(t, h.Queue, "x", "t", delayq.In(2*time.Minute))
	msg = fatal(require)
	for _, part := range []string{
		"queue test holds 2:", `pending    id "x", type "t", payload of 6 bytes, due in 2m0s`,
		`dead       id "dead", type "t", payload of 6 bytes, failed 1 times, the last time with "permanent"`,
	} {
		if !strings.Contains(msg, part) {
			t.Errorf("no %q in:\n%s", part, msg)
		}
	}
	if strings.Contains(msg, "secret") {
		t.Errorf("the payload is in:\n%s", msg)
	}
}

// fatal returns the message with which f ends a test, empty when it does not.
func fatal(f func(testing.TB)) (msg string) {
	defer func() {
		if v := recover(); v != nil {
			msg = fmt.Sprint(v)
		}
	}()
	f(exampleT{})
	return ""
}
