package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// forgetting makes the server forget its scripts before every call and every pipeline.
func forgetting(rdb *redis.Client, admin *redis.Client) *flaky {
	f := &flaky{err: func() error { return admin.ScriptFlush(context.Background()).Err() }}
	rdb.AddHook(f)
	return f
}

// Public case: B65.
func TestScriptsAreLoadedAgain(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			admin, rdb := realClient(t, server.Addr()), realClient(t, server.Addr())
			forgetting(rdb, admin)
			twin(t, call, admin, rdb, func(*world) {})
		})
	}
	t.Run("in the pipelines of a worker", func(t *testing.T) {
		admin, rdb := realClient(t, server.Addr()), realClient(t, server.Addr())
		f := forgetting(rdb, admin)
		q, err := delayq.Open(t.Context(), rdb, "pipelines", delayq.Config{Shards: 16})
		if err != nil {
			t.Fatal(err)
		}
		const n = 500
		tasks := make([]delayq.Task, n)
		for i := range tasks {
			tasks[i] = task(fmt.Sprint(i))
		}
		if _, err := q.EnqueueMany(t.Context(), tasks); err != nil {
			t.Fatal(err)
		}
		w := delayq.NewWorker(delayq.HandlerFunc(func(_ context.Context, t *delayq.Task) error {
			if strings.HasSuffix(t.ID, "5") && t.Attempt == 1 {
				return delayq.RetryAfter(0, errBoom)
			}
			return nil
		}), q)
		w.IdleExit, w.Logger = time.Millisecond, quiet()
		stats, err := w.Run(t.Context())
		if err != nil || stats.Succeeded != n || stats.Retried != n/10 || stats.LeaseLost+stats.Missing != 0 {
			t.Errorf("%+v, %v", stats, err)
		}
		f.err = times(0, nil)
	})
}

// A full Redis refuses what would fill it further, cleanly, and lets everything else drain it. Public case: B8.
func TestAFullRedisDrains(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := realClient(t, server.Addr())
	fill := func(t *testing.T, limit string) {
		if err := rdb.ConfigSet(context.Background(), "maxmemory", limit).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			defer fill(t, "0")
			if !call.create {
				twin(t, call, rdb, rdb, func(*world) { fill(t, "1") })
				return
			}
			w := call.world(t, rdb)
			before := w.dump()
			fill(t, "1")
			_, err := call.do(t.Context(), w)
			if !errors.Is(err, delayq.ErrFull) {
				t.Errorf("error %v", err)
			}
			w.unchanged(before, "refused")
		})
	}
	t.Run("lease, repeated", func(t *testing.T) {
		defer fill(t, "0")
		w := newWorld(t, rdb, delayq.Config{})
		call := delayq.LeaseCall{Max: 2, Lease: leaseTime, Consumer: "c"}
		first := w.do(call)
		call.Token = first.Token
		fill(t, "1")
		if again := w.do(call); len(again.Leases) != len(first.Leases) {
			t.Errorf("got %q, then %q", idsOf(first.Leases), idsOf(again.Leases))
		}
	})
	t.Run("a worker that starts now", func(t *testing.T) {
		defer fill(t, "0")
		w := newWorld(t, rdb, delayq.Config{})
		before, err := w.q.Stats(t.Context())
		w.ok(err)
		fill(t, "1")
		q := w.open(w.q.Name(), delayq.Config{OnWarning: func(delayq.Warning) {}})
		worker := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { return nil }), q)
		worker.IdleExit, worker.Logger = time.Millisecond, quiet()
		stats, err := worker.Run(t.Context())
		if err != nil || stats.Succeeded != before.Due-1 { // one of them is cancelled
			t.Errorf("of %d due: %+v, %v", before.Due, stats, err)
		}
		if _, err := delayq.Open(t.Context(), rdb, "new", delayq.Config{}); !errors.Is(err, delayq.ErrFull) {
			t.Errorf("a new queue: %v", err)
		}
	})
}

