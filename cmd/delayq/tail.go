package main

import (
	"strings"
	"sync"
)

// tail keeps the last max bytes written to it: the end of a handler's stderr says why it failed, its start rarely does.
type tail struct {
	max int

	mu  sync.Mutex // a grandchild may still write while the task is being judged
	buf []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p[max(0, len(p)-t.max):]...)
	if over := len(t.buf) - t.max; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// String is what was kept, as text: a rune cut in half at the front is dropped.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.buf), ""))
}
