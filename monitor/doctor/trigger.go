package doctor

import (
	"fmt"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// noRun is how long nobody may ask for work.
const noRun = 3 * time.Minute

// nextTick is how long what is due may wait for the next start of a function that runs every minute and leaves when it is idle.
const nextTick = 90 * time.Second

const startWorkers = "Is the schedule on, and does its function start (throttled? an error each time?); do the long-lived workers run? See their log. " +
	"From anywhere, right now: delayq work --queue %s --exec ./handler. If no worker was ever meant to take this name, add it to DELAYQ_QUEUES or correct the sender; " +
	"the tasks wait until then."

func (c *chart) trigger(b *book) {
	s, name := c.q.Stats, c.q.Name
	silent := fmt.Sprintf("the last call of a consumer was %s ago", span(c.ago(s.LastRun)))
	if s.LastRun.IsZero() {
		silent = "no consumer has called for an hour at least, or ever"
	}
	stopped := s.LastRun.IsZero() || c.ago(s.LastRun) > noRun
	switch {
	case !stopped:
		b.ok(Trigger, NoRun, name, silent)
	case c.waiting() == 0:
		b.add(Trigger, Info, NoRun, name, silent+"; no task waits", "")
	case s.Due == 0: // else served says it
		b.add(Trigger, Critical, NoRun, name, fmt.Sprintf("%s, and %s", silent, num(c.waiting(), "task waits", "tasks wait")), fmt.Sprintf(startWorkers, name))
	}
	c.served(b, stopped, silent)
	c.stale(b)
	c.types(b)
}

// served judges whether those who call are healthy.
func (c *chart) served(b *book, stopped bool, silent string) {
	s, q := c.q.Stats, c.q
	due := fmt.Sprintf("%s, the oldest for %s", num(s.Due, "task is due", "tasks are due"), span(s.OldestDueAge))
	switch {
	case q.Healthy > 0:
		b.ok(Trigger, NoConsumer, q.Name, c.healthy())
	case q.Stuck > 0: // that is a matter of the execution
	case s.Due > 0 && (stopped || s.OldestDueAge > nextTick):
		b.add(Trigger, Critical, NoConsumer, q.Name, fmt.Sprintf("%s, and there is no healthy consumer: %s", due, silent), fmt.Sprintf(startWorkers, q.Name))
	case s.Due > 0:
		b.add(Trigger, Info, NoConsumer, q.Name, due+", and no consumer is there at this moment", "A function that is started every minute will take them with its next start. If none is meant to be: start the workers.")
	case !stopped:
		b.ok(Trigger, NoConsumer, q.Name, "no consumer at this moment, and nothing is due")
	}
}

// healthy tells those that say how they are from those that only have called, among which are runs that ended just now.
func (c *chart) healthy() string {
	beats := 0
	for _, con := range c.q.Consumers {
		if c.ago(con.Beat) <= c.e.StaleAfter {
			beats++
		}
	}
	if beats == 0 {
		return num(c.q.Healthy, "consumer has", "consumers have") + " called within " + span(c.e.StaleAfter)
	}
	return num(c.q.Healthy, "consumer is", "consumers are") + " healthy"
}

// stale tells of consumers that went silent without a goodbye: one that ended by itself has taken its beat away.
func (c *chart) stale(b *book) {
	var names []string
	for i := range c.q.Consumers {
		con := &c.q.Consumers[i]
		if !con.Beat.IsZero() && c.ago(con.Beat) > c.e.StaleAfter && c.ago(con.Seen) > c.e.StaleAfter {
			names = append(names, fmt.Sprintf("%s (%s ago)", few([]string{con.Name}), span(c.ago(con.Beat))))
		}
	}
	if len(names) == 0 {
		b.ok(Trigger, StaleConsumers, c.q.Name, "no consumer has gone silent")
		return
	}
	slices.Sort(names)
	b.add(Trigger, Warning, StaleConsumers, c.q.Name, num(len(names), "consumer has", "consumers have")+" gone silent without a goodbye: "+few(names),
		"Killed, crashed, frozen, out of memory, or ended by a function's timeout: see its log and exit status. Its tasks run again elsewhere when their leases end. "+
			"Give functions several ticks of timeout and a margin. It is forgotten after an hour.")
}

// types compares what is due with what live consumers have handlers for.
func (c *chart) types(b *book) {
	served, lives := map[string]bool{}, 0
	for i := range c.q.Consumers {
		con := &c.q.Consumers[i]
		if c.ago(con.Seen) > c.e.StaleAfter && c.ago(con.Beat) > c.e.StaleAfter {
			continue
		}
		if con.Beat.IsZero() || len(con.Types) == 0 || con.TypesCut > 0 {
			return // somebody takes all, or does not say what
		}
		lives++
		for _, t := range con.Types {
			served[t] = true
		}
	}
	if lives == 0 || c.more.Due == nil {
		return
	}
	orphans := map[string]int64{}
	for i := range c.more.Due {
		if t := c.more.Due[i].Type; !served[t] {
			orphans[t]++
		}
	}
	if len(orphans) == 0 {
		b.ok(Trigger, NoTypeHandler, c.q.Name, "live consumers have handlers for every type that is due")
		return
	}
	b.add(Trigger, Warning, NoTypeHandler, c.q.Name,
		fmt.Sprintf("no live consumer has a handler for %s, of the %d most overdue tasks", counted(orphans), len(c.more.Due)),
		"Deploy workers that know the type, or correct the sender. Each try counts as failed (no_handler), and in the end the task is a dead letter; "+
			"then delayq replay --queue "+c.q.Name+" --reason "+delayq.ReasonNoHandler+" brings them back.")
}
