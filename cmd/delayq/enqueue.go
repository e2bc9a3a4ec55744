package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

// A batch of a task file goes to Redis in one call; with the greatest payloads it is cut by size, to bound memory.
const (
	enqueueBatch = 500
	enqueueBytes = 4 << 20
)

type enqueue struct {
	target
	due                  when
	id, typ, key         string
	payload, payloadFile string
	conflict             string
	shards               int
	file                 string
	json                 bool
}

func newEnqueue() *cobra.Command {
	var e enqueue
	cmd := &cobra.Command{
		Use:   "enqueue",
		Short: "Put a task, or a file of tasks, into a queue",
		Long: `enqueue puts one task into a queue, or with --file one task for each line of a file.

A line of the file is a JSON object:

  {"id":"cancel-order:42","type":"order.cancel","delay":"30m","payload":{"order":42}}

  id              a chosen id makes the call safe to repeat; without one the task gets a new id
  type            names the handler
  delay           a duration in quotes such as "90s", or a number of seconds
  run_at          RFC 3339 time, in place of delay; with neither the task is due at once
  payload         any JSON value, kept byte for byte; payload_base64 in its place for other bytes
  key             business key for logs

A wrong line is told on stderr with its number, the others go in. The queue is made if there is none yet.
Exit status: 0 all tasks are in (a known id that is kept counts), 1 one was refused or Redis failed, 2 wrong usage.`,
		Example: `  delayq enqueue --queue orders --type order.cancel --id cancel-order:42 --in 30m --payload '{"order":42}'
  delayq enqueue --queue orders --file tasks.ndjson
  zcat tasks.ndjson.gz | delayq enqueue --queue orders --file -`,
		Args: exactly(0, "flags only"),
	}
	e.flags(cmd)
	e.due.flags(cmd)
	f := cmd.Flags()
	f.StringVar(&e.id, "id", "", "the task's `id`, at most 256 bytes; default a new one")
	f.StringVar(&e.typ, "type", "", "the task's `type`, which names its handler")
	f.StringVar(&e.key, "key", "", "business key for logs")
	f.StringVar(&e.payload, "payload", "", "the payload itself")
	f.StringVar(&e.payloadFile, "payload-file", "", "`file` that holds the payload, - for stdin")
	f.StringVar(&e.conflict, "conflict", "keep", "what to do about a known id: keep it, replace it while it waits, or reject the new one")
	f.IntVar(&e.shards, "shards", 0, "shards of a new queue; for an existing one 0 or what it has")
	f.StringVar(&e.file, "file", "", "`file` of tasks, one JSON object a line, - for stdin")
	f.BoolVar(&e.json, "json", false, "print the result as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		conflict, err := parseConflict(e.conflict)
		if err != nil {
			return err
		}
		if e.file != "" {
			return e.runFile(cmd, conflict)
		}
		return e.runOne(cmd, conflict)
	}
	return cmd
}

func parseConflict(s string) (delayq.Conflict, error) {
	switch s {
	case "keep":
		return delayq.Keep, nil
	case "replace":
		return delayq.Replace, nil
	case "reject":
		return delayq.Reject, nil
	}
	return delayq.Keep, usagef("--conflict: want keep, replace or reject")
}

