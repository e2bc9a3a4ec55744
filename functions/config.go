package functions

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// envPrefix starts the name of every variable a function reads.
const envPrefix = "DELAYQ_"

// Config is everything that can be set about a function. The tag of a field, after DELAYQ_, is
// the environment variable it is read from. Durations are written the Go way: 500ms, 30s, 5m. A
// variable that is unset, empty or zero means the default.
//
// The reconciler and the monitor do not use Concurrency, Lease, Timeout, MaxPoll, IdleExit, BatonGroup and Runners, and the monitor
// alone uses MonitorToken and MetricsNamespace.
type Config struct {
	// RedisURL is where Redis is: redis://host:6379/0, rediss://host:6379 for TLS, or
	// unix:///path. Options of the client go in the query, as in ?dial_timeout=2s. Never logged.
	//
	// Required, unless WithRedis is given.
	RedisURL Secret `env:"REDIS_URL"`

	// RedisPassword is the password, kept apart from the URL so that it can come from a
	// secret store. It wins over a password in the URL. Never logged.
	RedisPassword Secret `env:"REDIS_PASSWORD"`

	// RedisCluster says that RedisURL is a node of a Redis Cluster. ElastiCache Serverless is one.
	RedisCluster bool `env:"REDIS_CLUSTER"`

	// DatabaseURL is the PostgreSQL database that keeps the ledger: postgres://user@host:5432/name.
	// Options of the connection and of the pool go in the query, as in
	// ?sslmode=verify-full&pool_max_conns=2. Never logged.
	//
	// Empty means that there is no ledger, and all tasks are in Redis alone. The reconciler needs one.
	DatabaseURL Secret `env:"DATABASE_URL"`

	// DatabasePassword is the password, kept apart from the URL so that it can come from a
	// secret store. It wins over a password in the URL. Never logged.
	DatabasePassword Secret `env:"DATABASE_PASSWORD"`

	// Horizon keeps tasks that are due later than this from now out of Redis: they wait in the
	// ledger until the reconciler brings them in. Make it several times the interval of the
	// reconciler's schedule, and the same for all that open the queue.
	//
	// Defaults to none: all tasks are in Redis too. At least 1 second. Only with a ledger.
	Horizon time.Duration `env:"HORIZON"`

	// Queues are the names of the queues, separated by commas.
	//
	// Required.
	Queues []string `env:"QUEUES"`

	// Shards is what the queues are divided in.
	//
	// Defaults to what each queue has. At most 256; a wrong number is refused.
	Shards int `env:"SHARDS"`

	// Concurrency is how many handlers run at once.
	//
	// Defaults to 32. At most 10,000.
	Concurrency int `env:"CONCURRENCY"`

	// Lease is how long a task is out of other runners' reach when this one dies. It is
	// renewed while the handler works.
	//
	// Defaults to 30 seconds. 1 second to 12 hours.
	Lease time.Duration `env:"LEASE"`

	// Timeout is the longest a handler may take. Keep it well below the function's own
	// timeout: a handler that meets the end of the invocation is cut, and its task runs again.
	//
	// Defaults to 5 minutes.
	Timeout time.Duration `env:"TIMEOUT"`

	// Margin is how long before the invocation's deadline running handlers are told to end, so
	// that there is time to give their tasks back and to answer before the process is killed.
	// New tasks are taken until twice the margin before it, and the reconciler works until then.
	//
	// Defaults to 2 seconds. At least 100 milliseconds.
	Margin time.Duration `env:"MARGIN"`

	// MaxPoll is the longest sleep between two looks at the queue, and so the lateness of a
	// task that was enqueued to run at once.
	//
	// Defaults to 500 milliseconds. 5 milliseconds to 1 minute.
	MaxPoll time.Duration `env:"MAX_POLL"`

	// IdleExit ends the invocation early when nothing falls due within it. It saves money on
	// quiet queues; set it to the interval of the schedule.
	//
	// Defaults to never.
	IdleExit time.Duration `env:"IDLE_EXIT"`

	// BatonGroup names the functions that relieve each other: a new invocation of the
	// group sends the oldest one home.
	//
	// Defaults to "worker".
	BatonGroup string `env:"BATON_GROUP"`

	// Runners is how many invocations of the group work side by side. The function's reserved
	// concurrency must be greater, so that a new one can start before an old one has left.
	//
	// Defaults to 1. At most 100.
	Runners int `env:"RUNNERS"`

	// ScriptHeader is the first line of every script, for servers that want one:
	// "#!lua flags=allow-key-locking" on Upstash.
	ScriptHeader string `env:"SCRIPT_HEADER"`

	// MonitorToken is what a request to the monitor must bring, as "Authorization: Bearer <token>". Never logged.
	//
	// Empty means that no request is served. At least 16 characters.
	MonitorToken Secret `env:"MONITOR_TOKEN"`

	// MetricsNamespace is the namespace of the CloudWatch metrics that the monitor writes. Give each deployment one of its own: the
	// metrics of the whole have no dimension that would tell two apart.
	//
	// Defaults to "delayq". 1 to 255 of letters, digits, spaces and . - _ / # :, and not "AWS/..." nor a colon first.
	MetricsNamespace string `env:"METRICS_NAMESPACE"`

	// AllowEviction opens queues although Redis may evict their data when it is full.
	AllowEviction bool `env:"ALLOW_EVICTION"`

	// LogLevel is debug, info, warn or error.
	//
	// Defaults to info.
	LogLevel slog.Level `env:"LOG_LEVEL"`
}

