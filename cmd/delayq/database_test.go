package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/delayq/toolkit/delayq"
)

func TestDatabasePasswordComesFromTheEnvironment(t *testing.T) {
	t.Setenv("PGPASSWORD", "s3cret")
	for url, want := range map[string]string{
		"postgres://shop@db.example.com/shop":       "s3cret",
		"postgres://shop:other@db.example.com/shop": "other",
	} {
		pool, err := (&database{url}).pool(3)
		if err != nil {
			t.Fatal(err)
		}
		if got := pool.Config().ConnConfig.Password; got != want {
			t.Errorf("%s: password %q, want %q", url, got, want)
		}
		if got := pool.Config().MaxConns; got != 3 {
			t.Errorf("%s: %d connections", url, got)
		}
		pool.Close()
	}
}

func TestDatabaseURLIsShownWithoutItsPassword(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://shop:s3cret@db:5432/shop?sslmode=require":           "postgres://shop@db:5432/shop?sslmode=require",
		"postgres:///shop?host=/tmp&password=s3cret&sslpassword=s3cret": "postgres:///shop?host=%2Ftmp",
		"postgresql://db/shop":                                             "postgresql://db/shop",
		"postgres://shop:s3%zzcret@db/shop":                                "",
		"postgres://shop:s3cret@one:1,two:2/shop?target_session_attrs=any": "",
	} {
		got := (&database{url}).shown()
		if strings.Contains(got, "s3") || want != "" && got != want {
			t.Errorf("%s is shown as %q, want %q", url, got, want)
		}
	}
}

func TestMessages(t *testing.T) {
	for _, tt := range []struct {
		name, text, want string
	}{
		{"whose error it is, once", "delayq: reconcile: delayq: stats orders: no", "reconcile: stats orders: no"},
		{
			"tries without TLS after tries with", "failed to connect to `user=a`:\n\t[::1]:1: dial error: refused\n\t127.0.0.1:1: dial error: refused\n\t127.0.0.1:1: dial error: refused",
			"failed to connect to `user=a`: [::1]:1: dial error: refused 127.0.0.1:1: dial error: refused",
		},
		{
			"a server without TLS", "failed to connect to `user=a`:\n\t127.0.0.1:1: tls error: server refused TLS connection\n\t127.0.0.1:1: server error: no such role",
			"failed to connect to `user=a`: 127.0.0.1:1: server error: no such role",
		},
	} {
		if got := message(errors.New(tt.text)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if got := message(&delayq.TaskError{Op: "get", Queue: "q", ID: "a", Err: delayq.ErrLedger}); !strings.Contains(got, "add --database") {
		t.Errorf("%q does not help", got)
	}
}
