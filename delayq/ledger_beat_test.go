package delayq_test

import (
	"context"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
)

// With a ledger a worker beats to Redis all the same, and the drop of what has succeeded is what tells the last success.
func TestLedgerWorkersBeatToo(t *testing.T) {
	t.Parallel()
	b := newBooked(t, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{Shards: 2})
	ctx := t.Context()
	before, err := b.q.Stats(ctx)
	b.ok(err)
	if !before.LastRun.IsZero() || !before.LastSuccess.IsZero() {
		t.Errorf("before anything: last run %v, last success %v", before.LastRun, before.LastSuccess)
	}
	_, err = b.q.Enqueue(ctx, task("fails"))
	b.ok(err)
	var during []delayq.Consumer
	ran := make(chan struct{})
	b.work(func(ctx context.Context, task *delayq.Task) error {
		if task.ID == "fails" {
			time.Sleep(100 * time.Millisecond) // the first beat is under way beside it
			list, err := b.q.Consumers(ctx, 10)
			b.ok(err)
			during = list
			defer close(ran)
			return delayq.Permanent(errBoom)
		}
		return nil
	}, func() bool {
		select {
		case <-ran:
			return b.status("fails") == delayq.LedgerDead
		default:
			return false
		}
	})
	if len(during) != 1 || during[0].Beat.IsZero() || during[0].Concurrency != 32 || time.Since(during[0].Beat) > time.Minute {
		t.Errorf("consumers %+v", during)
	}
	failed, err := b.q.Stats(ctx)
	b.ok(err)
	if !failed.LastSuccess.IsZero() || failed.LastRun.Before(before.Now) {
		t.Errorf("after a failure: last success %v, last run %v", failed.LastSuccess, failed.LastRun)
	}

	_, err = b.q.Enqueue(ctx, task("x"))
	b.ok(err)
	b.work(func(context.Context, *delayq.Task) error { return nil }, func() bool { return b.status("x") == delayq.LedgerSucceeded })
	after, err := b.q.Stats(ctx)
	b.ok(err)
	if after.LastSuccess.Before(failed.Now) || after.LastSuccess.After(after.Now) {
		t.Errorf("last success %v, of %v to %v", after.LastSuccess, failed.Now, after.Now)
	}
	list, err := b.q.Consumers(ctx, 10)
	b.ok(err)
	for _, c := range list {
		if !c.Beat.IsZero() {
			t.Errorf("%s has ended and is told to live: %+v", c.Name, c)
		}
	}
	if len(list) != 2 {
		t.Errorf("%d consumers, want those of two runs", len(list))
	}
}
