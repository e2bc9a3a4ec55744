package delayq_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// A reply that is lost leaves the caller in doubt; the call is sent again, finds what it has done, and gives the same answer.
// Public cases: B2, B3.
func TestALostReplyChangesNothing(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			proxy := servers.NewProxy(t, server.Addr())
			twin(t, call, realClient(t, server.Addr()), realClient(t, proxy.Addr()), func(*world) { proxy.DropReply("evalsha") })
			if proxy.Hits() != 1 {
				t.Errorf("%d faults", proxy.Hits())
			}
		})
	}
}

// To the caller a request that never arrived looks the same as a lost reply. So there is one thing that it cannot know: an id
// that is found cancelled may have been this very task. It is an error, and the caller may enqueue again.
func TestALostRequestIsSentAgain(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	for _, call := range apiCalls {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			proxy := servers.NewProxy(t, server.Addr())
			if call.name == "enqueue many" {
				w := newWorld(t, realClient(t, proxy.Addr()), delayq.Config{})
				proxy.DropRequest("evalsha")
				results, err := w.q.EnqueueMany(t.Context(), []delayq.Task{task("new"), task("cancelled")})
				w.is(err, delayq.ErrCancelled)
				w.is(results[0].Err, nil)
				if info, err := w.q.Get(t.Context(), "cancelled"); err != nil || info.State != delayq.StateCancelled {
					t.Errorf("%+v, %v", info, err)
				}
				w.add("cancelled")
				return
			}
			twin(t, call, realClient(t, server.Addr()), realClient(t, proxy.Addr()), func(*world) { proxy.DropRequest("evalsha") })
			if proxy.Hits() != 1 {
				t.Errorf("%d faults", proxy.Hits())
			}
		})
	}
}

// flaky answers the first calls of a script with an error, as a server in trouble does.
type flaky struct {
	err      func() error // nil when it is well again
	after    bool         // the script runs and its answer is lost, rather than not at all
	commands string       // what is hit: "evalsha", or all
}

func (f *flaky) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *flaky) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if f.commands != "" && cmd.Name() != f.commands {
			return next(ctx, cmd)
		}
		if err := f.err(); err != nil {
			if f.after {
				_ = next(ctx, cmd)
			}
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func (f *flaky) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := f.err(); err != nil {
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
			return err
		}
		return next(ctx, cmds)
	}
}

// times returns an error so many times.
func times(n int32, err error) func() error {
	var left atomic.Int32
	left.Store(n)
	return func() error {
		if left.Add(-1) >= 0 {
			return err
		}
		return nil
	}
}

// replyError is an error that Redis answers.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

// Answers that say "not now" are waited out, as the server says them and as proxies pass them on. Public case: B67.
func TestPassingErrorsAreWaitedOut(t *testing.T) {
	for _, text := range []string{
		"READONLY You can't write against a read only replica.",
		"ERR READONLY You can't write against a read only replica.",
		"LOADING Redis is loading the dataset in memory",
		"TRYAGAIN Multiple keys request during rehashing of slot",
		"CLUSTERDOWN The cluster is down",
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
		"NOREPLICAS Not enough good replicas to write.",
		"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
		"ERR max number of clients reached",
		"UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
	} {
		t.Run(text[:12], func(t *testing.T) {
			onRedis(t, delayq.Config{}, func(r *rig) {
				f := &flaky{err: times(3, replyError(text)), commands: "evalsha"}
				r.rdb.(*redis.Client).AddHook(f)
				r.add("x")
				f.err = times(100, replyError(text))
				_, err := r.q.Enqueue(r.Context(), task("y"))
				if err == nil || !strings.Contains(err.Error(), text[:12]) {
					r.Errorf("a server that stays in trouble: %v", err)
				}
				f.err = times(0, nil)
				r.holds(`
					pending x 0.001
					task x of-x`)
			})
		})
	}
}

func TestOtherErrorsAreNotRepeated(t *testing.T) {
	onRedis(t, delayq.Config{}, func(r *rig) {
		f := &flaky{err: times(1, replyError("ERR something else")), commands: "evalsha"}
		r.rdb.(*redis.Client).AddHook(f)
		_, err := r.q.Enqueue(r.Context(), task("x"))
		var reply redis.Error
		var of *delayq.TaskError
		if !errors.As(err, &reply) || reply.Error() != "ERR something else" || !errors.As(err, &of) || of.ID != "x" {
			r.Errorf("error %v", err)
		}
		r.holds("")
	})
}

