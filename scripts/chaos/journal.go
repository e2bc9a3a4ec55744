package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// An event is one line of a journal. Journals are what the verdict rests on: each process writes its own, with one write(2) a
// line, so that a SIGKILL loses nothing, and nothing in them comes from the system under test but what a handler was given.
type event struct {
	Kind string `json:"k"`
	At   int64  `json:"at"`             // wall clock in microseconds
	Mono int64  `json:"mono,omitempty"` // since the process began, in microseconds
	PID  int    `json:"pid,omitempty"`
	Task string `json:"task,omitempty"`

	// Of producers: a call, and what came of it.
	Call    int64  `json:"call,omitempty"`
	Op      opKind `json:"op,omitempty"`
	Tx      bool   `json:"tx,omitempty"`
	Due     int64  `json:"due,omitempty"`     // the earliest due time that the call asks for; of a run, what the handler is told
	Version int    `json:"version,omitempty"` // of the payload
	Fate    fate   `json:"fate,omitempty"`
	Outcome string `json:"outcome,omitempty"`
	Answer  string `json:"answer,omitempty"`

	// Of consumers: one execution of a handler.
	Run      int64  `json:"run,omitempty"`
	Delivery int    `json:"delivery,omitempty"`
	Failed   int    `json:"failed,omitempty"`
	Lost     int    `json:"lost,omitempty"`
	Redis    int64  `json:"redis,omitempty"` // the server's clock at the start, 0 when it did not tell
	DB       int64  `json:"db,omitempty"`
	From     int64  `json:"from,omitempty"`
	Delay    int64  `json:"delay,omitempty"`
	Cause    string `json:"cause,omitempty"`

	// Of consumers at their end, of reconcilers after a pass, of the nemesis.
	Count  int64  `json:"count,omitempty"`
	Mended int64  `json:"mended,omitempty"`
	Note   string `json:"note,omitempty"`
}

// Kinds of events.
const (
	evCall = "call" // a producer is about to call
	evRet  = "ret"  // it has an outcome

	evStart      = "start"      // a handler begins
	evEffect     = "effect"     // it has done what cannot be undone
	evCompleting = "completing" // it is about to call CompleteTx
	evCompleted  = "completed"  // with this outcome
	evCut        = "cut"        // its context has ended
	evEnd        = "end"        // it returns this outcome
	evDying      = "dying"      // it kills its own process

	evStall = "stall" // the process did not run from From to At
	evExit  = "exit"  // the process ends; Count is its refused stale reports
	evPass  = "pass"  // a reconciler's slice; Count is its drift

	evFault  = "fault"
	evClock  = "clock" // Redis' clock is Delay ahead
	evCalm   = "calm"  // the faults of a scenario are over
	evKill   = "kill"
	evTerm   = "term"
	evPause  = "pause"
	evResume = "resume"
)

// Outcomes of calls.
const (
	outDone       = "done"
	outRolledBack = "rolled back"
	outDoubt      = "in doubt"
	outRefused    = "refused"
)

// micros is the wall clock. Every process of a run is on one machine.
func micros() int64 { return time.Now().UnixMicro() }

// A journal is appended to by one process.
type journal struct {
	began time.Time
	pid   int
	mu    sync.Mutex
	f     *os.File
}

func openJournal(dir, name string) (*journal, error) {
	f, err := os.OpenFile(filepath.Join(dir, name+".jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &journal{began: time.Now(), pid: os.Getpid(), f: f}, nil
}

// write appends an event. Without its journal a process proves nothing, so a failed write ends it.
func (j *journal) write(e event) {
	if e.At == 0 {
		e.At = micros()
	}
	e.Mono = time.Since(j.began).Microseconds()
	if e.PID == 0 {
		e.PID = j.pid
	}
	line, err := json.Marshal(e)
	if err == nil {
		j.mu.Lock()
		defer j.mu.Unlock()
		_, err = j.f.Write(append(line, '\n'))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos: journal:", err)
		os.Exit(4)
	}
}

func (j *journal) close() { _ = j.f.Close() } // every line is written already

// readJournals returns the events of all journals of a directory, each file's in its order.
func readJournals(dir string) ([]event, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	var all []event
	for _, name := range files {
		some, err := readJournal(name)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func readJournal(name string) ([]event, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var events []event
	var broken error
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if broken != nil {
			return nil, broken // only the last line may be cut
		}
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			broken = fmt.Errorf("%s: %.80s: %w", name, lines.Text(), err)
			continue
		}
		events = append(events, e)
	}
	return events, lines.Err()
}

// logText is the ends of all logs of a directory, for a failed run.
func logText(dir string, most int) string {
	files, _ := filepath.Glob(filepath.Join(dir, "*.log")) // a fixed pattern
	var b strings.Builder
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil || len(text) == 0 {
			continue
		}
		fmt.Fprintf(&b, "--- %s\n%s\n", filepath.Base(name), text[max(0, len(text)-most):])
	}
	return b.String()
}

var errNoTime = errors.New("it did not come to rest in time")
