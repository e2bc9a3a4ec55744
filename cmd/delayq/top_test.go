package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

func TestTopView(t *testing.T) {
	now := time.Now()
	look := func(at time.Time, created int64, failed int64) *monitor.View {
		return &monitor.View{At: at, LeftOut: 2, Queues: []monitor.QueueView{
			{Name: "a", Stats: &delayq.Stats{Now: at, Pending: 1, Created: created, Failed: map[string]int64{}}},
			{Name: "broken", Err: delayq.ErrSchema},
			{Name: "late", Healthy: 2, Stuck: 1, Stats: &delayq.Stats{Now: at, Due: 7, OldestDueAge: time.Hour, Created: 3, Failed: map[string]int64{"error": failed}}},
		}}
	}
	v := newTopView(look(now.Add(-2*time.Second), 10, 0), look(now, 30, 4))
	if v.Queues[0].Name != "late" || v.Queues[1].Name != "a" {
		t.Errorf("order: %+v", v.Queues)
	}
	if r := v.Queues[1].EnqueuedPerSec; r == nil || *r != 10 {
		t.Errorf("enqueued a second: %v", r)
	}
	if r := v.Queues[0].FailedPerSec; r == nil || *r != 2 {
		t.Errorf("failed a second: %v", r)
	}
	text := ansi.Strip((&top{}).text(v, 0))
	for _, want := range []string{
		"QUEUE     OLDEST  DUE  PENDING  RUNNING  DEAD  IN/S  OUT/S  FAIL/S  CONSUMERS\n",
		"late    1h0m0s    7        0        0     0   0.0    0.0     2.0  2, 1 stuck\n",
		"a            -    0        1        0     0  10.0    0.0     0.0  0\n",
		"broken  wrong schema version\n",
		"and 2 more queues\n",
	} {
		if strings.Contains(want, "QUEUE") {
			want = strings.Join(strings.Fields(want), " ")
			if !strings.Contains(strings.Join(strings.Fields(text), " "), want) {
				t.Errorf("no titles in\n%s", text)
			}
			continue
		}
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}

	// A counter that fell belongs to other data; there is no rate then.
	if v = newTopView(look(now.Add(-time.Second), 30, 0), look(now, 10, 0)); v.Queues[1].EnqueuedPerSec != nil {
		t.Error("a rate over the loss of data")
	}
	// A low screen shows the worst, and says how many more there are.
	v.Unlisted = "NOPERM"
	text = ansi.Strip((&top{}).text(v, 7))
	if !strings.Contains(text, "late") || strings.Contains(text, "broken") || !strings.Contains(text, "and 4 more queues") || strings.Count(text, "\n") > 6 {
		t.Errorf("on 7 lines:\n%s", text)
	}
}

// Queues that could not be listed are not taken for queues that are not there, and one that fails does not hide the others.
func TestTopWithoutAList(t *testing.T) {
	view := &monitor.View{At: time.Now(), FindErr: errors.New("NOPERM no SCAN")}
	if v := newTopView(nil, view); v.err == nil || v.Unlisted == "" {
		t.Errorf("%+v", v)
	}
	view.Queues = []monitor.QueueView{{Name: "a", Err: delayq.ErrSchema}}
	v := newTopView(nil, view)
	if text := ansi.Strip((&top{}).text(v, 0)); v.err != nil || !strings.Contains(text, "queues may be missing: NOPERM no SCAN") || !strings.Contains(text, "wrong schema version") {
		t.Errorf("%v\n%s", v.err, text)
	}
}

// The block that is drawn over must be as high as it counts.
func TestRawLines(t *testing.T) {
	if got := rawLines("a\n\nb\n"); got != "\ra\n\r\n\rb\n" {
		t.Errorf("%q", got)
	}
}
