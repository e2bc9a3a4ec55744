package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const (
	ledgerWorkers = 1_000 // concurrency of the one worker in ledger mode
	ledgerInsert  = 5_000 // tasks of one call, as many as River gets
	connections   = 25    // 20 callers and what runs beside them
)

// batchTimes are the two halves of a batch's life: all tasks inserted, then all of them completed.
type batchTimes struct{ insert, work time.Duration }

// batchCost is a turn: rates in tasks a second, and what each task cost.
type batchCost struct{ whole, insert, work, cpu, wal float64 }

// measureLedgerBatch is a batch from insert to completed, with the ledger and Redis on one side and River on the other, both
// on the same PostgreSQL, one after the other. Each has one producer that inserts everything and then one worker in this
// process with handlers that do nothing. River's time ends with the last completion in the database, delayq's when Run
// returns, so Redis has been told as well.
func measureLedgerBatch(ctx context.Context, b *bench) ([]Row, error) {
	const metric = "ledger mode against River, batch insert to completed, tasks/s"
	db, err := b.database(ctx, "batch", connections)
	if err != nil {
		return noPostgres(err, "ledger/batch", metric)
	}
	defer db.close()
	r, err := b.river(ctx, db.pool)
	if err != nil {
		return nil, err
	}
	settings, err := durability(ctx, db.pool)
	if err != nil {
		return nil, err
	}
	b.progress("  %s", settings)

	ours := func(n int) (batchTimes, error) { return b.ledgerBatch(ctx, db, n) }
	river := func(how riverBatch) func(int) (batchTimes, error) {
		return func(n int) (batchTimes, error) { return r.batch(ctx, n, how) }
	}
	sides := []func(int) (batchTimes, error){
		ours, river(riverBatch{workers: riverWorkers}), river(riverBatch{workers: 200}), river(riverBatch{riverWorkers, true}),
	}
	for _, side := range sides { // to connect, prepare, plan
		if err := db.empty(ctx); err != nil {
			return nil, err
		}
		if _, err := side(2_000); err != nil {
			return nil, err
		}
	}
	var whole, insert, work, cpu, wal, few, unique turns
	err = takeTurns(ctx, b.ledgerBudget, func() error {
		var costs [4]batchCost
		for i, side := range sides {
			if costs[i], err = b.batchTurn(ctx, db, side); err != nil {
				return err
			}
		}
		us, they := costs[0], costs[1]
		whole.add(us.whole, they.whole)
		insert.add(us.insert, they.insert)
		work.add(us.work, they.work)
		cpu.add(us.cpu, they.cpu)
		wal.add(us.wal, they.wal)
		few.add(us.whole, costs[2].whole)
		unique.add(us.whole, costs[3].whole)
		b.progress("  delayq %.0f + %.0f = %.0f, River %.0f + %.0f = %.0f, with 200 workers %.0f, unique %.0f tasks/s",
			us.insert, us.work, us.whole, they.insert, they.work, they.whole, costs[2].whole, costs[3].whole)
		return nil
	})
	settled := compare("ledger/batch/wal", "its write-ahead log, bytes a task", wal, bar{})
	settled.Note = settings
	return []Row{
		compare("ledger/batch", metric, whole, atLeast(2)),
		compare("ledger/batch/insert", "its insert alone (River by COPY), tasks/s", insert, bar{}),
		compare("ledger/batch/work", "its work alone, tasks/s", work, bar{}),
		compare("ledger/batch/200", "the whole against River with 200 workers, tasks/s", few, bar{}),
		compare("ledger/batch/unique", "the whole against River with unique jobs, tasks/s", unique, bar{}),
		compare("ledger/batch/cpu", "CPU of client and servers, us a task", cpu, bar{}),
		settled,
	}, err
}

// batchTurn measures one side on empty tables and a quiet server.
func (b *bench) batchTurn(ctx context.Context, db *database, side func(n int) (batchTimes, error)) (batchCost, error) {
	if err := db.empty(ctx); err != nil {
		return batchCost{}, err
	}
	if err := b.wipe(ctx); err != nil {
		return batchCost{}, err
	}
	runtime.GC()
	logBefore, err := wal(ctx, db.pool)
	if err != nil {
		return batchCost{}, err
	}
	cpuBefore, err := b.cpuTime(ctx)
	if err != nil {
		return batchCost{}, err
	}
	t, err := side(b.batchTasks)
	if err != nil {
		return batchCost{}, err
	}
	cpuAfter, err := b.cpuTime(ctx)
	if err != nil {
		return batchCost{}, err
	}
	logAfter, err := wal(ctx, db.pool)
	n := float64(b.batchTasks)
	return batchCost{
		whole: n / (t.insert + t.work).Seconds(), insert: n / t.insert.Seconds(), work: n / t.work.Seconds(),
		cpu: (cpuAfter - cpuBefore).Seconds() * 1e6 / n, wal: (logAfter - logBefore) / n,
	}, err
}

func (b *bench) ledgerBatch(ctx context.Context, db *database, n int) (batchTimes, error) {
	q, err := b.openLedger(ctx, db)
	if err != nil {
		return batchTimes{}, err
	}
	tasks := ids(n)
	var t batchTimes
	start := time.Now()
	for chunk := range slices.Chunk(tasks, ledgerInsert) {
		if err := b.enqueueMany(ctx, q, chunk, delayq.Task{}); err != nil {
			return t, err
		}
	}
	t.insert = time.Since(start)
	w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), q)
	w.Concurrency = ledgerWorkers
	w.IdleExit = time.Millisecond
	start = time.Now()
	stats, err := w.Run(ctx)
	t.work = time.Since(start)
	if err == nil && stats.Succeeded != int64(n) {
		err = fmt.Errorf("delayq: %d of %d tasks ran: %+v", stats.Succeeded, n, stats)
	}
	return t, err
}