// Public case: B67.
func TestAReplicaThatIsPromotedTakesTheCall(t *testing.T) {
	t.Parallel()
	master, replica := servers.NewRedis(t, "--repl-diskless-sync-delay", "0"), servers.NewRedis(t)
	rdb, admin := realClient(t, replica.Addr()), realClient(t, replica.Addr())
	r := newRig(t, rdb, delayq.Config{})
	host, port, _ := strings.Cut(master.Addr(), ":")
	demote := func() {
		r.ok(admin.Do(t.Context(), "REPLICAOF", host, port).Err())
		until(t, func() bool {
			return strings.Contains(admin.Info(t.Context(), "replication").Val(), "master_link_status:up")
		})
	}
	// It takes over what its master has, which is nothing: so the queue lives there first.
	r.q = newRig(t, realClient(t, master.Addr()), delayq.Config{}).q
	name := r.q.Name()
	demote()
	keys := delayq.Keys(r.q, 0)
	until(t, func() bool { return admin.Exists(t.Context(), keys...).Val() == int64(len(keys)) })
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{NoCreate: true})
	r.ok(err)
	r.q = q
	delayq.SetClock(q, r.now)
	before := r.state()
	_, err = q.Enqueue(t.Context(), task("x"))
	if err == nil || !strings.Contains(err.Error(), "READONLY") || r.state() != before {
		t.Errorf("a replica: %v", err)
	}
	promoted := false
	rdb.AddHook(after(func(err error) {
		if err != nil && strings.Contains(err.Error(), "READONLY") && !promoted {
			promoted = true
			r.ok(admin.Do(context.Background(), "REPLICAOF", "NO", "ONE").Err())
		}
	}))
	r.add("x")
	if !promoted {
		t.Error("the replica took a write")
	}
}

// after calls f with what became of each command.
type after func(err error)

func (f after) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f after) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f after) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		f(err)
		return err
	}
}

// until waits for something that the test has set going on a server.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never came to pass")
		}
	}
}

func TestALoadingServerIsWaitedFor(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t, "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no")
	rdb, admin := realClient(t, server.Addr()), realClient(t, server.Addr())
	r := newRig(t, rdb, delayq.Config{})
	for i := range 100 {
		r.ok(admin.Set(t.Context(), fmt.Sprint("filler", i), strings.Repeat("x", 1000), 0).Err())
	}
	r.ok(admin.ConfigSet(t.Context(), "key-load-delay", "200000").Err()) // us
	reload := make(chan error)
	go func() {
		other := redis.NewClient(&redis.Options{Addr: server.Addr(), ReadTimeout: time.Minute})
		defer other.Close()
		reload <- other.Do(context.Background(), "DEBUG", "RELOAD").Err()
	}()
	until(t, func() bool { return strings.Contains(admin.Info(t.Context(), "persistence").Val(), "loading:1") })
	met := false
	rdb.AddHook(after(func(err error) {
		if err != nil && strings.Contains(err.Error(), "LOADING") && !met {
			met = true
			r.ok(admin.ConfigSet(context.Background(), "key-load-delay", "0").Err())
		}
	}))
	r.add("x")
	r.ok(<-reload)
	if !met {
		t.Error("the server was never met loading")
	}
}

