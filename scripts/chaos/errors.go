package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// A trouble is one error that a server can answer with. It must be over when end returns.
type trouble struct {
	name  string
	begin func(ctx context.Context, t *troublemaker) error
	end   func(ctx context.Context, t *troublemaker) error
	says  string // parts of what a client may be told while it lasts, by "|"; empty = it is told nothing
	ofPG  bool   // enqueueing may then fail, but soon and with an error
}

// A troublemaker has connections that were there before the trouble.
type troublemaker struct {
	*stage
	conn  *redis.Conn
	other *redis.Client // another client, for what takes long
	held  []*pgx.Conn

	visitor *link // a producer inside the harness, which the troubles do touch
}

// set changes a setting of Redis.
func set(name, value string) func(ctx context.Context, t *troublemaker) error {
	return func(ctx context.Context, t *troublemaker) error { return t.conn.ConfigSet(ctx, name, value).Err() }
}

// do sends a command to Redis.
func do(args ...any) func(ctx context.Context, t *troublemaker) error {
	return func(ctx context.Context, t *troublemaker) error {
		return t.conn.Process(ctx, redis.NewCmd(ctx, args...))
	}
}

func nothing(context.Context, *troublemaker) error { return nil }

// inTheBackground sends a command that keeps Redis busy, and does not wait for its answer.
func inTheBackground(args ...any) func(ctx context.Context, t *troublemaker) error {
	return func(ctx context.Context, t *troublemaker) error {
		go func() { _ = t.other.Do(context.WithoutCancel(ctx), args...).Err() }() // how it ends is seen in what others are told
		time.Sleep(150 * time.Millisecond)
		return nil
	}
}

