package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/functions"
	"github.com/delayq/toolkit/reconciler"
)

// autoDatabase as a URL is a PostgreSQL of dev's own, if the machine has its programs.
const autoDatabase = "auto"

// leftovers is what has to be taken away at the end, also when that comes at once.
type leftovers struct {
	mu   sync.Mutex
	undo []func()
}

// make makes something, and remembers how to take it away. A clear meanwhile waits, so that nothing half made stays.
func (l *leftovers) make(start func() (undo func(), err error)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	undo, err := start()
	if undo != nil {
		l.undo = append(l.undo, undo)
	}
	return err
}

// clear takes all away, the last first.
func (l *leftovers) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := len(l.undo); n > 0; n = len(l.undo) {
		l.undo[n-1]()
		l.undo = l.undo[:n-1]
	}
}

// undoLimit bounds each step of taking away: a server that does not answer keeps nobody.
const undoLimit = 5 * time.Second

// chooseDatabase settles which database there is to be, and starts one of dev's own if it is that. Afterwards d.database has a URL, or
// none.
func (d *dev) chooseDatabase(ctx context.Context, v *view, left *leftovers) error {
	switch d.database.url {
	case autoDatabase:
	case noDatabase:
		d.database.url = ""
		return nil
	default:
		return nil
	}
	d.database.url = ""
	if d.guestRedis {
		// A queue would outlive a database of ours, and one that others use must not come under it.
		switch there, err := d.queueThere(ctx); {
		case err != nil:
			return err
		case there == keptByLedger:
			return usagef("--queue: a ledger keeps %s; name its --database, or another queue", d.queue)
		case there == withoutLedger:
			v.note("queue %s is there already, without a ledger, and stays so; --database URL would give it one", d.queue)
			return nil
		}
	}
	v.say("starting a PostgreSQL for the ledger; --database off does without")
	err := left.make(func() (func(), error) {
		url, stop, missing, err := startPostgres()
		switch {
		case missing:
			v.note("no ledger, since this machine has no PostgreSQL programs (%v); --database URL names one that runs", err)
		case err != nil:
			lines := distinctLines(err)
			v.note("no ledger, since PostgreSQL does not start here: %s ... %s", lines[0], lines[len(lines)-1])
		default:
			d.database.url, d.private = url, true
		}
		return stop, nil
	})
	return errors.Join(err, ctx.Err())
}

// What may be known of the queue on a Redis that is somebody else's.
const (
	noQueue = iota
	withoutLedger
	keptByLedger
)

func (d *dev) queueThere(ctx context.Context) (int, error) {
	rdb, err := d.connect()
	if err != nil {
		return 0, err
	}
	defer rdb.Close()
	_, err = delayq.Open(ctx, rdb, d.queue, delayq.Config{NoCreate: true, OnWarning: func(delayq.Warning) {}})
	switch {
	case errors.Is(err, delayq.ErrNoQueue):
		return noQueue, nil
	case errors.Is(err, delayq.ErrLedger):
		return keptByLedger, nil
	}
	return withoutLedger, err
}

// queueKeys is what a shard has, as lua/README.md lists it.
var queueKeys = []string{
	"pending", "processing", "dead", "tasks", "state", "done:0", "done:1", "errors", "meta", "req", "consumers", "revs", "beats",
}

// removeQueue takes the queue away from a Redis that is somebody else's: without its ledger nobody can use it.
func (d *dev) removeQueue(shards int) func() {
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), undoLimit)
		defer cancel()
		rdb, err := d.connect()
		if err != nil {
			return
		}
		defer rdb.Close()
		for i := range shards {
			var keys []string
			for _, name := range queueKeys {
				keys = append(keys, fmt.Sprintf("dq:{%s:%d}:%s", d.queue, i, name))
			}
			_ = rdb.Unlink(ctx, keys...).Err() // a call for each shard, whose keys share a slot; the Redis may have gone before us
		}
	}
}

// bookkeeping is what dev has in PostgreSQL.
type bookkeeping struct {
	// Pools of their own, so that a crowd of customers cannot keep the functions from the database, nor either the display.
	forShop, forCloud, forView *pgxpool.Pool
	ledgers                    [3]*ledger.Ledger // on these
	stock                      *stockroom
}

func (b *bookkeeping) close() {
	for _, pool := range []*pgxpool.Pool{b.forShop, b.forCloud, b.forView} {
		if pool != nil {
			pool.Close()
		}
	}
}

