package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// River's settings are those of its own benchmark, with as many workers as were fastest here: of 200, 500, 1,000 and 2,000
// workers 1,000 were, by a quarter over 200, and of 1,000, 5,000 and 20,000 jobs an insert 5,000. Its default fetch
// settings would hold 200 workers to 2,000 jobs a second.
const (
	riverWorkers  = 1_000
	riverInsert   = 5_000
	riverCooldown = 2 * time.Millisecond
	riverPoll     = 20 * time.Millisecond
)

type riverPeer struct {
	pool    *pgxpool.Pool
	payload string
}

// riverArgs have an id where jobs are to be unique by it, as tasks are by theirs.
type riverArgs struct {
	ID      string `json:"id,omitempty" river:"unique"`
	Payload string `json:"payload"`
}

func (riverArgs) Kind() string { return "bench" }

type riverNoop struct {
	river.WorkerDefaults[riverArgs]
}

func (*riverNoop) Work(context.Context, *river.Job[riverArgs]) error { return nil }

// river makes River's tables beside delayq's.
func (b *bench) river(ctx context.Context, pool *pgxpool.Pool) (riverPeer, error) {
	m, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	if err != nil {
		return riverPeer{}, err
	}
	_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return riverPeer{pool, string(b.payload)}, err
}

// riverBatch is how a batch is run: with how many workers, and whether jobs are unique by an id. COPY then fails on the first one
// that is known, so they are inserted by INSERT ... ON CONFLICT.
type riverBatch struct {
	workers int
	unique  bool
}

// batch inserts n jobs and then works them. It ends with the last job's completion in the database, of which
// River tells its subscribers; to stop the client is not counted.
func (r riverPeer) batch(ctx context.Context, n int, how riverBatch) (batchTimes, error) {
	noop := river.NewWorkers()
	river.AddWorker(noop, &riverNoop{})
	client, err := river.NewClient(riverpgxv5.New(r.pool), &river.Config{
		FetchCooldown: riverCooldown, FetchPollInterval: riverPoll,
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: how.workers}},
		Workers: noop,
		Logger:  slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return batchTimes{}, err
	}
	completed, unsubscribe := client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: n, Kinds: []river.EventKind{river.EventKindJobCompleted},
	})
	defer unsubscribe()

	var t batchTimes
	names := ids(n)
	start := time.Now()
	for chunk := range slices.Chunk(names, riverInsert) {
		jobs := make([]river.InsertManyParams, len(chunk))
		for i := range jobs {
			jobs[i].Args = riverArgs{Payload: r.payload}
			if how.unique {
				jobs[i].Args = riverArgs{chunk[i], r.payload}
				jobs[i].InsertOpts = &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
			}
		}
		if how.unique {
			_, err = client.InsertMany(ctx, jobs)
		} else {
			_, err = client.InsertManyFast(ctx, jobs)
		}
		if err != nil {
			return t, err
		}
	}
	t.insert = time.Since(start)
	start = time.Now()
	if err := client.Start(ctx); err != nil {
		return t, err
	}
	timeout := time.After(2 * time.Minute)
	for done := range n {
		select {
		case <-completed:
		case <-ctx.Done():
			return t, ctx.Err()
		case <-timeout:
			return t, fmt.Errorf("river completed %d of %d jobs in two minutes", done, n)
		}
	}
	t.work = time.Since(start)
	return t, client.Stop(ctx)
}

// inserter returns what inserts one job in a transaction, by a client as a service that works no jobs has it.
func (r riverPeer) inserter() (func(context.Context, pgx.Tx) error, error) {
	client, err := river.NewClient(riverpgxv5.New(r.pool), &river.Config{
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := client.InsertTx(ctx, tx, riverArgs{Payload: r.payload}, nil)
		return err
	}, err
}
