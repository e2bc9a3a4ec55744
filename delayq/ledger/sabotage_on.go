//go:build sabotage

package ledger

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

var sabotage = os.Getenv("DELAYQ_SABOTAGE")

// A seed is a change of the text of some statements: pairs of old and new.
type seed struct {
	statements []string
	changes    []string
}

const (
	ofToken = ` AND t.token = u.token`
	holds   = `t.token = $2::text::uuid OR `
	lapsed  = `t.locked_until < clock_timestamp()`
	waited  = ` - $7::bigint * interval '1 microsecond'`
	unless  = ` AND (` + holds + lapsed // and then a parenthesis
)

var seeds = map[string]seed{
	"finish-without-token":       {[]string{succeedSQL, finishSQL}, []string{ofToken, ``}},
	"heartbeat-without-token":    {[]string{heartbeatSQL}, []string{ofToken, ``}},
	"claim-without-locked-until": {[]string{claimSQL}, []string{unless + `)`, ``}},
	"claim-without-rev":          {[]string{claimSQL}, []string{` AND t.rev = u.rev`, ``}},
	"claim-refuses-own":          {[]string{claimSQL}, []string{`(` + holds + lapsed, `(` + lapsed}},
	"takeover-ignores-limits":    {[]string{claimSQL, leaseSQL}, []string{spent, `false`}},
	"takeover-ignores-cancel":    {[]string{claimSQL, leaseSQL}, []string{`t.cancel_requested OR `, ``}},
	"retry-ignores-cancel":       {[]string{finishSQL}, []string{`WHEN l.cancel_requested THEN 'cancel'`, ``}},
	"cancel-spares-running":      {[]string{cancelSQL}, []string{`t.cancel_requested OR NOT o.ends`, `t.cancel_requested`}},
	"ledger-lease-takes-running": {[]string{leaseSQL}, []string{unless + waited + `)`, ``, unless + `)`, ``}},
	"insert-ignores-stamp":       {[]string{reviveSQL}, []string{` AND t.stamp <> u.stamp`, ``}},
	"now-from-app":               {[]string{claimSQL}, []string{lapsed, lapsed + ` + interval '` + appClock() + `'`}},
}

// appClock is how far the clock of this machine is ahead: machines differ by a minute, those of different processes here.
func appClock() string { return fmt.Sprintf("%d seconds", 60*(os.Getpid()%2)) }

// A seed that does not apply any more proves nothing.
func init() {
	if s, ok := seeds[sabotage]; ok {
		for _, sql := range s.statements {
			for i := 0; i < len(s.changes); i += 2 {
				if !strings.Contains(sql, s.changes[i]) {
					panic(fmt.Sprintf("sabotage %s: the statement has changed: no %q in %s", sabotage, s.changes[i], sql))
				}
			}
		}
	}
}

func seeded(sql string) string {
	if s, ok := seeds[sabotage]; ok && slices.Contains(s.statements, sql) {
		return strings.NewReplacer(s.changes...).Replace(sql)
	}
	return sql
}
