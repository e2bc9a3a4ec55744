package delayq

import (
	"cmp"
	"context"
	"errors"
	flags "flag"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"
)

// TestWalk lets random calls run against the scripts and against a model of them (walk_model_test.go), with the clock going
// forward and back, and compares everything after every step. -rapid.checks=5000 makes it longer. A failure prints the calls
// and how to play them again.
func TestWalk(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr()})
		walkOn(t, rdb, Config{}, 100)
	})
	t.Run("miniredis", func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
		walkOn(t, rdb, Config{}, 25)
	})
	t.Run("strict cluster", func(t *testing.T) {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: servers.SharedStrict(t).Addrs()})
		walkOn(t, rdb, Config{ScriptHeader: "#!lua"}, 15)
	})
}

// walkOn walks percent of the times that rapid is told to, each about 50 steps.
func walkOn(t *testing.T, rdb redis.UniversalClient, cfg Config, percent int) {
	defer rdb.Close()
	scale := func(name string, to func(n int) int) {
		f := flags.Lookup(name)
		old := f.Value.String()
		n, _ := strconv.Atoi(old)
		if err := f.Value.Set(strconv.Itoa(to(n))); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Value.Set(old) })
	}
	scale("rapid.checks", func(n int) int { return max(1, n*percent/100) })
	scale("rapid.steps", func(n int) int { return n * 50 / 30 })
	rapid.Check(t, func(t *rapid.T) {
		w := newWalk(t, rdb, cfg)
		actions := map[string]func(*rapid.T){"": w.check}
		for i, do := range []func(*rapid.T){ // rapid prefers the first ones
			w.enqueue, w.lease, w.forward, w.enqueue, w.lease, w.repeatLease, w.bury, w.cancel,
			w.ack, w.retry, w.enqueue, w.extend, w.forward, w.release, w.back, w.resend,
			w.enqueue, w.lease, w.reschedule, w.look, w.replay, w.purge, w.flush, w.forward,
			w.lease, w.ack, w.retry, w.bury, w.cancel, w.extend, w.enqueue, w.release, w.beat,
		} {
			_, name, _ := strings.Cut(runtime.FuncForPC(reflect.ValueOf(do).Pointer()).Name(), ").")
			actions[fmt.Sprintf("%02d %s", i, strings.TrimSuffix(name, "-fm"))] = do
		}
		t.Repeat(actions)
		w.look(t)
		w.audit(t)
	})
}

type walk struct {
	q      *Queue
	sh     *shard
	m      *model
	loans  []modelLoan // every lease there was
	sent   [][]modelItem
	calls  map[string]modelLease // the last lease call of each consumer
	tokens int
}

const walkDeadCap = 3

var walkIDs = []string{"a", "b", "c", "d", "e", "\x00\xff\n", " h", "Ä", "f", "g", "i", "j", "k", "l", "m", "n"}

