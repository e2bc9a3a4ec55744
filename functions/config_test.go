package functions

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestConfigFromEnv(t *testing.T) {
	got, wrong := configFrom(map[string]string{
		"DELAYQ_REDIS_URL":      "redis://localhost:6379/3",
		"DELAYQ_REDIS_PASSWORD": "hunter2",
		"DELAYQ_QUEUES":         "orders, mail",
		"DELAYQ_SHARDS":         "4",
		"DELAYQ_CONCURRENCY":    "", // an empty variable is an unset one
		"DELAYQ_LEASE":          "45s",
		"DELAYQ_LOG_LEVEL":      "debug",
		"DELAYQ_REDIS_CLUSTER":  "true",
		"DELAYQ_DATABASE_URL":   "postgres://localhost/shop",
		"DELAYQ_HORIZON":        "1h",

		"DELAYQ_MONITOR_TOKEN":     "0123456789abcdef",
		"DELAYQ_METRICS_NAMESPACE": "shop/delayq #1",
	})
	if err := asError(wrong); err != nil {
		t.Fatal(err)
	}
	if got.RedisPassword != "hunter2" || strings.Join(got.Queues, " ") != "orders mail" || got.Shards != 4 || got.Concurrency != 0 ||
		got.Lease != 45*time.Second || got.LogLevel != slog.LevelDebug || !got.RedisCluster ||
		got.DatabaseURL != "postgres://localhost/shop" || got.Horizon != time.Hour ||
		got.MonitorToken != "0123456789abcdef" || got.MetricsNamespace != "shop/delayq #1" {
		t.Errorf("read %+v", got)
	}
}

func TestConfigErrorListsEverythingWrong(t *testing.T) {
	_, wrong := configFrom(map[string]string{
		"DELAYQ_CONCURRENCY":   "many",
		"DELAYQ_REDIS_CLUSTER": "perhaps",
		"DELAYQ_LEASE":         "30",
		"DELAYQ_LOG_LEVEL":     "loud",
		"DELAYQ_SHARDS":        "257",
		"DELAYQ_RUNNERS":       "-1",
		"DELAYQ_MAX_POLL":      "1ms",
		"DELAYQ_TIMEOUT":       "-5s",
		"DELAYQ_MARGIN":        "50ms",
		"DELAYQ_QUEUES":        "orders, ,mail,orders",

		"DELAYQ_MONITOR_TOKEN":     "0123456789abcde",
		"DELAYQ_METRICS_NAMESPACE": ":a",
	})
	err := asError(wrong)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		`DELAYQ_CONCURRENCY: "many" is not a whole number`,
		`DELAYQ_REDIS_CLUSTER: "perhaps" is not true or false`,
		`DELAYQ_LEASE: "30" is not a duration such as 500ms, 30s or 5m`,
		`DELAYQ_LOG_LEVEL: "loud" is not debug, info, warn or error`,
		`DELAYQ_SHARDS: must be 1 to 256, got 257`,
		`DELAYQ_RUNNERS: must be 1 to 100, got -1`,
		`DELAYQ_MAX_POLL: must be at least 5ms, got 1ms`,
		`DELAYQ_TIMEOUT: must be positive, got -5s`,
		`DELAYQ_MARGIN: must be at least 100 ms, got 50ms`,
		`DELAYQ_QUEUES: "" is not 1 to 128 of letters`,
		`DELAYQ_QUEUES: "orders" is there twice`,
		`DELAYQ_MONITOR_TOKEN: must be at least 16 characters, got 15`,
		`DELAYQ_METRICS_NAMESPACE: ":a" is not 1 to 255 of letters`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in: %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
}

func TestConfigKeepsSecrets(t *testing.T) {
	cfg := Config{
		RedisURL: "redis://:hunter2@localhost", RedisPassword: "hunter2",
		DatabaseURL: "postgres://u:hunter2@localhost/shop", DatabasePassword: "hunter2", MonitorToken: "hunter2",
	}
	var logged strings.Builder
	slog.New(slog.NewJSONHandler(&logged, nil)).Info("", "cfg", cfg, "url", cfg.RedisURL)
	body, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s %q", cfg, cfg, cfg, cfg.RedisURL, cfg.RedisURL), logged.String(), string(body)} {
		if strings.Contains(text, "hunter2") {
			t.Errorf("printed in %s", text)
		}
		if !strings.Contains(text, "[secret]") {
			t.Errorf("no sign of it in %s", text)
		}
	}
	for _, url := range []string{"redis://:hunter2/x@localhost", "redis://hunter2/x", "http://:hunter2@localhost", "%hunter2", "redis://h?hunter2=1"} {
		cfg.RedisURL = Secret(url)
		if _, p := cfg.client(); p == nil {
			t.Errorf("%s: accepted", url)
		} else if strings.Contains(p.text, "hunter2") {
			t.Errorf("%s: repeated in %q", url, p.text)
		}
	}
	for _, url := range []string{
		"hunter2", "host=db password=hunter2", "mysql://u:hunter2@db/x", "postgres://u:hunter2/x@db/y", "postgres://%hunter2@db/x",
		"postgres://u:hunter2@db:port/x", "postgres://db/x?sslmode=hunter2", "postgres://db/x?pool_max_conns=hunter2",
		"postgres://db/x?default_query_exec_mode=hunter2", "postgres://db/x?connect_timeout=hunter2",
	} {
		cfg.DatabaseURL = Secret(url)
		if _, p := cfg.database(); p == nil {
			t.Errorf("%s: accepted", url)
		} else if strings.Contains(p.text, "hunter2") {
			t.Errorf("%s: repeated in %q", url, p.text)
		}
	}
}

