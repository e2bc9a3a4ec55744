package delayq

import (
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by SHA-1
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/delayq/toolkit/lua"
	"github.com/redis/go-redis/v9"
)

// Bounds of one script call (lua/README.md says why): Go splits what is larger.
const (
	maxBatch     = 500
	maxCallBytes = 512 << 10
	maxReply     = 1 << 20
)

// schemaVersion changes when stored shapes change in a way that an older package cannot read.
const schemaVersion = "1"

// Codes that scripts answer; lua/README.md has the same table. Never an error: an outcome is data.
const (
	codeOK              = 1
	codeRepeat          = 2
	codeReplaced        = 3
	codeFinished        = 3 // of cancel
	codeCancelled       = 4
	codeCancelledBefore = 5
	codeRunning         = 6
	codeLeaseLost       = -1
	codeUnknown         = -2
	codePending         = -3
	codeProcessing      = -4
	codeDead            = -5
	codeDone            = -6
	codeStop            = -7
	codeNewer           = -8
	codeChanged         = -8 // of quarantine
	codeNoEpoch         = -9
	codeNoQueue         = -10
	codeShards          = -11
	codeSchema          = -12
	codeOlder           = -13
	codeBroken          = -14
	codeMode            = -15
	codeQuarantined     = -16
	codeUnbooked        = -17
)

// A script is one verb's text, named by its hash so that it travels once.
type script struct{ verb, text, sha string }

// scripts holds every verb, with the optional header line (Config.ScriptHeader) prepended.
type scripts struct {
	init, enqueue, lease, extend, ack, retry, release, bury, cancel, reschedule, replay, purge, stats, get, list, audit,
	beat, consumers, put, drop, quarantine, check, mend, nudge script
}

func newScripts(header string) *scripts {
	make1 := func(verb, text string) script {
		if header != "" {
			text = header + "\n" + text
		}
		sum := sha1.Sum([]byte(text)) //nolint:gosec // as above
		return script{verb, text, hex.EncodeToString(sum[:])}
	}
	return &scripts{
		init: make1("init", lua.Init), enqueue: make1("enqueue", lua.Enqueue), lease: make1("lease", lua.Lease),
		extend: make1("extend", lua.Extend), ack: make1("ack", lua.Ack), retry: make1("retry", lua.Retry),
		release: make1("release", lua.Release), bury: make1("bury", lua.Bury), cancel: make1("cancel", lua.Cancel),
		reschedule: make1("reschedule", lua.Reschedule), replay: make1("replay", lua.Replay), purge: make1("purge", lua.Purge),
		stats: make1("stats", lua.Stats), get: make1("get", lua.Get), list: make1("list", lua.List), audit: make1("audit", lua.Audit),
		beat: make1("beat", lua.Beat), consumers: make1("consumers", lua.Consumers),
		put: make1("put", lua.Put), drop: make1("drop", lua.Drop), quarantine: make1("quarantine", lua.Quarantine),
		check: make1("check", lua.Check), mend: make1("mend", lua.Mend), nudge: make1("nudge", lua.Nudge),
	}
}

// onceCmd is a command that go-redis must not resend on its own: run does it, and tells enqueue.lua so.
type onceCmd struct{ *redis.Cmd }

// NoRetry is read by go-redis.
func (onceCmd) NoRetry() bool { return true }

func (sh *shard) command(ctx context.Context, verb, text string, args []any) *redis.Cmd {
	all := make([]any, 0, 3+len(sh.keys)+len(args))
	all = append(all, verb, text, len(sh.keys))
	for _, k := range sh.keys {
		all = append(all, k)
	}
	return redis.NewCmd(ctx, append(all, args...)...)
}

// Waits before the second, third and fourth send of a call.
var resendAfter = []time.Duration{20 * time.Millisecond, 80 * time.Millisecond, 320 * time.Millisecond}

