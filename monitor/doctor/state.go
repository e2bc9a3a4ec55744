package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const (
	overdue      = 2 * time.Minute
	overdueBadly = 15 * time.Minute
	shardLarge   = 1_000_000
)

func (c *chart) state(b *book) {
	name, s := c.q.Name, c.q.Stats
	if c.q.Err != nil {
		c.unread(b)
	}
	if s == nil {
		return
	}
	if c.q.RedisOnly && c.q.Err == nil {
		b.add(State, Warning, NeedsLedger, name, "the queue has a ledger and none was given: of its tasks only those in Redis are seen here",
			"Add --database URL, or set DELAYQ_DATABASE_URL.")
	}
	b.ok(State, QueueMissing, name, fmt.Sprintf("the queue is there: %d pending, %d due, %d processing, %d dead", s.Pending, s.Due, s.Processing, s.Dead))
	c.loss(b)
	c.backlog(b)
	for i, sh := range s.Shards {
		if n := sh.Pending + sh.Due + sh.Processing; n > shardLarge {
			b.add(State, Warning, ShardLarge, name, fmt.Sprintf("shard %d holds %d tasks: more than it is sized for", i, n),
				"It works, and slower. Drain it, keep what is due later in a ledger (--horizon), or make a new queue with more shards.")
		}
	}
	c.whole(b)
}

// unread tells why a queue, or its part in the ledger, could not be read.
func (c *chart) unread(b *book) {
	name, err := c.q.Name, c.q.Err
	switch {
	case errors.Is(err, delayq.ErrNoQueue):
		what := "there is no queue of this name"
		if like := alike(name, c.e.Known); like != "" {
			what += "; there is " + few([]string{like})
		}
		b.add(State, Critical, QueueMissing, name, what,
			"delayq queues lists those that are there. Is it the right Redis and database number? A queue is made by the first that enqueues or by a worker. "+
				"If it was there before, Redis has lost it: with a ledger delayq reconcile --once --queue "+name+" makes it again with all tasks.")
	case errors.Is(err, delayq.ErrSchema):
		b.add(State, Critical, SchemaMismatch, name, "its data are of another version than this command knows: "+plain(err), "Update this command, or the workers, to one version; see CHANGELOG.md.")
	case errors.Is(err, delayq.ErrLedger):
		b.add(State, Critical, NeedsLedger, name, "the queue has a ledger, and the database that was given does not know the queue",
			"Is --database the right one? Workers with the wrong one cannot run its tasks either.")
	case c.q.Stats != nil && c.e.Database != nil && c.e.Database.Err != nil: // said of the database once
		b.add(State, Info, QueueUnread, name, "its part in the ledger could not be read: figures are those of Redis alone", "")
	default:
		b.add(State, Critical, QueueUnread, name, "it could not be read: "+plain(err), "delayq stats --queue "+name+" says more; damaged data: delayq audit --queue "+name+".")
	}
}

// loss tells of data that Redis no longer has.
func (c *chart) loss(b *book) {
	name, s := c.q.Name, c.q.Stats
	gone := 0
	for _, sh := range s.Shards {
		if sh.Epoch == "" {
			gone++
		}
	}
	const find = "Find out what emptied Redis (redis-cli info server, acl log), and stop it. "
	switch {
	case gone > 0:
		b.add(State, Critical, DataLost, name, fmt.Sprintf("Redis has lost %d of %d shards of the queue, and the ledger has its tasks", gone, len(s.Shards)),
			find+"delayq reconcile --once --queue "+name+" puts everything back; tasks that had ended do not run again.")
	case c.lost:
		b.add(State, Critical, DataLost, name, "while it was watched Redis lost the data of the queue, or went back to older ones",
			find+"With a ledger: delayq reconcile --once --queue "+name+". Without: find the missing tasks in your own tables and enqueue them again, the same ids do no harm.")
	}
	missing := c.since(func(s *delayq.Stats) int64 { return s.Missing })
	switch {
	case missing > 0:
		b.add(State, Critical, RecordsMissing, name, fmt.Sprintf("the records of %s were gone when they were to run, in the last %s", num(missing, "task", "tasks"), span(c.over)),
			"Something deletes from Redis. See the eviction policy above, and who else writes there; then delayq audit --queue "+name+".")
	case s.Missing > 0:
		b.add(State, Info, RecordsMissing, name, fmt.Sprintf("the records of %s were gone when they were to run, since the queue's data began; none lately", num(s.Missing, "task", "tasks")), "")
	default:
		b.ok(State, RecordsMissing, name, "no record was ever missing")
	}
}

