package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// Bounds of the judgement; those that alerts have too are the same as theirs.
const (
	skewed        = time.Second
	skewedBadly   = 30 * time.Second // Open refuses beyond it
	memoryHigh    = 0.8
	memoryFull    = 0.95
	justRestarted = 10 * time.Minute
)

// server judges Redis, and reports whether it answers.
func (e *Evidence) server(b *book) bool {
	s := e.Now.Server
	if s.Err != nil {
		what, do := whyNoRedis(s.Err)
		b.add(State, Critical, RedisDown, "", what, do)
		return false
	}
	b.ok(State, RedisDown, "", "Redis answers"+version(s.Version))
	if old(s.Version) {
		b.add(State, Critical, RedisOld, "", "Redis "+s.Version+" is too old: queues need 6.2", "Upgrade the server.")
	}
	if s.Skew.Abs() > skewed {
		b.add(State, grade(s.Skew.Abs() > skewedBadly), RedisSkew, "", fmt.Sprintf("Redis' clock is %s this machine's", ahead(s.Skew)),
			"Redis' clock decides what is due. See whose is wrong (redis-cli time beside date +%s, on more than one machine), and repair its time "+
				"synchronisation; slew it, do not step it: a step forward ends all leases at once.")
	} else {
		b.ok(State, RedisSkew, "", "its clock agrees with this machine's, within "+span(max(s.Skew.Abs(), time.Millisecond)))
	}
	e.policy(b)
	e.memory(b)
	if s.LastSaveOK {
		b.ok(State, SaveFailed, "", "its last save went well, or it has made none")
	} else {
		b.add(State, Critical, SaveFailed, "", "Redis could not save its data: what came since would not survive a restart, and it may refuse all writes (MISCONF)",
			"Mostly the disk is full: df -h on its machine, and its log. Make room (or vm.overcommit_memory=1 if it could not fork), then redis-cli bgsave, "+
				"and redis-cli info persistence.")
	}
	if s.Uptime >= 0 && s.Uptime < justRestarted {
		b.add(State, Info, Restarted, "", "Redis started "+span(s.Uptime)+" ago",
			"If that was not planned, see whether all tasks are there: delayq audit, or with a ledger delayq reconcile --once.")
	}
	return true
}

func (e *Evidence) policy(b *book) {
	s := e.Now.Server
	switch {
	case s.Policy == "":
		b.add(State, Info, Eviction, "", "Redis does not tell its eviction policy", "See that maxmemory-policy is noeviction, in the parameter group of a managed server.")
	case s.EvictionUnsafe():
		b.add(State, Critical, Eviction, "", "maxmemory-policy is "+s.Policy+": Redis may delete whole queues when memory is short, and workers that start refuse to open one",
			"redis-cli config set maxmemory-policy noeviction, and the same in its configuration.")
		if s.Evicted > 0 {
			b.add(State, Critical, Evicted, "", fmt.Sprintf("it has deleted %s since its start", num(s.Evicted, "key", "keys")),
				"First the policy, then more memory. Then delayq audit --queue NAME tells what is missing; with a ledger delayq reconcile --once puts it back.")
		}
	default:
		b.ok(State, Eviction, "", "maxmemory-policy is "+s.Policy+", which spares queues")
	}
}

func (e *Evidence) memory(b *book) {
	s := e.Now.Server
	switch fill := float64(s.MemoryUsed) / float64(max(s.MemoryMax, 1)); {
	case s.MemoryUsed < 0 || s.MemoryMax < 0:
		b.add(State, Info, Memory, "", "Redis does not tell how much memory it uses", "")
	case s.MemoryMax == 0:
		b.add(State, Info, Memory, "", fmt.Sprintf("Redis uses %s and has no limit but the machine's memory", size(s.MemoryUsed)),
			"Set maxmemory, so that a full Redis refuses new tasks instead of being killed.")
	case fill > memoryHigh:
		b.add(State, grade(fill > memoryFull), Memory, "", fmt.Sprintf("Redis uses %s of %s, %.0f %%; when full it refuses new tasks", size(s.MemoryUsed), size(s.MemoryMax), 100*fill),
			"redis-cli config set maxmemory to more if the machine has it, and see that consumers drain the queues. delayq purge removes dead letters; "+
				"with a ledger a --horizon keeps what is due later out of Redis.")
	default:
		b.ok(State, Memory, "", fmt.Sprintf("it uses %s of %s", size(s.MemoryUsed), size(s.MemoryMax)))
	}
}

