package functions

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/aws/aws-lambda-go/lambda"
)

// Start is the main of a function: in Lambda it serves invocations with handler and does not
// return. Elsewhere it runs one invocation, for cron, a Kubernetes job or a try on the command
// line, of the length that the flag -for says; it prints the summary and ends the process.
func Start[S any](handler func(context.Context, json.RawMessage) (S, error)) {
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	if os.Getenv("AWS_LAMBDA_RUNTIME_API") != "" {
		lambda.Start(handler)
		return
	}
	os.Exit(once(handler))
}

func once[S any](handler func(context.Context, json.RawMessage) (S, error)) int {
	span := flag.Duration("for", 0, "outside Lambda: run one invocation of this `length` and print its summary")
	flag.Parse()
	if *span <= 0 {
		fmt.Fprintf(os.Stderr, "%s: not in Lambda (AWS_LAMBDA_RUNTIME_API is not set): -for 55s runs one invocation here, scripts/local-rie one in Lambda's emulator\n",
			filepath.Base(os.Args[0]))
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), *span)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	summary, err := handler(ctx, json.RawMessage(`{}`))
	if err != nil {
		return 1 // the handler has logged why
	}
	_ = json.NewEncoder(os.Stdout).Encode(summary) // to a reader that is gone, if it fails
	return 0
}
