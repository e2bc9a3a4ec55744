package delayq

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// A source is one shard as the poll loop sees it. Only the poll loop uses it, but for what is guarded.
type source struct {
	sh       *shard
	run      *run
	settler  *settler
	register bool // no lease call has been answered yet

	nextAt   time.Time     // when something is known to fall due
	pollAt   time.Time     // when to ask at the latest
	interval time.Duration // between polls: short after work, doubling to MaxPoll while there is none
	version  int64         // of cancellations
	failures int
	touched  bool   // a task was given back since the last lease call was sent; guarded by run.mu
	token    string // of a lease call without an answer: sent again, or what it leased would be lost until its end
	asked    bool
	more     bool // the last reply left tasks that are due

	failedAt  time.Time // when the present row of failures began
	unclaimed []*Lease  // leased in Redis, and the ledger has not answered whether they may run
}

const farAway = 1000 * time.Hour

// poll leases and starts tasks until something ends the run, and says what.
func (r *run) poll(ctx context.Context) (string, error) {
	var lastRound time.Time
	var lastErr error
	answered := false
	turn := 0
	for {
		now := time.Now()
		if ctx.Err() != nil {
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return "deadline", unanswered(answered, lastErr)
			}
			return "cancelled", unanswered(answered, lastErr)
		}
		stopAt := r.deadline.Add(-2 * r.cfg.Margin)
		if !r.deadline.IsZero() && !now.Before(stopAt) {
			return "deadline", unanswered(answered, lastErr)
		}
		if !answered && lastErr != nil && now.Sub(r.began) >= r.cfg.StartTimeout {
			return "error", lastErr
		}
		free, stuck := r.room()
		if stuck >= r.cfg.Concurrency {
			return "error", ErrStuck
		}
		if b := r.backupDue(now); b != nil && free > 0 {
			if err := r.fallBack(b, free); err == nil {
				answered = true
				r.progress()
			} else {
				lastErr = err
			}
			free, _ = r.room()
		}
		chosen, wake := r.choose(now, free, turn)
		// Rounds keep a distance, unless a backlog meets a half-empty worker.
		if earliest := lastRound.Add(r.cfg.MinPoll); len(chosen) > 0 && now.Before(earliest) && (free < (r.cfg.Concurrency+1)/2 || !backlog(chosen)) {
			chosen, wake = nil, earliest
		}
		if len(chosen) == 0 {
			if !r.deadline.IsZero() && stopAt.Before(wake) {
				wake = stopAt
			}
			r.sleep(ctx, wake)
			continue
		}
		turn++
		lastRound = now
		stay, err := r.round(chosen, free)
		if err == nil {
			answered = true
			if free > 0 {
				r.progress()
			}
		} else if lastErr = err; !answered && !mayPass(err) {
			return "error", err // a refusal, such as of a missing right, is the same the next time
		}
		if !stay {
			return "baton", nil
		}
		if r.idle() {
			return "idle", nil
		}
	}
}

func unanswered(answered bool, err error) error {
	if answered {
		return nil
	}
	return err
}

// room is how many tasks may be leased: free slots, none while too many reports wait for Redis.
func (r *run) room() (free, stuck int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	free = r.cfg.Concurrency - r.active
	for _, s := range r.sources {
		free -= len(s.unclaimed)
	}
	if len(r.inflight) >= 2*r.cfg.Concurrency+maxBatch {
		free = 0
	}
	return free, r.stuck
}

// choose picks the sources to ask now, each turn beginning with another, or says when to look again.
func (r *run) choose(now time.Time, free, turn int) (chosen []*source, wake time.Time) {
	wake = now.Add(farAway)
	for i := range r.sources {
		s := r.sources[(turn+i)%len(r.sources)]
		at := s.pollAt
		if free > 0 && s.nextAt.Before(at) && s.failures == 0 {
			at = s.nextAt
		}
		if !at.After(now) {
			chosen = append(chosen, s)
		} else if at.Before(wake) {
			wake = at
		}
	}
	for _, b := range r.backups {
		if at := b.dueAt(); free > 0 && at.Before(wake) {
			wake = at
		}
	}
	return chosen, wake
}

func backlog(chosen []*source) bool {
	return slices.ContainsFunc(chosen, func(s *source) bool { return s.more })
}

func (r *run) sleep(ctx context.Context, until time.Time) {
	t := time.NewTimer(time.Until(until))
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.freed:
	case <-ctx.Done():
	}
}

