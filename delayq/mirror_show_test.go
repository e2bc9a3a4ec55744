package delayq_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/redis/go-redis/v9"
)

// place brings the entry x, of revision 5, into a situation, and answers the token of its lease if it had one.
func (r *rig) place(situation string) (token string) {
	r.Helper()
	const id = "x"
	lease := func() {
		r.pass(time.Millisecond)
		got := r.leaseRedis(0, 1)
		if len(got.Leases) != 1 || got.Leases[0].ID != id {
			r.Fatalf("leased %q", idsOf(got.Leases))
		}
		token = delayq.BareToken(got.Leases[0])
	}
	first, rest, _ := strings.Cut(situation, ", ")
	switch first {
	case "absent":
	case "waiting":
		r.show("1 0 0 0", row(id, 5, time.Hour))
	case "leased":
		r.show("1 0 0 0", row(id, 5, 0))
		lease()
	case "expired":
		token = r.place("leased")
		r.pass(leaseTime)
	case "taken back":
		r.show("1 0 0 0", row("older", 1, time.Second))
		token = r.place("expired")
		if got := r.leaseRedis(0, 1); len(got.Leases) != 1 || got.Leases[0].ID != "older" {
			r.Fatalf("leased %q", idsOf(got.Leases))
		}
		r.show("0 1 0 0", ended("older", 2))
		r.forget("older")
	case "released":
		token = r.place("leased")
		codes, err := delayq.RunScript(r.Context(), r.q, 0, "release", fmt.Sprintf("%.3f", r.now()), 1, id, token, "@"+fmt.Sprint(zero+3_600_000))
		if r.ok(err); fmt.Sprint(codes) != "[1]" {
			r.Fatal(codes)
		}
	case "quarantined":
		r.place("waiting")
		r.quarantine(1, delayq.Suspect{ID: id, Rev: 5})
	case "quarantined from its lease":
		token = r.place("leased")
		r.quarantine(1, delayq.Suspect{ID: id, Rev: 5, Token: token})
	case "dropped":
		r.place("waiting")
		r.show("0 1 0 0", ended(id, 6))
		r.buried(id, "rev:5")
	case "cancelled without a ledger":
		r.place("dropped")
		r.buried(id, "cancelled")
	case "done without a ledger":
		r.place("dropped")
		r.buried(id, "rev:9 is a token")
	default:
		r.Fatalf("no situation %q", first)
	}
	for what := range strings.SplitSeq(rest, ", ") {
		switch what {
		case "":
		case "tombstone":
			r.show("0 1 0 0", ended("other", 1)) // for the generation to be there
			r.forget("other")
			r.buried(id, "rev:5")
		default:
			r.harm(id, what)
		}
	}
	return token
}

// buried makes the tombstone of an id by hand, after the first rotation; empty for none.
func (r *rig) buried(id, tomb string) {
	r.Helper()
	key := delayq.Keys(r.q, delayq.ShardOf(r.q, id))[6]
	if tomb == "" {
		r.ok(r.rdb.HDel(r.Context(), key, id).Err())
	} else {
		r.ok(r.rdb.HSet(r.Context(), key, id, tomb).Err())
	}
}

func (r *rig) forget(id string) { r.Helper(); r.buried(id, "") }

