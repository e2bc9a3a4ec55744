package delayq

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A worker tells each of its queues how it is every beatEvery, in beatLimit, and does not insist: the next beat tells more.
const (
	beatEvery = 10 * time.Second
	beatLimit = 2 * time.Second

	lastWordLimit = 500 * time.Millisecond
)

// Bounds of what a worker says of itself.
const (
	maxBeat  = 2048 // bytes, beat.lua refuses more
	maxTypes = 100
)

// beatVersion is raised when the meaning of a field changes; a new field is none such, since readers skip what they do not know.
const beatVersion = 1

// A beat is what a worker says of itself. Instants are told as how long ago they were, so that no clock but Redis' enters.
type beat struct {
	Version     int      `json:"v"`
	Started     int64    `json:"s"` // ms ago
	Progress    int64    `json:"p"` // ms ago
	Running     int      `json:"r"`
	Concurrency int      `json:"c"`
	Stuck       int      `json:"k,omitempty"`
	OldestRun   int64    `json:"o,omitempty"` // ms
	Skew        int64    `json:"w,omitempty"` // us
	Types       []string `json:"t,omitempty"`
	TypesCut    int      `json:"x,omitempty"`
}

// encode fits the beat into maxBeat, leaving out types.
func (b beat) encode() string {
	all := len(b.Types)
	b.Types = b.Types[:min(all, maxTypes)]
	for {
		b.TypesCut = all - len(b.Types)
		text, err := json.Marshal(b)
		if err == nil && len(text) <= maxBeat || len(b.Types) == 0 {
			return string(text)
		}
		b.Types = b.Types[:len(b.Types)*9/10]
	}
}

// readBeat fills in what beat.lua has stored: the time of the beat and what the worker said. What cannot be read stays zero.
func (c *Consumer) readBeat(stored string) {
	stamp, said, _ := strings.Cut(stored, " ")
	us, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil {
		return
	}
	c.Beat = time.UnixMicro(us)
	var b beat
	if json.Unmarshal([]byte(said), &b) != nil || b.Version < 1 {
		return
	}
	ago := func(n int64) time.Time { return c.Beat.Add(-time.Duration(n) * time.Millisecond) }
	c.Started, c.Progress = ago(b.Started), ago(b.Progress)
	c.Running, c.Concurrency, c.Stuck = b.Running, b.Concurrency, b.Stuck
	c.OldestRun, c.Skew = time.Duration(b.OldestRun)*time.Millisecond, time.Duration(b.Skew)*time.Microsecond
	c.Types, c.TypesCut = b.Types, b.TypesCut
}

// beatReply checks the head of an answer of beat.lua and consumers.lua.
func beatReply(reply any) ([]any, error) {
	f, ok := reply.([]any)
	if !ok || len(f) < 2 {
		return nil, errReply
	}
	if f[0] == int64(codeNoEpoch) {
		return nil, errNoEpoch
	}
	return f, nil
}

// progress notes that the worker gets on: see Consumer.Progress.
func (r *run) progress() { r.moved.Store(int64(time.Since(r.began))) }

// beats tells one queue how the worker is, until ctx ends, and then that it has gone. Nobody waits for it meanwhile, and nobody
// hears of a call that failed: the age of the last beat says it all. A shard that Redis has lost is for the lease calls to make again.
func (r *run) beats(ctx context.Context, q *Queue) {
	ticks := time.NewTicker(beatEvery)
	defer ticks.Stop()
	var skew time.Duration
	for {
		// Not cut off by ctx: a beat that comes after the last word would stay for an hour.
		if s, ok := r.tell(q, r.beat1(q, skew)); ok {
			skew = s
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
			r.tell(q, "")
			return
		}
	}
}

// tellAll begins to tell all queues. end begins the last word to each, in the background; the function that it answers waits for
// that, but not for long on a Redis that does not answer.
func (r *run) tellAll(queues []*Queue) (end func() (wait func())) {
	ctx, stop := context.WithCancel(r.base)
	told, cut := context.WithCancel(r.base)
	r.told = told
	var all sync.WaitGroup
	for i, q := range queues {
		if !slices.Contains(queues[:i], q) {
			all.Go(func() { r.beats(ctx, q) })
		}
	}
	return func() func() {
		stop()
		until := time.Now().Add(lastWordLimit)
		return func() {
			defer cut()
			waitUntil(&all, until, cut)
		}
	}
}

// tell sends one beat and compares the clocks, unless the call took so long that it would say little.
func (r *run) tell(q *Queue, said string) (skew time.Duration, ok bool) {
	ctx, cancel := r.call(r.told, beatLimit, r.cfg.Margin/16)
	defer cancel()
	sh, sc := q.shards[0], q.scripts.beat
	args := []any{q.clock(), r.cfg.Consumer, said}
	var cmd onceCmd
	var took time.Duration
	var sent time.Time
	send := func(verb, text string) error {
		cmd = onceCmd{sh.command(ctx, verb, text, args)}
		sent = time.Now()
		err := q.rdb.Process(ctx, cmd)
		took = time.Since(sent)
		return err
	}
	err := send("evalsha", sc.sha)
	if err != nil && mayHaveRun(err) && ctx.Err() == nil { // a connection that broke while it was not used, as in a frozen function
		err = send("evalsha", sc.sha)
	}
	if isNoScript(err) {
		err = send("eval", sc.text)
	}
	if err != nil || took > time.Second {
		return 0, false
	}
	f, err := beatReply(cmd.Val())
	if err != nil {
		return 0, false
	}
	us, err := number(f[1])
	if err != nil {
		return 0, false
	}
	return sent.Add(took / 2).Sub(time.UnixMicro(us)), true
}

// beat1 is what the worker says to one queue.
func (r *run) beat1(q *Queue, skew time.Duration) string {
	now := time.Now()
	b := beat{
		Version: beatVersion, Started: now.Sub(r.began).Milliseconds(),
		Progress:    (now.Sub(r.began) - time.Duration(r.moved.Load())).Milliseconds(),
		Concurrency: r.cfg.Concurrency, Skew: skew.Microseconds(), Types: r.names,
	}
	r.mu.Lock()
	b.Running, b.Stuck = r.active, r.stuck
	for t := range r.inflight {
		if t.phase == phaseRunning && t.src.sh.q == q {
			b.OldestRun = max(b.OldestRun, now.Sub(t.started).Milliseconds())
		}
	}
	r.mu.Unlock()
	return b.encode()
}

// types are the names that a Mux has handlers for.
func (m *Mux) types() []string { return slices.Sorted(maps.Keys(m.routes)) }
