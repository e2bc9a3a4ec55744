//go:build sabotage

package lua

import (
	"fmt"
	"os"
	"strings"
)

var sabotage = os.Getenv("DELAYQ_SABOTAGE")

// A seed is a change of a script: pairs of old and new text.
type seed struct {
	verb    string
	changes []string
}

// Parts of lease.lua and put.lua.
const (
	toProcessing = "redis.call('ZADD', KEYS[2], unpack(z))\n"
	offPending   = "redis.call('ZREMRANGEBYRANK', KEYS[1], 0, n - 1)\n"
	upToNow      = "redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', at, 'LIMIT', 0, max + 1)"
	sameRev      = "if at == rev and not died[i] then code = 2 end"
)

var seeds = map[string]seed{
	"put-ignores-rev":            {"put", []string{"if at > rev then code = -8 else" + sameRev, sameRev}},
	"put-refuses-equal-tomb":     {"put", []string{"tomb_rev(tomb) > rev", "tomb_rev(tomb) >= rev"}},
	"lease-early":                {"lease", []string{upToNow, strings.Replace(upToNow, "at,", "int(t + 300000),", 1)}},
	"lease-by-ttl":               {"lease", []string{toProcessing, toProcessing + "redis.call('PEXPIRE', KEYS[2], ARGV[4])\n"}},
	"zrem-before-a-failing-step": {"lease", []string{offPending, "", toProcessing, offPending + failingStep + toProcessing}},
}

const failingStep = "if t % 20 == 0 then error('a failing step') end\n"

// seeded panics when the script has changed: a seed that does not apply any more proves nothing.
func seeded(verb, text string) string {
	s := seeds[sabotage]
	if s.verb != verb {
		return text
	}
	for i := 0; i < len(s.changes); i += 2 {
		if strings.Count(text, s.changes[i]) != 1 {
			panic(fmt.Sprintf("sabotage %s: %s.lua has changed: not once %q", sabotage, verb, s.changes[i]))
		}
		text = strings.Replace(text, s.changes[i], s.changes[i+1], 1)
	}
	return text
}