// settle waits until Redis answers again.
func settle(ctx context.Context, t *troublemaker) error {
	var err error
	for range 200 {
		if err = t.conn.Process(ctx, redis.NewCmd(ctx, "SET", "chaos:probe", 1)); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

const busyLoop = `local function now() local t = redis.call('TIME') return t[1] * 1000 + t[2] / 1000 end
local until_ = now() + tonumber(ARGV[1]) while now() < until_ do end return 1`

var troubles = []trouble{
	{"OOM", set("maxmemory", "1"), set("maxmemory", "0"), "OOM", false},
	{"READONLY", do("REPLICAOF", "127.0.0.1", "1"), do("REPLICAOF", "NO", "ONE"), "READONLY", false},
	{"NOREPLICAS", set("min-replicas-to-write", "1"), set("min-replicas-to-write", "0"), "NOREPLICAS", false},
	{
		"LOADING", func(ctx context.Context, t *troublemaker) error {
			for i := range 30 { // it looks for clients only so often while it loads
				noise := make([]byte, 4096) // text would be compressed
				_, _ = rand.Read(noise)     // never fails
				if err := t.rdb.Set(ctx, fmt.Sprint("chaos:ballast:", i), noise, 0).Err(); err != nil {
					return err
				}
			}
			err := errors.Join(set("loading-process-events-interval-bytes", "1024")(ctx, t), set("key-load-delay", "20000")(ctx, t))
			return errors.Join(err, inTheBackground("DEBUG", "RELOAD")(ctx, t))
		}, func(ctx context.Context, t *troublemaker) error {
			return errors.Join(settle(ctx, t), set("key-load-delay", "0")(ctx, t))
		}, "LOADING", false,
	},
	{
		"BUSY", func(ctx context.Context, t *troublemaker) error {
			err := set("lua-time-limit", "50")(ctx, t)
			return errors.Join(err, inTheBackground("EVAL", busyLoop, 0, 800)(ctx, t))
		}, func(ctx context.Context, t *troublemaker) error {
			return errors.Join(settle(ctx, t), set("lua-time-limit", "5000")(ctx, t))
		}, "BUSY", false,
	},
	{"NOSCRIPT", do("SCRIPT", "FLUSH"), do("SCRIPT", "FLUSH"), "", false},
	{
		"max clients", func(ctx context.Context, t *troublemaker) error {
			return errors.Join(set("maxclients", "1")(ctx, t), do("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")(ctx, t))
		}, set("maxclients", "10000"), "max number of clients|broken pipe|reset by peer|EOF", false, // it closes the connection, and its word may get lost
	},
	{"NOPERM", do("ACL", "SETUSER", "default", "-eval", "-evalsha", "-set"), do("ACL", "SETUSER", "default", "+@all"), "NOPERM", false},
	{"CLIENT PAUSE", do("CLIENT", "PAUSE", 700, "WRITE"), settle, "timeout", false},
	{
		"redis is silent", func(_ context.Context, t *troublemaker) error { return t.redis.Pause() },
		func(_ context.Context, t *troublemaker) error { return t.redis.Resume() }, "timeout", false,
	},
	{"postgres: backends terminated", terminateAll, nothing, "", true},
	{
		"postgres: read-only", func(ctx context.Context, t *troublemaker) error { return t.readOnly(ctx, "on") },
		func(ctx context.Context, t *troublemaker) error { return t.readOnly(ctx, "off") }, "read-only", true,
	},
	{"postgres: no connection is free", fillConnections, freeConnections, "too many clients", true},
}

func terminateAll(ctx context.Context, t *troublemaker) error {
	_, err := t.pool.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity
		where datname = current_database() and application_name like 'chaos %'`)
	return err
}

// readOnly makes all sessions but the harness' refuse to write.
func (t *troublemaker) readOnly(ctx context.Context, value string) error {
	if _, err := t.pool.Exec(ctx, fmt.Sprintf("alter database %q set default_transaction_read_only = %s", t.database, value)); err != nil {
		return err
	}
	return terminateAll(ctx, t)
}

// fillConnections takes every connection there is, and those that others must give up.
func fillConnections(ctx context.Context, t *troublemaker) error {
	for refused := 0; refused < 20; {
		conn, err := pgx.Connect(ctx, t.pg.URL(""))
		if err == nil {
			t.held = append(t.held, conn)
			continue
		}
		refused++
		if err := terminateAll(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

func freeConnections(ctx context.Context, t *troublemaker) error {
	for _, conn := range t.held {
		_ = conn.Close(ctx) // it is gone either way
	}
	t.held = nil
	return nil
}

// errorMatrix makes each trouble in turn and looks at what goes on meanwhile.
func errorMatrix(ctx context.Context, s *stage) error {
	other := redis.NewClient(&redis.Options{Addr: s.redis.Addr(), ClientName: "harness", ReadTimeout: -1})
	t := &troublemaker{stage: s, conn: s.rdb.Conn(), other: other}
	defer t.other.Close()
	defer func() { _ = t.conn.Close() }()
	if err := errors.Join(t.conn.Ping(ctx).Err(), t.other.Ping(ctx).Err()); err != nil {
		return err
	}
	visitor := s.cfg
	visitor.Role = "visitor"
	var err error
	if t.visitor, err = visitor.open(ctx); err != nil {
		return err
	}
	defer t.visitor.close()
	share := time.Until(deadline(ctx)) / time.Duration(len(troubles))
	for i, trouble := range troubles {
		began := time.Now()
		s.fault("%s", trouble.name)
		// Not cut off by the end of the play: on a busy machine it may come in the middle of a call.
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		err := trouble.begin(within, t)
		if err == nil {
			err = t.during(within, i, &trouble)
			pause(ctx, share*2/3-time.Since(began))
		}
		cancel()
		clean := context.WithoutCancel(ctx)
		if err = errors.Join(err, trouble.end(clean, t)); err != nil {
			return fmt.Errorf("%s: %w", trouble.name, err)
		}
		if !pause(ctx, share-time.Since(began)) {
			s.j.write(event{Kind: evFault, Note: fmt.Sprintf("time for %d of %d", i+1, len(troubles))})
		}
	}
	return nil
}

func deadline(ctx context.Context) time.Time {
	d, _ := ctx.Deadline() // play sets one
	return d
}

// during checks that a client is told what it should be, and that the ledger does not mind.
func (t *troublemaker) during(ctx context.Context, i int, tr *trouble) error {
	if tr.says != "" {
		said := ""
		expected := func() bool {
			return slices.ContainsFunc(strings.Split(tr.says, "|"), func(part string) bool { return strings.Contains(said, part) })
		}
		for try := 0; try < 20 && !expected(); try++ {
			said = t.told(ctx, tr.ofPG)
		}
		if !expected() {
			return fmt.Errorf("a client is told %q", said)
		}
	}
	for k := range 3 {
		id := fmt.Sprintf("e%02d-%d", i, k)
		limit := 4 * time.Second
		began := time.Now()
		outcome := t.enqueue(ctx, id, k == 1)
		if took := time.Since(began); took > limit {
			return fmt.Errorf("an enqueue took %s", took)
		}
		if outcome != outDone && !tr.ofPG {
			return fmt.Errorf("an enqueue is %s, though the ledger is well", outcome)
		}
		if k == 2 && outcome == outDone {
			if err := t.cancel(ctx, id); err != nil && !tr.ofPG {
				return err
			}
		}
	}
	return nil
}

// told is the error that a client of the server gets, one that is new to it for the database.
func (t *troublemaker) told(ctx context.Context, ofPG bool) string {
	if ofPG {
		cfg, err := pgx.ParseConfig(t.cfg.Database)
		if err != nil {
			return err.Error()
		}
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err != nil {
			return err.Error()
		}
		defer func() { _ = conn.Close(ctx) }()
		_, err = conn.Exec(ctx, "update chaos.stock set taken = taken where part = 0")
		return fmt.Sprint(err)
	}
	fresh := redis.NewClient(&redis.Options{
		Addr: t.redis.Addr(), MaxRetries: -1, DialTimeout: 300 * time.Millisecond, ReadTimeout: 300 * time.Millisecond, ClientName: "harness",
	})
	defer fresh.Close()
	return fmt.Sprint(fresh.Do(ctx, "SET", "chaos:probe", 1).Err())
}

// enqueue is a producer's call by the harness, in the trouble, and in its journal.
func (t *troublemaker) enqueue(ctx context.Context, id string, inTx bool) string {
	p := planned{ID: id, Fate: fateOK, Tx: inTx}
	task := delayq.Task{ID: id, Type: typeMail, Payload: p.body(1)}
	if inTx {
		task.Type = typeOrder
	}
	if strings.HasSuffix(id, "2") {
		task.Delay = time.Hour // it will be cancelled
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	call := t.nextCall()
	due := time.Now().Add(task.Delay).UnixMicro()
	t.j.write(event{Kind: evCall, Call: call, Task: id, Op: opEnqueue, Tx: inTx, Due: due, Version: 1, Fate: fateOK})
	outcome := outDone
	var err error
	if inTx {
		err = pgx.BeginFunc(ctx, t.visitor.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into chaos.orders (task) values ($1)", id); err != nil {
				return err
			}
			_, err := t.visitor.q.EnqueueTx(ctx, tx, task)
			return err
		})
	} else {
		_, err = t.visitor.q.Enqueue(ctx, task)
	}
	if err != nil {
		outcome = outDoubt
	}
	t.j.write(event{Kind: evRet, Call: call, Task: id, Outcome: outcome, Answer: fmt.Sprint(err)})
	return outcome
}

func (t *troublemaker) cancel(ctx context.Context, id string) error {
	call := t.nextCall()
	t.j.write(event{Kind: evCall, Call: call, Task: id, Op: opCancel})
	got, err := t.visitor.q.Cancel(ctx, id)
	t.j.write(event{Kind: evRet, Call: call, Task: id, Outcome: outcomeOf(err), Answer: got.String()})
	if err != nil || got != delayq.Cancelled {
		return fmt.Errorf("a cancel is answered %s, %w", got, err)
	}
	return nil
}
