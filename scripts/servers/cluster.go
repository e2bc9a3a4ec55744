package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const clusterSlots = 16384

// A Cluster is a Redis Cluster of masters without replicas, whose slots are
// spread evenly in node order.
type Cluster struct {
	Nodes []*Redis
}

// StartCluster starts a cluster of n masters and returns when every node says
// that it is up. That takes two seconds: a master that was just started waits
// that long before it takes writes, and Redis has no setting for it.
//
// One node is a cluster too, the strictest local check of a script's keys: it
// refuses keys of two slots, and, in a script with a "#!lua" line, undeclared
// keys of another slot.
func StartCluster(n int, opts Options) (*Cluster, error) {
	if n > 1 && opts.Dir != "" {
		return nil, errors.New("servers: nodes of a cluster cannot share a directory")
	}
	c := &Cluster{}
	for range n {
		r, err := start(opts, true)
		if err != nil {
			c.Stop()
			return nil, err
		}
		c.Nodes = append(c.Nodes, r)
	}
	if err := c.join(); err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

// Addrs are the nodes' host:port pairs.
func (c *Cluster) Addrs() []string {
	var addrs []string
	for _, r := range c.Nodes {
		addrs = append(addrs, r.Addr())
	}
	return addrs
}

// URL is the cluster's address as redis.ParseClusterURL takes it.
func (c *Cluster) URL() string {
	addrs := c.Addrs()
	url := "redis://" + addrs[0]
	if len(addrs) > 1 {
		url += "?addr=" + strings.Join(addrs[1:], "&addr=")
	}
	return url
}

// Stop stops every node. It may be called twice.
func (c *Cluster) Stop() {
	for _, r := range c.Nodes {
		r.Stop()
	}
}

// join spreads the slots, introduces the nodes to each other and waits until
// all of them agree that the cluster is up.
func (c *Cluster) join() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	n := len(c.Nodes)
	for i, r := range c.Nodes {
		rdb := redis.NewClient(&redis.Options{Addr: r.Addr()})
		defer rdb.Close()
		from, to := i*clusterSlots/n, (i+1)*clusterSlots/n-1
		if err := rdb.ClusterAddSlotsRange(ctx, from, to).Err(); err != nil {
			return fmt.Errorf("servers: slots of %s: %w", r.Addr(), err)
		}
		// Without epochs of their own the nodes settle a collision first.
		if err := rdb.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(); err != nil {
			return fmt.Errorf("servers: epoch of %s: %w", r.Addr(), err)
		}
		if i > 0 {
			host, port, _ := net.SplitHostPort(c.Nodes[0].Addr())
			if err := rdb.Do(ctx, "CLUSTER", "MEET", host, port, c.Nodes[0].busPort).Err(); err != nil {
				return fmt.Errorf("servers: %s meets %s: %w", r.Addr(), c.Nodes[0].Addr(), err)
			}
		}
	}
	return c.WaitUp(ctx)
}

// WaitUp waits until every node knows every other and says that all slots are
// served, as after a node was restarted.
func (c *Cluster) WaitUp(ctx context.Context) error {
	for _, r := range c.Nodes {
		if err := r.waitUp(ctx, len(c.Nodes)); err != nil {
			return err
		}
	}
	return nil
}

func (r *Redis) waitUp(ctx context.Context, nodes int) error {
	rdb := redis.NewClient(&redis.Options{Addr: r.Addr()})
	defer rdb.Close()
	var info string
	for {
		var err error
		info, err = rdb.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok\r\n") &&
			strings.Contains(info, fmt.Sprintf("cluster_slots_ok:%d\r\n", clusterSlots)) &&
			strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r\n", nodes)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("servers: cluster node %s is not up: %w\n%s", r.Addr(), errors.Join(ctx.Err(), err), info)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