// run runs a script on a shard and resends it while the failure is one that may pass. All scripts are safe to run twice.
// resent, if not nil, is called before a resend of a call that may have been executed.
func (sh *shard) run(ctx context.Context, s script, args []any, resent func()) (any, error) {
	for try := 0; ; try++ {
		cmd := onceCmd{sh.command(ctx, "evalsha", s.sha, args)}
		err := sh.q.rdb.Process(ctx, cmd)
		if isNoScript(err) {
			cmd = onceCmd{sh.command(ctx, "eval", s.text, args)}
			err = sh.q.rdb.Process(ctx, cmd)
		}
		if err == nil {
			return cmd.Val(), nil
		}
		if try == len(resendAfter) || !mayPass(err) || ctx.Err() != nil {
			return nil, sh.q.scriptError(s.verb, err)
		}
		if resent != nil && mayHaveRun(err) {
			resent()
		}
		wait := resendAfter[try]
		wait += rand.N(wait / 2)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, sh.q.scriptError(s.verb, err)
		}
	}
}

func isNoScript(err error) bool { return err != nil && strings.Contains(err.Error(), "NOSCRIPT") }

// Answers by which a server says that it did nothing and may do it later. Proxies put ERR in front of some.
var passing = []string{"LOADING", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "BUSY ", "max number of clients", "UNBLOCKED", "non local key"}

// mayPass reports whether sending again can help.
func mayPass(err error) bool {
	var reply redis.Error
	if errors.As(err, &reply) {
		for _, p := range passing {
			if strings.Contains(reply.Error(), p) {
				return true
			}
		}
		return false
	}
	return !errors.Is(err, redis.ErrClosed)
}

// mayHaveRun reports whether the call can have been executed although it failed.
func mayHaveRun(err error) bool {
	var reply redis.Error
	return !errors.As(err, &reply) && !isDial(err) && !errors.Is(err, redis.ErrPoolTimeout) && !errors.Is(err, redis.ErrClosed)
}

func isDial(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// scriptError adds the queue and the verb, and makes a full Redis a kind of its own.
func (q *Queue) scriptError(verb string, err error) error {
	var reply redis.Error
	if errors.As(err, &reply) && strings.Contains(reply.Error(), "OOM ") {
		return fmt.Errorf("delayq: %s %s: %w: %w", verb, q.name, ErrFull, err)
	}
	return fmt.Errorf("delayq: %s %s: %w", verb, q.name, err)
}

// batch runs a script over n items and answers their codes. again is the code by which the script answers an item that it
// has done before: after a resend that may have been this call's own first send, and counts as done.
func (sh *shard) batch(ctx context.Context, s script, args []any, n, again int) ([]int, error) {
	resent := false
	reply, err := sh.run(ctx, s, args, func() { resent = true })
	if err != nil {
		return nil, err
	}
	codes, err := exceptions(reply, n)
	for i, code := range codes {
		if resent && code == again {
			codes[i] = codeOK
		}
	}
	return codes, err
}

// exceptions unpacks {ok, i, code, ...}: the code of each of n items.
func exceptions(reply any, n int) ([]int, error) {
	list, ok := reply.([]any)
	if !ok || len(list) == 0 {
		return nil, errReply
	}
	first, err := number(list[0])
	if err != nil {
		return nil, err
	}
	switch first {
	case codeNoEpoch:
		return nil, errNoEpoch
	case codeMode:
		return nil, ErrLedger
	}
	codes := make([]int, n)
	for i := range codes {
		codes[i] = codeOK
	}
	for i := 1; i+1 < len(list); i += 2 {
		at, err1 := number(list[i])
		code, err2 := number(list[i+1])
		if err1 != nil || err2 != nil || at < 1 || at > int64(n) {
			return nil, errReply
		}
		codes[at-1] = int(code)
	}
	return codes, nil
}

var (
	errReply = errors.New("delayq: unexpected reply of a script")
	// errNoEpoch: the shard is not there (any more). Redis mode makes it again, see shard.withEpoch.
	errNoEpoch = errors.New("delayq: shard has no epoch")
)

func number(v any) (int64, error) {
	n, ok := v.(int64)
	if !ok {
		return 0, errReply
	}
	return n, nil
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

// ms is d in whole milliseconds, rounded up: a delay is never cut short.
func ms(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return int64((d-1)/time.Millisecond) + 1
}

// unixMS is t in whole milliseconds, rounded up: a task is never early.
func unixMS(t time.Time) int64 {
	n := t.UnixMilli()
	if t.Nanosecond()%int(time.Millisecond) != 0 {
		n++
	}
	return n
}

func bit(on bool) string {
	if on {
		return "1"
	}
	return "0"
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