const (
	defaultMargin = 2 * time.Second
	defaultGroup  = "worker"
)

// A Secret is a string that is not printed: %v, JSON and slog show "[secret]" in its place.
type Secret string

// hidden is what is seen of a secret. An empty one may be seen to be empty.
func (s Secret) hidden() string {
	if s == "" {
		return ""
	}
	return "[secret]"
}

// String returns "[secret]", or nothing if there is none.
func (s Secret) String() string { return s.hidden() }

// GoString is String, for %#v.
func (s Secret) GoString() string { return s.hidden() }

// MarshalText is String, for JSON and slog.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.hidden()), nil }

// configFrom reads the variables, and says everything that is wrong with them.
func configFrom(vars map[string]string) (Config, []problem) {
	var cfg Config
	err := env.ParseWithOptions(&cfg, env.Options{Prefix: envPrefix, Environment: vars})
	for i, name := range cfg.Queues {
		cfg.Queues[i] = strings.TrimSpace(name)
	}
	// A variable that could not be read has left its field at zero, which is in range.
	return cfg, append(unreadable(err, vars), cfg.problems()...)
}

// A problem is one thing wrong with one variable.
type problem struct{ variable, text string }

// unreadable says in a reader's words what the env package could not parse.
func unreadable(err error, vars map[string]string) []problem {
	if err == nil {
		return nil
	}
	var all env.AggregateError
	if !errors.As(err, &all) {
		return []problem{{"environment", err.Error()}}
	}
	var wrong []problem
	for _, err := range all.Errors {
		var parse env.ParseError
		if !errors.As(err, &parse) {
			wrong = append(wrong, problem{"environment", err.Error()})
			continue
		}
		field, _ := reflect.TypeFor[Config]().FieldByName(parse.Name)
		name := envPrefix + field.Tag.Get("env")
		wrong = append(wrong, problem{name, fmt.Sprintf("%q is not %s", vars[name], wanted(parse.Type))})
	}
	return wrong
}

func wanted(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return "a duration such as 500ms, 30s or 5m"
	case reflect.TypeFor[slog.Level]():
		return "debug, info, warn or error"
	case reflect.TypeFor[bool]():
		return "true or false"
	default:
		return "a whole number"
	}
}