// What each call answers for an entry of revision 5. put, drop and check are at revisions 4, 5 and 6: put, current, newer, dropped,
// whole, absent, older, broken, quarantined. Quarantine is of what was seen at revision 5, 4 and 0, then at 5 with the token of
// its lease and with another. Mend leaves it, removes it, makes it whole, gives it revision 0, or tells that it is unbooked.
var situations = []struct{ name, put, drop, check, quarantine, mend string }{
	{"absent", "ppp", "ddd", "aaa", "-----", "leaves"},
	{"waiting", "ncp", "nnd", "nwo", "q----", "leaves"},
	{"leased", "ncp", "nnd", "nwo", "q--q-", "leaves"},
	{"expired", "ncp", "nnd", "nwo", "q--q-", "leaves"},
	{"taken back", "ncp", "nnd", "nwo", "q----", "leaves"},
	{"released", "ncp", "nnd", "nwo", "q----", "leaves"},
	{"quarantined", "npp", "nnd", "nqq", "-----", "leaves"},
	{"quarantined from its lease", "npp", "nnd", "nqq", "-----", "leaves"},
	{"dropped", "npp", "ddd", "aaa", "-----", "leaves"},
	{"cancelled without a ledger", "ppp", "ddd", "aaa", "-----", "leaves"},
	{"done without a ledger", "ppp", "ddd", "aaa", "-----", "leaves"},
	{"waiting, tombstone", "ncp", "nnd", "nwo", "q----", "leaves"},

	{"waiting, rev", "ppp", "ddd", "ooo", "--q--", "unbooked"},
	{"leased, rev", "ppp", "ddd", "ooo", "--q--", "unbooked"},
	{"quarantined, rev", "ppp", "ddd", "qqq", "-----", "gives it 0"},

	{"waiting, record", "ppp", "ddd", "bbb", "r----", "removes"},
	{"leased, record", "ppp", "ddd", "bbb", "r--r-", "removes"},
	{"quarantined, record", "ppp", "ddd", "bbb", "r----", "removes"},
	{"waiting, place", "ppp", "ddd", "bbb", "q----", "removes"},
	{"leased, place", "ppp", "ddd", "bbb", "q----", "removes"},
	{"waiting, place, rev", "ppp", "ddd", "bbb", "--q--", "removes"},
	{"waiting, place, record", "ppp", "ddd", "bbb", "r----", "removes"},
	{"leased, place, record", "ppp", "ddd", "bbb", "r----", "removes"},
	{"waiting, record, rev", "ppp", "ddd", "bbb", "--r--", "removes"},
	{"leased, state", "ppp", "ddd", "bbb", "q----", "makes whole"},
	{"leased, pending", "ppp", "ddd", "bbb", "q--q-", "makes whole"},
	{"leased, dead", "ppp", "ddd", "bbb", "q--q-", "makes whole"},
	{"leased, dead, pending", "ppp", "ddd", "bbb", "q--q-", "makes whole"},
	{"leased, state, dead", "ppp", "ddd", "bbb", "q----", "makes whole"},
	{"waiting, dead", "ppp", "ddd", "bbb", "q----", "makes whole"},
	{"quarantined from its lease, pending", "ppp", "ddd", "bbb", "q----", "makes whole"},
	{"waiting, place, record, tombstone", "npp", "ddd", "bbb", "r----", "removes"},
	{"leased, record, tombstone", "npp", "ddd", "bbb", "r--r-", "removes"},
}

// eachSituation calls for every situation, in a queue of its own. What a call leaves is whole.
func eachSituation(t *testing.T, test func(r *rig, i int, token string)) {
	t.Helper()
	ledgerServer(t, 1, func(r *rig) {
		for i, s := range situations {
			r.Run(s.name, func(t *testing.T) {
				r := r.sub(t)
				test(r, i, r.place(s.name))
			})
		}
	})
}

func (r *rig) clean() {
	r.Helper()
	for _, v := range r.audit(r.Context()) {
		r.Errorf("%+v", v)
	}
}

func TestWhatPutAppliesTo(t *testing.T) {
	for k, rev := range []int64{4, 5, 6} {
		t.Run(fmt.Sprint("revision ", rev), func(t *testing.T) {
			eachSituation(t, func(r *rig, i int, _ string) {
				before := r.state()
				p := row("x", rev, 2*time.Hour)
				switch situations[i].put[k] {
				case 'p':
					r.show("1 0 0 0", p)
					r.holds(fmt.Sprintf("pending x 7200000 \n task x x@%d \n rev x %d", rev, rev))
					r.clean()
					r.show("0 0 1 0", p)
					r.clean()
				case 'c':
					r.show("0 0 1 0", p)
					r.holds(before)
				case 'n':
					r.show("0 0 0 1", p)
					r.holds(before)
				}
			})
		})
	}
}

