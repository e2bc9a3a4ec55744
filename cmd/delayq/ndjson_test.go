package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestParseTask(t *testing.T) {
	at := time.Date(2030, 1, 2, 15, 4, 5, 0, time.UTC)
	tests := []struct {
		name, line string
		id         string
		payload    string
		delay      time.Duration
		runAt      time.Time
	}{
		{"the least", `{"type":"t"}`, "", "", 0, time.Time{}},
		{"a duration in quotes", `{"type":"t","id":"a","delay":"1h30m"}`, "a", "", 90 * time.Minute, time.Time{}},
		{"a number of seconds", `{"type":"t","id":"a","delay":1.5}`, "a", "", 1500 * time.Millisecond, time.Time{}},
		{"a delay that is past", `{"type":"t","delay":-3}`, "", "", -3 * time.Second, time.Time{}},
		{"null is as good as absent", `{"type":"t","delay":null,"run_at":null}`, "", "", 0, time.Time{}},
		{"a time", `{"type":"t","run_at":"2030-01-02T16:04:05+01:00"}`, "", "", 0, at},
		{"a payload byte for byte", `{"type":"t","payload": {"b" :1.0, "a":"\u00e9"} }`, "", `{"b" :1.0, "a":"\u00e9"}`, 0, time.Time{}},
		{"a payload of null", `{"type":"t","payload":null}`, "", "null", 0, time.Time{}},
		{"a payload in base64", `{"type":"t","payload_base64":"AP8K"}`, "", "\x00\xff\n", 0, time.Time{}},
		{"an id of odd characters", `{"type":"t","id":"a:b}{%\n\u0000\"é"}`, "a:b}{%\n\x00\"é", "", 0, time.Time{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseTask([]byte(tt.line))
			if err != nil {
				t.Fatal(err)
			}
			if got.ID != tt.id || got.Type != "t" || string(got.Payload) != tt.payload || got.Delay != tt.delay || !got.RunAt.Equal(tt.runAt) {
				t.Errorf("got %+v, payload %q", got, got.Payload)
			}
		})
	}
}

func TestParseTaskSaysWhatIsWrong(t *testing.T) {
	tests := []struct{ line, want string }{
		{`{"type":"t","dealy":"5s"}`, `unknown field "dealy"`},
		{`{"type":"t","id":5}`, "id: want a string"},
		{`{"type":"t","delay":"soon"}`, "delay: want a duration"},
		{`{"type":"t","delay":"30"}`, "delay: want a duration"},
		{`{"type":"t","delay":1e3}`, "delay: want a duration"},
		{`{"type":"t","delay":{}}`, "delay: want a duration"},
		{`{"type":"t","delay":99999999999999}`, "delay: want a duration"},
		{`{"type":"t","delay":"5s","run_at":"2030-01-02T15:04:05Z"}`, "run_at and delay"},
		{`{"type":"t","run_at":"tomorrow"}`, "run_at: want RFC 3339"},
		{`{"type":"t","run_at":1893596645}`, "run_at: want a string"},
		{`{"type":"t","payload":1,"payload_base64":"AA=="}`, "payload and payload_base64"},
		{`{"type":"t","payload_base64":"*"}`, "payload_base64: not standard base64"},
		{`{"type":"t"} {"type":"u"}`, "more than one JSON value"},
		{`{"type":"t"`, "ends too soon"},
		{`[1]`, "want a JSON object"},
		{`hello`, "not JSON"},
		{"{\"type\":\"t\",\"id\":\"\xff\"}", "not UTF-8"},
	}
	for _, tt := range tests {
		_, err := parseTask([]byte(tt.line))
		var wrong *lineError
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.line, err, tt.want)
		}
	}
}

func TestParseTaskKeepsPayloadsOutOfErrors(t *testing.T) {
	for _, line := range []string{
		`{"type":"t","payload":{"card":"4111111111111111"},"delay":"x"}`,
		`{"type":"t","payload":{"card":"4111111111111111"}`,
		`{"type":"t","payload":{"card":4111111111111111}} 4111111111111111`,
		`4111111111111111`,
		`"4111111111111111"`,
	} {
		_, err := parseTask([]byte(line))
		if err == nil || strings.Contains(err.Error(), "4111") {
			t.Errorf("%s: got %v", line, err)
		}
	}
}

func TestLinesCountsAndGoesOn(t *testing.T) {
	file := "\uFEFF" + `{"type":"first"}` + "\r\n" +
		"\n" +
		`{"type":"long","payload":"` + strings.Repeat("x", 3*maxLine) + `"}` + "\n" +
		`oops` + "\n" +
		`{"type":"last"}` // no newline at the end
	var got []string
	in := newLines(strings.NewReader(file))
	for {
		task, err := in.next()
		if errors.Is(err, io.EOF) {
			break
		}
		switch {
		case err != nil:
			got = append(got, fmt.Sprintf("%d: %v", in.n, err))
		default:
			got = append(got, fmt.Sprintf("%d: %s", in.n, task.Type))
		}
	}
	want := []string{
		"1: first",
		fmt.Sprintf("3: longer than %d bytes", maxLine),
		"4: not JSON: wrong at byte 1",
		"5: last",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestLinesTakesALineOfTheGreatestLength(t *testing.T) {
	const frame = `{"type":"t","payload":""}`
	for _, tt := range []struct {
		over int
		ok   bool
	}{{-1, true}, {0, true}, {1, false}} {
		line := strings.Replace(frame, `""`, `"`+strings.Repeat("x", maxLine-len(frame)-1+tt.over)+`"`, 1) + "\n"
		_, err := newLines(strings.NewReader(line)).next()
		if (err == nil) != tt.ok {
			t.Errorf("line of %d bytes with its newline: %v", len(line), err)
		}
	}
}

func TestLinesReadError(t *testing.T) {
	broken := errors.New("disk on fire")
	in := newLines(io.MultiReader(strings.NewReader(`{"type":"t"`), iotest.ErrReader(broken)))
	if _, err := in.next(); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func FuzzParseTask(f *testing.F) {
	f.Add([]byte(`{"id":"a","type":"t","delay":"5s","payload":{"a":1}}`))
	f.Add([]byte(`{"type":"t","payload_base64":"AA==","run_at":"2030-01-02T15:04:05Z"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		task, err := parseTask(line)
		var wrong *lineError
		if err != nil && !errors.As(err, &wrong) {
			t.Fatalf("%q: %v ends the file", line, err)
		}
		if err == nil && task.Delay != 0 && !task.RunAt.IsZero() {
			t.Fatalf("%q: both a delay and a time", line)
		}
	})
}