// The repeat of an enqueue may find that its task is through already, or was cancelled: it does not run a second time.
func TestAResentEnqueueDoesNotReviveItsTask(t *testing.T) {
	for name, row := range map[string]struct {
		between func(r *rig)
		state   delayq.State
		err     error
	}{
		"done": {func(r *rig) {
			r.pass(time.Millisecond)
			r.ok(r.q.Ack(r.Context(), r.lease1()))
		}, delayq.StateDone, nil},
		"cancelled": {func(r *rig) { r.cancel("x", delayq.Cancelled) }, delayq.StateCancelled, delayq.ErrCancelled},
		"running": {func(r *rig) {
			r.pass(time.Millisecond)
			r.lease1()
		}, delayq.StateProcessing, nil},
	} {
		t.Run(name, func(t *testing.T) {
			onRedis(t, delayq.Config{}, func(r *rig) {
				rdb := realClient(t, servers.SharedRedis(t).Addr())
				f := &flaky{after: true, commands: "evalsha", err: times(0, nil)}
				rdb.AddHook(f)
				q, err := delayq.Open(r.Context(), rdb, r.q.Name(), r.cfg)
				r.ok(err)
				delayq.SetClock(q, r.now)
				sends := 0
				f.err = func() error {
					switch sends++; sends {
					case 1:
						return io.ErrUnexpectedEOF
					case 2:
						row.between(r)
					}
					return nil
				}
				res, err := q.Enqueue(r.Context(), task("x"), delayq.OnConflict(delayq.Reject))
				r.is(err, row.err)
				if info, err := r.q.Get(r.Context(), "x"); err != nil || info.State != row.state {
					r.Errorf("enqueue answered %v; the task is %+v, %v", res.Outcome, info, err)
				}
			})
		})
	}
}

// A worker's pipelines that are cut, before or amid their replies, cost neither a task nor a second run.
func TestAWorkerBehindALineThatBreaks(t *testing.T) {
	t.Parallel()
	server := servers.SharedRedis(t)
	proxy := servers.NewProxy(t, server.Addr())
	for name, arm := range map[string]func(){
		"the reply is lost":       func() { proxy.DropReply("evalsha") },
		"half of it gets through": func() { proxy.CutReply("evalsha", 100) },
		"the request is lost":     func() { proxy.DropRequest("evalsha") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, realClient(t, proxy.Addr()), delayq.Config{Shards: 16})
			delayq.SetClock(r.q, func() float64 { return 0 })
			const n = 600
			tasks := make([]delayq.Task, n)
			for i := range tasks {
				tasks[i] = task(fmt.Sprint(i))
			}
			_, err := r.q.EnqueueMany(t.Context(), tasks)
			r.ok(err)
			before := proxy.Hits()
			var runs atomic.Int64
			w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error {
				if runs.Add(1)%50 == 1 {
					arm()
				}
				return nil
			}), r.q)
			w.Concurrency, w.IdleExit, w.Logger = 64, time.Millisecond, quiet()
			stats, err := w.Run(t.Context())
			if err != nil || stats.Succeeded != n || runs.Load() != n || stats.LeaseLost+stats.Missing != 0 {
				t.Errorf("%d runs, %+v, %v", runs.Load(), stats, err)
			}
			if hits := proxy.Hits() - before; hits < 5 {
				t.Errorf("only %d faults", hits)
			}
		})
	}
}

// Where the walk over all keys breaks off, what it has found is better than nothing.
func TestQueuesFoundBeforeTheWalkBrokeOff(t *testing.T) {
	t.Parallel()
	rdb := realClient(t, servers.NewRedis(t).Addr())
	for i := range 50 {
		if _, err := delayq.Open(t.Context(), rdb, fmt.Sprint("q", i), delayq.Config{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5000 { // so that one page is not all
		rdb.Set(t.Context(), fmt.Sprint("other", i), "v", 0)
	}
	pages, broken := 0, errors.New("broken off")
	rdb.AddHook(&flaky{commands: "scan", err: func() error {
		if pages++; pages > 3 {
			return broken
		}
		return nil
	}})
	if found, err := delayq.Queues(t.Context(), rdb); !errors.Is(err, broken) || len(found) == 0 || len(found) == 50 {
		t.Errorf("%d found, %v", len(found), err)
	}
}