func TestAServerWithoutRoomForClientsIsWaitedFor(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	r := newRig(t, realClient(t, server.Addr()), delayq.Config{})
	admin := realClient(t, server.Addr()).Conn()
	r.ok(admin.ConfigSet(t.Context(), "maxclients", "1").Err())
	r.ok(admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
	var refused []error
	r.rdb.(*redis.Client).AddHook(after(func(err error) {
		if err != nil {
			refused = append(refused, err)
		}
		if len(refused) == 2 { // the first may be of the connection that was killed
			admin.ConfigSet(context.Background(), "maxclients", "10000")
		}
	}))
	r.add("x")
	if len(refused) < 2 {
		t.Errorf("the server had room: %v", refused)
	}
}

// While a cluster moves a slot, a script whose keys do not all exist is turned away: the sentinels keep them in being even
// when a container is empty, so that calls go through until the keys themselves move.
func TestCallsGoThroughWhileASlotMoves(t *testing.T) {
	t.Parallel()
	cluster := servers.NewCluster(t, 2)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	t.Cleanup(func() { rdb.Close() })
	ctx := t.Context()
	nodes := []*redis.Client{realClient(t, cluster.Nodes[0].Addr()), realClient(t, cluster.Nodes[1].Addr())}
	empty := newRig(t, rdb, delayq.Config{})
	keys := delayq.Keys(empty.q, 0)
	slot := rdb.ClusterKeySlot(ctx, keys[0]).Val()
	from, to := 0, 1
	if slot >= 16384/2 {
		from, to = 1, 0
	}
	id := func(node int) string { return nodes[node].Do(ctx, "CLUSTER", "MYID").Val().(string) }
	empty.ok(nodes[to].Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", id(from)).Err())
	empty.ok(nodes[from].Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", id(to)).Err())

	whole := func(r *rig) {
		r.Helper()
		r.bring("a", "done")
		r.bring("b", "told to stop")
		r.pass(leaseTime)
		r.lease(10)
		r.bring("c", "dead")
		r.ok(r.q.Purge(ctx, "c"))
		r.bring("d", "replaced")
		r.cancel("d", delayq.Cancelled)
		r.pass(10 * time.Minute) // both generations of tombstones are stale
		r.bring("e", "done")
		r.pass(3 * time.Minute) // one is
		r.bring("f", "cancelled")
		_, err := r.q.Stats(ctx)
		r.ok(err)
		r.list(delayq.ListOptions{State: delayq.StateDue})
		r.pass(10 * time.Minute)
	}
	whole(empty)

	// Too many tombstones to be removed one by one: their key goes, and the call waits until the move is over. So does one
	// that finds a part of the keys on the other side.
	move := func(keys ...string) {
		host, port, _ := strings.Cut(cluster.Nodes[to].Addr(), ":")
		args := []any{"MIGRATE", host, port, "", 0, 60_000, "KEYS"}
		for _, k := range keys {
			args = append(args, k)
		}
		empty.ok(nodes[from].Do(context.Background(), args...).Err())
	}
	for _, row := range []struct {
		name   string
		before func(r *rig)
		met    string
	}{
		{"many tombstones", func(r *rig) {
			for round := range 3 {
				tasks := make([]delayq.Task, 500)
				ids := make([]string, len(tasks))
				for i := range tasks {
					tasks[i] = task(fmt.Sprint(round, ":", i))
					ids[i] = tasks[i].ID
				}
				_, err := r.q.EnqueueMany(ctx, tasks, delayq.In(time.Hour))
				r.ok(err)
				_, err = r.q.CancelMany(ctx, ids)
				r.ok(err)
			}
			r.pass(10 * time.Minute)
		}, "non local key"},
		{"two halves", func(*rig) { move(keys[:5]...) }, "TRYAGAIN"},
	} {
		row.before(empty)
		met := ""
		rdb.AddHook(after(func(err error) {
			if err != nil && met == "" {
				met = err.Error()
				move(keys...)
				for _, n := range []int{to, from} {
					empty.ok(nodes[n].Do(context.Background(), "CLUSTER", "SETSLOT", slot, "NODE", id(to)).Err())
				}
			}
		}))
		empty.bring(row.name, "cancelled")
		if !strings.Contains(met, row.met) {
			t.Errorf("%s: the call met %q", row.name, met)
		}
		from, to = to, from
		empty.ok(nodes[to].Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", id(from)).Err())
		empty.ok(nodes[from].Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", id(to)).Err())
		whole(empty)
	}
}

func TestAClusterThatIsDownIsWaitedFor(t *testing.T) {
	t.Parallel()
	cluster := servers.NewCluster(t, 1)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	t.Cleanup(func() { rdb.Close() })
	r := newRig(t, rdb, delayq.Config{})
	node := realClient(t, cluster.Nodes[0].Addr())
	slot := rdb.ClusterKeySlot(t.Context(), delayq.Keys(r.q, 0)[0]).Val()
	down := ""
	rdb.AddHook(after(func(err error) {
		if err != nil && down == "" {
			down = err.Error()
			r.ok(node.ClusterAddSlots(context.Background(), int(slot)).Err())
		}
	}))
	r.ok(node.ClusterDelSlots(t.Context(), int(slot)).Err())
	r.add("x")
	if !strings.Contains(down, "CLUSTERDOWN") {
		t.Errorf("the cluster answered %q", down)
	}
}

// A script that meets a key of the wrong type stops before its first write, whichever key it is. Public case: B8.
func TestAWrongTypeStopsAScriptBeforeItsFirstWrite(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	rdb := realClient(t, server.Addr())
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			failed := 0
			for k := range delayq.Keys(call.world(t, rdb).q, 0) {
				w := call.world(t, rdb)
				key := delayq.Keys(w.q, 0)[k]
				_, name, _ := strings.Cut(key, "}:")
				w.ok(rdb.Set(t.Context(), key, "not a container", 0).Err())
				before := w.dump()
				_, err := call.do(t.Context(), w)
				switch {
				case err == nil: // it has no business with this key
					if w.dump()[name] != before[name] {
						t.Errorf("%s was overwritten", name)
					}
				case strings.Contains(err.Error(), "WRONGTYPE"):
					failed++
					w.unchanged(before, "with a wrong "+name)
				}
				rdb.Del(t.Context(), delayq.Keys(w.q, 0)...)
			}
			if failed == 0 {
				t.Error("no key matters to it")
			}
		})
	}
}

// A user who may not run one of the commands hears of it at Open, or from a call that has then changed nothing.
func TestAMissingRightStopsAScriptBeforeItsFirstWrite(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	admin := realClient(t, server.Addr())
	acl := func(rules ...any) {
		t.Helper()
		if err := admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "user"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	acl("on", ">secret", "~*", "+@all")
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), Username: "user", Password: "secret"})
	t.Cleanup(func() { rdb.Close() })
	forbidden := func(err error) bool {
		return err != nil && (strings.Contains(err.Error(), "NOPERM") || strings.Contains(err.Error(), "can't run this command"))
	}
	for _, command := range []string{"zadd", "zrem", "zremrangebyrank", "hset", "hdel", "hincrby", "unlink", "hmget", "time", "evalsha"} {
		acl("-" + command)
		if _, err := delayq.Open(t.Context(), rdb, "new", delayq.Config{}); !forbidden(err) {
			t.Errorf("open without %s: %v", command, err)
		}
		acl("+" + command)
		admin.FlushDB(t.Context())
	}
	for _, command := range []string{
		"zrange", "zrangebyscore", "zcount", "zcard", "zscore", "zmscore", "hget", "hmget", "hgetall", "hkeys", "hlen", "hexists", "unlink",
	} {
		for _, call := range apiCalls {
			if call.reads {
				continue
			}
			w := call.world(t, rdb)
			before := w.dump()
			acl("-" + command)
			_, err := call.do(t.Context(), w)
			acl("+" + command)
			if forbidden(err) {
				w.unchanged(before, call.name+" without "+command)
			}
		}
	}
	acl("-info")
	var warnings []string
	_, err := delayq.Open(t.Context(), rdb, "new", delayq.Config{OnWarning: func(w delayq.Warning) { warnings = append(warnings, w.Code) }})
	if err != nil || !slices.Equal(warnings, []string{"unchecked"}) {
		t.Errorf("open without info: %v, warnings %q", err, warnings)
	}
}