func TestWhatDropAppliesTo(t *testing.T) {
	for k, rev := range []int64{4, 5, 6} {
		t.Run(fmt.Sprint("revision ", rev), func(t *testing.T) {
			eachSituation(t, func(r *rig, i int, _ string) {
				before := r.state()
				tomb := rev
				if name := situations[i].name; strings.Contains(name, "tombstone") || name == "dropped" {
					tomb = max(5, rev)
				}
				for range 2 {
					if situations[i].drop[k] == 'n' {
						r.show("0 0 0 1", ended("x", rev))
						r.holds(before)
						continue
					}
					r.show("0 1 0 0", ended("x", rev))
					r.holds(fmt.Sprint("done x rev:", tomb))
					r.clean()
				}
			})
		})
	}
}

func TestWhatCheckFinds(t *testing.T) {
	findings := map[byte]delayq.Finding{
		'a': delayq.FoundAbsent, 'w': delayq.FoundWhole, 'o': delayq.FoundOlder, 'n': delayq.FoundNewer, 'b': delayq.FoundBroken,
		'q': delayq.FoundQuarantined,
	}
	eachSituation(t, func(r *rig, i int, _ string) {
		before := r.state()
		for k, rev := range []int64{4, 5, 6} {
			found, err := r.q.Mirror().Check(r.Context(), []delayq.LedgerWant{{ID: "x", Rev: rev}})
			if r.ok(err); found[0] != findings[situations[i].check[k]] {
				r.Errorf("at revision %d: found %d", rev, found[0])
			}
		}
		r.holds(before)
	})
}

func TestWhatQuarantineAppliesTo(t *testing.T) {
	for k, how := range []string{"seen at 5", "seen at 4", "seen without", "with its token", "with another token"} {
		t.Run(how, func(t *testing.T) {
			eachSituation(t, func(r *rig, i int, token string) {
				s := delayq.Suspect{ID: "x", Rev: []int64{5, 4, 0, 5, 5}[k]}
				switch how {
				case "with its token":
					s.Token = token
					if token == "" {
						s.Token = "none was ever ..."
					}
				case "with another token":
					s.Token = "not anyone's own"
				}
				before := r.state()
				switch situations[i].quarantine[k] {
				case '-':
					r.quarantine(0, s)
					r.holds(before)
				case 'r':
					r.quarantine(1, s)
					if got := r.state(); got != "" && got != "done x rev:5" {
						r.Errorf("left\n%s", got)
					}
					r.clean()
				case 'q':
					counted := r.counter("c:quarantined")
					r.quarantine(1, s)
					after := r.state()
					for _, want := range []string{"dead x ", "error x unbooked nobody knows it", "task x x@5"} {
						if !strings.Contains(after, want) {
							r.Errorf("no %q in\n%s", want, after)
						}
					}
					r.clean()
					if r.counter("c:quarantined") != counted+1 {
						r.Error("not counted")
					}
					r.quarantine(0, s)
					r.holds(after)
				}
			})
		})
	}
}

func TestWhatMendDoes(t *testing.T) {
	eachSituation(t, func(r *rig, i int, _ string) {
		before := r.state()
		n, unbooked, err := r.q.Mirror().Mend(r.Context(), []string{"x", "x", "unheard of"})
		r.ok(err)
		switch situations[i].mend {
		case "leaves":
			if n != 0 || len(unbooked) != 0 {
				r.Errorf("%d mended, unbooked %q", n, unbooked)
			}
			r.holds(before)
			r.clean()
		case "gives it 0":
			r.holds(before + "\n rev x 0")
			r.clean()
		case "unbooked":
			if n != 0 || fmt.Sprint(unbooked) != "[x]" {
				r.Errorf("%d mended, unbooked %q", n, unbooked)
			}
			r.holds(before)
		case "removes":
			if n != 1 || len(unbooked) != 0 {
				r.Errorf("%d mended, unbooked %q", n, unbooked)
			}
			if got := r.state(); got != "" && got != "done x rev:5" {
				r.Errorf("left\n%s", got)
			}
			r.clean()
		case "makes whole":
			if n != 1 || len(unbooked) != 0 {
				r.Errorf("%d mended, unbooked %q", n, unbooked)
			}
			r.clean()
			found, err := r.q.Mirror().Check(r.Context(), []delayq.LedgerWant{{ID: "x", Rev: 5}})
			if r.ok(err); found[0] != delayq.FoundWhole {
				r.Errorf("found %d", found[0])
			}
			leased := strings.Contains(before, "state x L")
			if leased != strings.Contains(r.state(), "processing x") {
				r.Errorf("from\n%s\nto\n%s", before, r.state())
			}
		}
	})
}

