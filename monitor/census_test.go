package monitor_test

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// A situation is a queue whose state the test makes and reads by itself: raw containers of Redis, raw rows of PostgreSQL.
type situation struct {
	*testing.T
	rdb  *redis.Client
	pool *pgxpool.Pool // nil without a ledger
	q    *delayq.Queue
	name string
}

// truth is every gauge and counter, read without the packages under test. Ages and instants are as of now, by Redis' clock.
type truth struct {
	exact map[string]float64
	ages  map[string]float64
	now   time.Time
}

const sentinel = ""

// forShards reads all shards' containers.
func (s *situation) forShards(container string, fn func(key string)) {
	for shard := range s.q.Shards() {
		fn(fmt.Sprintf("dq:{%s:%d}:%s", s.name, shard, container))
	}
}

func (s *situation) members(container string) []redis.Z {
	var all []redis.Z
	s.forShards(container, func(key string) {
		zs, err := s.rdb.ZRangeWithScores(s.Context(), key, 0, -1).Result()
		ok(s.T, err)
		for _, z := range zs {
			if z.Member != sentinel {
				all = append(all, z)
			}
		}
	})
	return all
}

func (s *situation) sum(container, field string) float64 {
	total := 0.0
	s.forShards(container, func(key string) {
		v, err := s.rdb.HGet(s.Context(), key, field).Result()
		if errors.Is(err, redis.Nil) {
			return
		}
		ok(s.T, err)
		n, err := strconv.ParseFloat(v, 64)
		ok(s.T, err)
		total += n
	})
	return total
}

func (s *situation) count(where string, args ...any) float64 {
	var n int64
	ok(s.T, s.pool.QueryRow(s.Context(), "select count(*) from delayq.task t join delayq.queue q on q.id = t.queue where q.name = $1 and "+where,
		append([]any{s.name}, args...)...).Scan(&n))
	return float64(n)
}

func (s *situation) truth() truth {
	ctx := s.Context()
	now, err := s.rdb.Time(ctx).Result()
	ok(s.T, err)
	us := float64(now.UnixMicro())
	tr := truth{exact: map[string]float64{}, ages: map[string]float64{}, now: now}
	set := func(v float64, name string, more ...string) { tr.exact[of(s.name, name, more...)] = v }

	var pending, due, processing float64
	oldest := us
	for _, container := range []string{"pending", "processing"} {
		for _, z := range s.members(container) {
			switch {
			case z.Score <= us:
				due++
				oldest = min(oldest, z.Score)
			case container == "pending":
				pending++
			default:
				processing++
			}
		}
	}
	dead := float64(len(s.members("dead")))
	if s.pool != nil {
		later := s.count("t.status in ('pending', 'retry') and t.run_at > now() + $2 * interval '1 second'", truthHorizon.Seconds())
		pending += later
		dead += s.count("t.status = 'dead'")
		set(later, "ledger_waiting_tasks")
	}
	set(pending, "tasks", `state="pending"`)
	set(due, "tasks", `state="due"`)
	set(processing, "tasks", `state="processing"`)
	set(dead, "tasks", `state="dead"`)
	set(due/max(pending+due+processing, 1), "backlog_ratio")
	if due > 0 {
		tr.ages[of(s.name, "oldest_due_age_seconds")] = (us - oldest) / 1e6
	}
	if began := s.oldestLease(us); began > 0 {
		tr.ages[of(s.name, "oldest_processing_age_seconds")] = us/1e6 - began/1e3
	}

	tombstones := 0.0
	for shard := range s.q.Shards() {
		key := fmt.Sprintf("dq:{%s:%d}:", s.name, shard)
		set(float64(s.rdb.HLen(ctx, key+"tasks").Val()-1), "shard_tasks", fmt.Sprintf("shard=\"%d\"", shard))
		tombstones += float64(s.rdb.HLen(ctx, key+"done:0").Val() + s.rdb.HLen(ctx, key+"done:1").Val() - 2)
	}
	set(tombstones, "tombstones")

	for name, fields := range map[string][]string{
		"enqueued_total": {"created"}, "duplicates_total": {"duplicate"}, "replaced_total": {"replaced"}, "retried_total": {"retried"},
		"released_total": {"released"}, "lost_leases_total": {"expired"}, "buried_total": {"buried"}, "cancelled_total": {"cancelled"},
		"stale_calls_total": {"stale"}, "missing_total": {"missing"}, "trimmed_total": {"trimmed"}, "replayed_total": {"replayed"},
		"purged_total": {"purged"}, "rescheduled_total": {"rescheduled"}, "quarantined_total": {"quarantined"},
	} {
		set(s.sum("meta", "c:"+fields[0])+s.sum("meta", "e:"+fields[0]), name)
	}
	for _, reason := range []string{"error", "permanent", "panic", "timeout", "partial", "no_handler", "lost", "unreadable", "unbooked"} {
		set(s.sum("meta", "f:"+reason), "failed_total", fmt.Sprintf("reason=%q", reason))
	}
	leased, acked := s.histogram(&tr, "l:", "lateness_seconds"), s.histogram(&tr, "d:", "duration_seconds")
	set(leased, "leased_total")
	set(acked-s.sum("meta", "e:timed")+s.sum("meta", "e:succeeded"), "succeeded_total")
	return tr
}

// oldestLease is the least start of a lease that has not run out, in ms.
func (s *situation) oldestLease(us float64) float64 {
	began := math.Inf(1)
	for shard := range s.q.Shards() {
		key := fmt.Sprintf("dq:{%s:%d}:", s.name, shard)
		for id, entry := range s.rdb.HGetAll(s.Context(), key+"state").Val() {
			if until := s.rdb.ZScore(s.Context(), key+"processing", id).Val(); id != sentinel && until > us {
				counts := strings.Split(entry[17:], ":")
				ms, err := strconv.ParseFloat(counts[len(counts)-1], 64)
				ok(s.T, err)
				began = min(began, ms)
			}
		}
	}
	if math.IsInf(began, 1) {
		return 0
	}
	return began
}

func (s *situation) histogram(tr *truth, prefix, name string) float64 {
	total := 0.0
	for _, ms := range []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000, 300000, 3600000} {
		total += s.sum("meta", prefix+strconv.FormatFloat(ms, 'f', -1, 64))
		tr.exact[fmt.Sprintf("%s le=%v", of(s.name, name+"_bucket"), ms/1000)] = total
	}
	total += s.sum("meta", prefix+"inf")
	tr.exact[of(s.name, name+"_count")] = total
	tr.exact[of(s.name, name+"_sum")] = s.sum("meta", prefix+"sum") / 1000
	return total
}
