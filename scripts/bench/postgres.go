package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// errNoPostgres says that there is no server to measure on here.
var errNoPostgres = errors.New("no PostgreSQL here")

// postgres starts the private server when the first family asks for it: with PostgreSQL's own defaults for what is
// durable, unlike the servers of tests.
func (b *bench) postgres() (*servers.Postgres, error) {
	if b.pg != nil {
		return b.pg, nil
	}
	if _, err := servers.PostgresPrograms(); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoPostgres, err)
	}
	var err error
	b.pg, err = servers.StartPostgres(servers.PostgresOptions{Settings: []string{
		"fsync=on", "synchronous_commit=on", "full_page_writes=on", "max_wal_size=1GB",
	}})
	return b.pg, err
}

// noPostgres is what a family returns that cannot run.
func noPostgres(err error, name, metric string) ([]Row, error) {
	if errors.Is(err, errNoPostgres) {
		return []Row{leftOut(name, metric, err.Error())}, nil
	}
	return nil, err
}

// A database of a family's own, with delayq's tables.
type database struct {
	url    string
	pool   *pgxpool.Pool
	ledger *ledger.Ledger
}

func (b *bench) database(ctx context.Context, name string, connections int32) (*database, error) {
	server, err := b.postgres()
	if err != nil {
		return nil, err
	}
	admin, err := pgxpool.New(ctx, server.URL("postgres"))
	if err != nil {
		return nil, err
	}
	defer admin.Close()
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, err
	}
	db := &database{url: server.URL(name)}
	conf, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		return nil, err
	}
	conf.MaxConns = connections
	if db.pool, err = pgxpool.NewWithConfig(ctx, conf); err != nil {
		return nil, err
	}
	if _, err = migrations.Up(ctx, db.pool); err == nil {
		db.ledger, err = ledger.Open(ctx, db.pool)
	}
	if err != nil {
		db.close()
		return nil, err
	}
	return db, nil
}

func (db *database) close() { db.pool.Close() }

// openLedger makes a new, empty queue in a database.
func (b *bench) openLedger(ctx context.Context, db *database) (*delayq.Queue, error) {
	b.queues++
	return delayq.Open(ctx, b.rdb, fmt.Sprintf("bench-%d", b.queues), delayq.Config{
		Shards: 1, Ledger: db.ledger, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
}

// empty removes the tasks of both sides.
func (db *database) empty(ctx context.Context) error {
	for _, table := range []string{"delayq.task", "river_job"} {
		if _, err := db.pool.Exec(ctx, "TRUNCATE "+table); err != nil {
			return err
		}
	}
	return calm(ctx, db.pool)
}

// wal is how far the server's write-ahead log is, in bytes.
func wal(ctx context.Context, pool *pgxpool.Pool) (float64, error) {
	var at float64
	err := pool.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").Scan(&at)
	return at, err
}

// calm writes out what the turns before have left to write, so that no turn pays for another's pages.
func calm(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, "CHECKPOINT")
	return err
}

// durability names the settings on which the figures depend, as the server has them.
func durability(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	var version, fsync, commit, pages, buffers string
	err := pool.QueryRow(ctx, `SELECT current_setting('server_version_num')::int / 10000 || '', current_setting('fsync'),
		current_setting('synchronous_commit'), current_setting('full_page_writes'), current_setting('shared_buffers')`).
		Scan(&version, &fsync, &commit, &pages, &buffers)
	if err == nil && (fsync != "on" || commit != "on" || pages != "on") {
		err = errors.New("PostgreSQL does not keep what it commits: the figures would be no user's")
	}
	return fmt.Sprintf("PostgreSQL %s, fsync %s, synchronous_commit %s, full_page_writes %s, shared_buffers %s",
		version, fsync, commit, pages, buffers), err
}

// cpuTime is the CPU time of this process, Redis and PostgreSQL together.
func (b *bench) cpuTime(ctx context.Context) (time.Duration, error) {
	var self syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		return 0, err
	}
	rdb, err := b.usedCPU(ctx)
	if err != nil {
		return 0, err
	}
	pg, err := treeCPU(b.pg.PID())
	return time.Duration(self.Utime.Nano()+self.Stime.Nano()) + time.Duration(rdb*float64(time.Second)) + pg, err
}

// treeCPU is the CPU time of a process and its children, those that have ended included. It is Linux's /proc.
func treeCPU(pid int) (time.Duration, error) {
	const perSecond = 100 // USER_HZ on every Linux
	tasks, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	var ticks int64
	found := false
	for _, file := range tasks {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has just ended
		}
		// The name, in parentheses, may hold blanks; after it come the state, the parent and, 14th to 17th of all, the times.
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		self := filepath.Base(filepath.Dir(file)) == strconv.Itoa(pid)
		if len(fields) < 15 || !self && fields[1] != strconv.Itoa(pid) {
			continue
		}
		times := fields[11:13]
		if self {
			times, found = fields[11:15], true
		}
		for _, t := range times {
			n, err := strconv.ParseInt(t, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", file, err)
			}
			ticks += n
		}
	}
	if !found {
		return 0, fmt.Errorf("no process %d in /proc", pid)
	}
	return time.Duration(ticks) * time.Second / perSecond, nil
}
