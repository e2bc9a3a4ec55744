package servers

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestClusterSpreadsItsSlots(t *testing.T) {
	t.Parallel()
	c := SharedCluster(t)
	opts, err := redis.ParseClusterURL(c.URL())
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClusterClient(opts)
	defer rdb.Close()
	for _, key := range []string{"a", "b", "c", "d"} { // on all three nodes
		if err := rdb.Set(t.Context(), key, key, 0).Err(); err != nil {
			t.Error(err)
		}
	}
	shards, err := rdb.ClusterShards(t.Context()).Result()
	if err != nil || len(shards) != 3 {
		t.Errorf("shards %v, %v", shards, err)
	}
}

func TestClusterNodeRestarts(t *testing.T) {
	t.Parallel()
	c := NewCluster(t, 2)
	if err := c.Nodes[1].Restart(); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitUp(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStrictRefusesKeysThatAreNotDeclared(t *testing.T) {
	t.Parallel()
	rdb := client(t, SharedStrict(t).Addrs()[0])
	const lua = "#!lua\nreturn redis.call('SET', KEYS[1], '1') and redis.call('GET', '{b}k')"
	err := rdb.Eval(t.Context(), lua, []string{"{a}k"}).Err()
	if err == nil || !strings.Contains(err.Error(), "do not hash to the same slot") {
		t.Errorf("undeclared key: %v", err)
	}
	err = rdb.Eval(t.Context(), "return 1", []string{"{a}k", "{b}k"}).Err()
	if err == nil || !strings.Contains(err.Error(), "CROSSSLOT") {
		t.Errorf("keys of two slots: %v", err)
	}
}
