package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
)

//go:embed bullmq.mjs
var bullmqScript []byte

const (
	bullmqVersion  = "6.7.0"
	ioredisVersion = "5.11.1" // the client that this BullMQ is tested with
)

// bullmqPeer runs BullMQ in a node of its own, as its users do.
type bullmqPeer struct{ script string }

// installBullMQ puts BullMQ into the user's cache, where later runs find it.
func (b *bench) installBullMQ(ctx context.Context) (bullmqPeer, error) {
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			return bullmqPeer{}, fmt.Errorf("no %s here", tool)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return bullmqPeer{}, err
	}
	dir := filepath.Join(cache, "delayq-bench", "bullmq-"+bullmqVersion)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return bullmqPeer{}, err
	}
	if _, err := os.Stat(filepath.Join(dir, "node_modules", "bullmq")); err != nil {
		b.progress("installing BullMQ %s", bullmqVersion)
		npm := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--loglevel=error",
			"bullmq@"+bullmqVersion, "ioredis@"+ioredisVersion)
		if out, err := npm.CombinedOutput(); err != nil {
			return bullmqPeer{}, fmt.Errorf("npm install: %w: %s", err, out)
		}
	}
	script := filepath.Join(dir, "bullmq.mjs") // beside node_modules, or node would not find the package
	return bullmqPeer{script}, os.WriteFile(script, bullmqScript, 0o644)
}

// bullmqRates are tasks a second.
type bullmqRates struct{ Enqueue, Drain float64 }

// run fills a queue with n tasks and drains it.
func (p bullmqPeer) run(ctx context.Context, addr string, n int, payload []byte) (bullmqRates, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return bullmqRates{}, err
	}
	var rates bullmqRates
	out, err := exec.CommandContext(ctx, "node", p.script, host, port, strconv.Itoa(n), string(payload)).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return rates, fmt.Errorf("bullmq: %w: %s", err, exit.Stderr)
	}
	if err != nil {
		return rates, err
	}
	return rates, json.Unmarshal(out, &rates)
}