// Tombstones are forgotten after the retention, and not before, whichever generation they are in.
func TestTombstonesOfRevisionsAreForgotten(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		r.show("0 1 0 0", ended("x", 5))
		r.pass(119 * time.Second)
		r.show("0 0 0 1", row("x", 4, 0))
		r.pass(2 * time.Second)
		r.show("0 1 0 0", ended("y", 5)) // rotates
		r.show("0 0 0 1", row("x", 4, 0))
		r.show("0 1 0 0", ended("x", 4)) // moves it on with its revision
		r.pass(119 * time.Second)
		r.show("0 0 0 1", row("x", 4, 0))
		r.pass(5 * time.Minute)
		r.show("1 0 0 0", row("x", 4, 0))
	})
}

// Where a task is due beyond the horizon it is taken out, and it comes back unchanged when its time comes nearer.
func TestTheHorizonOfAMirror(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		r.cfg.Horizon = time.Hour
		r.q = r.open(r.q.Name(), r.cfg)
		r.show("0 1 0 0", row("x", 5, time.Hour+time.Second))
		r.pass(2 * time.Second)
		r.show("1 0 0 0", row("x", 5, time.Hour+time.Second)) // with the revision of the drop
		r.show("0 1 0 0", row("x", 6, 2*time.Hour))
		r.holds("done x rev:6")
		running := row("y", 7, 0)
		running.Status, running.LockedUntil, running.Token = delayq.LedgerRunning, instant(30*time.Minute), "t"
		r.show("1 0 0 0", running)
		r.holds("done x rev:6 \n pending y 1800000 \n task y y@7 \n rev y 7")
	})
}

func TestDueTimesAreShownToTheMicrosecond(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		at := func(id string, at time.Time) delayq.LedgerRow {
			row := row(id, 5, 0)
			row.RunAt = at
			return row
		}
		r.show("5 0 0 0", at("now", instant(1234567*time.Microsecond)), at("nanos", instant(999*time.Nanosecond)), at("past", time.Unix(-1, 0)),
			at("never", time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)), at("zero", time.Time{}))
		k := delayq.Keys(r.q, 0)
		for id, want := range map[string]float64{"now": zero*1000 + 1234567, "nanos": zero * 1000, "past": 0, "zero": 0, "never": 1<<53 - 2} {
			if got := r.rdb.ZScore(r.Context(), k[0], id).Val(); got != want {
				r.Errorf("%s at %.0f, want %.0f", id, got, want)
			}
		}
		if n := r.rdb.ZRank(r.Context(), k[0], "").Val(); n != 5 {
			r.Errorf("the sentinel is at rank %d", n)
		}
	})
}

// The record that Show makes is the one that an enqueue made, byte for byte, and it is read as the task that it was.
func TestShownRecordsAreThoseOfTheProducer(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		for _, want := range []delayq.Task{
			{ID: "a", Type: "t"},
			{ID: "b", Type: strings.Repeat("long", 50), Key: "k\x00ey", Payload: []byte("\x00\xff payload")},
		} {
			record := delayq.Encode(&want, time.UnixMilli(zero))
			r.show("1 0 0 0", delayq.LedgerRow{
				ID: want.ID, Rev: 1, Status: delayq.LedgerRetry, RunAt: instant(0), Type: want.Type, Key: want.Key,
				Payload: append([]byte{}, want.Payload...), Stamp: record[1:13],
			})
			if got := r.rdb.HGet(r.Context(), delayq.Keys(r.q, 0)[3], want.ID).Val(); got != string(record) {
				r.Errorf("record %q, want %q", got, record)
			}
		}
		r.pass(time.Second)
		for _, l := range r.leaseRedis(0, 10).Leases {
			if !l.EnqueuedAt.Equal(time.UnixMilli(zero)) {
				r.Errorf("%+v", l.Task)
			}
		}
	})
}

