package reconciler_test

import (
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/reconciler"
)

func (r *rig) status() reconciler.Status {
	r.Helper()
	s, err := reconciler.ReadStatus(r.Context(), r.q.LedgerQueue())
	r.ok(err)
	return s
}

func TestStatusTellsOfPassesAndSlices(t *testing.T) {
	r := newRig(t, delayq.Config{Shards: 2})
	ctx := t.Context()
	if s := r.status(); s != (reconciler.Status{}) {
		t.Errorf("before the first: %+v", s)
	}
	r.add(1200)
	r.told(1200)
	r.lose()
	var before reconciler.Status
	for slices := 0; ; slices++ {
		rep, err := r.another().Slice(ctx, time.Millisecond)
		r.ok(err)
		s := r.status()
		if s.Total.Drift < before.Total.Drift || s.Total.Rows < before.Total.Rows || s.Total.Rows-before.Total.Rows != rep.Rows {
			t.Errorf("sums %+v after %+v, this slice %+v", s.Total, before.Total, rep.Counts)
		}
		if s.Coverage != rep.Coverage || !s.Began.Equal(rep.Began) || s.LastFull.IsZero() == rep.Complete {
			t.Errorf("%+v of %+v", s, rep)
		}
		if before = s; rep.Complete {
			break
		}
		if slices > 10_000 {
			t.Fatal("no end")
		}
	}
	if s := before; s.Total.Drift != 1200 || s.Total.Repaired != 1200 || s.Last.Restored != 1200 || time.Since(s.LastFull) > time.Minute {
		t.Errorf("%+v", s)
	}
	r.pass(reconciler.Counts{}) // which finds nothing
	r.lose()
	r.pass(reconciler.Counts{Drift: 1200, Repaired: 1200, Restored: 1200})
	if s := r.status(); s.Total.Drift != 2400 || s.Total.Repaired != 2400 || s.Last.Drift != 1200 {
		t.Errorf("%+v", s)
	}
}

// What a pass has counted is kept when it could not go on.
func TestStatusAfterAPassThatFailed(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(10)
	r.told(10)
	r.pass(reconciler.Counts{})
	was := r.status()
	away := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	r.ok(away.Close())
	q, err := delayq.Open(t.Context(), away, r.q.Name(), r.cfg)
	r.ok(err)
	rec, err := reconciler.New(q, reconciler.Config{Logger: quiet()})
	r.ok(err)
	if _, err := rec.Pass(t.Context()); !errors.Is(err, redis.ErrClosed) {
		t.Fatal(err)
	}
	if s := r.status(); s.Total != was.Total || !s.LastFull.Equal(was.LastFull) || s.Coverage != 1 {
		t.Errorf("%+v, was %+v", s, was)
	}
}

func TestAPassCountsWhatTheLedgerLost(t *testing.T) {
	r := newRig(t, delayq.Config{})
	r.add(3)
	r.exec("create table aside as select * from delayq.task where id = '1'")
	r.ok(r.q.Ack(t.Context(), r.lease(3)[:2]...))
	r.exec("delete from delayq.task where id = '1'")
	r.exec("insert into delayq.task select * from aside")
	for range 2 {
		r.pass(reconciler.Counts{Drift: 1, Restored: 1, Unconfirmed: 1})
	}
	// Once nobody remembers the end, it is a task like others.
	r.ok(r.rdb.HDel(t.Context(), r.key+"done:0", "1").Err())
	r.ok(r.rdb.HDel(t.Context(), r.key+"done:1", "1").Err())
	r.pass(reconciler.Counts{Drift: 1, Repaired: 1, Restored: 1})
	r.agrees()
}
