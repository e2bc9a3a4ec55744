package doctor

import (
	"fmt"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const (
	reconcileStale = time.Hour
	fewAway        = 20 // messages on their way
)

func (c *chart) downstream(b *book) {
	c.slow(b)
	if c.q.Stats.Mode != "ledger" || c.q.RedisOnly {
		return
	}
	c.reconciler(b)
	c.drift(b)
	c.quarantine(b)
}

// slow compares how long handlers take now with how long they always took: the histograms know bounds only.
func (c *chart) slow(b *book) {
	if c.before == nil {
		return
	}
	now, before := c.q.Stats.Duration, c.before.Duration
	if n := now.Count - before.Count; n >= 10 && before.Count >= 100 {
		lately, usual := (now.Sum-before.Sum)/time.Duration(n), before.Sum/time.Duration(before.Count)
		if lately > 4*usual && lately > 100*time.Millisecond {
			b.add(Downstream, Warning, Slow, c.q.Name, fmt.Sprintf("tasks take %s on average now, and %s before", span(lately), span(usual)),
				"What their handlers call has become slow: a database, a payment, a mail server. See the dashboards of that; more consumers would make it worse.")
		} else {
			b.ok(Downstream, Slow, c.q.Name, fmt.Sprintf("tasks take %s on average, and %s before", span(lately), span(usual)))
		}
	}
}

func (c *chart) reconciler(b *book) {
	name, r, s := c.q.Name, c.q.Reconciler, c.q.Stats
	start := "Switch on the reconciler's schedule, or run delayq reconcile beside the workers. Now: delayq reconcile --once --queue " + name
	switch {
	case r == nil:
		b.add(Downstream, Warning, NoReconcile, name, "no reconciler has ever been at the queue: what Redis loses is not put back", start)
		return
	case r.LastFull.IsZero():
		b.add(Downstream, Info, NoReconcile, name, fmt.Sprintf("the first pass of the reconciler is under way, %.0f %% done", 100*r.Coverage), "")
	case s.Now.Sub(r.LastFull) > reconcileStale:
		b.add(Downstream, Warning, NoReconcile, name, "the last full pass of the reconciler ended "+span(s.Now.Sub(r.LastFull))+" ago", start)
	default:
		b.ok(Downstream, NoReconcile, name, "the last full pass of the reconciler ended "+span(max(0, s.Now.Sub(r.LastFull)))+" ago")
	}
	if left := r.Last.Drift - r.Last.Repaired; left > 0 {
		b.add(Downstream, Warning, Unrepaired, name, fmt.Sprintf("its last pass found %s on which Redis and the ledger differ, and could not mend %d", num(r.Last.Drift, "task", "tasks"), left),
			"See the reconciler's log: a full Redis refuses what must be put back. Then delayq reconcile --once --queue "+name)
	}
	if r.Last.Unconfirmed > 0 {
		b.add(Downstream, Critical, Unconfirmed, name, fmt.Sprintf("Redis counts %s as ended, and the ledger has them open: it has lost what it once had", num(r.Last.Unconfirmed, "task", "tasks")),
			"Was the database restored, or did a failover lose commits? They run again when Redis has forgotten them; handlers bear that. Set synchronous_commit on.")
	}
}

// drift compares how many tasks both sides have. Messages on their way are always some.
func (c *chart) drift(b *book) {
	name, s, l := c.q.Name, c.q.Stats, c.more.Ledger
	if l == nil {
		return
	}
	if l.Open >= mostCounted || l.Later >= mostCounted {
		return // then they say at least so many
	}
	inRedis, booked := s.Pending-s.Later+s.Due+s.Processing, l.Open-l.Later
	if away := max(inRedis-booked, booked-inRedis); away > max(fewAway, booked/50) {
		b.add(Downstream, Warning, Drift, name, fmt.Sprintf("the ledger has %s for Redis to hold, and Redis has %d", num(booked, "open task", "open tasks"), inRedis),
			"delayq reconcile --once --queue "+name+" makes them equal, at any time. Is --horizon the same here as for the workers?")
	} else {
		b.ok(Downstream, Drift, name, fmt.Sprintf("Redis has %s, and the ledger has as many for it, but for what is on its way", num(inRedis, "open task", "open tasks")))
	}
}

// mostCounted bounds what is counted in the ledger.
const mostCounted = delayq.MostCounted

// inRedis is how many dead letters Redis has. Of a queue with a ledger they are the quarantined, and some from before it had one.
func inRedis(s *delayq.Stats) (n int64) {
	for _, sh := range s.Shards {
		n += sh.Dead
	}
	return n
}

// quarantine tells of tasks that the ledger does not know.
func (c *chart) quarantine(b *book) {
	unbooked, there := int64(0), inRedis(c.q.Stats)
	for i := range c.more.Dead {
		if c.more.Dead[i].Reason == delayq.ReasonUnbooked {
			unbooked++
		}
	}
	n, name := max(unbooked, c.since(func(s *delayq.Stats) int64 { return s.Quarantined })), c.q.Name
	all := c.more.DeadAll || n >= there
	look := "delayq list --queue " + name + " --state dead shows them, of reason unbooked. Was the ledger restored from a backup, or does somebody enqueue without it? " +
		"delayq replay runs one after all, delayq purge drops it."
	switch {
	case n == 0 && all:
		b.ok(Downstream, Quarantined, name, "no task is in quarantine")
	case n == 0:
		b.add(Downstream, Warning, Quarantined, name, fmt.Sprintf("Redis alone has %s, and not all could be looked at: they may be in quarantine", num(there, "dead letter", "dead letters")), look)
	default:
		atLeast := ""
		if !all {
			atLeast = "at least "
		}
		b.add(Downstream, Warning, Quarantined, name, fmt.Sprintf("%s%s set aside, since Redis has them and the ledger does not know them", atLeast, num(n, "task is", "tasks are")), look)
	}
}

// ledgerOnly judges what can be known while Redis is away.
func (c *chart) ledgerOnly(b *book) {
	if l := c.more.Ledger; l != nil {
		b.add(Downstream, Info, Drift, c.q.Name, "the ledger has "+num(l.Open, "open task", "open tasks")+": they are safe, and workers lease from it while Redis is away", "")
	}
}