func newWalk(t *rapid.T, rdb redis.UniversalClient, cfg Config) *walk {
	cfg.Retention = rapid.SampledFrom([]time.Duration{10 * time.Second, 4 * time.Minute}).Draw(t, "retention")
	cfg.Logger = slog.New(slog.DiscardHandler)
	q, err := Open(t.Context(), rdb, servers.QueueName(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &walk{q: q, sh: q.shards[0], calls: map[string]modelLease{}, m: newModel(1_790_000_000_000_001, cfg.Retention.Microseconds())}
	q.clock = func() string { return fmt.Sprintf("%d.%03d", w.m.now/1000, w.m.now%1000) }
	t.Cleanup(func() { rdb.Del(context.Background(), w.sh.keys...) })
	return w
}

func same(t *rapid.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s:\n got %#v\nwant %#v", what, got, want)
	}
}

// call runs a script and returns the code of each of n items, after checking the count in front.
func (w *walk) call(t *rapid.T, s script, n int, args ...any) []int {
	t.Helper()
	reply, err := w.sh.run(t.Context(), s, args, nil)
	if err != nil {
		t.Fatal(err)
	}
	codes, err := exceptions(reply, n)
	if err != nil {
		t.Fatal(err)
	}
	ok := int64(0)
	for _, c := range codes {
		if c == 1 {
			ok++
		}
	}
	same(t, s.verb+" count", reply.([]any)[0], ok)
	return codes
}

// flat lays arguments out as the scripts want them: lists behind one another.
func flat(head []any, lists ...[]string) []any {
	for _, list := range lists {
		for _, s := range list {
			head = append(head, s)
		}
	}
	return head
}

// byToken lays leases out as ack and extend want them: each token once a run.
func byToken(head []any, loans []modelLoan) []any {
	var runs, ids []any
	for i, l := range loans {
		if i == 0 || l.token != loans[i-1].token {
			runs = append(runs, l.token, 0)
		}
		runs[len(runs)-1] = runs[len(runs)-1].(int) + 1
		ids = append(ids, l.id)
	}
	return slices.Concat(head, []any{len(runs) / 2}, runs, ids)
}

// Draws.

// drawIDs draws distinct ids, mostly some that are in a place that the call is about.
func (w *walk) drawIDs(t *rapid.T, places ...string) []string {
	from := walkIDs
	if known := w.m.in(places...); len(known) > 0 && rapid.IntRange(0, 3).Draw(t, "any id") < 3 {
		from = known
	}
	return rapid.SliceOfNDistinct(rapid.SampledFrom(from), 1, min(len(from), 4), rapid.ID).Draw(t, "ids")
}

// drawSpan is one of a few lengths in us, give or take. rapid's own ranges are mostly near zero.
func drawSpan(t *rapid.T, spans ...int64) int64 {
	span := rapid.SampledFrom(spans).Draw(t, "about us")
	return span + rapid.SampledFrom([]int64{0, span / 10, span / 3, 1}).Draw(t, "and us")
}

func drawDue(t *rapid.T, now int64, it *modelItem) {
	it.at, it.delay = 0, 0
	if rapid.IntRange(0, 3).Draw(t, "absolute") == 3 {
		it.at = now + rapid.SampledFrom([]int64{-5e6, -1500, -1, 0, 1, 2e6, 60e6}).Draw(t, "from now us")
	} else {
		it.delay = rapid.SampledFrom([]int64{0, 1000, 1500, 0, 10e6, 1, 180e6}).Draw(t, "delay us")
	}
}

func (it modelItem) due() string {
	if it.at != 0 {
		return fmt.Sprint("@", ceilMS(it.at))
	}
	return fmt.Sprint(ceilMS(it.delay))
}

func (w *walk) draws(t *rapid.T, what string, n int, from ...string) []string {
	return rapid.SliceOfN(rapid.SampledFrom(from), n, n).Draw(t, what)
}

// drawLoans chooses leases: mostly such as are held, some that were, some that never were.
func (w *walk) drawLoans(t *rapid.T) (loans []modelLoan, ids, tokens []string) {
	if len(w.loans) == 0 {
		t.Skip("nothing was leased")
	}
	held := slices.DeleteFunc(slices.Clone(w.loans), func(l modelLoan) bool { return !w.m.tasks[l.id].holds(l.token) })
	one := rapid.Custom(func(t *rapid.T) modelLoan {
		kind := rapid.SampledFrom([]string{"held", "any", "recent", "held", "foreign token", "foreign id", "held", "held"}).Draw(t, "kind")
		from := w.loans
		switch {
		case kind == "held" && len(held) > 0:
			from = held
		case kind != "any":
			from = from[max(0, len(from)-6):]
		}
		l := rapid.SampledFrom(from).Draw(t, "lease")
		switch kind {
		case "foreign token":
			l.token = "not anyone's own"
		case "foreign id":
			l.id = rapid.SampledFrom(walkIDs).Draw(t, "id")
		}
		return l
	})
	// Go sends no lease twice in a call; an id under two tokens it may.
	loans = rapid.SliceOfNDistinct(one, 1, 4, rapid.ID).Draw(t, "leases")
	for _, l := range loans {
		ids, tokens = append(ids, l.id), append(tokens, l.token)
	}
	return loans, ids, tokens
}

func drawFaults(t *rapid.T, n int) []string {
	return rapid.SliceOfN(rapid.SampledFrom([]string{"error\nno luck", "timeout\n", "permanent\ntwo\nlines"}), n, n).Draw(t, "faults")
}

func numbers(list []string) []int64 {
	ns := make([]int64, len(list))
	for i, s := range list {
		ns[i], _ = strconv.ParseInt(s, 10, 64)
	}
	return ns
}

// Actions.

// enqueue goes through the Go code that splits calls and reads outcomes; an id may come twice.
func (w *walk) enqueue(t *rapid.T) {
	policy := rapid.SampledFrom([]Conflict{Keep, Replace, Reject}).Draw(t, "policy")
	var entries []*entry
	var items []modelItem
	var due modelItem
	even := rapid.Bool().Draw(t, "one due time for all")
	drawDue(t, w.m.now, &due)
	for _, id := range rapid.SliceOfN(rapid.SampledFrom(walkIDs), 1, 6).Draw(t, "ids") {
		it := due
		if it.id = id; !even {
			drawDue(t, w.m.now, &it)
		}
		task := &Task{ID: id, Type: "walk", Payload: make([]byte, rapid.IntRange(0, 200).Draw(t, "size")), Conflict: policy}
		if it.at != 0 {
			task.RunAt = time.UnixMicro(it.at)
		} else {
			task.Delay = time.Duration(it.delay) * time.Microsecond
		}
		e, err := w.q.newEntry(task)
		if err != nil {
			t.Fatal(err)
		}
		it.blob = string(e.blob)
		entries, items = append(entries, e), append(items, it)
	}
	for len(items) > 0 {
		n := 1 // until the first id that came before
		for n < len(items) && !slices.ContainsFunc(items[:n], func(it modelItem) bool { return it.id == items[n].id }) {
			n++
		}
		same(t, "items a call", fit(entries), n)
		var want []Result
		for i, c := range w.m.enqueue(items[:n], policy == Replace, false) {
			r := Result{ID: items[i].id, Outcome: map[int]Outcome{
				1: Created, 3: Replaced, -3: DuplicatePending, -4: DuplicateProcessing, -5: DuplicateDead, -6: DuplicateDone,
			}[c]}
			if policy == Reject && c < 0 {
				r.Err = &TaskError{"enqueue", w.q.name, r.ID, ErrConflict}
			}
			want = append(want, r)
		}
		same(t, "enqueue", w.sh.enqueue(t.Context(), entries[:n]), want)
		w.sent = append(w.sent, items[:n])
		entries, items = entries[n:], items[n:]
	}
}

// resend sends an earlier enqueue call again, byte for byte.
func (w *walk) resend(t *rapid.T) {
	if len(w.sent) == 0 {
		t.Skip("nothing sent")
	}
	items := w.sent[len(w.sent)-1-rapid.IntRange(0, min(len(w.sent), 4)-1).Draw(t, "ago")]
	replace, resent := rapid.Bool().Draw(t, "replace"), rapid.Bool().Draw(t, "resent")
	digit := map[bool]string{true: "1", false: "0"}
	var pairs, dues []string
	for _, it := range items {
		pairs, dues = append(pairs, it.id, it.blob), append(dues, it.due())
	}
	if len(slices.Compact(slices.Clone(dues))) == 1 {
		dues = dues[:1]
	}
	args := flat([]any{w.q.clock(), digit[replace], digit[resent], len(items), len(dues)}, pairs, dues)
	same(t, "resend", w.call(t, w.q.scripts.enqueue, len(items), args...), w.m.enqueue(items, replace, resent))
}

func (w *walk) lease(t *rapid.T) {
	w.tokens++
	w.leaseAs(t, modelLease{
		token:    fmt.Sprintf("token\x00\xff%9d", w.tokens),
		consumer: rapid.SampledFrom([]string{"ann", "bob", "ann", "eve", "bob", "joe", "sue", "ian"}).Draw(t, "consumer"),
		max:      rapid.SampledFrom([]int{1, 5, 3, 2, 0}).Draw(t, "max"),
		lease:    rapid.SampledFrom([]int64{30e6, 100e3, 5e6, 300e6}).Draw(t, "lease us"),
		cap:      rapid.SampledFrom([]int{maxReply, maxReply, 300, 1}).Draw(t, "cap"),
		group:    rapid.SampledFrom([]string{"", "", "day", "night"}).Draw(t, "group"),
		keep:     rapid.IntRange(1, 2).Draw(t, "keep"),
		register: rapid.Bool().Draw(t, "register"),
		dues:     rapid.Bool().Draw(t, "dues"),
	})
}

func (w *walk) beat(t *rapid.T) {
	consumer := rapid.SampledFrom([]string{"ann", "bob", "only beats"}).Draw(t, "consumer")
	said := rapid.SampledFrom([]string{`{"v":1}`, "", "\x00 of another\xff"}).Draw(t, "said")
	reply, err := w.sh.run(t.Context(), w.q.scripts.beat, []any{w.q.clock(), consumer, said}, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.m.beat(consumer, said)
	same(t, "beat", reply, any([]any{int64(1), w.m.now}))
}

// repeatLease sends the last lease call of a consumer again, whatever happened since.
func (w *walk) repeatLease(t *rapid.T) {
	if len(w.calls) == 0 {
		t.Skip("no lease yet")
	}
	w.toDeadline(t)
	w.leaseAs(t, w.calls[rapid.SampledFrom(slices.Sorted(maps.Keys(w.calls))).Draw(t, "consumer")])
}

func (w *walk) leaseAs(t *rapid.T, c modelLease) {
	w.calls[c.consumer] = c
	call := leaseCall{
		token: c.token, max: c.max, lease: time.Duration(c.lease) * time.Microsecond, consumer: c.consumer,
		group: c.group, register: c.register, keep: c.keep, dues: c.dues,
	}
	args := call.args(w.q)
	args[5] = c.cap
	reply, err := w.sh.run(t.Context(), w.q.scripts.lease, args, nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := w.sh.leased(reply, &call, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	want := w.m.lease(c)
	var head []any
	for _, n := range []int64{want.code, want.now, want.next, want.stay, want.version, want.deadline} {
		head = append(head, n)
	}
	same(t, "lease reply (code, now, next, stay, version, deadline)", reply.([]any)[:6], head)
	same(t, "missing", len(got.missing), 0)
	var ids []string
	for i, l := range got.leases {
		ids = append(ids, l.ID)
		if i >= len(want.ids) || l.ID != want.ids[i] {
			break
		}
		e := w.m.tasks[l.ID].entry
		same(t, "counts of "+strconv.Quote(l.ID), []int{l.Deliveries, l.Failed, l.Lost, l.Attempt},
			[]int{e.deliveries, e.failed, e.lost, e.failed + e.lost + 1})
		same(t, "record", text(reply.([]any)[7].([]any)[i]), w.m.tasks[l.ID].blob)
		same(t, "type", l.Type, "walk")
		if want.code == 1 {
			if c.dues {
				same(t, "due", l.Due.UnixMicro(), want.dues[i])
			}
			w.loans = append(w.loans, modelLoan{l.ID, c.token})
		}
	}
	same(t, "leased", ids, want.ids)
	w.leaseIsRight(t, c, want)
}

// leaseIsRight holds the answer (the model's, which is the script's) to what lease is for.
func (w *walk) leaseIsRight(t *rapid.T, c modelLease, r modelLeased) {
	if r.code == 2 {
		return
	}
	last := int64(0)
	for _, due := range r.dues {
		if due > w.m.now {
			t.Fatalf("I2: leased at %d, due at %d", w.m.now, due)
		}
		if due < last {
			t.Fatalf("leased out of order: %v", r.dues)
		}
		last = due
	}
	soonest, waits := int64(0), false
	for id, task := range w.m.tasks {
		if task.place == "dead" || slices.Contains(r.ids, id) {
			continue
		}
		// An expired task that was told to stop has used up a place of the batch.
		if task.score < last && r.stopped == 0 {
			t.Fatalf("%q, due at %d, is left behind; leased up to %d", id, task.score, last)
		}
		if !waits || task.score < soonest {
			soonest, waits = task.score, true
		}
	}
	switch {
	case !waits && r.next != -1, waits && r.next == -1:
		t.Fatalf("next is %d, something waits: %v", r.next, waits)
	case waits && r.next > max(soonest, w.m.now):
		t.Fatalf("next is %d, late for %d", r.next, soonest)
	case waits && r.next < soonest:
		t.Fatalf("next is %d, before %d: a spin", r.next, soonest)
	}
	if len(r.ids) < c.max && c.cap == maxReply && r.stopped == 0 && waits && soonest <= w.m.now {
		t.Fatalf("%d of %d leased, but %d is due", len(r.ids), c.max, soonest)
	}
}

func (w *walk) extend(t *rapid.T) {
	loans, _, _ := w.drawLoans(t)
	lease := rapid.SampledFrom([]int64{100e3, 5e6, 120e6}).Draw(t, "lease us")
	got := w.call(t, w.q.scripts.extend, len(loans), byToken([]any{w.q.clock(), lease / 1000, len(loans)}, loans)...)
	same(t, "extend", got, w.m.extend(loans, lease))
}

func (w *walk) ack(t *rapid.T) {
	loans, _, _ := w.drawLoans(t)
	got := w.call(t, w.q.scripts.ack, len(loans), byToken([]any{w.q.clock(), len(loans)}, loans)...)
	same(t, "ack", got, w.m.ack(loans))
}

func (w *walk) retry(t *rapid.T) {
	loans, ids, tokens := w.drawLoans(t)
	delays := w.draws(t, "delays", len(ids), "0", "5000", "1", "120000")
	faults := drawFaults(t, len(ids))
	blobs := make([]string, len(ids))
	for i := range blobs {
		if rapid.Bool().Draw(t, "new payload") {
			blobs[i] = string(encode(&Task{Type: "walk", Payload: []byte("the rest")}, time.UnixMilli(0)))
		}
	}
	got := w.call(t, w.q.scripts.retry, len(ids), flat([]any{w.q.clock(), len(ids)}, ids, tokens, delays, faults, blobs)...)
	same(t, "retry", got, w.m.retry(loans, numbers(delays), faults, blobs))
}

func (w *walk) release(t *rapid.T) {
	loans, ids, tokens := w.drawLoans(t)
	delays := w.draws(t, "delays", len(ids), "0", "5000", "1", "120000")
	got := w.call(t, w.q.scripts.release, len(ids), flat([]any{w.q.clock(), len(ids)}, ids, tokens, delays)...)
	same(t, "release", got, w.m.release(loans, numbers(delays)))
}

func (w *walk) bury(t *rapid.T) {
	loans, ids, tokens := w.drawLoans(t)
	charge := rapid.IntRange(0, 1).Draw(t, "charge")
	faults := drawFaults(t, len(ids))
	got := w.call(t, w.q.scripts.bury, len(ids), flat([]any{w.q.clock(), len(ids), walkDeadCap, charge}, ids, tokens, faults)...)
	same(t, "bury", got, w.m.bury(loans, walkDeadCap, charge, faults))
}

func (w *walk) cancel(t *rapid.T) {
	w.toDeadline(t)
	ids := w.drawIDs(t, rapid.SampledFrom([]string{"processing", "pending", "dead"}).Draw(t, "place"))
	got := w.call(t, w.q.scripts.cancel, len(ids), flat([]any{w.q.clock(), len(ids)}, ids)...)
	same(t, "cancel", got, w.m.cancel(ids))
}

func (w *walk) reschedule(t *rapid.T) {
	var items []modelItem
	var dues []string
	ids := w.drawIDs(t, "pending")
	for _, id := range ids {
		it := modelItem{id: id}
		drawDue(t, w.m.now, &it)
		items, dues = append(items, it), append(dues, it.due())
	}
	got := w.call(t, w.q.scripts.reschedule, len(ids), flat([]any{w.q.clock(), len(ids)}, ids, dues)...)
	same(t, "reschedule", got, w.m.reschedule(items))
}

func (w *walk) replay(t *rapid.T) {
	ids := w.drawIDs(t, "dead")
	got := w.call(t, w.q.scripts.replay, len(ids), flat([]any{w.q.clock(), len(ids)}, ids)...)
	same(t, "replay", got, w.m.replay(ids))
}

func (w *walk) purge(t *rapid.T) {
	ids := w.drawIDs(t, "dead")
	same(t, "purge", w.call(t, w.q.scripts.purge, len(ids), flat([]any{len(ids)}, ids)...), w.m.purge(ids))
}

func (w *walk) forward(t *rapid.T) {
	us := drawSpan(t, 150e3, 4e6, 11e6, 31e6, 2*60e6, 5*60e6, 25*60e6, 61*60e6, 1e3, 1)
	switch rapid.SampledFrom([]string{"to the point", "span", "to the end of a ms"}).Draw(t, "how") {
	case "to the point": // when something happens, or one microsecond off
		var at []int64
		for _, task := range w.m.tasks {
			at = append(at, task.score)
		}
		for _, r := range w.m.req {
			at = append(at, r.deadline)
		}
		at = append(at, w.m.rotate, w.m.rotate+w.m.ret)
		at = slices.DeleteFunc(at, func(at int64) bool { return at <= w.m.now+1 })
		if slices.Sort(at); len(at) > 0 {
			us = rapid.SampledFrom(at).Draw(t, "at") + rapid.SampledFrom([]int64{0, -1, 1}).Draw(t, "off") - w.m.now
		}
	case "to the end of a ms": // where the last digits of scores carry
		us += 998 - (w.m.now+us)%1000
	}
	w.m.step(us)
}

// toDeadline sometimes makes the call that follows at the very instant at which a lease runs out.
func (w *walk) toDeadline(t *rapid.T) {
	for _, id := range w.m.in("processing") {
		if at := w.m.tasks[id].score; at > w.m.now && rapid.IntRange(0, 4).Draw(t, "at the deadline") == 4 {
			w.m.step(at - w.m.now)
			return
		}
	}
}

func (w *walk) back(t *rapid.T) { w.m.step(-drawSpan(t, 2e6, 12e6, 3*60e6, 12*60e6, 1)) }

func (w *walk) flush(t *rapid.T) {
	if err := w.q.rdb.ScriptFlush(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
}

// look reads by Stats, Get and List.
func (w *walk) look(t *rapid.T) {
	w.stats(t)
	for _, id := range walkIDs {
		in, err := w.q.Get(t.Context(), id)
		want := w.m.state(id)
		if want == "" {
			same(t, "get of an unknown id", errors.Is(err, ErrNotFound), true)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		same(t, "state", in.State, want)
		task := w.m.tasks[id]
		if task == nil {
			continue
		}
		reason, fault, _ := strings.Cut(task.fault, "\n")
		same(t, "reason and error", []string{in.Reason, in.LastError}, []string{reason, fault})
		same(t, "at", in.At.UnixMicro(), task.score)
		e := task.entry
		if e == nil {
			e = &modelEntry{}
		}
		same(t, "counts", []int{in.Deliveries, in.Failed, in.Lost, in.Attempt}, []int{e.deliveries, e.failed, e.lost, e.failed + e.lost + 1})
		same(t, "told to stop", in.CancelRequested, e.flag == 'C')
	}
	for i, s := range []State{StatePending, StateDue, StateProcessing, StateDead, StateDead} {
		var want, got []string
		for _, place := range []string{"pending", "processing", "dead"} {
			for _, id := range w.m.in(place) {
				if w.m.state(id) == s {
					want = append(want, id)
				}
			}
		}
		slices.SortStableFunc(want, func(a, b string) int { return cmp.Compare(w.m.tasks[a].score, w.m.tasks[b].score) })
		o := ListOptions{State: s, Limit: rapid.IntRange(1, 4).Draw(t, "page"), NewestFirst: i == 4}
		if o.NewestFirst {
			slices.Reverse(want)
		}
		for {
			page, err := w.q.List(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			for _, in := range page.Tasks {
				got = append(got, in.ID)
			}
			if o.Cursor = page.Next; o.Cursor == "" {
				break
			}
		}
		same(t, fmt.Sprint("list of ", s, ", newest first: ", o.NewestFirst), got, want)
	}
}

func (w *walk) audit(t *rapid.T) {
	rep, err := w.q.Audit(t.Context(), AuditOptions{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "audit", rep.Violations, []Violation{})
}

// Checks after every step.

// A walkDump is everything in Redis, sentinels left out; scores in us.
type walkDump struct {
	zsets  map[string]map[string]int64
	hashes map[string]map[string]string
}

func (w *walk) dump(t *rapid.T) walkDump {
	d := walkDump{map[string]map[string]int64{}, map[string]map[string]string{}}
	var zsets []*redis.ZSliceCmd
	var hashes []*redis.MapStringStringCmd
	var ttls []*redis.DurationCmd
	zkeys := []int{0, 1, 2, 10}
	hkeys := []int{3, 4, 5, 6, 7, 8, 9, 12}
	_, err := w.q.rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for _, k := range zkeys {
			zsets = append(zsets, p.ZRangeWithScores(t.Context(), w.sh.keys[k], 0, -1))
		}
		for _, k := range hkeys {
			hashes = append(hashes, p.HGetAll(t.Context(), w.sh.keys[k]))
		}
		for _, k := range w.sh.keys {
			ttls = append(ttls, p.PTTL(t.Context(), k))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	name := func(k int) string { return w.sh.keys[k][strings.Index(w.sh.keys[k], "}:")+2:] }
	for i, c := range zsets {
		z := map[string]int64{}
		for _, m := range c.Val() {
			z[m.Member.(string)] = int64(m.Score)
		}
		if _, ok := z[""]; !ok {
			t.Fatalf("%s has no sentinel", name(zkeys[i]))
		}
		delete(z, "")
		d.zsets[name(zkeys[i])] = z
	}
	for i, c := range hashes {
		h := c.Val()
		if _, ok := h[""]; !ok && name(hkeys[i]) != "meta" {
			t.Fatalf("%s has no sentinel", name(hkeys[i]))
		}
		delete(h, "")
		d.hashes[name(hkeys[i])] = h
	}
	for i, c := range ttls {
		if c.Val() != -1 {
			t.Fatalf("I6: PTTL of %s is %d", name(i), c.Val())
		}
	}
	return d
}

func (w *walk) check(t *rapid.T) {
	d := w.dump(t)
	w.invariants(t, d)

	m := w.m
	zsets := map[string]map[string]int64{"pending": {}, "processing": {}, "dead": {}, "consumers": {}}
	hashes := map[string]map[string]string{
		"tasks": {}, "state": {}, "errors": {}, "req": {}, "beats": m.beats, "done:0": m.tombs[0], "done:1": m.tombs[1], "meta": d.hashes["meta"],
	}
	for id, task := range m.tasks {
		zsets[task.place][id] = task.score
		hashes["tasks"][id] = task.blob
		if task.entry != nil {
			hashes["state"][id] = task.entry.String()
		}
		if task.fault != "" {
			hashes["errors"][id] = task.fault
		}
	}
	for name, at := range m.consumers {
		zsets["consumers"][name] = at
	}
	for name, r := range m.req {
		hashes["req"][name] = fmt.Sprint(r.token, r.deadline)
	}
	for name := range zsets {
		same(t, name, d.zsets[name], zsets[name])
	}
	for name := range hashes {
		same(t, name, d.hashes[name], hashes[name])
	}
	w.counters(t, d)
}

// invariants holds Redis' content to I1, I3 and I4 without asking the model.
func (w *walk) invariants(t *rapid.T, d walkDump) {
	allow := map[string]string{"pending": "ERX", "processing": "LC", "dead": "B"}
	members := 0
	for place, allowed := range allow {
		members += len(d.zsets[place])
		for id := range d.zsets[place] {
			if _, ok := d.hashes["tasks"][id]; !ok {
				t.Fatalf("I1: %q is %s without a record", id, place)
			}
			e, ok := d.hashes["state"][id]
			if ok && !strings.Contains(allowed, e[:1]) || !ok && place != "pending" {
				t.Fatalf("I3: %q is %s, its entry is %q", id, place, e)
			}
			if _, failed := d.hashes["errors"][id]; failed && !ok {
				t.Fatalf("I3: %q has an error and no entry", id)
			}
		}
	}
	same(t, "I1: members, records", members, len(d.hashes["tasks"]))
	for _, h := range []string{"state", "errors"} {
		for id := range d.hashes[h] {
			if _, ok := d.hashes["tasks"][id]; !ok {
				t.Fatalf("I4: %s of unknown %q", h, id)
			}
		}
	}
	// A finished id is remembered for the retention, and up to as long again. A step back of the clock may bring it back
	// for as long as the step, or come after it was dropped for good.
	for id, end := range w.m.ends {
		known := w.m.tomb(id) != ""
		if !known && w.m.high < end.at+w.m.ret {
			t.Fatalf("%q is forgotten after %d us", id, w.m.now-end.at)
		}
		if known && w.m.now >= end.high+2*w.m.ret {
			t.Fatalf("%q is still known after %d us", id, w.m.now-end.at)
		}
	}
}

// counters is I5.
func (w *walk) counters(t *rapid.T, d walkDump) {
	counts := map[string]int64{}
	for field, v := range d.hashes["meta"] {
		if len(field) > 1 && field[1] == ':' && v != "0" {
			counts[field], _ = strconv.ParseInt(v, 10, 64)
		}
	}
	late := counts["l:sum"]
	if float64(late) < w.m.late[0] || float64(late) > w.m.late[1] {
		t.Fatalf("I5: the sum of lateness is %d, out of %v", late, w.m.late)
	}
	delete(counts, "l:sum")
	same(t, "I5: counters", counts, w.m.count)
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// stats compares what Stats makes of it.
func (w *walk) stats(t *rapid.T) {
	m, c := w.m, w.m.count
	s, err := w.q.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pending, processing, expired := m.in("pending"), m.in("processing"), m.due("processing")
	due := append(m.due("pending"), expired...)
	oldest := m.now
	for _, id := range due {
		oldest = min(oldest, m.tasks[id].score)
	}
	longest, called := int64(0), int64(0)
	for _, id := range processing {
		if task := m.tasks[id]; task.score > m.now {
			longest = max(longest, m.now-1000*task.entry.start)
		}
	}
	for _, at := range m.consumers {
		called = max(called, at)
	}
	leased, acked := int64(0), int64(0)
	for field, n := range c {
		switch {
		case strings.HasSuffix(field, "sum"):
		case strings.HasPrefix(field, "l:"):
			leased += n
		case strings.HasPrefix(field, "d:"):
			acked += n
		}
	}
	states, faults := int64(0), int64(0)
	for _, task := range m.tasks {
		if task.entry != nil {
			states++
		}
		if task.fault != "" {
			faults++
		}
	}
	n := func(in int) int64 { return int64(in) }
	same(t, "sizes", s.Shards[0], ShardStats{
		Epoch: s.Shards[0].Epoch, Pending: n(len(pending) - len(due) + len(expired)), Due: n(len(due)),
		Processing: n(len(processing) - len(expired)), Dead: n(len(m.in("dead"))), Tasks: n(len(m.tasks)),
		States: states, Errors: faults, Tombstones: n(len(m.tombs[0]) + len(m.tombs[1])),
		balance: n(len(m.tasks)),
	})
	same(t, "stats", []int64{
		s.Pending, s.Due, s.Processing, s.Dead, s.Now.UnixMicro(), s.OldestDueAge.Microseconds(), s.Consumers,
		s.OldestProcessingAge.Microseconds(), micros(s.LastRun), micros(s.LastSuccess),
		s.Created, s.Replaced, s.Duplicates, s.Leased, s.Succeeded, s.Duration.Sum.Milliseconds(),
		s.Retried, s.Released, s.Buried, s.Cancelled, s.Expired, s.Stale, s.Missing, s.Trimmed, s.Replayed, s.Purged, s.Rescheduled,
		s.Failed["error"], s.Failed["timeout"], s.Failed["permanent"],
	}, []int64{
		s.Shards[0].Pending, s.Shards[0].Due, s.Shards[0].Processing, s.Shards[0].Dead, m.now, m.now - oldest, n(len(m.consumers)),
		longest, called, m.acked,
		c["c:created"], c["c:replaced"], c["c:duplicate"], leased, acked, c["d:sum"],
		c["c:retried"], c["c:released"], c["c:buried"], c["c:cancelled"], c["c:expired"], c["c:stale"], 0, c["c:trimmed"], c["c:replayed"],
		c["c:purged"], c["c:rescheduled"], c["f:error"], c["f:timeout"], c["f:permanent"],
	})
}