// openDatabase brings the schema up to date and opens all that uses it.
func (d *dev) openDatabase(ctx context.Context, v *view, b *bookkeeping) error {
	for i, pool := range []**pgxpool.Pool{&b.forShop, &b.forCloud, &b.forView} {
		p, err := d.database.pool([]int32{16, 8, 4}[i])
		if err != nil {
			return err
		}
		*pool = p
		if i == 0 && errors.Is(checkSchema(ctx, p), delayq.ErrSchema) {
			version, err := migrations.Up(ctx, p)
			if err != nil {
				return err
			}
			if !d.private {
				v.say("schema delayq: version %d", version)
			}
		}
		if b.ledgers[i], err = ledger.Open(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// now is the clock of the database, which the due times are judged by.
func (b *bookkeeping) now(ctx context.Context) (now time.Time, err error) {
	err = b.forView.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now, err
}

// ahead is how far the clock of Redis is ahead of the database's, at most; 0 where they may be the same.
func (b *bookkeeping) ahead(ctx context.Context, rdb redis.UniversalClient) time.Duration {
	before, err1 := b.now(ctx)
	there, err2 := rdb.Time(ctx).Result()
	after, err3 := b.now(ctx)
	if errors.Join(err1, err2, err3) != nil || !there.After(after) {
		return 0
	}
	return there.Sub(before)
}

// openShop makes the shop's tables.
func (d *dev) openShop(ctx context.Context, sys *system, q *delayq.Queue, left *leftovers) error {
	s := &stockroom{pool: sys.kept.forShop, schema: "shop", q: q, books: sys.shop.books, log: sys.shop.log, doubts: map[string]bool{}}
	if !d.private {
		s.schema = "shop_" + sys.shop.run
	}
	sys.kept.stock, sys.shop.till, sys.shop.now = s, s, sys.kept.now
	return left.make(func() (func(), error) {
		err := s.build(ctx)
		if err != nil || d.private {
			return nil, err
		}
		return func() { d.removeShop(s.schema) }, nil
	})
}

// removeShop takes the shop's tables away from a database that is somebody else's. It has a connection of its own, as there may be a
// crowd at the others.
func (d *dev) removeShop(schema string) {
	ctx, cancel := context.WithTimeout(context.Background(), undoLimit)
	defer cancel()
	pool, err := d.database.pool(1)
	if err == nil {
		defer pool.Close()
		_, err = pool.Exec(ctx, "DROP SCHEMA "+schema+" CASCADE")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "delayq: the schema %s stays in the database: %s\n", schema, message(err))
	}
}

// mending is the reconciler function as dev sees it.
type mending struct {
	passes, drift, repaired atomic.Int64
}

func (m *mending) add(rep *reconciler.Report) {
	if rep.Complete {
		m.passes.Add(1)
	}
	m.drift.Add(rep.Drift)
	m.repaired.Add(rep.Repaired)
}

// Booked is the part of the summary that only a ledger makes possible.
type Booked struct {
	StockErrors int   `json:"stock_errors"` // products and orders whose stock is not what it must be
	Passes      int64 `json:"reconcile_passes"`
	Drift       int64 `json:"drift"` // tasks on which Redis and the ledger differed, those with a message on its way too
	Repaired    int64 `json:"drift_repaired"`
}

// told is how many lines about wrong stock are printed.
const told = 10

// account audits the stock. What cannot be audited is wrong.
func (b *bookkeeping) account(ctx context.Context, sys *system) *Booked {
	wrong, err := b.stock.audit(ctx)
	if err != nil {
		wrong = append(wrong, "the stock cannot be audited: "+message(err))
	}
	for _, line := range wrong[:min(len(wrong), told)] {
		sys.shop.log.Error("stock: " + line)
	}
	return &Booked{
		StockErrors: len(wrong), Passes: sys.mended.passes.Load(), Drift: sys.mended.drift.Load(), Repaired: sys.mended.repaired.Load(),
	}
}

// reconciler is a new environment of the reconciler function. Its log would tell of every message that it overtakes; the numbers do.
func (d *dev) reconciler(sys *system, led delayq.Ledger) invoke {
	fn := functions.Reconciler(d.function(sys, led, slog.New(slog.DiscardHandler))...)
	return func(ctx context.Context) error {
		done, err := fn(ctx, json.RawMessage(`{}`))
		for _, rep := range done.Queues {
			sys.mended.add(&rep)
		}
		if ctx.Err() != nil { // sent home in the middle of a slice
			return nil
		}
		return err
	}
}
