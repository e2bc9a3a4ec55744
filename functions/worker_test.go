package functions

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "delayq-functions-")
	if err != nil {
		panic(err)
	}
	buildDir = dir
	code := m.Run()
	servers.StopShared()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// A bench is one queue of a real server, and the variables of functions that work it off.
type bench struct {
	t    *testing.T
	rdb  *redis.Client
	q    *delayq.Queue
	name string // of the queue, and of the functions' connections
	vars []string
}

// newBench makes a queue of its own on server. More variables can override the ones it sets:
// short times, so that tests do not wait.
func newBench(t *testing.T, server *servers.Redis, vars ...string) *bench {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), DisableIdentity: true})
	t.Cleanup(func() { _ = rdb.Close() })
	name := queueOf(t)
	q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &bench{t: t, rdb: rdb, q: q, name: name, vars: append([]string{
		"DELAYQ_REDIS_URL=" + server.URL() + "?client_name=" + name,
		"DELAYQ_QUEUES=" + name,
		"DELAYQ_MARGIN=500ms",
		"DELAYQ_LEASE=1s",
	}, vars...)}
}

// queueOf is a name no other test uses, nor this one when it is run again on the same server.
func queueOf(t *testing.T) string {
	return strings.ReplaceAll(t.Name(), "/", ".") + "." + uuid.NewString()[:8]
}

// environment starts a process of the test worker.
func (b *bench) environment(vars ...string) *environment {
	b.t.Helper()
	return newEnvironment(b.t, program(b.t, testworker), append(slices.Clone(b.vars), vars...)...)
}

func (b *bench) enqueue(id, typ string, v any, opts ...delayq.Option) {
	b.t.Helper()
	task, err := delayq.NewTask(id, typ, v)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.q.Enqueue(b.t.Context(), task, opts...); err != nil {
		b.t.Fatal(err)
	}
}

// enqueueMany enqueues n tasks that do nothing, due at once.
func (b *bench) enqueueMany(n int) {
	b.t.Helper()
	tasks := make([]delayq.Task, n)
	for i := range tasks {
		tasks[i] = delayq.Task{ID: "task-" + strconv.Itoa(i), Type: "quick"}
	}
	if _, err := b.q.EnqueueMany(b.t.Context(), tasks); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) get(id string) *delayq.Info {
	b.t.Helper()
	info, err := b.q.Get(b.t.Context(), id)
	if err != nil {
		b.t.Fatalf("get %s: %v", id, err)
	}
	return info
}

// connections are the ids of the connections the functions of this bench have open.
func (b *bench) connections() []string {
	b.t.Helper()
	list, err := b.rdb.ClientList(b.t.Context()).Result()
	if err != nil {
		b.t.Fatal(err)
	}
	var ids []string
	for client := range strings.Lines(list) {
		if strings.Contains(client, " name="+b.name+" ") {
			id, _, _ := strings.Cut(strings.TrimPrefix(client, "id="), " ")
			ids = append(ids, id)
		}
	}
	return ids
}

// ran is how often each task was started, by all of the environments.
func ran(event string, envs ...*environment) map[string]int {
	times := map[string]int{}
	for _, e := range envs {
		for _, l := range e.lines(event) {
			times[l.ID]++
		}
	}
	return times
}