// variable finds those that are complained of.
var variable = regexp.MustCompile(`DELAYQ_\w+: `)

// What is set must fit whether there is a ledger, and whether one is needed.
func TestConfigOfALedger(t *testing.T) {
	const database = "postgres://localhost/shop"
	for _, tt := range []struct {
		name       string
		cfg        Config
		opts       []Option
		reconciler bool
		want       string // the variable that is wrong
	}{
		{"none", Config{}, nil, false, ""},
		{"a database", Config{DatabaseURL: database, DatabasePassword: "x", Horizon: time.Hour}, nil, false, ""},
		{"a ledger of the caller's", Config{Horizon: time.Hour}, []Option{WithLedger(tampered{})}, false, ""},
		{"a password without a database", Config{DatabasePassword: "x"}, nil, false, "DATABASE_PASSWORD"},
		{"a horizon without a ledger", Config{Horizon: time.Hour}, nil, false, "HORIZON"},
		{"a short horizon", Config{DatabaseURL: database, Horizon: time.Millisecond}, nil, false, "HORIZON"},
		{"a horizon before now", Config{DatabaseURL: database, Horizon: -time.Hour}, nil, false, "HORIZON"},
		{"no URL", Config{DatabaseURL: "localhost"}, nil, false, "DATABASE_URL"},
		{"a reconciler without", Config{}, nil, true, "DATABASE_URL"},
		{"a reconciler with a password alone", Config{DatabasePassword: "x"}, nil, true, "DATABASE_URL"},
		{"a reconciler with a database", Config{DatabaseURL: database}, nil, true, ""},
		{"a reconciler with a ledger of the caller's", Config{}, []Option{WithLedger(tampered{})}, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.cfg.RedisURL, tt.cfg.Queues = "redis://localhost", []string{"orders"}
			err := newProcess(append(tt.opts, WithConfig(tt.cfg)), tt.reconciler).err
			if tt.want == "" {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatal("accepted")
			}
			if got := variable.FindAllString(err.Error(), -1); len(got) != 1 || got[0] != envPrefix+tt.want+": " {
				t.Errorf("want %s alone: %v", tt.want, err)
			}
		})
	}
}

func TestClientSuitsAFunction(t *testing.T) {
	cfg := Config{RedisURL: "rediss://user:inURL@localhost:7000/2?dial_timeout=2s", RedisPassword: "apart"}
	rdb, p := cfg.client()
	if p != nil {
		t.Fatal(p)
	}
	defer rdb.Close()
	opt := rdb.(*redis.Client).Options()
	if opt.Password != "apart" || opt.Username != "user" || opt.DB != 2 || opt.TLSConfig == nil || opt.DialTimeout != 2*time.Second {
		t.Errorf("URL read as %+v", opt)
	}
	if !opt.ContextTimeoutEnabled || !opt.DisableIdentity || opt.ConnMaxIdleTime >= 350*time.Second || opt.PoolSize != poolSize || opt.MaxRetries < 1 {
		t.Errorf("options %+v", opt)
	}

	cfg = Config{RedisURL: "redis://localhost:7000", RedisCluster: true}
	rdb, p = cfg.client()
	if p != nil {
		t.Fatal(p)
	}
	defer rdb.Close()
	if c := rdb.(*redis.ClusterClient).Options(); !c.ContextTimeoutEnabled || !c.DisableIdentity || c.ConnMaxIdleTime >= 350*time.Second || c.PoolSize != poolSize {
		t.Errorf("cluster options %+v", c)
	}

	cfg = Config{RedisURL: "unix:///run/redis.sock"}
	rdb, p = cfg.client()
	if p != nil {
		t.Fatal(p)
	}
	defer rdb.Close()
	if opt := rdb.(*redis.Client).Options(); opt.Network != "unix" || opt.Addr != "/run/redis.sock" {
		t.Errorf("unix socket read as %s %s", opt.Network, opt.Addr)
	}
}

// Every rule of the worker is reported under the name of a variable.
func TestConfigKnowsTheWorkersFields(t *testing.T) {
	bad := Config{
		Queues: []string{"orders"}, Concurrency: -1, Lease: -1, Timeout: -1, Margin: -1, MaxPoll: 1 << 50, IdleExit: -1,
		BatonGroup: strings.Repeat("x", 1000), Runners: -1,
	}
	found := map[string]bool{}
	for _, p := range bad.problems() {
		found[strings.TrimPrefix(p.variable, envPrefix)] = true
	}
	for _, name := range variables {
		if !found[name] {
			t.Errorf("nothing is said of a bad %s", name)
		}
	}
	if len(found) != len(variables) {
		t.Errorf("found %v, know %v", found, variables)
	}
}
