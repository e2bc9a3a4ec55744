//go:build unix

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// shell is a handler that runs a shell script.
func shell(script string, grace time.Duration) *process {
	return &process{path: "/bin/sh", args: []string{"-c", script}, grace: grace, stdout: io.Discard, stderr: io.Discard}
}

var sample = &delayq.Task{ID: "a:b", Type: "t", Key: "k", Queue: "orders", Attempt: 3, Payload: []byte("in\x00put"), Due: time.UnixMilli(1893596645123)}

func TestProcessGetsTheTask(t *testing.T) {
	var out strings.Builder
	p := shell(`cat; echo "|$DELAYQ_TASK_ID|$DELAYQ_TASK_TYPE|$DELAYQ_KEY|$DELAYQ_QUEUE|$DELAYQ_ATTEMPT|$DELAYQ_DUE"`, time.Minute)
	p.stdout = &out
	if err := p.HandleTask(t.Context(), sample); err != nil {
		t.Fatal(err)
	}
	if want := "in\x00put|a:b|t|k|orders|3|2030-01-02T15:04:05.123Z\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestProcessMayLeaveItsInputUnread(t *testing.T) {
	task := *sample
	task.Payload = make([]byte, 256<<10)
	if err := shell("exit 0", time.Minute).HandleTask(t.Context(), &task); err != nil {
		t.Error(err)
	}
}

func TestTaskEnvRefusesNUL(t *testing.T) {
	task := *sample
	task.ID = "a\x00b"
	if _, err := taskEnv(&task); err == nil || !strings.Contains(err.Error(), "DELAYQ_TASK_ID") {
		t.Errorf("got %v", err)
	}
}

func TestProcessExitStatus(t *testing.T) {
	tests := []struct {
		name, script string
		code         int
		message      string
	}{
		{"done", "exit 0", 0, "exit status 0"},
		{"again later", "echo busy >&2; exit 75", 75, "exit status 75: busy"},
		{"never again", "echo bad order >&2; exit 65", 65, "exit status 65: bad order"},
		{"any other", "exit 3", 3, "exit status 3"},
		{"a signal", "kill -SEGV $$", -1, "ended by signal: segmentation fault"},
		{"the end of stderr alone", "head -c 5000 /dev/zero | tr '\\0' a >&2; echo end >&2; exit 1", 1, "exit status 1: " + strings.Repeat("a", lastErrorBytes-len("exit status 1: end")) + "end"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			end := shell(tt.script, time.Minute).run(t.Context(), nil, nil)
			if end.startErr != nil || end.cause != nil || end.code != tt.code || end.Error() != tt.message {
				t.Errorf("got %+v: %q", end, end.Error())
			}
		})
	}
}

func TestProcessThatCannotStartIsTriedAgain(t *testing.T) {
	p := &process{path: filepath.Join(t.TempDir(), "gone"), grace: time.Minute, stdout: io.Discard, stderr: io.Discard}
	if err := p.HandleTask(t.Context(), sample); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// A handler and its child both ignore TERM; KILL reaches both.
func TestProcessTimeoutEndsTheGroup(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	script := `trap "" TERM; sleep 600 & echo $! $$ > "` + pids + `.tmp" && mv "` + pids + `.tmp" "` + pids + `"; while :; do wait; done`
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		awaitFile(pids)
		cancel(delayq.ErrTimeout)
	}()
	err := shell(script, 50*time.Millisecond).HandleTask(ctx, sample)
	if !errors.Is(err, delayq.ErrTimeout) {
		t.Errorf("got %v, want a timeout", err)
	}
	assertGone(t, pids)
}

// The leader obeys TERM, its child does not and holds the pipe open.
func TestProcessTimeoutKillsAChildThatStays(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	script := `sh -c 'trap "" TERM; echo $$ > "` + pids + `.tmp" && mv "` + pids + `.tmp" "` + pids + `"; while :; do sleep 1; done' & wait`
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		awaitFile(pids)
		cancel(delayq.ErrTimeout)
	}()
	if err := shell(script, 50*time.Millisecond).HandleTask(ctx, sample); !errors.Is(err, delayq.ErrTimeout) {
		t.Errorf("got %v, want a timeout", err)
	}
	assertGone(t, pids)
}

// A process that obeys TERM, even with status 0, has not done its work.
func TestProcessEndedByTimeoutIsNotDone(t *testing.T) {
	ready := filepath.Join(t.TempDir(), "ready")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		awaitFile(ready)
		cancel(delayq.ErrTimeout)
	}()
	script := `trap "exit 0" TERM; : > "` + ready + `"; while :; do sleep 0.01; done`
	if err := shell(script, time.Minute).HandleTask(ctx, sample); !errors.Is(err, delayq.ErrTimeout) {
		t.Errorf("got %v, want a timeout", err)
	}
}

func TestProcessEndedForAnotherReasonSaysIt(t *testing.T) {
	for _, cause := range []error{delayq.ErrCancelled, delayq.ErrLeaseLost, delayq.ErrStopping} {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
		if err := shell("exec sleep 600", time.Minute).HandleTask(ctx, sample); !errors.Is(err, cause) || errors.Is(err, delayq.ErrTimeout) {
			t.Errorf("got %v, want %v", err, cause)
		}
	}
}

// A grandchild that keeps stderr open must not hang the worker, nor outlive the task.
func TestProcessLeavesNothingBehind(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	if err := shell(`sleep 600 & echo $! > "`+pids+`"; exit 0`, 50*time.Millisecond).HandleTask(t.Context(), sample); err != nil {
		t.Errorf("got %v, want done", err)
	}
	assertGone(t, pids)
}

func TestProcessKillAll(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	p := shell(`trap "" TERM; sleep 600 & echo $! $$ > "`+pids+`.tmp" && mv "`+pids+`.tmp" "`+pids+`"; while :; do wait; done`, time.Minute)
	go func() { _ = p.HandleTask(context.Background(), sample) }() // it never comes back: killAll is the last thing a process does
	awaitFile(pids)
	p.killAll()
	assertGone(t, pids)
}

func awaitFile(name string) {
	for {
		if _, err := os.Stat(name); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// assertGone waits for the processes that the file lists to be gone; a zombie that nobody has reaped yet is.
func assertGone(t *testing.T, pids string) {
	t.Helper()
	b, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		for running(pid) {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func running(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err == nil {
		_, rest, _ := strings.Cut(string(stat), ") ")
		return !strings.HasPrefix(rest, "Z")
	}
	return syscall.Kill(pid, 0) == nil // no /proc: not Linux
}
