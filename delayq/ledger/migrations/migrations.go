// Package migrations makes and updates the database schema of package ledger. It is a package of its own so that programs which only
// use the ledger do not link the migration library.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

//go:embed *.sql
var files embed.FS

// lockID is the key of the advisory lock that lets one migration run at a time: "delayq" in ASCII.
const lockID = 0x64656c617971

// Up brings the schema delayq to the version of this package and returns that version. It may be repeated, and run by several
// at once: one works and the others wait. The database user must be allowed to create the schema, or own it.
//
// It makes connections of its own, two at a time, as pool is configured, and closes them.
func Up(ctx context.Context, pool *pgxpool.Pool) (version int64, err error) {
	cfg := pool.Config()
	var opts []stdlib.OptionOpenDB
	if cfg.BeforeConnect != nil {
		opts = append(opts, stdlib.OptionBeforeConnect(cfg.BeforeConnect))
	}
	db := stdlib.OpenDB(*cfg.ConnConfig, opts...)
	defer db.Close() //nolint:errcheck // all is done, or has failed already
	version, err = up(ctx, db)
	if err != nil {
		return 0, fmt.Errorf("delayq: migrate: %w", err)
	}
	return version, nil
}

// up does it all under an advisory lock. An open transaction holds that: unlike a session's it works through PgBouncer, and unlike a
// row with a lease it is gone when its holder is. The library's own lockers come too late, since it begins by making its table.
func up(ctx context.Context, db *sql.DB) (int64, error) {
	lock, err := db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer lock.Rollback() //nolint:errcheck // it has written nothing
	if _, err := lock.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1::bigint)", int64(lockID)); err != nil {
		return 0, err
	}
	var there bool
	if err := db.QueryRowContext(ctx, "SELECT to_regnamespace('delayq') IS NOT NULL").Scan(&there); err != nil {
		return 0, err
	}
	if !there { // IF NOT EXISTS would ask for the right to create even where there is nothing to do
		if _, err := db.ExecContext(ctx, "CREATE SCHEMA delayq"); err != nil {
			return 0, err
		}
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName("delayq.migration"), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return 0, err
	}
	if _, err := provider.Up(ctx); err != nil {
		return 0, err
	}
	return provider.GetDBVersion(ctx)
}
