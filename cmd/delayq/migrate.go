package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/delayq/ledger/migrations"
)

func newMigrate() *cobra.Command {
	var d database
	var status, asJSON bool
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Make or update the schema of the ledger in PostgreSQL",
		Long: `migrate brings the schema delayq of a database to the version that this program works with. It may be run again, and by several
at once: one works and the others wait. Programs that use the ledger never do it by themselves. The database user must be allowed to
create the schema, or own it; the programs need less, and say what.

Exit status: 0 the schema is up to date, 1 it is not (--status) or the database failed, 2 wrong usage.`,
		Example: `  PGPASSWORD=... delayq migrate --database postgres://owner@db.example.com:5432/shop`,
		Args:    exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := d.required(); err != nil {
				return err
			}
			pool, err := d.pool(2)
			if err != nil {
				return err
			}
			defer pool.Close()
			return migrate(cmd, pool, status, asJSON)
		},
	}
	d.flags(cmd)
	cmd.Flags().BoolVar(&status, "status", false, "only tell whether the schema is up to date")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: {from, to, current}")
	return cmd
}

func migrate(cmd *cobra.Command, pool *pgxpool.Pool, status, asJSON bool) error {
	ctx := cmd.Context()
	from, err := schemaVersion(ctx, pool)
	if err != nil {
		return err
	}
	to := from
	if !status {
		if to, err = migrations.Up(ctx, pool); err != nil {
			return err
		}
	}
	wrong := checkSchema(ctx, pool)
	if wrong != nil && !errors.Is(wrong, delayq.ErrSchema) {
		return wrong
	}
	if asJSON {
		err = printJSON(cmd.OutOrStdout(), map[string]any{"from": from, "to": to, "current": wrong == nil})
	} else if wrong == nil {
		said := fmt.Sprintf("up to date, version %d", to)
		if from != to {
			said = fmt.Sprintf("from version %d to %d", from, to)
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "schema delayq: %s\n", said)
	}
	if err == nil && wrong != nil {
		err = wrong
		if asJSON {
			err = errReported
		}
	}
	return err
}

// schemaVersion is 0 for a database without the schema.
func schemaVersion(ctx context.Context, pool *pgxpool.Pool) (version int64, err error) {
	var there bool
	if err := pool.QueryRow(ctx, `SELECT to_regclass('delayq.migration') IS NOT NULL`).Scan(&there); err != nil || !there {
		return 0, err
	}
	err = pool.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM delayq.migration WHERE is_applied`).Scan(&version)
	return version, err
}

// checkSchema asks the ledger itself. What the user may not do is of no interest here: others will use it.
func checkSchema(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := ledger.Open(ctx, pool)
	if errors.Is(err, ledger.ErrRights) {
		return nil
	}
	return err
}