func TestWhatShowRefuses(t *testing.T) {
	ledgerServer(t, 2, func(r *rig) {
		unread, unstamped := row("unread", 1, 0), row("unstamped", 1, 0)
		unread.Payload, unstamped.Stamp = nil, nil
		ending := ended("ending", 1)
		ending.Payload, ending.Stamp = nil, nil // need not be read
		shown, err := r.q.Mirror().Show(r.Context(), []delayq.LedgerRow{
			row("good", 1, 0), row("zero", 0, 0), row("negative", -1, 0), row("huge", 1<<53+1, 0), unread, unstamped, ending, row("", 1, 0),
			row("greatest", 1<<53, 0),
		}, delayq.Showing{Now: r.instantNow()})
		r.is(err, delayq.ErrInvalid)
		var one *delayq.TaskError
		if !errors.As(err, &one) || shown != (delayq.Shown{Put: 2, Dropped: 1}) {
			r.Errorf("%+v, %v", shown, err)
		}
		if got := r.revs(); got != "good@1 greatest@9007199254740992" {
			r.Error(got)
		}
		r.show("0 0 0 1", row("greatest", 1<<53-1, 0))
		r.show("0 0 1 0", row("greatest", 1<<53, 0))
		m := r.q.Mirror()
		for _, cursor := range []string{"x", "0", "9:0", "-1:0", "0:x"} {
			_, _, err := m.Strays(r.Context(), 0, cursor)
			r.is(err, delayq.ErrInvalid, "strays", cursor)
			_, _, err = m.Entries(r.Context(), 0, cursor)
			r.is(err, delayq.ErrInvalid, "entries", cursor)
		}
		for _, shard := range []int{-1, 2} {
			_, _, err := m.Strays(r.Context(), shard, "")
			r.is(err, delayq.ErrInvalid, "strays", shard)
			_, _, err = m.Entries(r.Context(), shard, "")
			r.is(err, delayq.ErrInvalid, "entries", shard)
			_, err = m.Sizes(r.Context(), shard)
			r.is(err, delayq.ErrInvalid, "sizes", shard)
		}
		for _, args := range [][]any{{"0", 1, 1, "c:created", 1, "x", 1, 1, ""}, {"0", 1, 1, "e:created", -1, "x", 1, 1, ""}, {"0", 1, 1, "e:created", "x", "x", 1, 1, ""}} {
			if _, err := delayq.RunScript(r.Context(), r.q, 0, "put", args...); err == nil || !strings.Contains(err.Error(), "malformed counter") {
				r.Errorf("%v: %v", args, err)
			}
		}
		for _, what := range []string{"e:created", "e:shown"} {
			if n := r.counter(what); n > 2 {
				r.Errorf("%s is %d", what, n)
			}
		}
	})
}

// Of several rows with one id the newest counts, wherever it stands.
func TestOneIDTwiceInAMessage(t *testing.T) {
	ledgerServer(t, 3, func(r *rig) {
		r.show("1 1 0 0", row("a", 5, 0), ended("b", 9), row("a", 7, 0), row("b", 8, 0), row("a", 6, 0), row("a", 7, time.Hour))
		r.holds("pending a 0 \n task a a@7 \n rev a 7 \n done b rev:9")
	})
}

