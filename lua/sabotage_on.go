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

const toProcessing = "redis.call('ZADD', KEYS[2], unpack(z))\n"

var seeds = map[string]seed{
	"put-ignores-rev":            {"put", []string{"if at > rev then code = -8 elseif at == rev and not died[i] then code = 2 end", "if at == rev and not died[i] then code = 2 end"}},
	"put-refuses-equal-tomb":     {"put", []string{"tomb_rev(tomb) > rev", "tomb_rev(tomb) >= rev"}},
	"lease-early":                {"lease", []string{"redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', at, 'LIMIT', 0, max + 1)", "redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(t + 300000), 'LIMIT', 0, max + 1)"}},
	"lease-by-ttl":               {"lease", []string{toProcessing, toProcessing + "redis.call('PEXPIRE', KEYS[2], ARGV[4])\n"}},
	"zrem-before-a-failing-step": {"lease", []string{"redis.call('ZREMRANGEBYRANK', KEYS[1], 0, n - 1)\n", "", toProcessing, "redis.call('ZREMRANGEBYRANK', KEYS[1], 0, n - 1)\nif t % 20 == 0 then error('a failing step') end\n" + toProcessing}},
}

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
