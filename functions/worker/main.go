// Command worker is a function that runs due tasks: the one template.yaml deploys, and the pattern
// for your own, which differs in its handlers. Outside Lambda it runs one invocation, for cron, a
// Kubernetes job or a try on the command line:
//
//	DELAYQ_REDIS_URL=redis://localhost:6379 DELAYQ_QUEUES=orders worker -for 55s
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/aws/aws-lambda-go/lambda"

	"github.com/delayq/toolkit/functions"
)

func main() {
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	handler := functions.Worker(handlers())
	if os.Getenv("AWS_LAMBDA_RUNTIME_API") != "" {
		lambda.Start(handler)
		return
	}
	span := flag.Duration("for", 0, "outside Lambda: run one invocation of this `length` and print its summary")
	flag.Parse()
	if *span <= 0 {
		fmt.Fprintln(os.Stderr, "worker: not in Lambda (AWS_LAMBDA_RUNTIME_API is not set): -for 55s runs one invocation here, scripts/local-rie one in Lambda's emulator")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), *span)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	summary, err := handler(ctx, json.RawMessage(`{}`))
	if err != nil {
		os.Exit(1) // the handler has logged why
	}
	_ = json.NewEncoder(os.Stdout).Encode(summary)
}
