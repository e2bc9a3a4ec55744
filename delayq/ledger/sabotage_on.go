//go:build sabotage

package ledger

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

var sabotage = os.Getenv("DELAYQ_SABOTAGE")

// A seed is a change of the text of some statements.
type seed struct {
	statements []string
	old, new   string
}

const runningUnderToken = ` AND t.status = 'running' AND t.token = u.token::uuid`

var seeds = map[string]seed{
	"finish-without-token":       {[]string{succeedSQL, finishSQL}, runningUnderToken, ` AND t.status = 'running'`},
	"heartbeat-without-token":    {[]string{heartbeatSQL}, runningUnderToken, ` AND t.status = 'running'`},
	"claim-without-locked-until": {[]string{claimSQL}, ` AND (t.token = $2::text::uuid OR t.locked_until < clock_timestamp())`, ``},
	"claim-without-rev":          {[]string{claimSQL}, ` AND t.rev = u.rev`, ``},
	"claim-refuses-own":          {[]string{claimSQL}, `(t.token = $2::text::uuid OR t.locked_until`, `(t.locked_until`},
	"takeover-ignores-limits":    {[]string{claimSQL, leaseSQL}, `WHEN $5::int > 0 AND t.lost + 1 >= $5::int THEN 'bury'`, `WHEN $5::int < 0 THEN 'bury'`},
	"takeover-ignores-cancel":    {[]string{claimSQL, leaseSQL}, `WHEN t.cancel_requested THEN 'cancel'`, ``},
	"retry-ignores-cancel":       {[]string{finishSQL}, `WHEN l.cancel_requested THEN 'cancel'`, ``},
	"cancel-spares-running":      {[]string{cancelSQL}, `t.cancel_requested OR NOT o.ends`, `t.cancel_requested`},
	"ledger-lease-takes-running": {[]string{leaseSQL}, `OR t.status = 'running' AND (t.token = $2::text::uuid OR t.locked_until < clock_timestamp() - $7::bigint * interval '1 microsecond')`, `OR t.status = 'running'`},
	"insert-ignores-stamp":       {[]string{reviveSQL}, ` AND t.stamp <> u.stamp`, ``},
	"now-from-app":               {[]string{claimSQL}, `t.locked_until < clock_timestamp()`, `t.locked_until < clock_timestamp() + interval '` + appClock() + `'`},
}

// appClock is how far the clock of this machine is ahead: machines differ by a minute, those of different processes here.
func appClock() string { return fmt.Sprintf("%d seconds", 60*(os.Getpid()%2)) }

// A seed that does not apply any more proves nothing.
func init() {
	if s, ok := seeds[sabotage]; ok {
		for _, sql := range s.statements {
			if !strings.Contains(sql, s.old) {
				panic(fmt.Sprintf("sabotage %s: the statement has changed: no %q in %s", sabotage, s.old, sql))
			}
		}
	}
}

func seeded(sql string) string {
	if s, ok := seeds[sabotage]; ok && slices.Contains(s.statements, sql) {
		return strings.Replace(sql, s.old, s.new, 1)
	}
	return sql
}