// unlisted tells that queues may be missing from the view, which then says nothing of how they are.
func (e *Evidence) unlisted(b *book) {
	v := e.Now
	if v.FindErr == nil {
		return
	}
	what := "the queues could not be listed, and none was looked at: "
	if len(v.Queues) > 0 {
		what = "the queues could not all be listed, and those that are not known were not looked at: "
	}
	b.add(State, Critical, NotListed, "", what+plain(v.FindErr),
		"Name the queues with --queue. The user needs the right to SCAN; where Redis holds many other keys, the walk over them may take too long.")
}

// database judges the ledger's database.
func (e *Evidence) database(b *book) {
	d := e.Database
	if d == nil {
		return
	}
	redisNow := d.Skew - e.Now.Server.Skew
	switch {
	case errors.Is(d.Err, delayq.ErrSchema):
		b.add(Downstream, Critical, DatabaseSchema, "", "the database answers, and its schema is not the one that this version needs: "+plain(d.Err),
			"delayq migrate --database URL makes or updates it; if the database is newer, update this command and the workers.")
	case d.Err != nil:
		b.add(Downstream, Critical, DatabaseDown, "", "the database of the ledger does not answer: "+plain(d.Err),
			"psql $DELAYQ_DATABASE_URL -c 'select 1' from here. Until it is back, workers run nothing of its queues, since they cannot claim; nothing is lost.")
	case d.Skew.Abs() > skewed && (e.Now.Server.Err != nil || redisNow.Abs() > skewed):
		b.add(Downstream, grade(d.Skew.Abs() > skewedBadly), DatabaseSkew, "", fmt.Sprintf("the database's clock is %s this machine's", ahead(d.Skew)),
			"Delays are counted by the database's clock and judged by Redis'. Repair the time synchronisation of the one that is wrong.")
	default:
		b.ok(Downstream, DatabaseDown, "", "the database of the ledger answers, and its clock agrees")
	}
}

func grade(bad bool) Severity {
	if bad {
		return Critical
	}
	return Warning
}

func version(v string) string {
	if v == "" {
		return ""
	}
	return ", version " + v
}

// old reports whether a version is one that queues cannot use, 6.2 being the first; of an unknown one it says no.
func old(version string) bool {
	first, rest, _ := strings.Cut(version, ".")
	second, _, _ := strings.Cut(rest, ".")
	major, err1 := strconv.Atoi(first)
	minor, err2 := strconv.Atoi(second)
	return err1 == nil && err2 == nil && (major < 6 || major == 6 && minor < 2)
}

func size(bytes int64) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
	case bytes >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.0f KiB", float64(bytes)/(1<<10))
}

// whyNoRedis tells the kinds of silence apart: each has another remedy.
func whyNoRedis(err error) (what, do string) {
	var reply redis.Error
	const afterwards = " Queues without a ledger stand still meanwhile; with one, tasks wait in the database and workers lease from there."
	switch text := err.Error(); {
	case errors.As(err, &reply) && strings.Contains(text, "LOADING"):
		return "Redis has just started and is reading its data", "Wait, and ask again; its log says how far it is." + afterwards
	case errors.As(err, &reply) && (strings.Contains(text, "NOAUTH") || strings.Contains(text, "WRONGPASS") || strings.Contains(text, "NOPERM")):
		return "Redis refuses the user or the password: " + plain(err), "Was it changed? Put the right one into $DELAYQ_REDIS_URL, here and for the workers." + afterwards
	case errors.As(err, &reply) && strings.Contains(text, "BUSY"):
		return "Redis is busy with a script that takes too long: " + plain(err), "redis-cli script kill ends one that has not written; redis-cli slowlog get 10 shows what it was." + afterwards
	case isTimeout(err):
		return "Redis does not answer in time: " + plain(err),
			"It is stopped, overloaded, or out of reach (a firewall drops packets). redis-cli ping from here, then its process and its machine; redis-cli --latency." + afterwards
	}
	return "Redis cannot be reached: " + plain(err), "Is the server up, and the address right? redis-cli -u $DELAYQ_REDIS_URL ping from here." + afterwards
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// plain is an error on one short line.
func plain(err error) string {
	text := strings.Join(strings.Fields(strings.ReplaceAll(err.Error(), "delayq: ", "")), " ")
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return strings.ToValidUTF8(text, "?")
}
