package doctor

import (
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// A chart is one queue with what it is judged by.
type chart struct {
	e      *Evidence
	q      *monitor.QueueView
	before *delayq.Stats // nil when there is no earlier look, or the queue's data are other ones by now
	over   time.Duration // between the looks
	lost   bool          // the data became other ones between the looks
	more   More
}

func (e *Evidence) chart(q *monitor.QueueView) *chart {
	c := &chart{e: e, q: q, more: e.More[q.Name]}
	if e.Before == nil || q.Stats == nil {
		return c
	}
	for i := range e.Before.Queues {
		old := &e.Before.Queues[i]
		if old.Name != q.Name || old.Stats == nil {
			continue
		}
		c.over = q.Stats.Now.Sub(old.Stats.Now)
		if c.lost = made(old.Stats) != made(q.Stats) || q.Stats.Created < old.Stats.Created; !c.lost && c.over > 0 {
			c.before = old.Stats
		}
	}
	return c
}

// made is what changes when Redis loses the queue.
func made(s *delayq.Stats) (epochs string) {
	for _, sh := range s.Shards {
		epochs += sh.Epoch + " "
	}
	return epochs
}

// since is how much a counter rose between the looks.
func (c *chart) since(counter func(*delayq.Stats) int64) int64 {
	if c.before == nil {
		return 0
	}
	return max(0, counter(c.q.Stats)-counter(c.before))
}

// ago is how long a time lies back, by Redis' clock.
func (c *chart) ago(t time.Time) time.Duration { return max(0, c.q.Stats.Now.Sub(t)) }

// waiting is how many tasks are to run at some time.
func (c *chart) waiting() int64 { return c.q.Stats.Pending + c.q.Stats.Due + c.q.Stats.Processing }