// queueName is delayq.Open's rule, looked at here so that a wrong name is listed with the rest.
var queueName = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,128}$`)

// shortestToken keeps a token from being guessed; "openssl rand -hex 32" makes a longer one.
const shortestToken = 16

// metricsNamespace is CloudWatch's rule: it drops lines that break it.
var metricsNamespace = regexp.MustCompile(`^[A-Za-z0-9._/# -][A-Za-z0-9._/#: -]{0,254}$`)

// problems lists every value that is out of range. Zero is always in range: it is the default.
func (c *Config) problems() []problem {
	var wrong []problem
	bad := func(variable, format string, args ...any) {
		wrong = append(wrong, problem{envPrefix + variable, fmt.Sprintf(format, args...)})
	}
	if len(c.Queues) == 0 {
		bad("QUEUES", "is not set: name at least one queue")
	}
	for i, name := range c.Queues {
		if !queueName.MatchString(name) {
			bad("QUEUES", "%.140q is not 1 to 128 of letters, digits and . _ - : /", name)
		} else if slices.Contains(c.Queues[:i], name) {
			bad("QUEUES", "%q is there twice", name)
		}
	}
	if c.Shards < 0 || c.Shards > 256 {
		bad("SHARDS", "must be 1 to 256, got %d", c.Shards)
	}
	if c.Horizon != 0 && c.Horizon < time.Second {
		bad("HORIZON", "must be at least 1 s, got %s", c.Horizon)
	}
	if n := len(c.MonitorToken); n > 0 && n < shortestToken {
		bad("MONITOR_TOKEN", "must be at least %d characters, got %d", shortestToken, n)
	}
	if c.MetricsNamespace != "" && !metricsNamespace.MatchString(c.MetricsNamespace) || strings.HasPrefix(c.MetricsNamespace, "AWS/") {
		bad("METRICS_NAMESPACE", "%.260q is not 1 to 255 of letters, digits, spaces and . - _ / # :, or begins with AWS/ or a colon", c.MetricsNamespace)
	}
	wc := c.worker()
	if wc.MaxPoll != 0 && wc.MaxPoll < minPoll {
		bad("MAX_POLL", "must be at least %s, got %s", minPoll, wc.MaxPoll)
		wc.MaxPoll = 0
	}
	if all, ok := wc.Validate().(interface{ Unwrap() []error }); ok {
		for _, err := range all.Unwrap() {
			var in *delayq.InputError
			if errors.As(err, &in) {
				bad(variables[in.Field], "must be %s, got %s", in.Limit, in.Got)
			}
		}
	}
	return wrong
}

// minPoll is the worker's own: a MaxPoll below it would be said of a field that has no variable.
const minPoll = 5 * time.Millisecond

// variables are the names under which users know the worker's fields.
var variables = map[string]string{
	"WorkerConfig.Concurrency": "CONCURRENCY",
	"WorkerConfig.Lease":       "LEASE",
	"WorkerConfig.Timeout":     "TIMEOUT",
	"WorkerConfig.Margin":      "MARGIN",
	"WorkerConfig.MaxPoll":     "MAX_POLL",
	"WorkerConfig.IdleExit":    "IDLE_EXIT",
	"WorkerConfig.Group":       "BATON_GROUP",
	"WorkerConfig.Runners":     "RUNNERS",
}

// worker is the part of the configuration that delayq's own loop takes.
func (c *Config) worker() delayq.WorkerConfig {
	return delayq.WorkerConfig{
		Concurrency: c.Concurrency,
		Lease:       c.Lease,
		Timeout:     c.Timeout,
		Margin:      cmp.Or(c.Margin, defaultMargin),
		MinPoll:     minPoll,
		MaxPoll:     c.MaxPoll,
		IdleExit:    c.IdleExit,
		Group:       cmp.Or(c.BatonGroup, defaultGroup),
		Runners:     c.Runners,
	}
}

// asError makes one error of all the problems, on one line so that it stays one log event.
func asError(wrong []problem) error {
	if len(wrong) == 0 {
		return nil
	}
	lines := make([]string, len(wrong))
	for i, p := range wrong {
		lines[i] = p.variable + ": " + p.text
	}
	return errors.New("functions: configuration: " + strings.Join(lines, "; "))
}

// The pool is small because handlers do not use it: the worker's few goroutines speak for
// all of them, a batch a call. Each environment of a function holds its own pool.
const poolSize = 8

// onePool makes pipelines share it, where the client would open a second pool for them.
const onePool = -1

// A frozen environment keeps sockets that NAT gateways forget after 350 s of silence without
// telling either end; the client drops them first.
const idleConn = 5 * time.Minute

// redisProblem never repeats the URL: what could not be parsed may be a password.
var redisProblem = problem{
	envPrefix + "REDIS_URL",
	"is not a URL like redis://host:6379/0, rediss://host:6379 or unix:///path (special characters of a password are percent-encoded; " +
		envPrefix + "REDIS_PASSWORD takes them as they are)",
}

// client builds the client of one environment's life. It does not connect.
func (c *Config) client() (redis.UniversalClient, *problem) {
	if c.RedisURL == "" {
		return nil, &problem{envPrefix + "REDIS_URL", "is not set"}
	}
	if c.RedisCluster {
		opt, err := redis.ParseClusterURL(string(c.RedisURL))
		if err != nil {
			return nil, &redisProblem
		}
		opt.Password = cmp.Or(string(c.RedisPassword), opt.Password)
		opt.ContextTimeoutEnabled = true // else the invocation's deadline would not end a call
		opt.DisableIdentity = true
		opt.ConnMaxIdleTime = cmp.Or(opt.ConnMaxIdleTime, idleConn)
		opt.PoolSize = cmp.Or(opt.PoolSize, poolSize)
		opt.PipelinePoolSize = cmp.Or(opt.PipelinePoolSize, onePool)
		return redis.NewClusterClient(opt), nil
	}
	opt, err := redis.ParseURL(string(c.RedisURL))
	if err != nil {
		return nil, &redisProblem
	}
	opt.Password = cmp.Or(string(c.RedisPassword), opt.Password)
	opt.ContextTimeoutEnabled = true
	opt.DisableIdentity = true
	opt.ConnMaxIdleTime = cmp.Or(opt.ConnMaxIdleTime, idleConn)
	opt.PoolSize = cmp.Or(opt.PoolSize, poolSize)
	opt.PipelinePoolSize = cmp.Or(opt.PipelinePoolSize, onePool)
	return redis.NewClient(opt), nil
}
