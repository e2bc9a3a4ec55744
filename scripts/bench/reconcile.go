package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/reconciler"
)

// measureReconcile is a full pass of the reconciler over open rows that are all in Redis, and one that puts all of them back
// after Redis has lost them, as multiples of a plain SELECT count(*) over these rows right before. Each pass is a process of its
// own, whose peak memory is that of nothing else.
func measureReconcile(ctx context.Context, b *bench) ([]Row, error) {
	metric := func(what string) string {
		return fmt.Sprintf("%s, %s rows, against SELECT count(*), ms", what, depthName(b.reconcileRows))
	}
	db, err := b.database(ctx, "reconcile", connections)
	if err != nil {
		return noPostgres(err, "reconcile/pass", metric("full pass"))
	}
	defer db.close()
	if err := b.wipe(ctx); err != nil {
		return nil, err
	}
	q, err := b.openLedger(ctx, db)
	if err != nil {
		return nil, err
	}
	if err := b.fill(ctx, q, b.reconcileRows, 0); err != nil {
		return nil, err
	}
	if _, err := db.pool.Exec(ctx, "VACUUM ANALYZE delayq.task"); err != nil { // as autovacuum does a minute later
		return nil, err
	}
	var pass, restore turns
	var passMemory, restoreMemory float64
	for range b.reconcileTurns {
		ms, counted, p, err := b.reconcilePass(ctx, db, q)
		if err != nil {
			return nil, err
		}
		if n := int64(b.reconcileRows); p.Rows != n || p.Entries < n || p.Drift != 0 {
			return nil, fmt.Errorf("the pass was none over %d rows without drift: %+v", n, p.Counts)
		}
		pass.add(ms, counted)
		passMemory = max(passMemory, p.Peak)

		if err := b.wipe(ctx); err != nil {
			return nil, err
		}
		ms, counted, p, err = b.reconcilePass(ctx, db, q)
		if err != nil {
			return nil, err
		}
		if p.Restored != int64(b.reconcileRows) {
			return nil, fmt.Errorf("%d of %d tasks were restored: %+v", p.Restored, b.reconcileRows, p.Counts)
		}
		restore.add(ms, counted)
		restoreMemory = max(restoreMemory, p.Peak)
	}
	return []Row{
		compare("reconcile/pass", metric("full pass"), pass, bar{}),
		single("reconcile/pass/memory", "its process's peak memory, MB", passMemory, bar{}),
		compare("reconcile/restore", metric("restore after FLUSHALL"), restore, bar{}),
		single("reconcile/restore/memory", "its process's peak memory, MB", restoreMemory, bar{}),
	}, nil
}

// reconcilePass returns the milliseconds of a pass and of a count before it.
func (b *bench) reconcilePass(ctx context.Context, db *database, q *delayq.Queue) (ms, counted float64, p passed, err error) {
	if err := calm(ctx, db.pool); err != nil {
		return 0, 0, p, err
	}
	start := time.Now()
	var n int
	if err := db.pool.QueryRow(ctx, "SELECT count(*) FROM delayq.task").Scan(&n); err != nil {
		return 0, 0, p, err
	}
	counted = float64(time.Since(start).Microseconds()) / 1_000
	self, err := os.Executable()
	if err != nil {
		return 0, 0, p, err
	}
	child := exec.CommandContext(ctx, self, reconcileChild, b.server.Addr(), db.url, q.Name())
	var complaint bytes.Buffer
	child.Stderr = &complaint
	out, err := child.Output()
	if err != nil {
		return 0, 0, p, fmt.Errorf("reconciling process: %w: %s", err, complaint.Bytes())
	}
	if err := json.Unmarshal(out, &p); err != nil {
		return 0, 0, p, err
	}
	ms = float64(p.Elapsed.Microseconds()) / 1_000
	b.progress("  %.0f ms, count(*) %.0f ms, %.0f MB, %d restored", ms, counted, p.Peak, p.Restored)
	return ms, counted, p, nil
}

// reconcileChild as first argument makes this program a process that reconciles one queue once: Redis, PostgreSQL, queue.
const reconcileChild = "reconcile-child"

// passed is what it prints.
type passed struct {
	reconciler.Report
	Peak float64 `json:"peak"` // MB
}

func reconcileHere(ctx context.Context, args []string, out io.Writer) error {
	if len(args) != 3 {
		return fmt.Errorf("%s: want Redis, PostgreSQL and queue", reconcileChild)
	}
	rdb := redis.NewClient(&redis.Options{Addr: args[0]})
	defer rdb.Close()
	pool, err := pgxpool.New(ctx, args[1])
	if err != nil {
		return err
	}
	defer pool.Close()
	led, err := ledger.Open(ctx, pool)
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	q, err := delayq.Open(ctx, rdb, args[2], delayq.Config{Ledger: led, NoCreate: true, Logger: logger})
	if err != nil {
		return err
	}
	r, err := reconciler.New(q, reconciler.Config{Logger: logger})
	if err != nil {
		return err
	}
	var p passed
	if p.Report, err = r.Pass(ctx); err != nil {
		return err
	}
	if p.Peak, err = peakMemory(); err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(p)
}

// peakMemory is the most that this process has had in memory, in MB. Its resource usage would not do: that begins with what
// the parent had.
func peakMemory() (float64, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 64)
			return kb / 1024, err
		}
	}
	return 0, fmt.Errorf("no VmHWM in /proc/self/status")
}
