package main

import (
	"cmp"
	"context"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
)

// The variables are those of the functions.
const (
	databaseVar = "DELAYQ_DATABASE_URL"
	horizonVar  = "DELAYQ_HORIZON"
)

// noDatabase as a URL means none, whatever the environment says.
const noDatabase = "off"

// databaseConnect bounds a connect, so that a host that does not answer is told of while somebody waits.
const databaseConnect = 5 * time.Second

// database is the PostgreSQL that keeps the ledger.
type database struct{ url string }

func (d *database) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&d.url, "database", "", "PostgreSQL `URL` of the ledger: postgres://[user@]host[:port]/name, with the password in "+
		"$PGPASSWORD; off for none; default $"+databaseVar+", none if that is not set")
}

// fromEnv fills in what the flag leaves open. No URL at all means no ledger.
func (d *database) fromEnv() {
	if d.url == "" {
		d.url = os.Getenv(databaseVar)
	}
	if d.url == noDatabase {
		d.url = ""
	}
}

// required is fromEnv for a verb that is nothing without a ledger.
func (d *database) required() error {
	if d.fromEnv(); d.url == "" {
		return usagef("--database: no PostgreSQL URL given, and %s is not set", databaseVar)
	}
	return nil
}

// errDatabaseURL does not repeat the URL, nor what pgx says of it: both may hold a password.
var errDatabaseURL = usagef("--database: not a PostgreSQL URL, or one with an option that cannot be; " +
	"want postgres://[user[:password]@]host[:port]/name[?sslmode=...]")

// pool makes a pool of at most so many connections; nothing is dialled yet.
func (d *database) pool(conns int32) (*pgxpool.Pool, error) {
	// The other form that pgx reads, "host=... password=...", is not offered: almost any text is of it.
	if !strings.HasPrefix(d.url, "postgres://") && !strings.HasPrefix(d.url, "postgresql://") {
		return nil, errDatabaseURL
	}
	cfg, err := pgxpool.ParseConfig(d.url)
	if err != nil {
		return nil, errDatabaseURL
	}
	asked, err := pgconn.ParseConfig(d.url) // it takes the options of pgx and its pool for the server's, and so keeps them
	if err != nil {
		return nil, errDatabaseURL
	}
	if _, given := asked.RuntimeParams["default_query_exec_mode"]; !given {
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // no named statements, which poolers lose
	}
	if _, given := asked.RuntimeParams["pool_max_conns"]; !given {
		cfg.MaxConns = conns
	}
	cfg.ConnConfig.ConnectTimeout = cmp.Or(cfg.ConnConfig.ConnectTimeout, databaseConnect)
	params := cfg.ConnConfig.RuntimeParams
	params["application_name"] = cmp.Or(params["application_name"], "delayq")
	return pgxpool.NewWithConfig(context.Background(), cfg)
}

// open opens the ledger, on a pool that is to be closed.
func (d *database) open(ctx context.Context, conns int32) (*ledger.Ledger, *pgxpool.Pool, error) {
	pool, err := d.pool(conns)
	if err != nil {
		return nil, nil, err
	}
	led, err := ledger.Open(ctx, pool)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return led, pool, nil
}

// shown is the URL without a password.
func (d *database) shown() string {
	u, err := url.Parse(d.url)
	if err != nil {
		return ""
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	q := u.Query()
	q.Del("password")
	q.Del("sslpassword")
	u.RawQuery = q.Encode()
	return u.String()
}

// booked is the part of a queue's configuration that its ledger adds.
type booked struct {
	database
	horizon time.Duration
}

func (b *booked) flags(cmd *cobra.Command) {
	b.database.flags(cmd)
	cmd.Flags().DurationVar(&b.horizon, "horizon", 0, "keep tasks that are due later than this out of Redis, in the ledger alone; the same for "+
		"all that open the queue; default $"+horizonVar+", no such bound if that is not set")
}

// bound is the horizon, 0 for none. It fills in what the flags leave open.
func (b *booked) bound() (time.Duration, error) {
	horizon := b.horizon
	if v := os.Getenv(horizonVar); horizon == 0 && v != "" {
		var err error
		if horizon, err = time.ParseDuration(v); err != nil {
			return 0, usagef("%s: want a duration such as 1h", horizonVar)
		}
	}
	if b.fromEnv(); b.url == "" && horizon != 0 {
		return 0, usagef("--horizon: only a ledger keeps tasks beyond it; name its --database")
	}
	return horizon, nil
}

// into opens the ledger, if there is to be one, and puts it into cfg. It returns the ledger's pool, which is to be closed, or nil.
func (b *booked) into(ctx context.Context, cfg *delayq.Config) (*pgxpool.Pool, error) {
	horizon, err := b.bound()
	if err != nil || b.url == "" {
		return nil, err
	}
	led, pool, err := b.open(ctx, 4)
	if err != nil {
		return nil, err
	}
	cfg.Ledger, cfg.Horizon = led, horizon
	return pool, nil
}