func TestInvocationsOfOneEnvironment(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s")
	b.enqueueMany(20)
	b.enqueue("soon", "quick", nil, delayq.In(300*time.Millisecond))
	b.enqueue("later", "quick", nil, delayq.In(time.Hour))

	e := b.environment()
	a := e.invoke(patience)
	if a.Succeeded != 21 || a.Stop != "idle" || !a.ColdStart || !slices.Equal(a.Queues, []string{b.name}) || a.Error != "" {
		t.Errorf("first invocation: %+v", a)
	}
	if b.get("later").State != "pending" {
		t.Error("a task of the next hour is gone")
	}
	before := b.connections()

	b.enqueueMany(20) // known ids: nothing to do
	b.enqueue("again", "quick", nil)
	if a := e.invoke(patience); a.Succeeded != 1 || a.ColdStart {
		t.Errorf("second invocation: %+v", a)
	}
	for _, id := range b.connections() {
		if !slices.Contains(before, id) {
			t.Errorf("connection %s was opened for the second invocation, which had %v", id, before)
		}
	}
	if len(before) == 0 || len(before) > poolSize {
		t.Errorf("the process holds %d connections", len(before))
	}
	eventually(t, "both runs are logged", func() bool { return strings.Contains(e.log.String(), `"cold_start":false`) })
	if log := e.log.String(); strings.Count(log, "\n") != 2 || strings.Contains(log, "redis://") {
		t.Errorf("want one line a run and no address, logged:\n%s", log)
	}
}

func TestProcessesShareAQueue(t *testing.T) {
	t.Parallel()
	const processes, tasks = 4, 2000
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s", "DELAYQ_LEASE=30s", "DELAYQ_RUNNERS="+strconv.Itoa(processes))
	var envs []*environment
	for range processes {
		envs = append(envs, b.environment())
	}
	b.enqueueMany(tasks)
	for _, e := range envs {
		e.start(patience)
	}
	var done int64
	for _, e := range envs {
		a := e.answer()
		if a.failure != "" || a.Retried+a.LeaseLost+a.Dead != 0 {
			t.Errorf("%+v", a)
		}
		done += a.Succeeded
	}
	starts := ran("start", envs...)
	for id, n := range starts {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
	if done != tasks || len(starts) != tasks {
		t.Errorf("%d succeeded, %d started, want %d", done, len(starts), tasks)
	}
}

func TestBaton(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_LEASE=30s")
	first, second := b.environment(), b.environment()
	begin := time.Now()
	first.start(5 * time.Minute)

	// A task falls due every 20 ms, before, during and after the hand-over.
	var n int
	feed := func(until func() bool) {
		for !until() {
			b.enqueue("task-"+strconv.Itoa(n), "quick", nil, delayq.In(100*time.Millisecond))
			n++
			time.Sleep(20 * time.Millisecond)
			if time.Since(begin) > patience {
				t.Fatal("no hand-over")
			}
		}
	}
	feed(func() bool { return len(first.lines("end")) >= 10 })
	second.start(5 * time.Minute)
	feed(func() bool { return len(first.answers) == 1 })
	a := first.answer()
	if a.Stop != "baton" || a.Succeeded < 10 || a.LeaseLost != 0 {
		t.Errorf("the relieved runner: %+v", a)
	}
	last := n + 10
	feed(func() bool { return n == last })
	eventually(t, "the second runner has all the rest", func() bool { return len(ran("end", first, second)) == n })

	for id, times := range ran("start", first, second) {
		if times != 1 {
			t.Errorf("%s ran %d times", id, times)
		}
	}
	for _, l := range append(first.lines("start"), second.lines("start")...) {
		// A gap would be the rest of a minute. This is the lateness of a slow day.
		if l.LateMS > 5000 {
			t.Errorf("%s started %d ms late", l.ID, l.LateMS)
		}
	}
}

func TestFrozenPastTheLease(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=5s")
	b.enqueue("order-1", "deaf", 2*time.Second)
	frozen, other := b.environment(), b.environment()
	frozen.start(2 * patience)
	eventually(t, "the handler runs", func() bool { return len(frozen.lines("start")) == 1 })
	frozen.signal(syscall.SIGSTOP)

	other.start(2 * patience)
	eventually(t, "another process has taken it over", func() bool { return len(other.lines("start")) == 1 })
	frozen.signal(syscall.SIGCONT)
	late := frozen.answer()
	if late.failure != "" || late.Succeeded != 0 || late.LeaseLost != 1 {
		t.Errorf("after the thaw: %+v", late)
	}
	if a := other.answer(); a.failure != "" || a.Succeeded != 1 || a.LeaseLost != 0 {
		t.Errorf("the one that took over: %+v", a)
	}
	if info := b.get("order-1"); info.State != "done" {
		t.Errorf("in the end it is %s", info.State)
	}
}

// A handler that ignores its context outlives the invocation. Its lease must not be renewed by
// what wakes up in the next one.
func TestNothingRunsBetweenInvocations(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t)
	b := newBench(t, server)
	b.enqueue("order-1", "deaf", time.Hour)
	e := b.environment("DELAYQ_TIMEOUT=1s")
	a := e.invoke(4 * time.Second)
	if a.Leased != 1 || a.Succeeded != 0 {
		t.Errorf("%+v", a)
	}

	commands := func() int {
		t.Helper()
		info, err := b.rdb.Info(t.Context(), "stats").Result()
		if err != nil {
			t.Fatal(err)
		}
		_, after, _ := strings.Cut(info, "total_commands_processed:")
		n, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0]))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	e.signal(syscall.SIGSTOP)
	before := commands()
	time.Sleep(2 * time.Second) // two leases: this is the freeze, not a wait for something
	e.signal(syscall.SIGCONT)
	time.Sleep(time.Second)
	if n := commands() - before - 1; n != 0 {
		t.Errorf("the process sent %d commands without an invocation", n)
	}
}

