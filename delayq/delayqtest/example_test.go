package delayqtest_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/delayqtest"
)

// place is the code under test: an order that is not paid within half an hour is cancelled.
func place(q *delayq.Queue, order int) error {
	t, err := delayq.NewTask(fmt.Sprintf("cancel-order:%d", order), "order.cancel", order)
	if err != nil {
		return err
	}
	_, err = q.Enqueue(context.Background(), t, delayq.In(30*time.Minute))
	return err
}

func handlers(cancelled *[]int) *delayq.Mux {
	mux := delayq.NewMux()
	delayq.Handle(mux, "order.cancel", func(_ context.Context, order int) error {
		*cancelled = append(*cancelled, order)
		return nil
	})
	return mux
}

func Example() {
	t := exampleT{} // in a test: its t
	h := delayqtest.New(t)
	if err := place(h.Queue, 42); err != nil {
		t.Fatalf("%v", err)
	}
	delayqtest.RequireEnqueued(t, h.Queue, delayqtest.Want{ID: "cancel-order:42", DueIn: 30 * time.Minute})

	var cancelled []int
	h.Advance(29 * time.Minute)
	fmt.Println(h.RunDue(handlers(&cancelled)).Succeeded, cancelled)
	h.Advance(time.Minute)
	fmt.Println(h.RunDue(handlers(&cancelled)).Succeeded, cancelled)
	delayqtest.RequireNotEnqueued(t, h.Queue, delayqtest.Want{})
	// Output:
	// 0 []
	// 1 [42]
}

// exampleT stands in for the t of a test, which an example does not have.
type exampleT struct{ testing.TB }

func (exampleT) Helper()                   {}
func (exampleT) Cleanup(func())            {}
func (exampleT) Output() io.Writer         { return io.Discard }
func (exampleT) Logf(string, ...any)       {}
func (exampleT) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
