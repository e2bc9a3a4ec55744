package monitor_test

import (
	"bytes"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

// userWith makes a user of these rights, and connects as him.
func userWith(t *testing.T, server *servers.Redis, rules string) (admin, user *redis.Client) {
	t.Helper()
	admin = dial(t, server.Addr())
	args := []any{"ACL", "SETUSER", "watcher", "reset", "on", ">secret"}
	for rule := range strings.FieldsSeq(rules) {
		args = append(args, rule)
	}
	ok(t, admin.Do(t.Context(), args...).Err())
	user = redis.NewClient(&redis.Options{Addr: server.Addr(), Username: "watcher", Password: "secret", ContextTimeoutEnabled: true})
	t.Cleanup(func() { user.Close() })
	return admin, user
}

// rights are those that README.md tells to give, by name of the user.
func rights(t *testing.T, user string) string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	ok(t, err)
	found := regexp.MustCompile(`(?m)^ACL SETUSER ` + user + ` on >\S+ (.*)$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("README.md has no ACL SETUSER %s", user)
	}
	return string(found[1])
}

func TestTheRightsInTheReadmeAreEnoughToWatch(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	admin, user := userWith(t, server, rights(t, "monitor"))
	add(t, open(t, admin, "orders", delayq.Config{Shards: 2}), "x", 5)
	v := watch(t, monitor.Config{Redis: user}).Look(t.Context())
	if v.Err != nil || len(v.Queues) != 1 || v.Queues[0].Err != nil || v.Queues[0].Stats.Due != 5 || v.Server.Version == "" || v.Server.Policy == "" {
		t.Errorf("%+v", v)
	}
	if err := user.Set(t.Context(), "dq:x", "y", 0).Err(); err == nil || !strings.Contains(err.Error(), "NOPERM") {
		t.Errorf("one who watches may write: %v", err)
	}
}

// Queues that cannot be listed are never taken for queues that are not there.
func TestQueuesThatCannotBeListed(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	admin, user := userWith(t, server, "~* +@all -scan")
	add(t, open(t, admin, "orders", delayq.Config{}), "x", 5)
	var log lines
	m := watch(t, monitor.Config{Redis: user, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 2 {
		if got := scrape(t, m); got["delayq_up"] != 1 || got["delayq_queues_unlisted"] != 1 {
			t.Errorf("up %v, unlisted %v", got["delayq_up"], got["delayq_queues_unlisted"])
		}
	}
	if v := m.Look(t.Context()); v.FindErr == nil || v.Server.Err != nil || len(v.Queues) > 0 {
		t.Errorf("%+v", v)
	}
	ok(t, admin.Do(t.Context(), "ACL", "SETUSER", "watcher", "+scan").Err())
	eventually(t, "the queue", func() bool {
		got := scrape(t, m)
		return got["delayq_queues_unlisted"] == 0 && got[of("orders", "tasks", `state="due"`)] == 5
	})
	// Once known, it is watched whatever becomes of the list; and named queues need none.
	ok(t, admin.Do(t.Context(), "ACL", "SETUSER", "watcher", "-scan").Err())
	named := watch(t, monitor.Config{Redis: user, Queues: []string{"orders"}})
	if got := scrape(t, named); got["delayq_queues_unlisted"] != 0 || got[of("orders", "tasks", `state="due"`)] != 5 {
		t.Errorf("named: %v", got)
	}
	if got, want := log.told(), []string{"WARN list of queues", "INFO list of queues"}; !slices.Equal(got, want) {
		t.Errorf("logged %q, want %q", got, want)
	}
}

// lines is a log that may be written and read at once.
type lines struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

var logged = regexp.MustCompile(`level=(\w+) .* what=("[^"]*"|\S+)`)

// told are level and subject of what was logged.
func (l *lines) told() (told []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range logged.FindAllStringSubmatch(l.all.String(), -1) {
		told = append(told, m[1]+" "+strings.Trim(m[2], `"`))
	}
	return told
}
