package monitor

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server is what Redis says of itself; the worst of all masters of a cluster. Fields that it does not tell are -1 or empty.
type Server struct {
	Err        error         `json:"-"`
	Version    string        `json:"version"`
	MemoryUsed int64         `json:"memory_used"`  // of the master that is the fullest
	MemoryMax  int64         `json:"memory_max"`   // of the same; 0 = no limit
	Policy     string        `json:"policy"`       // maxmemory_policy
	Evicted    int64         `json:"evicted"`      // keys, since its start, of all masters
	LastSaveOK bool          `json:"last_save_ok"` // of RDB and AOF
	Skew       time.Duration `json:"skew_ns"`      // Redis' clock less this process'
	Uptime     time.Duration `json:"uptime_ns"`
}

func unknownServer(err error) Server {
	return Server{Err: err, MemoryUsed: -1, MemoryMax: -1, Evicted: -1, Uptime: -1}
}

// Server asks every master of Redis how it is.
func (m *Monitor) Server(ctx context.Context) Server {
	var mu sync.Mutex
	var all []Server
	ask := func(ctx context.Context, c redis.Cmdable) error {
		s, err := askServer(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, s)
		return err
	}
	var err error
	switch rdb := m.cfg.Redis.(type) {
	case *redis.ClusterClient:
		err = rdb.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return ask(ctx, c) })
	case *redis.Ring:
		err = rdb.ForEachShard(ctx, func(ctx context.Context, c *redis.Client) error { return ask(ctx, c) })
	default:
		err = ask(ctx, rdb)
	}
	if err != nil || len(all) == 0 {
		if err == nil {
			err = errors.New("monitor: no master answers")
		}
		return unknownServer(err)
	}
	worst := all[0]
	for _, s := range all[1:] {
		worst = worse(worst, s)
	}
	return worst
}

// askServer asks one. That it may not tell is no error.
func askServer(ctx context.Context, c redis.Cmdable) (Server, error) {
	s := unknownServer(nil)
	sent := time.Now()
	now, err := c.Time(ctx).Result()
	took := time.Since(sent)
	var reply redis.Error
	if err == nil {
		s.Skew = now.Sub(sent.Add(took / 2))
	} else if !errors.As(err, &reply) {
		return s, err
	}
	info, err := c.Info(ctx).Result()
	if err != nil {
		if errors.As(err, &reply) && !strings.HasPrefix(reply.Error(), "LOADING") {
			s.LastSaveOK = true // nobody says otherwise
			return s, nil
		}
		return s, err
	}
	fields := infoFields(info)
	s.Version, s.Policy = fields["redis_version"], fields["maxmemory_policy"]
	s.MemoryUsed, s.MemoryMax, s.Evicted = infoNumber(fields, "used_memory"), infoNumber(fields, "maxmemory"), infoNumber(fields, "evicted_keys")
	s.LastSaveOK = true
	for _, field := range []string{"rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"} {
		s.LastSaveOK = s.LastSaveOK && (fields[field] == "" || fields[field] == "ok")
	}
	if up := infoNumber(fields, "uptime_in_seconds"); up >= 0 {
		s.Uptime = time.Duration(up) * time.Second
	}
	return s, nil
}

func infoFields(info string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

func infoNumber(fields map[string]string, name string) int64 {
	n, err := strconv.ParseInt(fields[name], 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// worse takes of two masters what an operator has to know.
func worse(a, b Server) Server {
	w := a
	if b.fill() > a.fill() || b.fill() == a.fill() && b.MemoryUsed > a.MemoryUsed {
		w.MemoryUsed, w.MemoryMax = b.MemoryUsed, b.MemoryMax
	}
	if b.EvictionUnsafe() && !a.EvictionUnsafe() || a.Policy == "" {
		w.Policy = b.Policy
	}
	if a.Evicted < 0 || b.Evicted < 0 {
		w.Evicted = max(a.Evicted, b.Evicted)
	} else {
		w.Evicted = a.Evicted + b.Evicted
	}
	w.LastSaveOK = a.LastSaveOK && b.LastSaveOK
	if b.Skew.Abs() > a.Skew.Abs() {
		w.Skew = b.Skew
	}
	if a.Uptime < 0 || b.Uptime >= 0 && b.Uptime < a.Uptime {
		w.Uptime = b.Uptime
	}
	return w
}

// fill is the part of the memory's limit that is used, 0 without one.
func (s Server) fill() float64 {
	if s.MemoryMax <= 0 {
		return 0
	}
	return float64(s.MemoryUsed) / float64(s.MemoryMax)
}

// EvictionUnsafe says whether the server may evict keys of queues: a policy of allkeys. They have no time to live, so the volatile
// ones spare them. It does not where the policy is not told.
func (s Server) EvictionUnsafe() bool { return strings.HasPrefix(s.Policy, "allkeys-") }
