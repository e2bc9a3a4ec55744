package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// A consumer is a process with a worker.
type consumer struct {
	*roleConfig
	j       *journal
	q       *delayq.Queue
	effects *pgxpool.Pool // a pool of the handlers' own: they must not keep the ledger's connections
	clock   *redis.Client
	runs    atomic.Int64
	wrong   atomic.Int64
}

func consume(c *roleConfig) error {
	ctx, stop := c.hear()
	defer stop()
	j, err := openJournal(c.Dir, c.Name)
	if err != nil {
		return err
	}
	defer j.close()
	defer j.watchClock(c.Lease / 10)()
	k := &consumer{roleConfig: c, j: j}
	var link *link
	if link, err = c.open(ctx); err != nil {
		return unless(ctx, err)
	}
	k.q = link.q
	if k.effects, err = c.pool(ctx, c.Concurrency/2+1); err != nil {
		return err
	}
	k.clock = c.redis()

	w := delayq.NewWorker(delayq.HandlerFunc(k.handle), k.q)
	w.Concurrency, w.Lease, w.Grace, w.MaxAttempts, w.MaxLost = c.Concurrency, c.Lease, c.Lease/2, maxFailed, c.MaxLost
	w.Retry = func(int) time.Duration { return retryAfter }
	w.Consumer = consumerName(os.Getpid())
	w.StartTimeout = time.Minute // a server may be away when the process begins
	w.Logger = slog.Default()
	stats, err := w.Run(ctx)
	note, _ := json.Marshal(stats) // numbers: it cannot fail
	j.write(event{Kind: evExit, Count: stats.LeaseLost, Note: string(note)})
	k.effects.Close()
	_ = k.clock.Close()
	link.close()
	if err == nil && k.wrong.Load() > 0 {
		err = fmt.Errorf("%d wrong answers, see above", k.wrong.Load())
	}
	return errors.Join(err, leaks())
}

// unless drops the error of a process that was asked to end meanwhile.
func unless(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// leaks reports goroutines that outlive the worker and its connections (I13).
func leaks() error {
	const ours = 6 // main, signals, the clock's watch, the runtime's own
	for range 100 {
		if pprof.Lookup("goroutine").Count() <= ours {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1) // for the log
	return errors.New("goroutines are left after the end of the worker")
}

// watchClock notes when the process did not run for d: stopped, or starved. It goes on until the returned function is called.
func (j *journal) watchClock(d time.Duration) (stop func()) {
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		tick := time.NewTicker(d / 10)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case <-tick.C:
			case <-quit:
				return
			}
			now := time.Now()
			if now.Sub(last) > d {
				j.write(event{Kind: evStall, From: last.UnixMicro(), At: now.UnixMicro()})
			}
			last = now
		}
	}()
	return func() { close(quit); <-gone }
}

func (k *consumer) handle(ctx context.Context, t *delayq.Task) error {
	e := event{
		Kind: evStart, At: micros(), Task: t.ID, Run: k.runs.Add(1), Delivery: t.Deliveries, Failed: t.Failed, Lost: t.Lost, Due: t.Due.UnixMicro(),
	}
	var p payload
	if err := json.Unmarshal(t.Payload, &p); err != nil {
		return err
	}
	e.Version = p.Version
	if k.Clocks {
		e.Redis, e.DB = k.clocks(ctx)
	}
	k.j.write(e)
	note := func(kind, outcome string) event { return event{Kind: kind, Task: t.ID, Run: e.Run, Outcome: outcome} }
	noted := make(chan struct{})
	before := context.AfterFunc(ctx, func() {
		defer close(noted)
		cut := note(evCut, "")
		cut.Cause = fmt.Sprint(context.Cause(ctx))
		k.j.write(cut)
	})
	uncut := sync.OnceFunc(func() {
		if !before() {
			<-noted // nothing is written behind the end
		}
	})
	defer uncut()
	if p.Fate == fatePoison {
		k.j.write(note(evDying, ""))
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	outcome, err := k.perform(ctx, t, &p, note)
	end := note(evEnd, outcome)
	if outcome == runFail {
		end.Delay = retryAfter.Microseconds()
	}
	if err != nil {
		end.Cause = err.Error()
	}
	uncut() // the end of the context by the worker, after the handler, is no cut
	k.j.write(end)
	return err
}

// perform does the task's work and has its effect.
func (k *consumer) perform(ctx context.Context, t *delayq.Task, p *payload, note func(kind, outcome string) event) (outcome string, err error) {
	select {
	case <-time.After(time.Duration(p.Work) * time.Microsecond):
	case <-ctx.Done():
		return runCut, context.Cause(ctx)
	}
	switch {
	case p.Fate == fateFlaky && t.Failed < p.Times:
		return runFail, errors.New("not yet")
	case p.Fate == fateDoomed:
		return runPermanent, delayq.Permanent(errors.New("never"))
	case p.Fate == fateSnooze && t.Deliveries == 1:
		return runSnooze, delayq.Snooze(200 * time.Millisecond)
	case t.Type == typeMail:
		k.j.write(note(evEffect, ""))
		return runOK, nil
	}
	for try := 0; ; try++ {
		err = k.sell(ctx, t, note)
		switch {
		case err == nil:
			k.j.write(note(evCompleted, outDone))
			if k.runs.Load()%20 == 0 {
				k.completeAgain(ctx, t)
			}
			return runOK, nil
		case errors.Is(err, delayq.ErrFinished): // the commit before, whose answer was lost
			k.j.write(note(evCompleted, outDone))
			return runOK, nil
		case errors.Is(err, delayq.ErrLeaseLost):
			k.j.write(note(evCompleted, runLost))
			return runLost, err
		case ctx.Err() != nil:
			return runCut, context.Cause(ctx)
		case try == 3: // the database is ill, which is not the task's fault
			return runSnooze, delayq.Snooze(100 * time.Millisecond)
		}
		slog.Warn("effect failed, will try again", "task", t.ID, "error", err.Error())
		time.Sleep(50 * time.Millisecond)
	}
}

// sell is an effect in the same transaction as the task's completion.
func (k *consumer) sell(ctx context.Context, t *delayq.Task, note func(kind, outcome string) event) error {
	return pgx.BeginFunc(ctx, k.effects, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into chaos.effect (task, delivery) values ($1, $2)", t.ID, t.Deliveries); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "update chaos.stock set taken = taken + 1 where part = abs(hashtext($1)) % 64", t.ID); err != nil {
			return err
		}
		k.j.write(note(evCompleting, ""))
		return k.q.CompleteTx(ctx, tx, t)
	})
}

// completeAgain repeats a completion that has succeeded, which must say so (I12).
func (k *consumer) completeAgain(ctx context.Context, t *delayq.Task) {
	err := pgx.BeginFunc(ctx, k.effects, func(tx pgx.Tx) error { return k.q.CompleteTx(ctx, tx, t) })
	if err == nil || errors.Is(err, delayq.ErrLeaseLost) != errors.Is(err, delayq.ErrFinished) {
		k.wrong.Add(1)
		slog.Error("WRONG: completed twice", "task", t.ID, "error", fmt.Sprint(err))
	}
}

// clocks are the servers' clocks, 0 for one that does not tell at once.
func (k *consumer) clocks(ctx context.Context) (ofRedis, ofDB int64) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if at, err := k.clock.Time(ctx).Result(); err == nil {
		ofRedis = at.UnixMicro()
	}
	var at time.Time
	if err := k.effects.QueryRow(ctx, "select clock_timestamp()").Scan(&at); err == nil {
		ofDB = at.UnixMicro()
	}
	return ofRedis, ofDB
}
