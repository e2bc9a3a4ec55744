package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/delayq/toolkit/monitor"
)

// fallDue makes some of the tasks that still wait due, so that the gauges have more to show than zeros, and looks at them again.
func (s *stage) fallDue(ctx context.Context, bad func(rule, format string, args ...any)) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	moved := 0
	for id, r := range rows {
		if r.open() && moved < 7 {
			moved++
			if err := s.q.RescheduleIn(ctx, id, 0); err != nil {
				bad("I9", "%s, which waits, cannot be made due: %v", id, err)
			}
		}
	}
	pause(ctx, 50*time.Millisecond) // an age that shows
	s.gauges(ctx, bad)
}

// gauges holds what the monitor exports to what can be counted by reading everything.
func (s *stage) gauges(ctx context.Context, bad func(rule, format string, args ...any)) {
	m, err := monitor.New(monitor.Config{Redis: s.rdb, Ledger: s.led, Horizon: s.horizon})
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	before, err := s.counted(ctx)
	if err != nil {
		bad("I9", "%v", err)
		return
	}
	shown, err := exported(m.Collector())
	after := s.rdb.Time(ctx).Val()
	if err != nil {
		bad("I9", "the metrics: %v", err)
		return
	}
	for _, name := range sortedKeys(before.exact) {
		if got, there := shown[name]; !there || got != before.exact[name] {
			bad("I9", "%s is %v (there: %v), counted are %v", name, got, there, before.exact[name])
		}
	}
	went := after.Sub(before.at).Seconds() + 0.001
	name := fmt.Sprintf("delayq_oldest_due_age_seconds{queue=%s}", s.cfg.Queue)
	if got := shown[name]; got < before.oldest-0.001 || got > before.oldest+went && before.oldest > 0 || before.oldest == 0 && got != 0 {
		bad("I9", "%s is %v, by the clock it is %v to %v", name, got, before.oldest, before.oldest+went)
	}
}

// A census is what the gauges must show.
type census struct {
	exact  map[string]float64
	oldest float64 // age of the oldest due task, in seconds
	at     time.Time
}

// counted reads all rows and all keys. Nothing runs any more.
func (s *stage) counted(ctx context.Context) (*census, error) {
	rows, err := readRows(ctx, s.pool)
	if err != nil {
		return nil, err
	}
	c := &census{exact: map[string]float64{}}
	if c.at, err = s.rdb.Time(ctx).Result(); err != nil {
		return nil, err
	}
	var pending, due, processing, dead, later float64
	for _, r := range rows {
		switch {
		case r.status == "dead":
			dead++
		case r.open() && s.horizon > 0 && time.Until(time.UnixMicro(r.runAt)) > s.horizon:
			later++
		}
	}
	oldest := int64(math.MaxInt64)
	now := c.at.UnixMicro()
	for shard := range s.cfg.Shards {
		prefix := fmt.Sprintf("dq:{%s:%d}:", s.cfg.Queue, shard)
		for _, place := range []string{"pending", "processing", "dead"} {
			members, err := s.rdb.ZRangeWithScores(ctx, prefix+place, 0, -1).Result()
			if err != nil {
				return nil, err
			}
			for _, z := range members {
				switch {
				case z.Member == "": // the sentinel
				case place == "dead":
					dead++
				case int64(z.Score) <= now:
					due++
					oldest = min(oldest, int64(z.Score))
				case place == "pending":
					pending++
				default:
					processing++
				}
			}
		}
		records, err := s.rdb.HLen(ctx, prefix+"tasks").Result()
		if err != nil {
			return nil, err
		}
		c.set(s, float64(records-1), "shard_tasks", "shard", fmt.Sprint(shard))
	}
	if due > 0 {
		c.oldest = float64(now-oldest) / 1e6
	}
	c.set(s, pending+later, "tasks", "state", "pending")
	c.set(s, due, "tasks", "state", "due")
	c.set(s, processing, "tasks", "state", "processing")
	c.set(s, dead, "tasks", "state", "dead")
	c.set(s, later, "ledger_waiting_tasks")
	c.set(s, due/max(pending+later+due+processing, 1), "backlog_ratio")
	c.set(s, 0, "oldest_processing_age_seconds")
	c.set(s, 0, "ledger_unconfirmed_tasks")
	c.set(s, 1, "reconcile_coverage_ratio")
	c.set(s, 0, "scrape_error")
	c.exact["delayq_up"] = 1
	c.exact["delayq_queues_left_out"] = 0
	c.exact["delayq_redis_eviction_unsafe"] = 0
	return c, nil
}

func (c *census) set(s *stage, v float64, name string, label ...string) {
	labels := "queue=" + s.cfg.Queue
	if len(label) > 0 {
		labels += "," + strings.Join(label, "=")
	}
	c.exact["delayq_"+name+"{"+labels+"}"] = v
}

// exported gathers what is neither counter nor histogram.
func exported(c prometheus.Collector) (map[string]float64, error) {
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		return nil, err
	}
	families, err := reg.Gather()
	shown := map[string]float64{}
	for _, f := range families {
		for _, one := range f.GetMetric() {
			if one.GetGauge() == nil {
				continue
			}
			var labels []string
			for _, l := range one.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := f.GetName()
			if len(labels) > 0 {
				slices.Sort(labels) // queue comes before shard and state
				name += "{" + strings.Join(labels, ",") + "}"
			}
			shown[name] = one.GetGauge().GetValue()
		}
	}
	return shown, err
}

func sortedKeys(m map[string]float64) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
