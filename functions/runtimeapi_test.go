package functions

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// An environment is one bootstrap process and the part of Lambda's Runtime API it talks to. It
// gives what the emulator cannot: several processes at once, deadlines under a second, errors and
// answers told apart, freezes, and answers that get lost.
type environment struct {
	t       *testing.T
	cmd     *exec.Cmd
	exited  chan struct{}
	log     syncBuffer
	journal string

	events  chan event
	answers chan answer
	lose    chan struct{} // holds one token for each answer to lose
	n       int
}

type event struct {
	id, body string
	deadline time.Time
}

// An answer is what one invocation came to.
type answer struct {
	Summary        // of a worker
	raw     []byte // the whole, of any function
	id      string
	failure string // the error, if it was reported as one
	lost    bool   // the function's answer did not get through
}

// newEnvironment starts a bootstrap with these variables, on top of what every function has.
func newEnvironment(t *testing.T, bootstrap string, vars ...string) *environment {
	t.Helper()
	e := &environment{
		t: t, exited: make(chan struct{}), journal: filepath.Join(t.TempDir(), "journal"),
		events: make(chan event), answers: make(chan answer, 1), lose: make(chan struct{}, 1),
	}
	api := httptest.NewServer(e)
	e.cmd = exec.Command(bootstrap)
	e.cmd.Env = append([]string{"AWS_LAMBDA_RUNTIME_API=" + api.Listener.Addr().String(), "JOURNAL=" + e.journal}, vars...)
	e.cmd.Stdout, e.cmd.Stderr = &e.log, &e.log
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = e.cmd.Wait(); close(e.exited) }()
	t.Cleanup(func() {
		e.signal(syscall.SIGKILL)
		<-e.exited
		api.CloseClientConnections()
		api.Close()
		if t.Failed() {
			t.Logf("log of process %d:\n%s", e.cmd.Process.Pid, e.log.String())
		}
	})
	return e
}

func (e *environment) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/2018-06-01/runtime/"), "/")
	if path[len(path)-1] == "next" {
		select {
		case ev := <-e.events:
			w.Header().Set("Lambda-Runtime-Aws-Request-Id", ev.id)
			w.Header().Set("Lambda-Runtime-Deadline-Ms", fmt.Sprint(ev.deadline.UnixMilli()))
			w.Header().Set("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:us-east-1:1:function:worker")
			_, _ = io.WriteString(w, ev.body)
		case <-r.Context().Done():
		}
		return
	}
	body, _ := io.ReadAll(r.Body)
	a := answer{id: path[1]}
	select {
	case <-e.lose:
		a.lost = true
		e.answers <- a
		panic(http.ErrAbortHandler) // the connection breaks before a status is sent
	default:
	}
	var err error
	if path[2] == "response" {
		a.raw = body
		err = json.Unmarshal(body, &a.Summary)
		var other *json.UnmarshalTypeError
		if errors.As(err, &other) { // another function's
			err = nil
		}
	} else {
		var failure struct{ ErrorMessage string }
		err = json.Unmarshal(body, &failure)
		a.failure = failure.ErrorMessage
	}
	if err != nil {
		e.t.Errorf("%s: %v: %s", r.URL.Path, err, body)
	}
	w.WriteHeader(http.StatusAccepted)
	e.answers <- a
}

// start hands the process a tick that has budget to live, and does not wait for the answer.
func (e *environment) start(budget time.Duration) event {
	e.t.Helper()
	return e.startWith(`{}`, budget)
}

// startWith is start with another event.
func (e *environment) startWith(body string, budget time.Duration) event {
	e.t.Helper()
	e.n++
	ev := event{id: fmt.Sprintf("%d-%d", e.cmd.Process.Pid, e.n), body: body, deadline: time.Now().Add(budget)}
	select {
	case e.events <- ev:
	case <-e.exited:
		e.t.Fatal("the process has ended")
	case <-time.After(patience):
		e.t.Fatal("the process does not ask for an event")
	}
	return ev
}

// answer waits for the answer to the event that was started.
func (e *environment) answer() answer {
	e.t.Helper()
	select {
	case a := <-e.answers:
		return a
	case <-e.exited:
		e.t.Fatal("the process has ended without an answer")
	case <-time.After(patience):
		e.t.Fatal("no answer")
	}
	return answer{}
}

// invoke is start and answer, for an invocation that should succeed.
func (e *environment) invoke(budget time.Duration) answer {
	e.t.Helper()
	ev := e.start(budget)
	a := e.answer()
	if a.failure != "" {
		e.t.Fatalf("the invocation failed: %s", a.failure)
	}
	if a.id != ev.id || a.RequestID != ev.id {
		e.t.Errorf("answered %q as %q, asked %q", a.id, a.RequestID, ev.id)
	}
	return a
}

func (e *environment) signal(s syscall.Signal) { _ = e.cmd.Process.Signal(s) }

// A line is an entry of the journal.
type line struct {
	Event, ID string
	PID       int
	LateMS    int64 `json:"late_ms"`
}

// events reads the journal: what the handlers of this process did, so far.
func (e *environment) lines(event string) []line {
	e.t.Helper()
	file, err := os.Open(e.journal)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		e.t.Fatal(err)
	}
	defer file.Close()
	var lines []line
	for s := bufio.NewScanner(file); s.Scan(); {
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			break // its last line is being written
		}
		if l.Event == event {
			lines = append(lines, l)
		}
	}
	return lines
}

// patience is how long tests wait for what must happen: much longer than it takes on a slow day.
const patience = 60 * time.Second

// eventually waits until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %s in vain: %s", patience, what)
		}
	}
}

type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// The programs under test are built as scripts/build-functions builds them, once a test binary.
var (
	buildDir      string
	workerBin     = sync.OnceValues(func() (string, error) { return build("worker") })
	reconcilerBin = sync.OnceValues(func() (string, error) { return build("reconciler") })
	monitorBin    = sync.OnceValues(func() (string, error) { return build("monitor") })
	testworker    = sync.OnceValues(func() (string, error) { return build("internal/testworker") })
)

func build(name string) (string, error) {
	bin := filepath.Join(buildDir, filepath.Base(name), "bootstrap")
	cmd := exec.Command("go", "build", "-tags", "lambda.norpc", "-trimpath", "-ldflags", "-s -w", "-o", bin, "./"+name)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", name, err, out)
	}
	return bin, nil
}

func program(t *testing.T, bin func() (string, error)) string {
	t.Helper()
	path, err := bin()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
