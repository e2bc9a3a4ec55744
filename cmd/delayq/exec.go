package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// What a handler's exit status means, beside 0: sysexits.h has names for two, and timeout(1) has made the third usual.
const (
	exTempFail = 75
	exDataErr  = 65
	exTimedOut = 124
)

// lastErrorBytes is what the queue keeps of an error, from its start; of a handler's stderr the end says more.
const lastErrorBytes = 1024

// process handles each task by running one process: payload on stdin, the rest in DELAYQ_* variables.
type process struct {
	path   string
	args   []string
	grace  time.Duration // between TERM and KILL
	stdout io.Writer
	stderr io.Writer

	mu      sync.Mutex
	leaders map[int]struct{} // process groups that run
}

// killAll ends everything at once. A group of its own does not die with us.
func (p *process) killAll() {
	p.mu.Lock() // and keeps it: nothing may start any more
	for leader := range p.leaders {
		killGroup(leader)
	}
}

func (p *process) start(cmd *exec.Cmd) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	if p.leaders == nil {
		p.leaders = map[int]struct{}{}
	}
	p.leaders[cmd.Process.Pid] = struct{}{}
	return nil
}

func (p *process) ended(leader int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.leaders, leader)
}

// HandleTask implements delayq.Handler.
func (p *process) HandleTask(ctx context.Context, t *delayq.Task) error {
	env, err := taskEnv(t)
	if err != nil {
		return delayq.Permanent(err)
	}
	end := p.run(ctx, t.Payload, env)
	switch {
	case errors.Is(end.cause, delayq.ErrTimeout):
		return delayq.Timeout(end)
	case end.cause != nil:
		return end.cause // cancelled, lease lost or stopping: the worker knows what to do about each
	case end.startErr != nil:
		return end.startErr
	case end.code == 0:
		return nil
	case end.code == exDataErr:
		return delayq.Permanent(end)
	case end.code == exTimedOut:
		return delayq.Timeout(end)
	}
	return end
}

// taskEnv is the task as environment variables.
func taskEnv(t *delayq.Task) ([]string, error) {
	env := []string{
		"DELAYQ_TASK_ID=" + t.ID,
		"DELAYQ_TASK_TYPE=" + t.Type,
		"DELAYQ_KEY=" + t.Key,
		"DELAYQ_QUEUE=" + t.Queue,
		"DELAYQ_ATTEMPT=" + strconv.Itoa(t.Attempt),
		"DELAYQ_DUE=" + t.Due.UTC().Format(time.RFC3339Nano),
	}
	for _, v := range env {
		if name, _, _ := strings.Cut(v, "="); strings.ContainsRune(v, 0) {
			return nil, fmt.Errorf("%s holds a NUL byte, which no environment variable can carry", name)
		}
	}
	return env, nil
}

// ending is how a process came to its end. It is an error that says so, with the last of the process's stderr.
type ending struct {
	code     int
	signal   string
	stderr   string
	startErr error
	cause    error // why we ended it; its exit status says nothing then
}

func (e *ending) Error() string {
	what := fmt.Sprintf("exit status %d", e.code)
	if e.signal != "" {
		what = "ended by signal: " + e.signal
	}
	if e.stderr == "" {
		return what
	}
	what += ": "
	over := max(0, len(what)+len(e.stderr)-lastErrorBytes)
	return what + strings.ToValidUTF8(e.stderr[over:], "")
}

// run starts the process and waits for it. When ctx ends first, the whole process group gets TERM, and KILL after the
// grace. What a process leaves behind in its group is killed too, so that handlers cannot pile up.
func (p *process) run(ctx context.Context, stdin []byte, env []string) *ending {
	stderr := &tail{max: lastErrorBytes}
	cmd := exec.CommandContext(ctx, p.path, p.args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Stdout = p.stdout
	cmd.Stderr = io.MultiWriter(p.stderr, stderr)
	ownGroup(cmd)

	var cause error
	var killAt time.Time
	cmd.Cancel = func() error {
		cause = context.Cause(ctx)
		killAt = time.Now().Add(p.grace)
		return termGroup(cmd.Process.Pid)
	}
	// Kills a leader that ignores TERM, and stops waiting for a pipe that a grandchild keeps open.
	cmd.WaitDelay = p.grace

	if err := p.start(cmd); err != nil {
		if ctx.Err() != nil {
			return &ending{cause: context.Cause(ctx)}
		}
		return &ending{startErr: fmt.Errorf("start handler: %w", err)}
	}
	_ = cmd.Wait() // its error repeats what ProcessState says
	for groupAlive(cmd.Process.Pid) && time.Now().Before(killAt) {
		time.Sleep(10 * time.Millisecond) // children that clean up after TERM have the rest of the grace
	}
	killGroup(cmd.Process.Pid)
	p.ended(cmd.Process.Pid)
	return &ending{code: cmd.ProcessState.ExitCode(), signal: endedBy(cmd), stderr: stderr.String(), cause: cause}
}
