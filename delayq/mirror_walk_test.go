package delayq

import (
	"context"
	"fmt"
	"log/slog"
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

// TestMirrorWalk lets random messages of a ledger, lost leases and damage by hand run against the scripts of ledger mode and
// against a model of their pieces, and compares everything after every step.
func TestMirrorWalk(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr()})
		mirrorWalkOn(t, rdb, Config{})
	})
	t.Run("miniredis", func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr(), Protocol: 2})
		mirrorWalkOn(t, rdb, Config{})
	})
	t.Run("strict cluster", func(t *testing.T) {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: servers.SharedStrict(t).Addrs()})
		mirrorWalkOn(t, rdb, Config{ScriptHeader: "#!lua"})
	})
}

func mirrorWalkOn(t *testing.T, rdb redis.UniversalClient, cfg Config) {
	defer rdb.Close()
	rapid.Check(t, func(t *rapid.T) {
		w := newMirrorWalk(t, rdb, cfg)
		actions := map[string]func(*rapid.T){"": w.check}
		for i, do := range []func(*rapid.T){
			w.show, w.lease, w.forward, w.show, w.repeat, w.extend, w.quarantine, w.release, w.harm, w.mend, w.look, w.lease, w.forward, w.show,
		} {
			_, name, _ := strings.Cut(runtime.FuncForPC(reflect.ValueOf(do).Pointer()).Name(), ").")
			actions[fmt.Sprintf("%02d %s", i, strings.TrimSuffix(name, "-fm"))] = do
		}
		t.Repeat(actions)
		w.settle(t)
	})
}

type walkLedger struct{ LedgerQueue }

func (walkLedger) OpenQueue(_ context.Context, _ string, want LedgerConfig, _ bool) (LedgerQueue, LedgerConfig, error) {
	want.Shards, want.Retention, want.MaxPayload = 1, 24*time.Hour, 1000
	return walkLedger{}, want, nil
}

func (walkLedger) Counts(context.Context, int, time.Duration) (LedgerCounts, error) {
	return LedgerCounts{}, nil
}

// pieces are all that Redis can have of one id. Zero or empty is none; times are us.
type pieces struct {
	rev                       string
	record                    string
	pending, processing, dead int64
	state                     *pieceState
	err                       string
}

type pieceState struct {
	flag, token     string
	deliveries, out int // lost
	start           int64
}

func (s *pieceState) held(token string) bool {
	return s != nil && s.flag == "L" && s.token == token
}

func (p *pieces) none() bool {
	return p.rev == "" && p.record == "" && p.pending+p.processing+p.dead == 0 && p.state == nil && p.err == ""
}

func (p *pieces) places() (n int) {
	for _, at := range []int64{p.pending, p.processing, p.dead} {
		if at != 0 {
			n++
		}
	}
	return n
}

func (p *pieces) whole() bool {
	return p.record != "" && p.places() == 1 && (p.processing == 0 || p.state != nil)
}

func (p *pieces) at() int64 { n, _ := strconv.ParseInt(p.rev, 10, 64); return n }

type mirrorWalk struct {
	q     *Queue
	m     *Mirror
	now   int64
	rev   int64
	ids   map[string]*pieces
	tombs map[string]int64
	last  map[string]*rememberedCall // of each consumer, as Redis remembers it
	calls []leaseCall
}

// A rememberedCall is what Redis remembers of a consumer's lease call.
type rememberedCall struct {
	token    string
	deadline int64
}

var mirrorIDs = []string{"a", "b", "c", "d", "\x00\xff\n", "e e", "f"}

