package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/delayq"
)

// The variables are those of the functions.
const (
	urlVar     = "DELAYQ_REDIS_URL"
	clusterVar = "DELAYQ_REDIS_CLUSTER"
)

// server is the Redis a verb works on.
type server struct {
	url     string
	cluster bool
}

func (s *server) flags(cmd *cobra.Command, fallback string) {
	cmd.Flags().StringVar(&s.url, "redis", "", "Redis `URL`: redis://[user:password@]host:port[/db], rediss:// for TLS; default "+fallback)
	cmd.Flags().BoolVar(&s.cluster, "cluster", false, "the URL names a node of a Redis Cluster, more nodes as ?addr=host:port")
}

// fromEnv fills in what the flags leave open.
func (s *server) fromEnv() error {
	if s.url == "" {
		if s.url = os.Getenv(urlVar); s.url == "" {
			return usagef("--redis: no Redis URL given, and %s is not set", urlVar)
		}
		if v := os.Getenv(clusterVar); v != "" {
			cluster, err := strconv.ParseBool(v)
			if err != nil {
				return usagef("%s: want true or false", clusterVar)
			}
			s.cluster = s.cluster || cluster
		}
	}
	return nil
}

// connect makes the client; nothing is dialled yet. The URL's own text stays out of every error, as it may hold a
// password.
func (s *server) connect() (redis.UniversalClient, error) {
	// A reply of the handshake this server does not know must not be an error, and go-redis asks for features that
	// old servers and imitations lack.
	quiet := &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	if s.cluster {
		opt, err := redis.ParseClusterURL(s.url)
		if err != nil {
			return nil, errURL
		}
		opt.ContextTimeoutEnabled, opt.DisableIdentity, opt.MaintNotificationsConfig = true, true, quiet
		return redis.NewClusterClient(opt), nil
	}
	opt, err := redis.ParseURL(s.url)
	if err != nil {
		return nil, errURL
	}
	opt.ContextTimeoutEnabled, opt.DisableIdentity, opt.MaintNotificationsConfig = true, true, quiet
	return redis.NewClient(opt), nil
}

var errURL = usagef("--redis: not a Redis URL; want redis://[user:password@]host:port[/db], rediss:// or unix://")

const redisDefault = "$" + urlVar + ", of a cluster if $" + clusterVar + " is true; that keeps the password out of ps"

// target is one queue of that Redis, and of its ledger if it has one.
type target struct {
	server
	booked booked
	queue  string
}

func (t *target) flags(cmd *cobra.Command) {
	t.server.flags(cmd, redisDefault)
	t.booked.flags(cmd)
	cmd.Flags().StringVar(&t.queue, "queue", t.queue, "`name` of the queue")
}

// open opens the queue and hands it to fn.
func (t *target) open(ctx context.Context, cfg delayq.Config, fn func(*delayq.Queue) error) error {
	if t.queue == "" {
		return usagef("--queue: name the queue")
	}
	if err := t.fromEnv(); err != nil {
		return err
	}
	rdb, err := t.connect()
	if err != nil {
		return err
	}
	defer rdb.Close()
	pool, err := t.booked.into(ctx, &cfg)
	if err != nil {
		return err
	}
	if pool != nil {
		defer pool.Close()
	}
	cfg.OnWarning = warn
	q, err := delayq.Open(ctx, rdb, t.queue, cfg)
	if err != nil {
		return err
	}
	return fn(q)
}

// warn passes on what Open finds amiss, but not with every command that a server keeps its settings to itself.
func warn(w delayq.Warning) {
	if w.Code != uncheckedCode {
		fmt.Fprintln(os.Stderr, "delayq: warning:", strings.ReplaceAll(w.Message, ": delayq: ", ": "))
	}
}

const uncheckedCode = "unchecked"

// inspect opens a queue that must exist: a misspelt name is an error, not a new and empty queue.
func (t *target) inspect(ctx context.Context, fn func(*delayq.Queue) error) error {
	err := t.open(ctx, delayq.Config{NoCreate: true}, fn)
	if errors.Is(err, delayq.ErrNoQueue) {
		return t.noQueue()
	}
	return err
}

func (t *target) noQueue() error {
	if t.booked.url != "" {
		return failf("--queue: there is no queue %q in this ledger", t.queue)
	}
	return failf("--queue: there is no queue %q on this Redis", t.queue)
}

// shown is the address without user, password and options.
func (s *server) shown() string {
	u, err := url.Parse(s.url)
	if err != nil {
		return "" // connect says what is wrong
	}
	u.User, u.RawQuery = nil, ""
	return u.String()
}