func TestKilledAtTheDeadline(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s")
	b.enqueue("order-1", "deaf", 200*time.Millisecond)
	b.enqueue("order-2", "deaf", time.Hour)
	killed, next := b.environment(), b.environment()
	killed.start(patience)
	eventually(t, "one is done, one runs", func() bool {
		return len(killed.lines("end")) == 1 && len(killed.lines("start")) == 2 && b.get("order-1").State == "done"
	})
	killed.signal(syscall.SIGKILL)

	next.start(2 * patience)
	eventually(t, "the task of the dead runs elsewhere", func() bool { return len(next.lines("start")) == 1 })
	if info := b.get("order-2"); info.Lost != 1 || info.Failed != 0 || info.Deliveries != 2 {
		t.Errorf("a lost lease is not a failure: %+v", info)
	}
	if times := ran("start", killed, next); times["order-1"] != 1 || times["order-2"] != 2 {
		t.Errorf("runs: %v", times)
	}
}

func TestLostResponse(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=100ms")
	b.enqueueMany(10)
	e := b.environment()
	e.lose <- struct{}{}
	e.start(patience)
	if a := e.answer(); !a.lost {
		t.Fatalf("%+v", a)
	}
	next := b.environment()
	if a := next.invoke(patience); a.Leased != 0 {
		t.Errorf("the work of the lost answer was done again: %+v", a)
	}
	for id, n := range ran("end", e, next) {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
}

func TestDeadlineMargin(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_MARGIN=1s", "DELAYQ_LEASE=30s")
	e := b.environment()
	ev := e.start(12 * time.Second)
	// Both wait for their contexts to end. One had most of the invocation, the other a part of it
	// that says nothing about how long it takes.
	b.enqueue("whole", "hold", nil)
	b.enqueue("part", "hold", nil, delayq.At(ev.deadline.Add(-5*time.Second)))
	a := e.answer()
	if left := time.Until(ev.deadline); left <= 0 {
		t.Errorf("answered %s after the deadline", -left)
	}
	if a.failure != "" || a.Stop != "deadline" || a.Released != 1 || a.Retried != 1 || a.TimedOut != 1 || a.LeaseLost != 0 {
		t.Errorf("%+v", a)
	}
	if info := b.get("part"); info.State != "due" || info.Failed != 0 || info.Lost != 0 {
		t.Errorf("it was given back as %+v", info)
	}
	if info := b.get("whole"); info.State != "pending" || info.Failed != 1 || info.Lost != 0 || info.Reason != delayq.ReasonTimeout {
		t.Errorf("it was cut off as %+v", info)
	}
}

func TestTooLittleTime(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_MARGIN=30s")
	b.enqueue("order-1", "quick", nil)
	e := b.environment()
	e.start(5 * time.Second)
	if a := e.answer(); !strings.Contains(a.failure, "raise the function's timeout") || !strings.Contains(a.failure, "1m0s") {
		t.Errorf("%+v", a)
	}
	if info := b.get("order-1"); info.Deliveries != 0 {
		t.Errorf("it was leased: %+v", info)
	}
}

func TestFailuresOfTasksAreNotOurs(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s")
	b.enqueue("bad", "fail", nil)
	b.enqueue("stranger", "no.such.type", nil)
	b.enqueue("good", "quick", nil)
	e := b.environment()
	a := e.invoke(patience)
	if a.Succeeded != 1 || a.Leased != 3 {
		t.Errorf("%+v", a)
	}
	bad := b.get("bad")
	if bad.State != "pending" || bad.Failed != 1 || !strings.Contains(bad.LastError, "the handler says no") {
		t.Errorf("bad: %+v", bad)
	}
	stranger := b.get("stranger")
	if stranger.State != "pending" || !strings.Contains(stranger.LastError, "no.such.type") {
		t.Errorf("stranger: %+v", stranger)
	}
	if strings.Contains(e.log.String(), "payload") {
		t.Errorf("a payload in the log:\n%s", e.log.String())
	}
}

func TestBadEnvironment(t *testing.T) {
	t.Parallel()
	e := newEnvironment(t, program(t, workerBin),
		"DELAYQ_REDIS_URL=redis://:hunter2/x@localhost", "DELAYQ_CONCURRENCY=lots", "DELAYQ_LEASE=1ms")
	for range 2 { // and again: it does not crash, it fails
		e.start(patience)
		a := e.answer()
		for _, want := range []string{"DELAYQ_REDIS_URL", "DELAYQ_QUEUES", "DELAYQ_CONCURRENCY", "DELAYQ_LEASE"} {
			if !strings.Contains(a.failure, want) {
				t.Errorf("no %s in %q", want, a.failure)
			}
		}
	}
	if strings.Contains(e.log.String(), "hunter2") {
		t.Errorf("the password in the log:\n%s", e.log.String())
	}
}

func TestRedisGoneAndBack(t *testing.T) {
	t.Parallel()
	server := servers.NewRedis(t, "--appendonly", "yes", "--appendfsync", "always")
	b := newBench(t, server, "DELAYQ_IDLE_EXIT=100ms")
	b.enqueueMany(1)
	server.Kill()

	e := b.environment()
	e.start(patience)
	if a := e.answer(); a.failure == "" {
		t.Errorf("cold, without Redis: %+v", a)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	if a := e.invoke(patience); a.Succeeded != 1 {
		t.Errorf("with Redis: %+v", a)
	}

	server.Kill()
	e.start(5 * time.Second)
	if a := e.answer(); a.failure == "" {
		t.Errorf("warm, without Redis: %+v", a)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	b.enqueue("again", "quick", nil)
	if a := e.invoke(patience); a.Succeeded != 1 {
		t.Errorf("with Redis again: %+v", a)
	}
}

// Two queues of several shards each on a cluster, named by one of its nodes.
func TestClusterQueuesShards(t *testing.T) {
	t.Parallel()
	cluster := servers.SharedCluster(t)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	t.Cleanup(func() { _ = rdb.Close() })
	names := []string{queueOf(t), queueOf(t)}
	for _, name := range names {
		q, err := delayq.Open(t.Context(), rdb, name, delayq.Config{Shards: 4})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 50 {
			if _, err := q.Enqueue(t.Context(), delayq.Task{ID: strconv.Itoa(i), Type: "quick"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	vars := []string{
		"DELAYQ_REDIS_URL=redis://" + cluster.Addrs()[0], "DELAYQ_REDIS_CLUSTER=true",
		"DELAYQ_QUEUES=" + strings.Join(names, ", "), "DELAYQ_SHARDS=4", "DELAYQ_IDLE_EXIT=100ms",
	}
	a := newEnvironment(t, program(t, testworker), vars...).invoke(patience)
	if a.Succeeded != 100 || a.Stop != "idle" || !slices.Equal(a.Queues, names) {
		t.Errorf("%+v", a)
	}

	e := newEnvironment(t, program(t, testworker), append(vars, "DELAYQ_SHARDS=8")...)
	e.start(patience)
	if a := e.answer(); !strings.Contains(a.failure, delayq.ErrShards.Error()) {
		t.Errorf("with a wrong number of shards: %+v", a)
	}
}

// The functions as they are shipped, in Lambda's own emulator.
func TestRuntimeInterfaceEmulator(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("../scripts/local-rie", "--install").CombinedOutput(); err != nil {
		if os.Getenv("DELAYQ_REQUIRE_SERVERS") == "1" {
			t.Fatalf("the emulator could not be built: %v\n%s", err, out)
		}
		t.Skipf("the emulator could not be built: %v\n%s", err, out)
	}
	emulate := func(t *testing.T, b *bench, function string, answer any) (log string) {
		t.Helper()
		cmd := exec.Command("../scripts/local-rie", "30", function)
		cmd.Env = append(os.Environ(), b.vars...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err == nil {
			err = json.Unmarshal(out, answer)
		}
		if err != nil {
			t.Fatalf("answer %s: %v\n%s", out, err, stderr.String())
		}
		return stderr.String()
	}
	t.Run("worker", func(t *testing.T) { // one after the other: the script looks for free ports, and takes them later
		b := newBench(t, servers.SharedRedis(t), "DELAYQ_IDLE_EXIT=1s")
		for order := range 3 {
			b.enqueue(fmt.Sprintf("cancel-order:%d", order+1), "order.cancel", map[string]int{"order": order + 1})
		}
		var s Summary
		log := emulate(t, b, "worker", &s)
		if s.Succeeded != 3 || s.Stop != "idle" || !s.ColdStart || strings.Count(log, `"msg":"order cancelled"`) != 3 {
			t.Errorf("%+v\n%s", s, log)
		}
	})
	t.Run("reconciler", func(t *testing.T) {
		b, _ := newLedgerBench(t, servers.SharedRedis(t))
		b.enqueueMany(3)
		var s Reconciled
		if log := emulate(t, b, "reconciler", &s); len(s.Queues) != 1 || s.Queues[0].Rows != 3 || !s.Queues[0].Complete || !s.ColdStart {
			t.Errorf("%+v\n%s", s, log)
		}
	})
	t.Run("monitor", func(t *testing.T) {
		b, _ := newLedgerBench(t, servers.SharedRedis(t))
		b.enqueueMany(3)
		var s Watched
		log := emulate(t, b, "monitor", &s)
		if s.Queues != 1 || s.Errors != nil || !s.ColdStart || !strings.Contains(log, `"TasksDue":3`) {
			t.Errorf("%+v\n%s", s, log)
		}
	})
}

// The same code without a runtime, a client or an environment: what "delayq dev" runs.
func TestWorkerInProcess(t *testing.T) {
	t.Parallel()
	b := newBench(t, servers.SharedRedis(t))
	b.enqueueMany(3)
	quiet := slog.New(slog.DiscardHandler)
	mux := delayq.NewMux()
	mux.HandleFunc("quick", func(context.Context, *delayq.Task) error { return nil })
	run := Worker(mux, WithRedis(b.rdb), WithLogger(quiet), WithConfig(Config{Queues: []string{b.name}, IdleExit: 100 * time.Millisecond}))
	s, err := run(t.Context(), nil)
	if err != nil || s.Succeeded != 3 || s.RequestID == "" {
		t.Errorf("%+v, %v", s, err)
	}

	_, err = Worker(mux, WithRedis(b.rdb), WithLogger(quiet), WithConfig(Config{Concurrency: -1}))(t.Context(), nil)
	if err == nil || !strings.Contains(err.Error(), "CONCURRENCY") || !strings.Contains(err.Error(), "QUEUES") {
		t.Errorf("a bad config gives %v", err)
	}
}