// round asks the chosen sources, in one pipeline a client, and starts what comes. stay is false when a younger runner has
// taken over; err is set when no source answered.
func (r *run) round(chosen []*source, free int) (stay bool, err error) {
	// Not under Run's context: a call that is cut off may have leased tasks that nobody then knows of.
	most := r.cfg.Lease / 3
	if len(r.backups) > 0 {
		most = min(most, hungRedis)
	}
	claims, claimed := r.claiming()
	chosen, err = r.claimAgain(claims, chosen)
	claimed()
	if len(chosen) == 0 {
		return true, err
	}
	ctx, cancel := r.call(r.base, most, r.cfg.Margin)
	defer cancel()
	calls := make([]*leaseCall, len(chosen))
	for i, s := range chosen {
		share := (free + len(chosen) - i - 1) / (len(chosen) - i)
		share = min(share, maxBatch)
		free -= share
		if s.token == "" {
			s.token = string(randomToken())
		}
		calls[i] = &leaseCall{token: s.token, max: share, lease: r.cfg.Lease, consumer: r.cfg.Consumer, keep: r.cfg.Runners, dues: true}
		if s == r.sources[0] {
			calls[i].group, calls[i].register = r.cfg.Group, s.register
		}
	}
	r.mu.Lock()
	for _, s := range chosen {
		s.touched = false
	}
	r.mu.Unlock()
	sent := time.Now()
	replies := r.pipelined(ctx, chosen, calls)
	stay = true
	answered := false
	claims, claimed = r.claiming()
	defer claimed()
	for i, s := range chosen {
		got, err1 := replies[i].leased, replies[i].err
		if errors.Is(err1, errNoEpoch) || isNoScript(err1) {
			got, err1 = s.sh.lease(ctx, *calls[i])
		}
		r.mu.Lock()
		r.stats.Polls++
		r.mu.Unlock()
		if err1 != nil {
			err = err1
			s.failed(err1)
			continue
		}
		answered = true
		s.answered(got, calls[i], sent)
		stay = stay && got.stay
		s.startAll(claims, got.leases)
	}
	if answered {
		err = nil
	}
	return stay, err
}

type leaseReply struct {
	leased *leased
	err    error
}

// pipelined sends the calls of several sources in one pipeline a client; a single one goes its own way.
func (r *run) pipelined(ctx context.Context, chosen []*source, calls []*leaseCall) []leaseReply {
	replies := make([]leaseReply, len(chosen))
	if len(chosen) == 1 {
		replies[0].leased, replies[0].err = chosen[0].sh.lease(ctx, *calls[0])
		return replies
	}
	byClient := map[redis.UniversalClient][]int{}
	for i, s := range chosen {
		byClient[s.sh.q.rdb] = append(byClient[s.sh.q.rdb], i)
	}
	for rdb, places := range byClient {
		pipe := rdb.Pipeline()
		cmds := make([]*redis.Cmd, len(places))
		for k, i := range places {
			sh := chosen[i].sh
			cmds[k] = sh.command(ctx, "evalsha", sh.q.scripts.lease.sha, calls[i].args(sh.q))
			_ = pipe.Process(ctx, cmds[k]) // queued; Exec reports
		}
		sent := time.Now()
		_, _ = pipe.Exec(ctx) // each command has its own error
		for k, i := range places {
			if err := cmds[k].Err(); err != nil {
				replies[i].err = err
				continue
			}
			replies[i].leased, replies[i].err = chosen[i].sh.leased(cmds[k].Val(), calls[i], sent)
		}
	}
	return replies
}

// answered notes a reply: when to ask again.
func (s *source) answered(got *leased, c *leaseCall, sent time.Time) {
	now := time.Now()
	s.register, s.token = false, ""
	s.failures = 0
	if s.asked && got.version != s.version {
		s.run.beatNow(s)
	}
	s.asked, s.version, s.more = true, got.version, got.more
	cfg := s.run.cfg
	if len(got.leases) > 0 {
		s.interval = min(4*cfg.MinPoll, cfg.MaxPoll)
	} else {
		s.interval = min(max(2*s.interval, cfg.MinPoll), cfg.MaxPoll)
	}
	if c.max == 0 {
		s.interval = cfg.MaxPoll // asked only for the baton and cancellations
	}
	s.pollAt = now.Add(s.interval)
	switch {
	case got.next < 0:
		s.nextAt = now.Add(farAway)
	case got.more:
		s.nextAt = now
	default:
		// The server's now lies between sending and receiving; too early costs a poll, never an early start.
		s.nextAt = sent.Add(now.Sub(sent)/2 + got.next)
	}
	if n := len(got.missing); n > 0 {
		s.run.mu.Lock()
		s.run.stats.Missing += int64(n)
		s.run.mu.Unlock()
		for _, id := range got.missing {
			cfg.Logger.Error("delayq: a task's record is gone from redis; the task is lost here", "queue", s.sh.q.name, "task_id", printable(id))
		}
	}
}

// failed backs off; the first failure of a row is logged.
func (s *source) failed(err error) {
	s.failures++
	if s.failures == 1 {
		s.failedAt = time.Now()
	}
	cfg := s.run.cfg
	wait := min(100*time.Millisecond<<min(s.failures, 6), 5*time.Second)
	s.pollAt = time.Now().Add(wait/2 + rand.N(wait/2+1))
	if s.failures == 1 {
		cfg.Logger.Warn("delayq: cannot lease, will keep trying", "queue", s.sh.q.name, "shard", s.sh.index, "error", err.Error())
	}
}

// idle reports whether nothing runs and nothing is known to fall due within IdleExit.
func (r *run) idle() bool {
	if r.cfg.IdleExit <= 0 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.inflight) > 0 {
		return false
	}
	horizon := time.Now().Add(r.cfg.IdleExit)
	for _, s := range r.sources {
		if !s.asked || s.touched || s.failures > 0 || s.nextAt.Before(horizon) {
			return false
		}
	}
	return true
}