func newMirrorWalk(t *rapid.T, rdb redis.UniversalClient, cfg Config) *mirrorWalk {
	cfg.Ledger, cfg.Logger, cfg.DeadCap = walkLedger{}, slog.New(slog.DiscardHandler), 100
	q, err := Open(t.Context(), rdb, servers.QueueName(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &mirrorWalk{q: q, m: q.Mirror(), now: 1_790_000_000_000_001, ids: map[string]*pieces{}, tombs: map[string]int64{}, last: map[string]*rememberedCall{}}
	q.clock = func() string { return fmt.Sprintf("%d.%03d", w.now/1000, w.now%1000) }
	t.Cleanup(func() { rdb.Del(context.Background(), q.shards[0].keys...) })
	for _, id := range mirrorIDs {
		w.ids[id] = &pieces{}
	}
	return w
}

func (w *mirrorWalk) some(t *rapid.T) []string {
	return rapid.SliceOfNDistinct(rapid.SampledFrom(mirrorIDs), 1, 4, rapid.ID).Draw(t, "ids")
}

// drawRev is mostly a new revision, else one around that which Redis has.
func (w *mirrorWalk) drawRev(t *rapid.T, id string) int64 {
	near := rapid.SampledFrom([]int64{9, 9, 9, 0, 0, -1, 1}).Draw(t, "revision")
	if have := max(w.ids[id].at(), w.tombs[id]); near != 9 && have > 0 {
		return max(1, have+near)
	}
	w.rev += 10
	return w.rev
}

func (w *mirrorWalk) drawToken(t *rapid.T, id string) string {
	if s := w.ids[id].state; s != nil && rapid.IntRange(0, 3).Draw(t, "its token") > 0 {
		return s.token
	}
	return "not anyone's own"
}

func (w *mirrorWalk) drawSpan(t *rapid.T) int64 {
	return rapid.SampledFrom([]int64{0, 1, 1000, 10e6, 30e6, 31e6, 3600e6}).Draw(t, "us")
}

// show sends open and ended rows in one message.
func (w *mirrorWalk) show(t *rapid.T) {
	var rows []LedgerRow
	var want Shown
	var put []int
	ids := w.some(t)
	for i, id := range ids {
		row := LedgerRow{ID: id, Rev: w.drawRev(t, id), Status: LedgerSucceeded}
		if rapid.Bool().Draw(t, "open") {
			row.Status, row.RunAt, row.Type = LedgerPending, time.UnixMicro(w.now+w.drawSpan(t)-w.drawSpan(t)), "t"
			row.Payload, row.Stamp = fmt.Appendf(nil, "%q at %d, %d", id, row.Rev, len(w.calls)), []byte("123456abcdef")
			put = append(put, i)
		}
		rows = append(rows, row)
		p := w.ids[id]
		if row.Status.Open() {
			switch {
			case p.whole() && p.at() > row.Rev, !p.whole() && w.tombs[id] > row.Rev:
				want.Newer++
			case p.whole() && p.at() == row.Rev && p.dead == 0:
				want.Current++
			default:
				want.Put++
				*p = pieces{
					rev: fmt.Sprint(row.Rev), record: string(encodeStamped(row.Stamp, row.Type, row.Key, row.Payload)), pending: row.RunAt.UnixMicro(),
				}
				delete(w.tombs, id)
			}
			continue
		}
		if p.whole() && p.rev != "" && p.at() >= row.Rev {
			want.Newer++
			continue
		}
		want.Dropped++
		*p = pieces{}
		w.tombs[id] = max(w.tombs[id], row.Rev)
	}
	got, err := w.m.Show(t.Context(), rows, Showing{Now: time.UnixMicro(w.now), Durations: len(put) == 0})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "shown", got, want)
}

func (w *mirrorWalk) forward(t *rapid.T) { w.now += w.drawSpan(t) }

// in lists ids by place, in the order of Redis.
func (w *mirrorWalk) in(place func(*pieces) int64, upTo int64, most int) (ids []string) {
	for id, p := range w.ids {
		if at := place(p); at != 0 && at <= upTo {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b string) int {
		if x, y := place(w.ids[a]), place(w.ids[b]); x != y {
			return int(min(max(x-y, -1), 1))
		}
		return strings.Compare(a, b)
	})
	return ids[:min(len(ids), most)]
}

func placePending(p *pieces) int64    { return p.pending }
func placeProcessing(p *pieces) int64 { return p.processing }

func (w *mirrorWalk) lease(t *rapid.T) {
	w.leaseAs(t, leaseCall{
		token: string(randomToken()), max: rapid.IntRange(1, 4).Draw(t, "max"), lease: 30 * time.Second,
		consumer: rapid.SampledFrom([]string{"A", "B"}).Draw(t, "consumer"),
	})
}

func (w *mirrorWalk) repeat(t *rapid.T) {
	if len(w.calls) == 0 {
		t.Skip("no lease yet")
	}
	w.leaseAs(t, w.calls[len(w.calls)-1-rapid.IntRange(0, min(2, len(w.calls)-1)).Draw(t, "back")])
}

func (w *mirrorWalk) leaseAs(t *rapid.T, c leaseCall) {
	w.calls = append(w.calls, c)
	got, err := w.q.shards[0].lease(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	leased := map[string]int64{}
	for _, l := range got.leases {
		leased[l.ID] = l.rev
	}
	want := map[string]int64{}
	if last := w.last[c.consumer]; last != nil && last.token == c.token && last.deadline > w.now {
		for id, p := range w.ids {
			if p.processing == last.deadline && p.state.held(c.token) && p.record != "" {
				want[id] = p.at()
			}
		}
		same(t, "leased again", leased, want)
		return
	}
	for _, id := range w.in(placeProcessing, w.now, c.max) {
		p := w.ids[id]
		p.pending, p.processing = p.processing, 0
		if p.state != nil {
			p.state.flag = "E"
			p.state.out++
		}
	}
	var missing []string
	deadline := w.now + c.lease.Microseconds()
	for _, id := range w.in(placePending, w.now, c.max) {
		p := w.ids[id]
		if p.record == "" {
			missing = append(missing, id)
			p.pending, p.state, p.err, p.rev = 0, nil, "", ""
			continue
		}
		want[id] = p.at()
		if p.state == nil {
			p.state = &pieceState{}
		}
		p.state.flag, p.state.token, p.state.start = "L", c.token, w.now/1000
		p.state.deliveries++
		p.pending, p.processing = 0, deadline
	}
	if len(want) > 0 {
		w.last[c.consumer] = &rememberedCall{c.token, deadline}
	}
	same(t, "leased", leased, want)
	same(t, "missing", got.missing, missing)
}

func (w *mirrorWalk) codes(t *rapid.T, sc script, n int, args ...any) []int {
	reply, err := w.q.shards[0].run(t.Context(), sc, args, nil)
	if err != nil {
		t.Fatal(err)
	}
	codes, err := exceptions(reply, n)
	if err != nil {
		t.Fatal(err)
	}
	return codes
}

func (w *mirrorWalk) extend(t *rapid.T) {
	id := rapid.SampledFrom(mirrorIDs).Draw(t, "id")
	token, d := w.drawToken(t, id), w.drawSpan(t)
	want := codeOK
	switch p := w.ids[id]; {
	case p.state == nil:
		want = codeUnknown
	case !p.state.held(token):
		want = codeLeaseLost
	default:
		p.processing = w.now + (d+999)/1000*1000
	}
	same(t, "extend", w.codes(t, w.q.scripts.extend, 1, w.q.clock(), (d+999)/1000, 1, 1, token, 1, id), []int{want})
}

func (w *mirrorWalk) release(t *rapid.T) {
	id := rapid.SampledFrom(mirrorIDs).Draw(t, "id")
	token, at := w.drawToken(t, id), (w.now+w.drawSpan(t))/1000
	want := codeOK
	switch p := w.ids[id]; {
	case p.state.held(token):
		p.state.flag, p.processing, p.pending = "X", 0, at*1000
	case p.state != nil && p.state.flag == "X" && p.state.token == token:
		want = codeRepeat
	case p.state != nil || w.tombs[id] > 0:
		want = codeLeaseLost
	default:
		want = codeUnknown
	}
	same(t, "release", w.codes(t, w.q.scripts.release, 1, w.q.clock(), 1, id, token, fmt.Sprint("@", at)), []int{want})
}

func (w *mirrorWalk) quarantine(t *rapid.T) {
	var suspects []Suspect
	var want int
	for i, id := range w.some(t) {
		p := w.ids[id]
		s := Suspect{ID: id, Rev: p.at()}
		if rapid.IntRange(0, 4).Draw(t, "seen otherwise") == 0 {
			s.Rev += 3
		}
		if p.processing != 0 && rapid.Bool().Draw(t, "by lease") {
			s.Token = w.drawToken(t, id)
		}
		suspects = append(suspects, s)
		switch {
		case p.record == "" && p.rev == "" && p.places() == 0:
		case p.at() != s.Rev:
		case p.record != "" && p.places() == 1 && p.dead != 0:
		case s.Token != "" && (p.processing == 0 || !p.state.held(s.Token)):
		case p.record == "":
			want++
			*p = pieces{}
		default:
			want++
			p.dead, p.pending, p.processing, p.err = w.now+int64(i)+1, 0, 0, "r\nt"
			if p.state != nil {
				p.state.flag = "B"
			}
			if p.rev == "" {
				p.rev = "0"
			}
		}
	}
	n, err := w.m.Quarantine(t.Context(), suspects, "r", "t")
	if err != nil {
		t.Fatal(err)
	}
	same(t, "quarantined", n, want)
}

// harm takes one piece of a whole entry away, or adds one.
func (w *mirrorWalk) harm(t *rapid.T) {
	id := rapid.SampledFrom(mirrorIDs).Draw(t, "id")
	p := w.ids[id]
	if !p.whole() || p.rev == "" {
		t.Skip("it is in pieces")
	}
	keys, rdb, ctx := w.q.shards[0].keys, w.q.rdb, t.Context()
	var err error
	switch what := rapid.SampledFrom([]string{"record", "rev", "place", "state", "dead", "pending"}).Draw(t, "harm"); {
	case what == "record":
		p.record = ""
		err = rdb.HDel(ctx, keys[keyTasks], id).Err()
	case what == "rev":
		p.rev = ""
		err = rdb.HDel(ctx, keys[keyRevs], id).Err()
	case what == "place":
		for i, at := range []*int64{&p.pending, &p.processing, &p.dead} {
			*at = 0
			rdb.ZRem(ctx, keys[i], id)
		}
	case what == "state" && p.processing != 0:
		p.state = nil
		err = rdb.HDel(ctx, keys[keyState], id).Err()
	case what == "dead" && p.dead == 0:
		p.dead = w.now
		err = rdb.ZAdd(ctx, keys[keyDead], redis.Z{Score: float64(w.now), Member: id}).Err()
	case what == "pending" && p.pending == 0:
		p.pending = w.now
		err = rdb.ZAdd(ctx, keys[keyPending], redis.Z{Score: float64(w.now), Member: id}).Err()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (w *mirrorWalk) mend(t *rapid.T) { w.mendAll(t, w.some(t)) }

func (w *mirrorWalk) mendAll(t *rapid.T, ids []string) (unbooked []string) {
	want := 0
	for i, id := range ids {
		p := w.ids[id]
		switch {
		case p.whole() && p.rev == "" && p.dead != 0:
			p.rev = "0"
		case p.whole() && p.rev == "":
			unbooked = append(unbooked, id)
		case p.whole(), p.none():
		case p.record == "" || p.places() == 0:
			want++
			*p = pieces{}
		case p.processing != 0 && p.state != nil && p.state.flag == "L":
			want++
			p.pending, p.dead = 0, 0
		default:
			want++
			if p.pending == 0 {
				p.pending = w.now + int64(i) + 1
			}
			p.processing, p.dead = 0, 0
			if p.state != nil && !strings.Contains("ERX", p.state.flag) {
				p.state.flag = "X"
			}
		}
	}
	n, got, err := w.m.Mend(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "mended", n, want)
	same(t, "unbooked", got, unbooked)
	return unbooked
}

// look compares what only reads.
func (w *mirrorWalk) look(t *rapid.T) {
	var wants []LedgerWant
	var want []Finding
	for _, id := range w.some(t) {
		rev, p := w.drawRev(t, id), w.ids[id]
		wants = append(wants, LedgerWant{id, rev})
		f := FoundWhole
		switch {
		case p.record == "" && p.rev == "" && p.places() == 0:
			f = FoundAbsent
		case !p.whole():
			f = FoundBroken
		case p.at() > rev:
			f = FoundNewer
		case p.dead != 0:
			f = FoundQuarantined
		case p.at() < rev:
			f = FoundOlder
		}
		want = append(want, f)
	}
	got, err := w.m.Check(t.Context(), wants)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "found", got, want)
	entries, next, err := w.m.Entries(t.Context(), 0, "")
	if err != nil || next != "" {
		t.Fatal(next, err)
	}
	revs := map[string]int64{}
	for _, e := range entries {
		revs[e.ID] = e.Rev
	}
	for id, p := range w.ids {
		if rev, ok := revs[id]; ok != (p.rev != "") || rev != p.at() {
			t.Fatalf("entry %q at %d, want %q", id, rev, p.rev)
		}
	}
}

// check compares all that Redis has with the model.
func (w *mirrorWalk) check(t *rapid.T) {
	keys, rdb, ctx := w.q.shards[0].keys, w.q.rdb, t.Context()
	got, gotTombs := map[string]*pieces{}, map[string]int64{}
	at := func(id string) *pieces {
		if got[id] == nil {
			got[id] = &pieces{}
		}
		return got[id]
	}
	pipe := rdb.Pipeline()
	var zsets []*redis.ZSliceCmd
	for _, k := range []int{keyPending, keyProcessing, keyDead} {
		zsets = append(zsets, pipe.ZRangeWithScores(ctx, keys[k], 0, -1))
	}
	var hashes []*redis.MapStringStringCmd
	for _, k := range []int{keyTasks, keyState, keyErrors, keyRevs, 5, 6} {
		hashes = append(hashes, pipe.HGetAll(ctx, keys[k]))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	for i, z := range zsets {
		for _, m := range z.Val() {
			p := at(m.Member.(string))
			*[]*int64{&p.pending, &p.processing, &p.dead}[i] = int64(m.Score)
		}
	}
	for i, h := range hashes {
		for id, v := range h.Val() {
			switch p := at(id); {
			case id == "":
			case i == 0:
				p.record = v
			case i == 1:
				f := strings.Split(v[17:], ":")
				d, _ := strconv.Atoi(f[0])
				out, _ := strconv.Atoi(f[2])
				start, _ := strconv.ParseInt(f[3], 10, 64)
				p.state = &pieceState{v[:1], v[1:17], d, out, start}
			case i == 2:
				p.err = v
			case i == 3:
				p.rev = v
			default:
				gotTombs[id], _ = strconv.ParseInt(strings.TrimPrefix(v, "rev:"), 10, 64)
			}
		}
	}
	delete(got, "")
	same(t, "tombstones", gotTombs, w.tombs)
	for _, id := range mirrorIDs {
		if at(id); !reflect.DeepEqual(got[id], w.ids[id]) {
			t.Fatalf("%q:\n got %+v %+v\nwant %+v %+v", id, got[id], got[id].state, w.ids[id], w.ids[id].state)
		}
	}
	same(t, "ids", len(got), len(mirrorIDs))
}

// settle mends all that is in pieces; then the queue has nothing to be ashamed of.
func (w *mirrorWalk) settle(t *rapid.T) {
	var rows []LedgerRow
	for _, id := range w.mendAll(t, mirrorIDs) {
		w.rev += 10
		rows = append(rows, LedgerRow{ID: id, Rev: w.rev, Status: LedgerCancelled})
	}
	if _, err := w.m.Show(t.Context(), rows, Showing{}); err != nil {
		t.Fatal(err)
	}
	report, err := w.q.Audit(t.Context(), AuditOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Violations) > 0 {
		t.Fatalf("%+v", report.Violations)
	}
}
