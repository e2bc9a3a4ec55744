package main

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

const consoleToken = "a token of the console"

func TestMonitorServesTheConsole(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { rdb.Close() })
	name := servers.QueueName(t)
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{OnWarning: func(delayq.Warning) {}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Enqueue(t.Context(), delayq.Task{ID: "one", Type: "t", Payload: []byte("a secret payload"), Delay: time.Hour}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(consoleToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	task := "/queue/" + name + "/task/one"
	for _, c := range []struct {
		name  string
		flags []string
		auth  string
		want  int
		has   string
		lacks string
	}{
		{"open to this machine", nil, "", 200, "Cancel…", "a secret payload"},
		{"with payloads", []string{"--show-payloads"}, "", 200, "a secret payload", ""},
		{"read-only", []string{"--read-only"}, "", 200, "read-only", "Cancel…"},
		{"with a token", []string{"--console-token-file", file}, "Bearer " + consoleToken, 200, "Cancel…", ""},
		{"with the scrapers' token", []string{"--console-token-file", file}, "Bearer a token of scrapers", 401, "", name},
		{"none", []string{"--console=false"}, "", 404, "", name},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serveMonitor(t, append([]string{"--redis", server.URL(), "--queue", name}, c.flags...)...)
			code, page := s.get(task, c.auth)
			if code != c.want || !strings.Contains(page, c.has) || c.lacks != "" && strings.Contains(page, c.lacks) {
				t.Errorf("status %d, want %d with %q and without %q:\n%s", code, c.want, c.has, c.lacks, page)
			}
			if code, _ := s.get("/healthz", ""); code != http.StatusOK {
				t.Errorf("/healthz: %d", code)
			}
		})
	}
}

// Who decides about payloads must know what else is shown.
func TestHelpTellsWhatIsAlwaysShown(t *testing.T) {
	usage := newMonitor().Flags().Lookup("show-payloads").Usage
	for _, what := range []string{"ids", "keys", "errors", "always"} {
		if !strings.Contains(usage, what) {
			t.Errorf("--show-payloads does not speak of %s: %s", what, usage)
		}
	}
}

func TestDevServesTheConsole(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	out := &said{}
	root := newRoot()
	root.SetArgs([]string{"dev", "--database", "off", "--for", "20s", "--queue", "orders"})
	root.SetOut(out)
	root.SetErr(out)
	ended := make(chan error, 1)
	go func() { ended <- root.ExecuteContext(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	address := regexp.MustCompile(`(?m)^console (http://127\.0\.0\.1:\d+/)$`)
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if at := address.FindStringSubmatch(out.String()); at != nil {
			page, err := fetch(ctx, at[1])
			if err == nil && strings.Contains(page, `href="/queue/orders"`) {
				return
			}
		}
		if time.Now().After(until) {
			t.Fatalf("no console with the queue: %s", out)
		}
	}
}

func fetch(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		err = errors.Join(err, errors.New(resp.Status))
	}
	return string(page), err
}
