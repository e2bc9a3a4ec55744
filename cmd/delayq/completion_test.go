package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/scripts/servers"
)

// Where the names are more than can be found in the time that somebody waits, those that were found are offered.
func TestCompletionOffersAPart(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	const queues = 20_000
	_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for i := range queues {
			p.HSet(t.Context(), fmt.Sprintf("dq:{q%d:0}:meta", i), "epoch", "e")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	proxy := servers.NewProxy(t, server.Addr())
	proxy.SetLatency(100 * time.Millisecond)
	var out said
	root := newRoot()
	root.SetArgs([]string{"__complete", "stats", "--redis", "redis://" + proxy.Addr(), "--queue", "q"})
	root.SetOut(&out)
	root.SetErr(&out)
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count("\n"+out.String(), "\nq"); n == 0 || n == queues {
		t.Errorf("%d of %d names: %.300s", n, queues, out.String())
	}
}
