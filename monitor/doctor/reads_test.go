package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/doctor"
)

// bury makes dead letters.
func (w *ward) bury(n int, typ string) {
	w.Helper()
	for left := n; left > 0; {
		w.add(min(left, 500), typ)
		leases, err := w.q.Lease(w.Context(), delayq.LeaseOptions{Max: 500, Lease: time.Minute, Consumer: "c"})
		ok(w.T, err)
		for _, l := range leases {
			ok(w.T, w.q.Bury(w.Context(), l, errors.New("card refused")))
		}
		left -= len(leases)
	}
}

// A new dead letter is found behind more old ones than are ever read.
func TestNewDeadLettersBehindManyOldOnes(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	w.bury(3500, "old")
	const dead = "dq:{orders:0}:dead"
	died, err := w.rdb.ZRange(t.Context(), dead, 0, -1).Result()
	ok(t, err)
	_, err = w.rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for _, id := range died {
			if id != "" {
				p.ZIncrBy(t.Context(), dead, -float64(time.Hour.Microseconds()), id)
			}
		}
		return nil
	})
	ok(t, err)
	w.finds(w.visit(), doctor.Info, doctor.DeadRising, "3500 dead letters, none of the last 15m0s")
	w.bury(2, "pay")
	w.finds(w.visit(), doctor.Warning, doctor.DeadRising, "2 of its 3502 dead letters died in the last 15m0s: by reason 2 error; by type 2 pay")
	w.bury(3001, "pay")
	w.finds(w.visit(), doctor.Warning, doctor.DeadRising, "at least 3000 of its 6503 dead letters died")
}

// slow is how long a client's listings take, of all queues or, with name, of one.
type slow struct {
	name string
	time time.Duration
}

func (slow) DialHook(next redis.DialHook) redis.DialHook { return next }
func (slow) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (s slow) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if slices.Contains(cmd.Args(), any("dead")) && strings.Contains(fmt.Sprint(cmd.Args()), "{"+s.name) {
			select {
			case <-time.After(s.time):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return next(ctx, cmd)
	}
}

func TestManyQueuesAreReadInTime(t *testing.T) {
	w := newWard(t, delayq.Config{}, monitor.Config{})
	var names []string
	for i := range 24 {
		names = append(names, fmt.Sprintf("q%02d", i))
		_, err := delayq.Open(t.Context(), w.rdb, names[i], delayq.Config{OnWarning: func(delayq.Warning) {}})
		ok(t, err)
	}
	visit := func(s slow, timeout time.Duration) (unread []string) {
		t.Helper()
		rdb := redis.NewClient(w.rdb.Options())
		defer rdb.Close()
		rdb.AddHook(s)
		m, err := monitor.New(monitor.Config{Redis: rdb, Queues: names})
		ok(t, err)
		for _, f := range doctor.Diagnose(t.Context(), m, doctor.Options{Timeout: timeout}).Findings {
			if f.Code == doctor.NotRead && f.Severity == doctor.Warning && strings.HasSuffix(f.What, "not be looked at in time") {
				unread = append(unread, f.Queue)
			}
		}
		return unread
	}
	if unread := visit(slow{"q", 300 * time.Millisecond}, 3*time.Second); unread != nil {
		t.Errorf("24 queues of 300 ms each: not read are %q", unread)
	}
	if unread := visit(slow{"q03", time.Minute}, time.Second); !slices.Equal(unread, []string{"q03"}) {
		t.Errorf("with one that hangs: not read are %q", unread)
	}
}
