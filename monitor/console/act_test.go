package console

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

var hidden = regexp.MustCompile(`<input type="hidden" name="([^"]+)" value="([^"]*)">`)

// confirmed sends a form, and returns the one of the page that asks whether it is meant.
func (r *rig) confirmed(path string, form url.Values) url.Values {
	r.Helper()
	sure := url.Values{}
	for _, m := range hidden.FindAllStringSubmatch(r.post(path, form, 200), -1) {
		sure.Add(m[1], strings.NewReplacer("&#43;", "+", "&amp;", "&", "&#34;", `"`, "&lt;", "<", "&gt;", ">").Replace(m[2]))
	}
	if sure.Get("sure") == "" {
		r.Fatal("nothing to confirm")
	}
	return sure
}

func TestNothingHappensBeforeItIsConfirmed(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one", "two")
	const act = "/queue/orders/act"
	sure := r.confirmed(act, url.Values{"do": {"purge"}, "from": {"dead"}, "id": {"one"}})
	r.wantState(q, delayq.StateDead, "one", "two")
	for field, value := range map[string]string{"id": "two", "do": "replay", "all": "true", "ends": "99999999999", "sure": "x", "from": "task"} {
		other := url.Values{}
		for k, v := range sure {
			other[k] = v
		}
		other.Set(field, value)
		if code := r.ask(http.MethodPost, act, nil, other).StatusCode; code != http.StatusConflict {
			t.Errorf("with another %s: status %d", field, code)
		}
	}
	more := url.Values{}
	for k, v := range sure {
		more[k] = v
	}
	more.Add("id", "two")
	r.post(act, more, http.StatusConflict)
	r.post("/queue/orders/act", url.Values{"do": {"purge"}}, http.StatusBadRequest)
	r.post("/queue/orders/act", url.Values{"do": {"explode"}, "id": {"one"}}, http.StatusBadRequest)
	r.post("/queue/nowhere/act", sure, http.StatusNotFound)
	r.wantState(q, delayq.StateDead, "one", "two")
	r.c.now = func() time.Time { return time.Now().Add(confirmWithin + time.Minute) }
	r.post(act, sure, http.StatusConflict)
	r.c.now = time.Now
	page := r.post(act, sure, 200) // after the redirect
	if !strings.Contains(page, "1 dead letter is deleted.") {
		t.Error("nothing tells that it is done")
	}
	r.wantState(q, "", "one")
	if page = r.post(act, sure, 200); !strings.Contains(page, "1 did not go through: there is no such task") {
		t.Error("nothing tells that it was not done again")
	}
	r.wantLog("do=purge queue=orders ids=[one]", "do=purge queue=orders ok=1 failed=0", "ok=0 failed=1")
	if strings.Contains(r.log.String(), "window.pwned") {
		t.Error("a payload or an error of a handler is in the log")
	}
}

func TestAllThatTheFilterShows(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{Shards: 2})
	r.kill(q, "a", ids("a", 320)...)
	r.kill(q, "b", ids("b", 30)...)
	sure := r.confirmed("/queue/orders/act", url.Values{"do": {"purge-all"}, "from": {"dead"}, "type": {"a"}, "reason": {"permanent"}})
	time.Sleep(5 * time.Millisecond) // deaths are dated to the millisecond
	r.kill(q, "a", "after")          // nobody was shown this one
	page := r.post("/queue/orders/act", sure, 200)
	if !strings.Contains(page, "320 dead letters are deleted.") {
		t.Error(page)
	}
	r.wantState(q, delayq.StateDead, "b-000", "b-029", "after")
	r.wantState(q, "", "a-000", "a-319")
	sure = r.confirmed("/queue/orders/act", url.Values{"do": {"replay-all"}, "from": {"dead"}})
	if page = r.post("/queue/orders/act", sure, 200); !strings.Contains(page, "31 dead letters are due again.") {
		t.Error(page)
	}
	r.wantState(q, delayq.StateDue, "b-000", "after")
	r.wantLog("type=a", "ok=320", "ok=31", "all_seen=true")
}

// What is meant by "all" is told by Redis' clock, which dates the letters, however wrong this machine's is.
func TestAllIsByTheClockOfRedis(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"behind": -time.Hour, "ahead": time.Hour} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{})
			r.c.now = func() time.Time { return time.Now().Add(off) }
			q := r.queue("orders", delayq.Config{})
			r.kill(q, "t", "before")
			sure := r.confirmed("/queue/orders/act", url.Values{"do": {"purge-all"}, "from": {"dead"}})
			time.Sleep(5 * time.Millisecond)
			r.kill(q, "t", "after")
			r.post("/queue/orders/act", sure, 200)
			r.wantState(q, "", "before")
			r.wantState(q, delayq.StateDead, "after")
		})
	}
}

func TestCancelAndReschedule(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	act := func(form url.Values) string {
		r.Helper()
		form.Set("from", "task")
		return r.post("/queue/orders/act", r.confirmed("/queue/orders/act", form), 200)
	}
	r.add(q, "one", "t", time.Hour)
	r.add(q, "two", "t", time.Hour)
	act(url.Values{"do": {"move"}, "id": {"one"}, "at": {"2031-02-03T04:05"}}) // without scripts it is UTC
	in, err := q.Get(t.Context(), "one")
	r.ok(err)
	if got := in.Due.UTC().Format(time.RFC3339); got != "2031-02-03T04:05:00Z" {
		t.Errorf("due %s", got)
	}
	act(url.Values{"do": {"run"}, "id": {"one"}})
	r.wantState(q, delayq.StateDue, "one")
	act(url.Values{"do": {"cancel"}, "id": {"two"}})
	r.wantState(q, delayq.StateCancelled, "two")
	if page := act(url.Values{"do": {"cancel"}, "id": {"two"}}); !strings.Contains(page, "it had been cancelled before") {
		t.Error("a second cancel says nothing")
	}
	for _, form := range []url.Values{
		{"at": {"2031-02-03T04:05"}, "in": {"1h"}}, {}, {"in": {"soon"}}, {"in": {"-5m"}}, {"at": {"tomorrow"}},
	} {
		form["do"], form["id"] = []string{"move"}, []string{"one"}
		r.post("/queue/orders/act", form, http.StatusBadRequest)
	}
	// A running one is told to stop.
	started, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		r.workOne(q, started)
	}()
	<-started
	if page := act(url.Values{"do": {"cancel"}, "id": {"one"}}); !strings.Contains(page, "has been told to stop") {
		t.Error(page)
	}
	<-done
	r.wantState(q, delayq.StateCancelled, "one")
}

// Notices in addresses are the console's own.
func TestNobodyElseMakesNotices(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	r.queue("orders", delayq.Config{})
	to := r.c.withNotice("/queue/orders", &outcome{do: "run", ok: 1})
	if !strings.Contains(r.get(to, 200), "The task is due now.") {
		t.Error("no notice")
	}
	for _, done := range []string{"eyJEbyI6InJ1biIsIk9LIjoxfQ", "eyJEbyI6InJ1biIsIk9LIjoxfQ.", "x.y", strings.Split(to, "=")[1] + "x"} {
		if strings.Contains(r.get("/queue/orders?done="+done, 200), `id="notice"`) {
			t.Errorf("%q makes a notice", done)
		}
	}
}
