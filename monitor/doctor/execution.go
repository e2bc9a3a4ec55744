package doctor

import (
	"fmt"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const (
	longRun         = time.Hour
	deadLately      = 15 * time.Minute
	consumerSkewed  = 5 * time.Second
	failuresToJudge = 5
	failedMuch      = 0.05
	failedVeryMuch  = 0.25
	deadCap         = 100_000 // a shard, by default
)

func (c *chart) execution(b *book) {
	c.stuck(b)
	c.failures(b)
	c.dead(b)
	c.leases(b)
}

func (c *chart) stuck(b *book) {
	name, s := c.q.Name, c.q.Stats
	var oldest time.Duration
	handlers := 0
	var skewed []string
	for _, con := range c.q.Consumers {
		if con.Beat.IsZero() || c.ago(con.Beat) > c.e.StaleAfter {
			continue
		}
		handlers += con.Stuck
		oldest = max(oldest, con.OldestRun)
		if con.Skew.Abs() > consumerSkewed {
			skewed = append(skewed, fmt.Sprintf("%s is %s Redis", few([]string{con.Name}), ahead(con.Skew)))
		}
	}
	const restart = "Mostly handlers hang on something downstream: a lock, a database, a call without a timeout. A goroutine dump of the worker shows where " +
		"(kill -QUIT PID). Mend the downstream, restart the worker; its tasks run again when their leases end. Give calls the handler's context, and types a timeout."
	all := c.q.Healthy == 0 && s.Due > 0
	switch {
	case c.q.Stuck > 0 && all:
		b.add(Execution, Critical, StuckConsumers, name, fmt.Sprintf("all consumers that live (%d) are stuck: they send heartbeats and end no task; %s, the oldest handler runs for %s",
			c.q.Stuck, num(s.Due, "task is due", "tasks are due"), span(oldest)), restart)
	case c.q.Stuck > 0:
		b.add(Execution, Warning, StuckConsumers, name, fmt.Sprintf("%s stuck: no progress for %s and more, while %d are healthy", num(c.q.Stuck, "consumer is", "consumers are"), span(c.e.StuckAfter), c.q.Healthy), restart)
	case c.q.Healthy > 0:
		b.ok(Execution, StuckConsumers, name, "no consumer is stuck")
	}
	if handlers > 0 && c.q.Stuck == 0 {
		b.add(Execution, Warning, StuckHandlers, name, num(handlers, "handler has", "handlers have")+" ignored the end of the context and still holds a slot", restart)
	}
	if s.OldestProcessingAge > longRun {
		b.add(Execution, Warning, LongRun, name, "a task has been running for "+span(s.OldestProcessingAge)+", its lease renewed all the time",
			"delayq list --queue "+name+" --state processing, and delayq get for its type. If it hangs, restart its worker; delayq cancel tells it to stop.")
	}
	if len(skewed) > 0 {
		b.add(Execution, grade(len(skewed) > 0 && c.q.Healthy == 0), ConsumerSkew, name, "clocks of consumers are wrong: "+few(skewed),
			"Repair the time synchronisation there. Absolute due times that they compute are off by as much, and Open refuses at 30 s.")
	}
}

// failures judges attempts. Counters since the data began are told, and never warned of: they do not fall again.
func (c *chart) failures(b *book) {
	name, s := c.q.Name, c.q.Stats
	ever := int64(0)
	for _, n := range s.Failed {
		ever += n
	}
	lately, failed := map[string]int64{}, int64(0)
	if c.before != nil {
		for reason, n := range s.Failed {
			if d := n - c.before.Failed[reason]; d > 0 {
				lately[reason] = d
				failed += d
			}
		}
	}
	done := c.since(func(s *delayq.Stats) int64 { return s.Succeeded })
	ratio := float64(failed) / float64(max(failed+done, 1))
	switch {
	case failed >= failuresToJudge && ratio > failedMuch:
		b.add(Execution, grade(ratio > failedVeryMuch), FailureRate, name, fmt.Sprintf("%s of the attempts of the last %s failed: %s; %d succeeded", percent(failed, failed+done), span(c.over), counted(lately), done),
			"delayq list --queue "+name+" --state dead --newest, and delayq get or history for a task's last error. Retries come by themselves; if the downstream is ill, mend that first.")
	case ever == 0:
		b.ok(Execution, FailureRate, name, "no attempt has failed")
	case c.before == nil:
		b.add(Execution, Info, FailureRate, name, fmt.Sprintf("since the queue's data began %s of all attempts failed: %s", percent(ever, ever+s.Succeeded), counted(s.Failed)), "")
	default:
		b.ok(Execution, FailureRate, name, fmt.Sprintf("%d of %d attempts failed in the last %s; %s since the queue's data began", failed, failed+done, span(c.over), percent(ever, ever+s.Succeeded)))
	}
	if n := lately[delayq.ReasonNoHandler]; n > 0 {
		b.add(Execution, Warning, NoHandler, name, fmt.Sprintf("%s failed in the last %s because no handler is registered for the type", num(n, "attempt", "attempts"), span(c.over)), c.noHandler())
	}
	if n := lately[delayq.ReasonTimeout]; n > 0 {
		b.add(Downstream, Warning, Timeouts, name, fmt.Sprintf("%s ended by their timeout in the last %s", num(n, "handler was", "handlers were"), span(c.over)),
			"What do they call? See the dashboards of that. If it is well, the timeout of the type may be too short.")
	}
}

func (c *chart) noHandler() string {
	return "Deploy workers that know the type, or correct the sender. Dead letters of it come back by: delayq replay --queue " + c.q.Name + " --reason " + delayq.ReasonNoHandler
}

// dead judges dead letters by those that died lately.
func (c *chart) dead(b *book) {
	name, s := c.q.Name, c.q.Stats
	reasons, types, unhandled := map[string]int64{}, map[string]int64{}, map[string]int64{}
	lately := int64(0)
	for i := range c.more.Dead {
		d := &c.more.Dead[i]
		if c.ago(d.At) > deadLately || d.Reason == delayq.ReasonUnbooked {
			continue
		}
		lately++
		reasons[d.Reason]++
		types[d.Type]++
		if d.Reason == delayq.ReasonNoHandler {
			unhandled[d.Type]++
		}
	}
	buried := c.since(func(s *delayq.Stats) int64 { return s.Buried })
	atLeast := ""
	if !c.sawNewDead() {
		atLeast = "at least "
	}
	const look = "delayq list --queue %s --state dead --newest shows them, delayq get --queue %[1]s ID the last error. Mend the cause, then delayq replay --queue %[1]s --reason REASON; " +
		"what nobody needs: delayq purge."
	switch {
	case lately > 0:
		b.add(Execution, Warning, DeadRising, name, fmt.Sprintf("%s%d of its %d dead letters died in the last %s: by reason %s; by type %s", atLeast, lately, s.Dead, span(deadLately), counted(reasons), counted(types)),
			fmt.Sprintf(look, name))
	case buried > 0:
		b.add(Execution, Warning, DeadRising, name, fmt.Sprintf("%s among the dead letters in the last %s; there are %d", num(buried, "task ended", "tasks ended"), span(c.over), s.Dead), fmt.Sprintf(look, name))
	case s.Dead > 0 && !c.sawNewDead():
		what := num(s.Dead, "dead letter", "dead letters") + fmt.Sprintf(", of which %d could be looked at: whether some are new is not known", len(c.more.Dead))
		if c.before != nil {
			what += ", but none came in the last " + span(c.over)
		}
		b.add(Execution, Warning, DeadRising, name, what, fmt.Sprintf(look, name))
	case s.Dead > 0:
		b.add(Execution, Info, DeadRising, name, num(s.Dead, "dead letter", "dead letters")+", none of the last "+span(deadLately), fmt.Sprintf(look, name))
	default:
		b.ok(Execution, DeadRising, name, "there are no dead letters")
	}
	if len(unhandled) > 0 {
		b.add(Execution, Warning, NoHandler, name, "among them tasks of types that no worker had a handler for: "+counted(unhandled), c.noHandler())
	}
	c.trimmed(b, fmt.Sprintf(look, name))
}

// sawNewDead reports whether all that died lately were looked at.
func (c *chart) sawNewDead() bool {
	n := len(c.more.Dead)
	return c.more.DeadAll || n > 0 && c.ago(c.more.Dead[n-1].At) > deadLately
}

func (c *chart) trimmed(b *book, look string) {
	trimmed := c.since(func(s *delayq.Stats) int64 { return s.Trimmed })
	if trimmed > 0 {
		b.add(Execution, Critical, DeadTrimmed, c.q.Name, fmt.Sprintf("%s deleted in the last %s, because there are too many", num(trimmed, "old dead letter was", "old dead letters were"), span(c.over)), look)
		return
	}
	for i, sh := range c.q.Stats.Shards {
		if sh.Dead >= deadCap*9/10 {
			b.add(Execution, Warning, DeadTrimmed, c.q.Name, fmt.Sprintf("shard %d keeps %d dead letters; at the cap, by default %d, the oldest are deleted", i, sh.Dead, deadCap), look)
		}
	}
}

func (c *chart) leases(b *book) {
	name, s := c.q.Name, c.q.Stats
	expired := c.since(func(s *delayq.Stats) int64 { return s.Expired })
	switch {
	case expired > 0:
		b.add(Execution, Warning, LostLeases, name, fmt.Sprintf("%s ran out in the last %s: the consumer died, stalled, or its handler ignores its context", num(expired, "lease", "leases"), span(c.over)),
			"Look for crashes and out-of-memory kills in the workers' log. A task that kills its consumer each time ends as a dead letter of reason lost. See delayq list --queue "+name+" --state dead.")
	case s.Expired > 0:
		b.ok(Execution, LostLeases, name, fmt.Sprintf("no lease ran out lately; %d of %d since the queue's data began", s.Expired, s.Leased))
	default:
		b.ok(Execution, LostLeases, name, "no lease has run out")
	}
	if stale := c.since(func(s *delayq.Stats) int64 { return s.Stale }); stale > 10 {
		b.add(Execution, Warning, StaleCalls, name, fmt.Sprintf("%d calls were refused in the last %s because the lease was no longer the caller's", stale, span(c.over)),
			"Consumers stall for longer than their lease (30 s by default): too little CPU or memory, or a frozen environment.")
	}
}
