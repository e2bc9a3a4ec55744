package delayq_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// The last to die first, through pages that end amid many of one instant, while others die and the one that a cursor names goes.
func TestListShowsTheNewestDeadLettersFirst(t *testing.T) {
	for _, shards := range []int{1, 16} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			everyMode(t, shards, func(r *rig) {
				ctx := r.Context()
				want := map[string]int{}
				for i := range 40 {
					r.add(fmt.Sprintf("%d\x00%d", i%7, i))
				}
				r.add("new", delayq.In(time.Millisecond))
				r.pass(time.Second)
				var last *delayq.Lease
				for range 41 {
					for _, l := range r.lease(50) {
						if l.ID == "new" {
							last = l
							continue
						}
						if want[l.ID] = 1; len(want)%15 == 0 {
							r.pass(time.Second)
						}
						r.ok(r.q.Bury(ctx, l, errBoom))
					}
				}
				if len(want) != 40 || last == nil {
					r.Fatalf("buried %d", len(want))
				}
				all := func(o delayq.ListOptions, each func(pages int, page *delayq.Page)) (ids []string) {
					r.Helper()
					for pages := 0; ; pages++ {
						page := r.list(o)
						for i, info := range page.Tasks {
							if info.State != delayq.StateDead || string(info.Payload) != "of-"+info.ID || o.NewestFirst && i > 0 && info.At.After(page.Tasks[i-1].At) {
								r.Errorf("page %d: %q %s", pages, info.ID, info.State)
							}
							ids = append(ids, info.ID)
						}
						if o.Cursor = page.Next; o.Cursor == "" {
							return ids
						}
						if each(pages, page); pages > 30 {
							r.Fatal("the listing does not end")
						}
					}
				}
				newest := delayq.ListOptions{State: delayq.StateDead, Limit: 7, NewestFirst: true}
				forward := all(delayq.ListOptions{State: delayq.StateDead, Limit: 500}, nil)
				backward := all(newest, func(int, *delayq.Page) {})
				if slices.Reverse(forward); shards == 1 && !slices.Equal(backward, forward) {
					r.Errorf("newest first %q\noldest first, turned round %q", backward, forward)
				}
				got := map[string]int{}
				for _, id := range all(newest, func(pages int, page *delayq.Page) {
					switch named := page.Tasks[len(page.Tasks)-1].ID; pages {
					case 0:
						r.ok(r.q.Purge(ctx, named))
					case 1:
						if r.pool == nil { // there the data would move, not the clock
							r.pass(time.Second)
						}
						r.ok(r.q.Bury(ctx, last, errBoom))
					case 2:
						r.ok(r.q.Replay(ctx, named))
					}
				}) {
					got[id]++
				}
				if !maps.Equal(got, want) {
					r.Errorf("%d of %d shown, or some twice: %v", len(got), len(want), got)
				}
				if first := r.list(newest).Tasks[0].ID; first != "new" {
					r.Errorf("the newest is %q", first)
				}
			})
		})
	}
}

// Those that only Redis has come in their place among those of the ledger, and are left out while Redis is away.
func TestNewestDeadLettersOfBothStores(t *testing.T) {
	t.Parallel()
	pool := newLedgerPool(t)
	led, err := ledger.Open(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOn(t, pool, realClient(t, servers.SharedRedis(t).Addr()), delayq.Config{Shards: 2, Ledger: led})
	for _, id := range []string{"a", "q1", "b", "q2", "q3", "c"} {
		if id[0] != 'q' {
			r.bring(id, "dead")
			continue
		}
		r.add(id)
		_, err := pool.Exec(t.Context(), "delete from delayq.task where id = $1", []byte(id))
		r.ok(err)
		if got := r.lease(1); len(got) > 0 {
			t.Fatalf("leased %s, which the ledger does not know", got[0].ID)
		}
	}
	listed := func(q *delayq.Queue, limit int) string {
		t.Helper()
		var ids []string
		for o := (delayq.ListOptions{State: delayq.StateDead, Limit: limit, NewestFirst: true}); ; {
			page, err := q.List(t.Context(), o)
			if r.ok(err); len(page.Tasks) > limit || len(ids) > 6 {
				t.Fatalf("a page of %d, after %q", len(page.Tasks), ids)
			}
			for _, in := range page.Tasks {
				if ids = append(ids, in.ID); string(in.Payload) != "of-"+in.ID {
					t.Errorf("%+v", in)
				}
			}
			if o.Cursor = page.Next; o.Cursor == "" {
				return strings.Join(ids, " ")
			}
		}
	}
	for _, limit := range []int{1, 2, 4, 500} {
		if got := listed(r.q, limit); got != "c q3 q2 b q1 a" {
			t.Errorf("by %d: %s", limit, got)
		}
	}
	proxy := servers.NewProxy(t, servers.SharedRedis(t).Addr())
	rdb := redis.NewClient(&redis.Options{Addr: proxy.Addr(), ContextTimeoutEnabled: true, MaxRetries: -1})
	defer rdb.Close()
	through, err := delayq.Open(t.Context(), rdb, r.q.Name(), r.cfg)
	r.ok(err)
	proxy.Close()
	if got := listed(through, 2); got != "c b a" {
		t.Errorf("without Redis: %s", got)
	}
}
