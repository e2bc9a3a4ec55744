package delayq_test

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// FuzzDecode: a record of any bytes is a task or an error. What can be read is the same task after it is written again.
func FuzzDecode(f *testing.F) {
	at := time.UnixMilli(1_790_000_000_123)
	whole := delayq.Encode(&delayq.Task{Type: "mail", Key: "order 7", Payload: []byte("hello")}, at)
	f.Add([]byte(nil))
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add(append(whole[:13:13], 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1)) // a length beyond all
	f.Add(delayq.Encode(&delayq.Task{}, time.Time{}))
	f.Fuzz(func(t *testing.T, record []byte) {
		before := slices.Clone(record)
		got, err := delayq.Decode(record)
		if !bytes.Equal(record, before) {
			t.Fatal("decode changed the record")
		}
		if err != nil {
			return
		}
		again, err := delayq.Decode(delayq.Encode(&got, got.EnqueuedAt))
		if err != nil || again.Type != got.Type || again.Key != got.Key || !bytes.Equal(again.Payload, got.Payload) {
			t.Errorf("read %+v, wrote and read %+v, %v", got, again, err)
		}
	})
}

func TestARecordKeepsTheTask(t *testing.T) {
	at := time.UnixMilli(1_790_000_000_123)
	for _, want := range []delayq.Task{
		{Type: "t"},
		{Type: strings.Repeat("t", 128), Key: strings.Repeat("\xff", 256), Payload: bytes.Repeat([]byte{0}, 1<<18)},
		{Type: "\x00\x01", Key: "\x00", Payload: []byte("\x01\x02\x03")},
	} {
		a, b := delayq.Encode(&want, at), delayq.Encode(&want, at)
		if bytes.Equal(a, b) {
			t.Error("two enqueues of one content have one record: a resend could not be told from a repeat")
		}
		got, err := delayq.Decode(a)
		if err != nil || got.Type != want.Type || got.Key != want.Key || !bytes.Equal(got.Payload, want.Payload) || !got.EnqueuedAt.Equal(at) {
			t.Errorf("wrote %.60q, read %.60q, %v", want.Type, got.Type, err)
		}
	}
}

// A field of a younger package is skipped, wherever it stands; a younger version is not guessed at.
func TestARecordOfAYoungerPackage(t *testing.T) {
	record := delayq.Encode(&delayq.Task{Type: "mail", Payload: []byte("hello")}, time.UnixMilli(1))
	unknown := append([]byte{200, 3}, "new"...)
	end := len(record) - len("hello") - 1
	for name, at := range map[string]int{"first": 13 + len("\x04mail"), "last": end} {
		got, err := delayq.Decode(slices.Insert(slices.Clone(record), at, unknown...))
		if err != nil || got.Type != "mail" || string(got.Payload) != "hello" {
			t.Errorf("an unknown field %s: %+v, %v", name, got, err)
		}
	}
	younger := slices.Clone(record)
	younger[0]++
	if got, err := delayq.Decode(younger); err == nil {
		t.Errorf("another version was read as %+v", got)
	}
	for n := range end {
		if got, err := delayq.Decode(record[:n]); err == nil {
			t.Errorf("%d of %d bytes were read as %+v", n, len(record), got)
		}
	}
}

// A record that this package cannot read is tried as often as any other task, then buried with that reason: an older worker
// beside a younger producer neither runs it wrongly nor spins on it.
func TestAnUnreadableRecordEndsDead(t *testing.T) {
	for name, record := range map[string]string{"a younger version": "\x09nonce-nonce-\x00x", "no content": "", "half of it": "\x01nonce-nonce-\x01\x05m"} {
		t.Run(name, func(t *testing.T) {
			onRedis(t, delayq.Config{}, func(r *rig) {
				ctx := r.Context()
				delayq.SetClock(r.q, func() float64 { return 0 })
				r.add("x")
				r.add("good")
				r.ok(r.rdb.HSet(ctx, delayq.Keys(r.q, 0)[3], "x", record).Err())
				var runs atomic.Int64
				w := delayq.NewWorker(delayq.HandlerFunc(func(context.Context, *delayq.Task) error { runs.Add(1); return nil }), r.q)
				w.MaxAttempts, w.IdleExit, w.Logger = 3, time.Millisecond, quiet()
				w.Retry = func(int) time.Duration { return 0 }
				stats, err := w.Run(ctx)
				r.ok(err)
				if runs.Load() != 1 || stats.Succeeded != 1 || stats.Retried != 2 || stats.Dead != 1 || stats.Leased != 4 {
					r.Errorf("%d runs, %+v", runs.Load(), stats)
				}
				info, err := r.q.Get(ctx, "x")
				if err != nil || info.State != delayq.StateDead || info.Reason != delayq.ReasonUnread {
					r.Errorf("%+v, %v", info, err)
				}
				kept, err := r.rdb.HGet(ctx, delayq.Keys(r.q, 0)[3], "x").Result()
				if err != nil || kept != record {
					r.Errorf("the record is %q now, %v", kept, err)
				}
			})
		})
	}
}