// backlog judges whether what is due is done in time. Without a healthy consumer that is a matter of the trigger.
func (c *chart) backlog(b *book) {
	name, s := c.q.Name, c.q.Stats
	if c.q.Healthy == 0 {
		return
	}
	if s.OldestDueAge > overdue {
		b.add(State, grade(s.OldestDueAge > overdueBadly), Overdue, name, fmt.Sprintf("%s, the oldest for %s, although consumers are healthy", num(s.Due, "task is due", "tasks are due"), span(s.OldestDueAge)),
			"Slow or failing downstream: mend that first, more consumers would make it worse. Downstream well: more concurrency (DELAYQ_CONCURRENCY), more runners, "+
				"for large queues more shards. After a stop or a large batch: see with delayq top that it falls, and wait.")
	} else {
		b.ok(State, Overdue, name, "what is due is taken in time")
	}
	if c.before == nil {
		return
	}
	grown, slots := s.Due-c.before.Due, c.slots()
	if grown > max(10, c.before.Due/20) {
		b.add(State, Warning, BacklogGrowing, name, fmt.Sprintf("what is due has grown from %d to %d in %s, while %s healthy: %s fell due or were retried, %s were leased",
			c.before.Due, s.Due, span(c.over), num(c.q.Healthy, "consumer is", "consumers are"), c.rate(grown+c.leased()), c.rate(c.leased())),
			fmt.Sprintf("Is each task slower than usual (downstream, below)? If not, there is more work than the %d slots of the consumers can do: raise their concurrency or number.", slots))
	} else {
		b.ok(State, BacklogGrowing, name, fmt.Sprintf("the backlog does not grow (%d due, %d before)", s.Due, c.before.Due))
	}
}

func (c *chart) leased() int64 { return c.since(func(s *delayq.Stats) int64 { return s.Leased }) }

func (c *chart) rate(n int64) string { return fmt.Sprintf("%.1f/s", float64(n)/c.over.Seconds()) }

func (c *chart) slots() (n int) {
	for _, con := range c.q.Consumers {
		if c.ago(con.Beat) <= c.e.StaleAfter {
			n += con.Concurrency
		}
	}
	return n
}

// whole judges the audit, and says what could not be read.
func (c *chart) whole(b *book) {
	name := c.q.Name
	if a := c.more.Audit; a != nil && len(a.Violations) == 0 {
		b.ok(State, AuditViolations, name, num(a.Checked, "entry agrees", "entries agree")+" with each other")
	} else if a != nil {
		v := a.Violations[0]
		b.add(State, Critical, AuditViolations, name, fmt.Sprintf("%s in its data, the first: %s of task %s, %s",
			num(int64(len(a.Violations))+a.Omitted, "contradiction", "contradictions"), v.Invariant, few([]string{v.ID}), v.Detail),
			"delayq audit --queue "+name+" lists them. With a ledger delayq reconcile --once --queue "+name+" mends them. People, evictions and lost writes of a failover make such, scripts do not.")
	}
	if c.more.Err != nil {
		why := ": " + plain(c.more.Err)
		if errors.Is(c.more.Err, context.DeadlineExceeded) || errors.Is(c.more.Err, os.ErrDeadlineExceeded) {
			why = " in time"
		}
		b.add(State, Warning, NotRead, name, "its tasks could not be looked at"+why,
			"What is said of its tasks is not all. Look at it alone, with more time: delayq doctor --queue "+name+" --timeout 30s")
	}
}

// alike is the known name that name was most likely meant to be, empty when none is near.
func alike(name string, known []string) (best string) {
	least := 1 + len(name)/3
	for _, k := range known {
		if strings.EqualFold(k, name) {
			return k
		}
		if d := distance(name, k); d <= least {
			best, least = k, d-1
		}
	}
	return best
}

// distance is how many letters are to be changed, added or left out to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
