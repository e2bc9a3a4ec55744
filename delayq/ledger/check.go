package ledger

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/delayq/toolkit/delayq"
)

// schemaVersion is the newest of package migrations.
const schemaVersion = 1

// checkSQL asks the catalogs by oid, which needs no right on the schema itself. An object that is not there lacks nothing: then the
// version is wrong.
const checkSQL = `
SELECT current_setting('server_version_num')::int, current_setting('server_version')::text, pg_is_in_recovery(), current_user::text,
	EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = 'delayq' AND c.relname = 'migration'),
	ARRAY(
		SELECT 'USAGE on schema delayq' FROM pg_catalog.pg_namespace n
		WHERE n.nspname = 'delayq' AND NOT has_schema_privilege(n.oid, 'USAGE')
		UNION ALL
		SELECT need.privilege || ' on delayq.' || need.name
		FROM (VALUES
			('migration', 'SELECT'),
			('queue', 'SELECT'), ('queue', 'INSERT'), ('queue', 'UPDATE'),
			('task', 'SELECT'), ('task', 'INSERT'), ('task', 'UPDATE'), ('task', 'DELETE'),
			('once', 'SELECT'), ('once', 'INSERT'), ('once', 'UPDATE'), ('once', 'DELETE'),
			('reconcile', 'SELECT'), ('reconcile', 'INSERT'), ('reconcile', 'UPDATE'),
			('rev', 'USAGE')
		) AS need(name, privilege)
		JOIN pg_catalog.pg_class c ON c.relname = need.name
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'delayq'
		WHERE NOT CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, need.privilege)
			ELSE has_table_privilege(c.oid, need.privilege) END
	)::text[]`

// check refuses a database that the ledger cannot work with.
func check(ctx context.Context, tx pgx.Tx) error {
	var number int
	var version, user string
	var standby, migrated bool
	var missing []string
	if err := tx.QueryRow(ctx, checkSQL).Scan(&number, &version, &standby, &user, &migrated, &missing); err != nil {
		return err
	}
	switch {
	case number < 140_000:
		return fmt.Errorf("%w: PostgreSQL %s, need 14 or later", delayq.ErrServerVersion, version)
	case standby:
		return fmt.Errorf("%w: connect to the primary (target_session_attrs=read-write)", ErrStandby)
	case !migrated:
		return fmt.Errorf("%w: the database has no schema delayq: run `delayq migrate`", delayq.ErrSchema)
	case len(missing) > 0:
		return fmt.Errorf("%w: user %s needs %s", ErrRights, user, strings.Join(missing, ", "))
	}
	var have int64
	if err := tx.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM delayq.migration WHERE is_applied`).Scan(&have); err != nil {
		return err
	}
	switch {
	case have < schemaVersion:
		return fmt.Errorf("%w: the schema delayq has version %d, this program needs %d: run `delayq migrate`", delayq.ErrSchema, have, schemaVersion)
	case have > schemaVersion:
		return fmt.Errorf("%w: the schema delayq has version %d, this program knows %d: update the program", delayq.ErrSchema, have, schemaVersion)
	}
	return nil
}
