package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
	"github.com/delayq/toolkit/scripts/servers"
)

// Eight programs start at once on an empty database.
func TestMigrateAtOnceAndAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t, servers.NewDatabase(t), pgx.QueryExecModeCacheStatement)
	for range 2 {
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() {
				version, err := migrations.Up(t.Context(), pool)
				if errs[i] = err; err == nil && version != 1 {
					errs[i] = fmt.Errorf("version %d", version)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ledger.Open(t.Context(), pool); err != nil {
		t.Error(err)
	}
}

func TestMigrateWithAPoolOfOne(t *testing.T) {
	t.Parallel()
	oneConn(t, pgx.QueryExecModeSimpleProtocol)
}

func TestOpenChecksTheVersion(t *testing.T) {
	t.Parallel()
	pool := newPool(t, servers.NewDatabase(t), pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	refused := func(text string) {
		t.Helper()
		_, err := ledger.Open(ctx, pool)
		if !errors.Is(err, delayq.ErrSchema) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want a wrong schema and %q", err, text)
		}
	}
	refused("delayq migrate")
	if _, err := migrations.Up(ctx, pool); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ sql, want string }{
		{"INSERT INTO delayq.migration (version_id, is_applied) VALUES (99, true)", "update the program"},
		{"DELETE FROM delayq.migration WHERE version_id > 0", "delayq migrate"},
	} {
		if _, err := pool.Exec(ctx, c.sql); err != nil {
			t.Fatal(err)
		}
		refused(c.want)
	}
}

// Every right that Open asks for, and no other, is what a user needs.
func TestOpenChecksRights(t *testing.T) {
	t.Parallel()
	url := servers.NewDatabase(t)
	owner := newPool(t, url, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	if _, err := migrations.Up(ctx, owner); err != nil {
		t.Fatal(err)
	}
	user := "worker_" + strings.ReplaceAll(fmt.Sprint(time.Now().UnixNano()), "-", "")
	exec := func(sql string) {
		t.Helper()
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("CREATE ROLE " + user + " LOGIN PASSWORD 'secret-of-worker'")
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY " + user, "DROP ROLE " + user} {
			if _, err := owner.Exec(context.WithoutCancel(ctx), sql); err != nil {
				t.Log(err)
			}
		}
	})
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.User, cfg.ConnConfig.Password = user, "secret-of-worker"
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	rights := []string{
		"USAGE ON SCHEMA delayq", "SELECT ON delayq.migration", "USAGE ON SEQUENCE delayq.rev",
		"SELECT ON delayq.queue", "INSERT ON delayq.queue", "UPDATE ON delayq.queue",
		"SELECT ON delayq.task", "INSERT ON delayq.task", "UPDATE ON delayq.task", "DELETE ON delayq.task",
		"SELECT ON delayq.once", "INSERT ON delayq.once", "UPDATE ON delayq.once", "DELETE ON delayq.once",
		"SELECT ON delayq.reconcile", "INSERT ON delayq.reconcile", "UPDATE ON delayq.reconcile",
	}
	for _, right := range rights {
		exec("GRANT " + right + " TO " + user)
	}
	r := openRig(t, pool, "orders") // with all of them everything works
	r.verbs("rights", 7, func(string) {})
	r.ok(r.q.SetState(ctx, []byte("x")))
	r.inTx(func(ctx context.Context, tx pgx.Tx) {
		if first, err := ledger.Once(ctx, tx, "k"); err != nil || !first {
			t.Error(first, err)
		}
	})
	for _, right := range rights {
		exec("REVOKE " + right + " FROM " + user)
		_, err := ledger.Open(ctx, pool)
		privilege, object, _ := strings.Cut(right, " ON ")
		object = strings.TrimPrefix(strings.TrimPrefix(object, "SEQUENCE "), "SCHEMA ")
		if !errors.Is(err, ledger.ErrRights) || !strings.Contains(err.Error(), privilege) || !strings.Contains(err.Error(), object) ||
			!strings.Contains(err.Error(), user) || strings.Contains(err.Error(), "secret") {
			t.Errorf("without %s: %v", right, err)
		}
		exec("GRANT " + right + " TO " + user)
	}
}

func TestOpenQueue(t *testing.T) {
	eachMode(t, func(r *rig) {
		ctx := r.Context()
		name := "fresh " + r.name
		_, _, err := r.led.OpenQueue(ctx, name, delayq.LedgerConfig{}, false)
		r.is(err, delayq.ErrNoQueue)
		open := func(want delayq.LedgerConfig) delayq.LedgerConfig {
			r.Helper()
			_, have, err := r.led.OpenQueue(ctx, name, want, true)
			r.ok(err)
			if d := have.Now.Sub(have.Since); d < 0 || d > time.Minute || time.Since(have.Now).Abs() > time.Minute {
				r.Errorf("since %s, now %s", have.Since, have.Now)
			}
			have.Now, have.Since = time.Time{}, time.Time{}
			return have
		}
		if got := open(delayq.LedgerConfig{}); got != (delayq.LedgerConfig{Shards: 1, Retention: 2 * time.Minute, MaxPayload: 64 << 10}) {
			r.Errorf("%+v", got)
		}
		open(delayq.LedgerConfig{Retention: time.Hour, MaxPayload: 7})
		if got := open(delayq.LedgerConfig{Shards: 1}); got != (delayq.LedgerConfig{Shards: 1, Retention: time.Hour, MaxPayload: 7}) {
			r.Errorf("%+v", got)
		}
		_, _, err = r.led.OpenQueue(ctx, name, delayq.LedgerConfig{Shards: 2}, true)
		r.is(err, delayq.ErrShards)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if _, _, err := r.led.OpenQueue(ctx, "at once "+r.name, delayq.LedgerConfig{Shards: 3}, true); err != nil {
					r.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

func TestState(t *testing.T) {
	eachMode(t, func(r *rig) {
		for _, want := range [][]byte{nil, {}, []byte("\x00{\xff"), []byte("later")} {
			if want != nil {
				r.ok(r.q.SetState(r.Context(), want))
			}
			if got, err := r.q.State(r.Context()); err != nil || string(got) != string(want) {
				r.Errorf("%q %v, want %q", got, err, want)
			}
		}
	})
}

// The view is for people: it must work with ids that are no text.
func TestView(t *testing.T) {
	t.Parallel()
	r := newRig(t, pgx.QueryExecModeCacheStatement)
	bytes := newTask("\x00\xff")
	bytes.Key = ""
	r.insert(newTask("plain"), bytes)
	rows, err := r.pool.Query(t.Context(), "SELECT queue || ' ' || id || ' ' || status FROM delayq.tasks ORDER BY id DESC")
	r.ok(err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.ok(err)
	r.same(got, "orders plain pending", `orders \000\377 pending`)
}

// Errors never tell what a task contains.
func TestErrorsKeepSecrets(t *testing.T) {
	eachMode(t, func(r *rig) {
		task := newTask("a")
		task.Payload = []byte("secret-payload")
		tx, err := r.pool.Begin(r.Context())
		r.ok(err)
		defer tx.Rollback(context.WithoutCancel(r.Context()))
		_, err = tx.Exec(r.Context(), "SELECT 1/0")
		if err == nil {
			r.Fatal("no error")
		}
		_, err = r.q.Insert(r.Context(), tx, []delayq.LedgerTask{task}, false)
		if err == nil || strings.Contains(err.Error(), "secret") || !strings.HasPrefix(err.Error(), "delayq: ledger insert "+r.name+": ") {
			r.Error(err)
		}
	})
}
