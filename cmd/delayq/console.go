package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/console"
)

// consoleTokenVar is the console's token, for where a file is not at hand. It is not the scrapers', who must not change anything.
const consoleTokenVar = "DELAYQ_CONSOLE_TOKEN"

// consoling is the web console as the flags want it.
type consoling struct {
	on, readOnly, payloads bool
	tokenFile, userHeader  string
	proxies, hosts         []string
}

func (c *consoling) flags(f *pflag.FlagSet) {
	f.BoolVar(&c.on, "console", true, "serve the web console at /")
	f.BoolVar(&c.readOnly, "read-only", false, "the console changes nothing")
	f.BoolVar(&c.payloads, "show-payloads", false, "the console shows what tasks carry, which may be personal data; "+
		"their ids, keys and the texts of errors it always shows")
	f.StringVar(&c.tokenFile, "console-token-file", "", "`file` with the token to log in to the console with, at least 16 bytes; default $"+consoleTokenVar+
		". Without one, and without --trusted-proxy-header, the console answers this machine alone, and must not be behind a proxy")
	f.StringVar(&c.userHeader, "trusted-proxy-header", "", "`header` in which a proxy in front of the console names the user that it has made sure of")
	f.StringSliceVar(&c.proxies, "trusted-proxy", nil, "`addresses` of that proxy, as IP or CIDR; default this machine")
	f.StringSliceVar(&c.hosts, "host", nil, "`names` under which browsers reach the console")
}

// config is what the console is given.
func (c *consoling) config(log *slog.Logger) (console.Config, error) {
	cfg := console.Config{TrustedProxyHeader: c.userHeader, Hosts: c.hosts, ReadOnly: c.readOnly, ShowPayloads: c.payloads, Logger: log}
	cfg.Token = strings.TrimSpace(os.Getenv(consoleTokenVar))
	if c.tokenFile != "" {
		b, err := os.ReadFile(c.tokenFile)
		if err != nil {
			return cfg, usagef("--console-token-file: %w", err)
		}
		if cfg.Token = strings.TrimSpace(string(b)); cfg.Token == "" {
			return cfg, usagef("--console-token-file: %s is empty", c.tokenFile)
		}
	}
	if cfg.Token != "" && len(cfg.Token) < console.LeastToken {
		return cfg, usagef("--console-token-file: want a token of at least %d bytes", console.LeastToken)
	}
	if strings.ContainsAny(c.userHeader, " :\r\n\t") {
		return cfg, usagef("--trusted-proxy-header: want the name of a header")
	}
	for _, p := range c.proxies {
		prefix, err := netip.ParsePrefix(p)
		if err != nil {
			addr, err := netip.ParseAddr(p)
			if err != nil {
				return cfg, usagef("--trusted-proxy: want an IP address or a CIDR, got %q", p)
			}
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
		cfg.TrustedProxies = append(cfg.TrustedProxies, prefix)
	}
	return cfg, nil
}

// historyOf lets the console tell what the ledger knows of a task.
func historyOf(open func(context.Context) (*ledger.Ledger, error)) func(ctx context.Context, queue, id string) ([]console.Event, error) {
	return func(ctx context.Context, queue, id string) ([]console.Event, error) {
		led, err := open(ctx)
		if err != nil {
			return nil, err
		}
		h, err := led.History(ctx, queue, id)
		if err != nil {
			return nil, err
		}
		var events []console.Event
		for _, e := range timeline(h) {
			events = append(events, console.Event{At: e.At, Name: e.Event, By: e.By, Attempt: e.Attempt, Reason: e.Reason, Error: e.Error})
		}
		return events, nil
	}
}

// serveConsole serves the console of dev on a free port of this machine. stop ends it.
func serveConsole(ctx context.Context, l net.Listener, m *monitor.Monitor, cfg console.Config) (stop func(), err error) {
	c, err := console.New(m, cfg)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(ctx)
	go c.Run(ctx)
	srv := &http.Server{Handler: c, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	go func() { _ = srv.Serve(l) }() // until Close
	return func() { end(); _ = srv.Close() }, nil
}
