// Command testworker is a worker function for tests: its handlers misbehave on request and write
// what they do to the file that JOURNAL names, a JSON line an event.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"github.com/aws/aws-lambda-go/lambda"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/functions"
)

func main() {
	file, err := os.OpenFile(os.Getenv("JOURNAL"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	mux := delayq.NewMux()
	mux.Use(journal(file))
	mux.HandleFunc("quick", func(context.Context, *delayq.Task) error { return nil })
	mux.HandleFunc("fail", func(context.Context, *delayq.Task) error { return errors.New("the handler says no") })
	// hold works until its context ends, and says so.
	mux.HandleFunc("hold", func(ctx context.Context, _ *delayq.Task) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
	// deaf works for a time, whatever becomes of its context.
	delayq.Handle(mux, "deaf", func(_ context.Context, d time.Duration) error {
		time.Sleep(d)
		return nil
	})
	lambda.Start(functions.Worker(mux))
}

// journal writes a line before and after each task. One write a line: O_APPEND keeps the lines of
// several processes whole.
func journal(file *os.File) delayq.Middleware {
	return func(next delayq.Handler) delayq.Handler {
		return delayq.HandlerFunc(func(ctx context.Context, t *delayq.Task) error {
			write := func(event string) {
				line, _ := json.Marshal(map[string]any{"event": event, "id": t.ID, "pid": os.Getpid(), "late_ms": time.Since(t.Due).Milliseconds()})
				if _, err := file.Write(append(line, '\n')); err != nil {
					panic(err)
				}
			}
			write("start")
			err := next.HandleTask(ctx, t)
			write("end")
			return err
		})
	}
}
