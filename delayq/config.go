package delayq

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"
)

// Config tunes a Queue. The zero Config is ready to use.
type Config struct {
	// Shards is how many parts the queue has, each with keys of its own. It is stored with the queue when that is new; a
	// different count later is refused with ErrShards.
	//
	// 0 means as stored, 1 for a new queue. At most 256.
	Shards int

	// Retention is how long the id of a finished task is remembered at least (up to twice as long): within it a second
	// enqueue of the id answers DuplicateDone, and a repeated ack its first answer. It must be longer than callers retry.
	//
	// 0 means as stored, 2 minutes for a new queue. 1 second to 24 hours. It costs about 110 bytes of Redis memory a task.
	Retention time.Duration

	// MaxPayload bounds Task.Payload in bytes. Put large things elsewhere and a reference here.
	//
	// 0 means as stored, 64 KiB for a new queue. At most 256 KiB.
	MaxPayload int

	// DeadCap is how many dead letters a shard keeps; beyond it the oldest are deleted.
	//
	// Defaults to 100,000. At least 1.
	DeadCap int

	// NoCreate makes Open fail with ErrNoQueue instead of creating a queue that is not there.
	NoCreate bool

	// AllowEviction opens the queue on a server that may evict its keys (a maxmemory-policy of allkeys). Tasks can then
	// vanish; it is for caches in development.
	AllowEviction bool

	// MaxSkew is how far this machine's clock may be from Redis' clock. Due times are judged by Redis' clock alone, but
	// absolute times come from this one.
	//
	// Defaults to 30 seconds.
	MaxSkew time.Duration

	// OnWarning is told of what Open and later calls find amiss but can live with. It must be quick.
	//
	// Defaults to a line in Logger.
	OnWarning func(Warning)

	// Ledger keeps every task in a database too, and Redis becomes an index that can be rebuilt from it: tasks survive the loss of
	// all of Redis, and can be enqueued, cancelled and completed inside the application's own transactions. Package ledger has
	// the one for PostgreSQL. Run a reconciler (package reconciler) beside it. A queue that has a ledger cannot be opened
	// without.
	Ledger Ledger

	// Horizon keeps tasks that are due later than this from now out of Redis; they wait in the ledger until the reconciler
	// brings them in. It must be longer than the reconciler's period, several times.
	//
	// 0, the default, means all tasks are in Redis. At least 1 second. Only with Ledger.
	Horizon time.Duration

	// ScriptHeader is put before every script as its first line, for servers that want one, such as
	// "#!lua flags=allow-key-locking". On Redis itself a header without allow-oom makes a full server refuse every script.
	ScriptHeader string

	// Logger gets warnings. Defaults to slog.Default().
	Logger *slog.Logger
}

// A Warning is something amiss that does not stop the queue.
type Warning struct {
	Code    string // "skew", "eviction", "data_lost", "unchecked", "redis_away"
	Message string
}

func (c Config) withDefaults() Config {
	c.DeadCap = cmp.Or(c.DeadCap, 100_000)
	c.MaxSkew = cmp.Or(c.MaxSkew, 30*time.Second)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.OnWarning == nil {
		logger := c.Logger
		c.OnWarning = func(w Warning) { logger.Warn("delayq: "+w.Message, "code", w.Code) }
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.Shards < 0 || c.Shards > 256:
		return &InputError{"Config.Shards", "0 to 256", fmt.Sprint(c.Shards)}
	case c.Retention != 0 && (c.Retention < time.Second || c.Retention > 24*time.Hour):
		return &InputError{"Config.Retention", "1 s to 24 h", c.Retention.String()}
	case c.MaxPayload < 0 || c.MaxPayload > 256<<10:
		return &InputError{"Config.MaxPayload", "0 to 262144 bytes", fmt.Sprint(c.MaxPayload)}
	case c.DeadCap < 1:
		return &InputError{"Config.DeadCap", "at least 1", fmt.Sprint(c.DeadCap)}
	case c.Horizon != 0 && (c.Horizon < time.Second || c.Ledger == nil):
		return &InputError{"Config.Horizon", "0, or at least 1 s together with Config.Ledger", c.Horizon.String()}
	case c.MaxSkew < 0:
		return &InputError{"Config.MaxSkew", "positive", c.MaxSkew.String()}
	}
	return nil
}

func validQueue(name string) error {
	ok := len(name) > 0 && len(name) <= 128
	for i := range len(name) {
		c := name[i]
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-' || c == ':' || c == '/')
	}
	if !ok {
		return &InputError{"queue name", "1 to 128 of letters, digits and . _ - : /", fmt.Sprintf("%.140q", name)}
	}
	return nil
}