// The rights that README.md tells to give are enough for every call, of both modes.
func TestTheRightsInTheReadmeAreEnough(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^ACL SETUSER delayq on >\S+ (.*)$`).FindSubmatch(text)
	if found == nil {
		t.Fatal("README.md has no ACL SETUSER delayq")
	}
	server := servers.NewRedis(t)
	args := []any{"ACL", "SETUSER", "delayq", "on", ">secret"}
	for rule := range strings.FieldsSeq(string(found[1])) {
		args = append(args, rule)
	}
	if err := realClient(t, server.Addr()).Do(t.Context(), args...).Err(); err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), Username: "delayq", Password: "secret"})
	t.Cleanup(func() { rdb.Close() })
	for _, call := range apiCalls {
		if _, err := call.do(t.Context(), call.world(t, rdb)); err != nil && (strings.Contains(err.Error(), "NOPERM") || strings.Contains(err.Error(), "can't run")) {
			t.Errorf("%s: %v", call.name, err)
		}
	}
	if names, err := delayq.Queues(t.Context(), rdb); err != nil || len(names) == 0 {
		t.Errorf("%v, %d queues", err, len(names))
	}
}

// A batch that does not add up is refused as a whole, before anything is read.
func TestAMalformedBatchIsRefused(t *testing.T) {
	t.Parallel()
	rdb := realClient(t, servers.SharedRedis(t).Addr())
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			if slices.Contains([]string{"init", "stats", "list", "nudge"}, call.verb) {
				t.Skip("takes no batch")
			}
			w := call.world(t, realClient(t, servers.SharedRedis(t).Addr()))
			var sent []any
			w.rdb.(*redis.Client).AddHook(sending(func(cmd redis.Cmder) {
				if cmd.Name() == "evalsha" {
					sent = cmd.Args()[3+len(delayq.Keys(w.q, 0)):]
				}
			}))
			_, _ = call.do(t.Context(), w)
			w = call.world(t, rdb)
			before := w.dump()
			for name, args := range map[string][]any{
				"one too few":  sent[:len(sent)-1],
				"one too many": append(slices.Clone(sent), "x"),
			} {
				_, err := delayq.RunScript(t.Context(), w.q, 0, call.verb, args...)
				if err == nil || !strings.Contains(err.Error(), "malformed") {
					t.Errorf("%s: error %v", name, err)
				}
			}
			w.unchanged(before, "refused")
		})
	}
	r := newRig(t, rdb, delayq.Config{})
	for _, n := range []int{0, -1, 501} {
		args := []any{"0", n}
		for i := range n {
			args = append(args, fmt.Sprint(i))
		}
		if _, err := delayq.RunScript(t.Context(), r.q, 0, "cancel", args...); err == nil || !strings.Contains(err.Error(), "malformed") {
			t.Errorf("a batch of %d: %v", n, err)
		}
	}
}

// sending calls f with each command before it is sent.
type sending func(cmd redis.Cmder)

func (f sending) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f sending) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f sending) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		f(cmd)
		return next(ctx, cmd)
	}
}

// FLUSHALL under way: the queue is made again, its user is told, and what was leased before can do no harm.
func TestAQueueThatRedisLosesIsMadeAgain(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := realClient(t, server.Addr())
	var lost atomic.Int64
	r := newRig(t, rdb, delayq.Config{Shards: 4, Retention: time.Minute, MaxPayload: 100, OnWarning: func(w delayq.Warning) {
		if w.Code == "data_lost" {
			lost.Add(1)
		}
	}})
	ctx := t.Context()
	stale := r.bring("x", "leased")
	flush := func() { r.ok(rdb.FlushAll(ctx).Err()) }
	flush()
	for name, call := range map[string]func() error{
		"extend":     func() error { return r.q.Extend(ctx, time.Minute, stale) },
		"ack":        func() error { return r.q.Ack(ctx, stale) },
		"retry":      func() error { return r.q.Retry(ctx, stale, 0, errBoom) },
		"release":    func() error { return r.q.Release(ctx, 0, stale) },
		"bury":       func() error { return r.q.Bury(ctx, stale, errBoom) },
		"reschedule": func() error { return r.q.RescheduleIn(ctx, "x", 0) },
		"replay":     func() error { return r.q.Replay(ctx, "x") },
		"purge":      func() error { return r.q.Purge(ctx, "x") },
	} {
		r.is(call(), delayq.ErrNotFound, name)
	}
	r.cancel("x", delayq.Unknown)
	if n := rdb.DBSize(ctx).Val(); n != 0 || lost.Load() != 0 {
		t.Errorf("calls about nothing made %d keys and %d warnings", n, lost.Load())
	}
	r.add("x")
	if lost.Load() != 1 {
		t.Errorf("%d warnings of lost data, want 1", lost.Load())
	}
	r.is(r.q.Ack(ctx, stale), delayq.ErrNotFound)
	r.pass(time.Millisecond)
	fresh := r.lease1()
	r.is(r.q.Ack(ctx, stale), delayq.ErrLeaseLost)
	r.ok(r.q.Ack(ctx, fresh))
	if q := r.open(r.q.Name(), delayq.Config{NoCreate: true}); q.Shards() != 4 || q.MaxPayload() != 100 {
		t.Errorf("made again with %d shards and payloads of %d", q.Shards(), q.MaxPayload())
	}

	// The same amid producers and a worker.
	delayq.SetClock(r.q, func() float64 { return 0 })
	var runs atomic.Int64
	w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { runs.Add(1); return nil }), r.q)
	w.Logger, w.MaxPoll = quiet(), 10*time.Millisecond
	running, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		if _, err := w.Run(running); err != nil {
			t.Error(err)
		}
	})
	for p := range 4 {
		done.Go(func() {
			for i := 0; running.Err() == nil; i++ {
				if _, err := r.q.Enqueue(running, task(fmt.Sprint(p, "-", i))); err != nil && running.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	for range 5 {
		before := runs.Load()
		until(t, func() bool { return runs.Load() > before+50 })
		flush()
	}
	before := runs.Load()
	until(t, func() bool { return runs.Load() > before+50 })
	stop()
	done.Wait()
	if lost.Load() < 6 {
		t.Errorf("%d warnings of lost data", lost.Load())
	}
}

// told answers INFO in the place of a server that is hard to come by.
type told struct{ info string }

func (h told) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h told) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h told) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if info, ok := cmd.(*redis.StringCmd); ok && cmd.Name() == "info" {
			info.SetVal(h.info)
			return nil
		}
		return next(ctx, cmd)
	}
}

// Public case: B33.
func TestWhatOpenChecks(t *testing.T) {
	t.Parallel()
	addr := servers.SharedRedis(t).Addr()
	open := func(t *testing.T, rdb redis.UniversalClient, name string, cfg delayq.Config) (string, error) {
		var warnings []string
		cfg.OnWarning = func(w delayq.Warning) { warnings = append(warnings, w.Code) }
		_, err := delayq.Open(t.Context(), rdb, name, cfg)
		return strings.Join(warnings, " "), err
	}
	t.Run("what INFO says", func(t *testing.T) {
		for _, row := range []struct {
			info     string
			cfg      delayq.Config
			err      error
			warnings string
		}{
			{"redis_version:7.0.15\r\nmaxmemory_policy:noeviction\r\n", delayq.Config{}, nil, ""},
			{"redis_version:6.2.0\r\nmaxmemory_policy:noeviction\r\n", delayq.Config{}, nil, ""},
			{"redis_version:6.0.16\r\nmaxmemory_policy:noeviction\r\n", delayq.Config{}, delayq.ErrServerVersion, ""},
			{"redis_version:5.0\r\n", delayq.Config{}, delayq.ErrServerVersion, ""},
			{"redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.0\r\nmaxmemory_policy:noeviction\r\n", delayq.Config{}, nil, ""},
			{"redis_version:7.0.15\r\nmaxmemory_policy:allkeys-lru\r\n", delayq.Config{}, delayq.ErrEviction, ""},
			{"redis_version:7.0.15\r\nmaxmemory_policy:volatile-ttl\r\n", delayq.Config{}, nil, "eviction"},
			{"redis_version:7.0.15\r\nmaxmemory_policy:allkeys-lru\r\n", delayq.Config{AllowEviction: true}, nil, "eviction"},
			{"", delayq.Config{}, nil, "unchecked"},
		} {
			rdb := realClient(t, addr)
			rdb.AddHook(told{info: row.info})
			warnings, err := open(t, rdb, servers.QueueName(t), row.cfg)
			if !errors.Is(err, row.err) || (err == nil) != (row.err == nil) || warnings != row.warnings {
				t.Errorf("%q: error %v, warnings %q; want %v and %q", row.info, err, warnings, row.err, row.warnings)
			}
		}
	})
	t.Run("an evicting server", func(t *testing.T) {
		rdb := realClient(t, servers.NewRedis(t, "--maxmemory-policy", "allkeys-lru").Addr())
		if _, err := open(t, rdb, "q", delayq.Config{}); !errors.Is(err, delayq.ErrEviction) {
			t.Error(err)
		}
		if n := rdb.DBSize(t.Context()).Val(); n != 0 {
			t.Errorf("a refused Open made %d keys", n)
		}
	})
	t.Run("clock", func(t *testing.T) {
		m := miniredis.RunT(t)
		rdb := realClient(t, m.Addr())
		for _, row := range []struct {
			skew     time.Duration
			cfg      delayq.Config
			err      error
			warnings string
		}{
			{0, delayq.Config{}, nil, "unchecked"}, // miniredis tells no policy
			{20 * time.Second, delayq.Config{}, nil, "unchecked skew"},
			{-20 * time.Second, delayq.Config{}, nil, "unchecked skew"},
			{time.Minute, delayq.Config{}, delayq.ErrClockSkew, "unchecked"},
			{-time.Minute, delayq.Config{}, delayq.ErrClockSkew, "unchecked"},
			{time.Minute, delayq.Config{MaxSkew: time.Hour}, nil, "unchecked skew"},
		} {
			m.SetTime(time.Time{})
			if row.skew != 0 {
				m.SetTime(time.Now().Add(row.skew))
			}
			warnings, err := open(t, rdb, "q", row.cfg)
			if !errors.Is(err, row.err) || (err == nil) != (row.err == nil) || warnings != row.warnings {
				t.Errorf("skew %v: error %v, warnings %q; want %v and %q", row.skew, err, warnings, row.err, row.warnings)
			}
		}
	})
	t.Run("what is stored", func(t *testing.T) {
		rdb := realClient(t, addr)
		name := servers.QueueName(t)
		check := func(cfg delayq.Config, want error) {
			t.Helper()
			if _, err := open(t, rdb, name, cfg); !errors.Is(err, want) || (err == nil) != (want == nil) {
				t.Errorf("%+v: error %v, want %v", cfg, err, want)
			}
		}
		check(delayq.Config{NoCreate: true}, delayq.ErrNoQueue)
		check(delayq.Config{Shards: 4, MaxPayload: 1000, Retention: time.Hour}, nil)
		check(delayq.Config{Shards: 4}, nil)
		check(delayq.Config{NoCreate: true}, nil)
		check(delayq.Config{Shards: 1}, delayq.ErrShards)
		check(delayq.Config{Shards: 16}, delayq.ErrShards)
		q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{})
		if err != nil || q.Shards() != 4 || q.MaxPayload() != 1000 {
			t.Errorf("opened as it is stored: %d shards, payloads of %d, %v", q.Shards(), q.MaxPayload(), err)
		}
		check(delayq.Config{MaxPayload: 2000}, nil)
		if q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{}); err != nil || q.MaxPayload() != 2000 {
			t.Errorf("after a change payloads are %d, %v", q.MaxPayload(), err)
		}
		rdb.HSet(t.Context(), delayq.Keys(q, 0)[8], "schema", "999")
		check(delayq.Config{}, delayq.ErrSchema)
		check(delayq.Config{Shards: 1}, delayq.ErrSchema)
		for shard := range 4 {
			rdb.Del(t.Context(), delayq.Keys(q, shard)...)
		}
	})
	t.Run("what is asked for", func(t *testing.T) {
		for _, cfg := range []delayq.Config{
			{Shards: -1},
			{Shards: 257},
			{Retention: time.Millisecond},
			{Retention: 25 * time.Hour},
			{MaxPayload: -1},
			{MaxPayload: 256<<10 + 1},
			{DeadCap: -1},
			{MaxSkew: -1},
		} {
			if _, err := open(t, realClient(t, addr), "q", cfg); !errors.Is(err, delayq.ErrInvalid) {
				t.Errorf("%+v: %v", cfg, err)
			}
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
		defer rdb.Close()
		if _, err := open(t, rdb, "q", delayq.Config{}); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Error(err)
		}
	})
}

// Two processes that open a new queue at the same time agree.
func TestOpeningANewQueueAtTheSameTime(t *testing.T) {
	t.Parallel()
	rdb := realClient(t, servers.SharedRedis(t).Addr())
	name := servers.QueueName(t)
	var opened, refused atomic.Int64
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			_, err := delayq.Open(t.Context(), rdb, name, delayq.Config{Shards: 2 + i%2})
			switch {
			case err == nil:
				opened.Add(1)
			case errors.Is(err, delayq.ErrShards):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if opened.Load() != 10 || refused.Load() != 10 {
		t.Errorf("%d opened it, %d were refused", opened.Load(), refused.Load())
	}
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for shard := range q.Shards() {
		rdb.Del(t.Context(), delayq.Keys(q, shard)...)
	}
}

// A server that is stopped answers nothing; calls end with their contexts, and their repeats find what was done after all.
// Public case: B68.
func TestAFrozenServerHoldsNobodyPastTheDeadline(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	rdb := realClient(t, server.Addr())
	w := newWorld(t, rdb, delayq.Config{})
	w.ok(server.Pause())
	for _, call := range apiCalls {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		_, err := call.do(ctx, w)
		cancel()
		w.is(err, context.DeadlineExceeded, call.name)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, call := range apiCalls {
		_, err := call.do(ctx, w)
		w.is(err, context.Canceled, call.name)
	}
	w.ok(server.Resume())
	res, err := w.q.Enqueue(t.Context(), task("new"), delayq.In(time.Hour))
	if err != nil || res.Outcome != delayq.Created && res.Outcome != delayq.DuplicatePending {
		t.Errorf("%v, %v", res.Outcome, err)
	}
}
