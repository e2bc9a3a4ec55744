package functions

import (
	"cmp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// What the pool of one environment's life is like, where the URL does not say otherwise.
const (
	// The worker's loops send one statement for all the tasks they have at hand, and the
	// reconciler has one at a time. Each environment has a pool, and a database few connections.
	databasePool = 4
	// A connection that is slow to come is tried again; the invocation must outlive that.
	databaseConnect = 5 * time.Second
	// The pool asks an idle connection whether it is alive. One that died while the environment
	// was frozen does not answer at all.
	databasePing = 2 * time.Second
	// Named statements would outlive a transaction, and poolers give the next transaction to
	// another session. This one describes each statement once and then takes one round trip, with
	// the types as the server has them.
	databaseMode = pgx.QueryExecModeCacheDescribe
)

// databaseProblem never repeats the URL, nor what pgx says of it, which may.
var databaseProblem = problem{
	envPrefix + "DATABASE_URL",
	"is not a URL like postgres://user@host:5432/name, or has an option in its query with a value that cannot be " +
		"(special characters of a password are percent-encoded; " + envPrefix + "DATABASE_PASSWORD takes them as they are)",
}

// database says what the pool is to be, or nil where no database is configured. It does not connect.
func (c *Config) database() (*pgxpool.Config, *problem) {
	url := string(c.DatabaseURL)
	if url == "" {
		return nil, nil
	}
	// The other form pgx reads, "host=... password=...", is not offered: almost any text is of it.
	if !strings.HasPrefix(url, "postgres://") && !strings.HasPrefix(url, "postgresql://") {
		return nil, &databaseProblem
	}
	pool, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, &databaseProblem
	}
	asked, err := pgconn.ParseConfig(url) // it takes the options of the pool for the server's, and so keeps them
	if err != nil {
		return nil, &databaseProblem
	}
	given := func(option string) bool { _, ok := asked.RuntimeParams[option]; return ok }
	pool.ConnConfig.Password = cmp.Or(string(c.DatabasePassword), pool.ConnConfig.Password)
	pool.ConnConfig.ConnectTimeout = cmp.Or(pool.ConnConfig.ConnectTimeout, databaseConnect)
	if !given("default_query_exec_mode") {
		pool.ConnConfig.DefaultQueryExecMode = databaseMode
	}
	if !given("pool_max_conns") {
		pool.MaxConns = databasePool
	}
	if !given("pool_max_conn_idle_time") {
		pool.MaxConnIdleTime = idleConn
	}
	if !given("pool_ping_timeout") {
		pool.PingTimeout = databasePing
	}
	return pool, nil
}

// withoutLedger says what does not fit a function that has no ledger.
func (c *Config) withoutLedger(needed bool) []problem {
	if needed {
		return []problem{{envPrefix + "DATABASE_URL", "is not set: the reconciler needs the ledger"}}
	}
	var wrong []problem
	// A function that was meant to have a ledger must not make queues without.
	if c.DatabasePassword != "" {
		wrong = append(wrong, problem{envPrefix + "DATABASE_PASSWORD", "is set, and " + envPrefix + "DATABASE_URL is not"})
	}
	if c.Horizon != 0 {
		wrong = append(wrong, problem{envPrefix + "HORIZON", "is set, and " + envPrefix + "DATABASE_URL is not: only a ledger keeps tasks beyond it"})
	}
	return wrong
}