func (e *enqueue) runOne(cmd *cobra.Command, conflict delayq.Conflict) error {
	if e.typ == "" {
		return usagef("--type: name the task's type, or give --file")
	}
	at, err := e.due.parse(cmd)
	if err != nil {
		return err
	}
	payload, err := e.readPayload(cmd)
	if err != nil {
		return err
	}
	task := delayq.Task{ID: e.id, Type: e.typ, Key: e.key, Payload: payload, Delay: e.due.in, RunAt: at, Conflict: conflict}
	return e.open(cmd.Context(), delayq.Config{Shards: e.shards}, func(q *delayq.Queue) error {
		res, err := q.Enqueue(cmd.Context(), task)
		if err != nil {
			return err
		}
		if e.json {
			return printJSON(cmd.OutOrStdout(), map[string]any{"id": res.ID, "outcome": res.Outcome.String(), "duplicate": res.Outcome.Duplicate()})
		}
		said := res.Outcome.String()
		if res.Outcome.Duplicate() {
			said = "kept: the id is known, its task is " + said
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", printable(res.ID), said)
		return err
	})
}

func (e *enqueue) readPayload(cmd *cobra.Command) ([]byte, error) {
	switch {
	case e.payloadFile != "" && cmd.Flags().Changed("payload"):
		return nil, usagef("--payload and --payload-file: give one of them")
	case e.payloadFile == "-":
		return io.ReadAll(cmd.InOrStdin())
	case e.payloadFile != "":
		b, err := os.ReadFile(e.payloadFile)
		if err != nil {
			return nil, usagef("--payload-file: %w", err)
		}
		return b, nil
	}
	return []byte(e.payload), nil
}

func (e *enqueue) runFile(cmd *cobra.Command, conflict delayq.Conflict) error {
	for _, other := range []string{"id", "type", "key", "in", "at", "payload", "payload-file"} {
		if cmd.Flags().Changed(other) {
			return usagef("--%s: each line of --file has its own", other)
		}
	}
	in, size := cmd.InOrStdin(), int64(-1)
	if e.file != "-" {
		f, err := os.Open(e.file)
		if err != nil {
			return usagef("--file: %w", err)
		}
		defer f.Close()
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			size = info.Size()
		}
		in = f
	}
	return e.open(cmd.Context(), delayq.Config{Shards: e.shards}, func(q *delayq.Queue) error {
		bar := newBar(cmd.ErrOrStderr(), size, "bytes")
		load := fileLoad{q: q, conflict: conflict, bar: bar}
		err := load.run(cmd.Context(), newLines(io.TeeReader(in, bar)))
		bar.done()
		if printErr := load.print(cmd.OutOrStdout(), e.json); err == nil {
			err = printErr
		}
		if err == nil && load.sum.Failed > 0 {
			err = errReported
		}
		return err
	})
}

// fileLoad puts the tasks of a file into a queue, a batch at a time.
type fileLoad struct {
	q        *delayq.Queue
	conflict delayq.Conflict
	bar      *bar // errors are told above it
	batch    []delayq.Task
	numbers  []int // line number of each task of the batch
	size     int   // bytes of its payloads
	sum      struct {
		Created    int `json:"created"`
		Replaced   int `json:"replaced"`
		Duplicates int `json:"duplicates"`
		Failed     int `json:"failed"`
	}
}

func (l *fileLoad) run(ctx context.Context, in *lines) error {
	for {
		task, err := in.next()
		var wrong *lineError
		switch {
		case errors.Is(err, io.EOF):
			return l.flush(ctx)
		case errors.As(err, &wrong):
			l.fail(in.n, err)
			continue
		case err != nil:
			return errors.Join(l.flush(ctx), fmt.Errorf("line %d: %w", in.n, err))
		}
		task.Conflict = l.conflict
		l.batch, l.numbers, l.size = append(l.batch, task), append(l.numbers, in.n), l.size+len(task.Payload)
		if len(l.batch) == enqueueBatch || l.size >= enqueueBytes || in.idle() {
			if err := l.flush(ctx); err != nil {
				return err
			}
		}
	}
}

func (l *fileLoad) fail(line int, err error) {
	l.sum.Failed++
	l.bar.Printf("line %d: %s\n", line, message(err))
}

// unplaced is an error without the queue and id it is about: a line number says that better.
func unplaced(err error) error {
	var task *delayq.TaskError
	if errors.As(err, &task) {
		return task.Err
	}
	return err
}

// flush sends the batch and tells line by line what was refused.
func (l *fileLoad) flush(ctx context.Context) error {
	if len(l.batch) == 0 {
		return nil
	}
	results, _ := l.q.EnqueueMany(ctx, l.batch) // the error repeats what the results say
	down := 0
	for i, res := range results {
		switch {
		case res.Err != nil:
			l.fail(l.numbers[i], unplaced(res.Err))
			if !errors.Is(res.Err, delayq.ErrInvalid) && !errors.Is(res.Err, delayq.ErrConflict) {
				down++
			}
		case res.Outcome == delayq.Replaced:
			l.sum.Replaced++
		case res.Outcome.Duplicate():
			l.sum.Duplicates++
		default:
			l.sum.Created++
		}
	}
	first, last := l.numbers[0], l.numbers[len(l.numbers)-1]
	all := down == len(l.batch)
	l.batch, l.numbers, l.size = l.batch[:0], l.numbers[:0], 0
	if all { // the rest of the file would fare no better
		return failf("stopped: none of lines %d to %d went in", first, last)
	}
	return nil
}

// print is the summary of a file.
func (l *fileLoad) print(w io.Writer, asJSON bool) error {
	if asJSON {
		return printJSON(w, l.sum)
	}
	_, err := fmt.Fprintf(w, "%d created, %d replaced, %d duplicates, %d failed\n", l.sum.Created, l.sum.Replaced, l.sum.Duplicates, l.sum.Failed)
	return err
}