// Messages larger than a call are cut into several, by number and by bytes, and so are all other calls.
func TestLargeMessages(t *testing.T) {
	ledgerServer(t, 2, func(r *rig) {
		const n = 1300
		var rows, ends []delayq.LedgerRow
		var wants []delayq.LedgerWant
		var suspects []delayq.Suspect
		var ids []string
		for i := range n {
			id := fmt.Sprintf("%04d", i)
			rows, ends = append(rows, row(id, int64(i+1), time.Hour)), append(ends, ended(id, n+1))
			wants, ids = append(wants, delayq.LedgerWant{ID: id, Rev: int64(i + 1)}), append(ids, id)
			suspects = append(suspects, delayq.Suspect{ID: id, Rev: int64(i + 1)})
		}
		m, ctx := r.q.Mirror(), r.Context()
		counts := map[string]int64{"e:created": n, "f:timeout": 1, "f:panic": 2}
		r.showing(fmt.Sprint(n, " 0 0 0"), delayq.Showing{Counts: counts}, rows...)
		for field, want := range counts {
			if got := r.counter(field); got != want {
				r.Errorf("%s is %d, want %d", field, got, want)
			}
		}
		found, err := m.Check(ctx, wants)
		r.ok(err)
		for i, f := range found {
			if f != delayq.FoundWhole {
				r.Fatalf("%s: found %d", wants[i].ID, f)
			}
		}
		r.clean()
		r.quarantine(n, suspects...)
		if mended, unbooked, err := m.Mend(ctx, ids); mended != 0 || len(unbooked) != 0 || err != nil {
			r.Error(mended, unbooked, err)
		}
		r.clean()
		r.show(fmt.Sprint("0 ", n, " 0 0"), ends...)
		r.clean()

		large := make([]byte, 200<<10)
		rows = rows[:0]
		for i := range 10 {
			p := row(fmt.Sprint("large", i), 1, time.Hour)
			p.Payload = large
			rows = append(rows, p)
		}
		longest := 0
		sent := 0
		if c, ok := r.rdb.(interface{ AddHook(redis.Hook) }); ok {
			c.AddHook(sending(func(cmd redis.Cmder) {
				if cmd.Name() != "evalsha" {
					return
				}
				bytes := 0
				for _, a := range cmd.Args() {
					if b, ok := a.([]byte); ok {
						bytes += len(b)
					}
				}
				longest, sent = max(longest, bytes), sent+1
			}))
		}
		r.show("10 0 0 0", rows...)
		if longest > 512<<10 || sent < 5 {
			r.Errorf("%d calls of up to %d bytes", sent, longest)
		}
	})
}

// A bare call with numbers that are none is refused before it changes anything.
func TestWrongArgumentsOfMirrorScripts(t *testing.T) {
	ledgerServer(t, 1, func(r *rig) {
		r.show("1 0 0 0", row("x", 5, 0))
		before := r.state()
		for verb, calls := range map[string][][]any{
			"put": {
				{"0", "n", 0},
				{"0", 0, 0},
				{"0", 1, "k", "x", 6, 0, ""},
				{"0", 1, 0, "x", "six", 0, ""},
				{"0", 1, 0, "x", 6, "soon", ""},
				{"0", 1, 0, "x", 6, 0, "", ""},
				{"0", 1, 0, "x", 6, 0},
				{"0", 1, 1, "x", 6, 0, ""},
			},
			"drop":       {{"0", 1, "0", 0, "x", "six"}, {"0", 1, "0", 0, "x"}, {"0", 1, "0", "k", "x", 6}, {"0", 501, "0", 0}},
			"quarantine": {{"0", 1, 10, "why", "x", 5}, {"0", "n", 10, "why", "x", 5, ""}},
			"check":      {{1, "x"}, {1, "x", "six"}, {0}, {"n", "x", 5}},
			"mend":       {{"0", 1}, {"0", 2, "x"}, {"0", 0}},
		} {
			for _, args := range calls {
				if _, err := delayq.RunScript(r.Context(), r.q, 0, verb, args...); err == nil {
					r.Errorf("%s of %v went through", verb, args)
				}
				r.holds(before)
			}
		}
	})
}
