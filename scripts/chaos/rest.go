package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/reconciler"
)

// rest waits until every task that is due has ended.
func (s *stage) rest(ctx context.Context) error {
	for until := time.Now().Add(s.restTime()); ; {
		if err := s.replaceDead(); err != nil {
			return err
		}
		var open int
		err := s.pool.QueryRow(ctx, `select count(*) from delayq.task
			where queue > 0 and status in ('pending', 'retry', 'running') and run_at < clock_timestamp() + interval '30 minutes'`).Scan(&open)
		switch {
		case err == nil && open == 0:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(until):
			return errors.Join(fmt.Errorf("%d tasks are open %s after the faults: %w", open, s.restTime(), errNoTime), err)
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// finish looks at what is left when all has come to rest.
func (s *stage) finish(ctx context.Context) (problems []problem) {
	bad := func(rule, format string, args ...any) {
		problems = append(problems, problem{rule, "", fmt.Sprintf(format, args...)})
	}
	// The reconcilers have some periods to make the two agree on what still waits.
	var differ []problem
	for until := time.Now().Add(10 * time.Second); ; {
		var err error
		if differ, err = s.compare(ctx); err != nil {
			bad("I9", "%v", err)
			return problems
		}
		if len(differ) == 0 || time.Now().After(until) {
			break
		}
		pause(ctx, 100*time.Millisecond)
	}
	problems = append(problems, differ[:min(len(differ), 20)]...)
	s.stopAll(bad)
	s.quiet(ctx, bad)
	s.fallDue(ctx, bad)
	s.cancelParked(ctx, bad)
	if differ, err := s.compare(ctx); err != nil || len(differ) > 0 {
		bad("I10", "after the last cancel: %v %v", err, differ[:min(len(differ), 3)])
	}
	s.connections(ctx, bad)
	return problems
}

// compare reads both sides and says where they differ.
func (s *stage) compare(ctx context.Context) ([]problem, error) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		return nil, err
	}
	entries, err := dumpRedis(ctx, s.rdb, s.cfg.Queue, s.cfg.Shards)
	if err != nil {
		return nil, err
	}
	return disagree(rows, entries, s.horizon, time.Now()), nil
}

// stopAll ends every process in order (I13).
func (s *stage) stopAll(bad func(rule, format string, args ...any)) {
	s.mu.Lock()
	all := append(append([]*process{}, s.consumers...), s.others...)
	failed := s.failed
	s.mu.Unlock()
	ends := make(chan error, len(all))
	for _, p := range all {
		go func() { ends <- p.terminate(lease + 3*time.Second) }()
	}
	for range all {
		if err := <-ends; err != nil {
			failed = append(failed, err)
		}
	}
	for _, err := range failed {
		bad("I13", "%v", err)
	}
}

// quiet: the audit is clean, a pass of the reconciler finds nothing, and the next one writes nothing (I9, I11).
func (s *stage) quiet(ctx context.Context, bad func(rule, format string, args ...any)) {
	audit, err := s.q.Audit(ctx, delayq.AuditOptions{})
	if err == nil && s.rules.vandal { // nobody knows what was counted in a key that somebody deleted
		audit.Violations = slices.DeleteFunc(audit.Violations, func(v delayq.Violation) bool { return v.Invariant == "I5" && v.ID == "" })
	}
	if err != nil {
		bad("I9", "audit: %v", err)
	} else if n := len(audit.Violations); n > 0 {
		bad("I9", "audit: %d violations, such as %+v", n, audit.Violations[0])
	}
	r, err := reconciler.New(s.q, reconciler.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	for _, which := range []string{"first", "second"} {
		before, _ := s.rdb.Do(ctx, "DEBUG", "DIGEST").Text() // an empty one differs from what follows
		rep, err := r.Pass(ctx)
		after, _ := s.rdb.Do(ctx, "DEBUG", "DIGEST").Text()
		if err != nil || rep.Drift > 0 || !rep.Complete {
			bad("I9", "%s pass after all has come to rest: %+v %v", which, rep.Counts, err)
		}
		if which == "second" && (before == "" || before != after) {
			bad("I11", "the second pass over a healthy state writes to redis")
		}
	}
	s.gauges(ctx, bad)
}

// cancelParked ends the tasks that were only there to be compared.
func (s *stage) cancelParked(ctx context.Context, bad func(rule, format string, args ...any)) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	var ids []string
	for id, r := range rows {
		if r.open() {
			ids = append(ids, id)
		}
	}
	first := s.calls
	for _, id := range ids {
		s.j.write(event{Kind: evCall, Call: s.nextCall(), Task: id, Op: opCancel})
	}
	got, err := s.q.CancelMany(ctx, ids)
	for i, id := range ids {
		s.j.write(event{Kind: evRet, Call: first + int64(i) + 1, Task: id, Outcome: outcomeOf(err), Answer: got[i].String()})
		if err != nil || got[i] != delayq.Cancelled {
			bad("I8", "cancel of %s, which waits: %s %v", id, got[i], err)
		}
	}
}

// connections: no process has left one behind (I13).
func (s *stage) connections(ctx context.Context, bad func(rule, format string, args ...any)) {
	var left int
	var list string
	for until := time.Now().Add(2 * time.Second); ; pause(ctx, 20*time.Millisecond) {
		err := s.pool.QueryRow(ctx, `select count(*) from pg_stat_activity
			where application_name like 'chaos %' and datname = current_database()`).Scan(&left)
		if err != nil {
			bad("I13", "%v", err)
			return
		}
		list, _ = s.rdb.ClientList(ctx).Result() // empty is fine
		if left == 0 && !strings.Contains(list, "name=chaos") {
			return
		}
		if time.Now().After(until) {
			bad("I13", "%d connections to the database and %d to redis are left", left, strings.Count(list, "name=chaos"))
			return
		}
	}
}

// collect joins all that was left behind.
func (s *stage) collect(ctx context.Context) (*history, error) {
	events, err := readJournals(s.dir)
	if err != nil {
		return nil, err
	}
	h := join(events)
	h.lease, h.maxFailed, h.maxLost = lease, maxFailed, s.maxLost()
	return h, dumpLedger(ctx, s.pool, h)
}
