package delayq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// AuditOptions tune Audit.
type AuditOptions struct {
	// Progress, if not nil, is told now and then how many entries of how many have been looked at.
	Progress func(done, total int64)
	// Most violations to report; 0 means 1000. The rest is counted.
	Most int
}

// An AuditReport is what Audit found.
type AuditReport struct {
	Checked    int64       `json:"checked"` // entries looked at; an id counts once for each container it is in
	Violations []Violation `json:"violations"`
	Omitted    int64       `json:"omitted,omitempty"` // violations beyond AuditOptions.Most
}

// A Violation is a broken invariant (lua/README.md lists them).
type Violation struct {
	Invariant string `json:"invariant"` // "I1", "I3", "I4", "I5", "I6"
	Shard     int    `json:"shard"`
	ID        string `json:"id,omitempty"`
	Detail    string `json:"detail"`
}

// Audit checks the invariants of a live queue: every id of every container, each atomically, in steps of at most 500. It
// reads everything once, so on a large queue it takes a while and costs the server some; it changes nothing.
func (q *Queue) Audit(ctx context.Context, o AuditOptions) (*AuditReport, error) {
	if o.Most <= 0 {
		o.Most = 1000
	}
	rep := &AuditReport{Violations: []Violation{}}
	stats, err := q.Stats(ctx)
	if err != nil {
		return nil, err
	}
	var total int64
	for _, s := range stats.Shards {
		total += 2*s.Tasks + s.States + s.Errors + s.Revs
	}
	for i, sh := range q.shards {
		a := auditor{sh: sh, rep: rep, o: o, total: total, seen: map[string]bool{}}
		if s := stats.Shards[i]; s.balance != s.Tasks {
			a.breach("I5", "", fmt.Sprintf("counters say %d tasks are open, there are %d records", s.balance, s.Tasks))
		}
		if err := a.run(ctx); err != nil {
			return rep, err
		}
	}
	return rep, nil
}

type auditor struct {
	sh    *shard
	rep   *AuditReport
	o     AuditOptions
	total int64
	seen  map[string]bool // breaches already told
}

func (a *auditor) breach(invariant, id, detail string) {
	if a.seen[id+"\x00"+detail] {
		return
	}
	a.seen[id+"\x00"+detail] = true
	if len(a.rep.Violations) >= a.o.Most {
		a.rep.Omitted++
		return
	}
	a.rep.Violations = append(a.rep.Violations, Violation{invariant, a.sh.index, id, detail})
}

func (a *auditor) run(ctx context.Context) error {
	rdb, keys := a.sh.q.rdb, a.sh.keys
	for i, k := range keys {
		ttl, err := rdb.PTTL(ctx, k).Result()
		if err != nil {
			return a.sh.q.scriptError("audit", err)
		}
		name := k[strings.LastIndex(k, "}:")+2:]
		switch {
		case ttl == -2*time.Nanosecond:
			a.breach("I6", "", "key "+name+" is missing")
		case ttl != -1*time.Nanosecond:
			a.breach("I6", "", "key "+name+" has a time to live")
		}
		if sentinel, err := a.sentinel(ctx, i); err != nil {
			return a.sh.q.scriptError("audit", err)
		} else if !sentinel && ttl != -2*time.Nanosecond {
			a.breach("I6", "", "key "+name+" has no sentinel")
		}
	}
	for _, k := range []int{keyTasks, keyState, keyErrors, keyRevs} {
		if err := a.scan(ctx, func(cursor uint64) *redis.ScanCmd { return hashFields(ctx, rdb, keys[k], cursor) }); err != nil {
			return err
		}
	}
	for _, k := range []int{keyPending, keyProcessing, keyDead} {
		if err := a.scan(ctx, func(cursor uint64) *redis.ScanCmd { return rdb.ZScan(ctx, keys[k], cursor, "", maxBatch) }); err != nil {
			return err
		}
	}
	return nil
}

// sentinel reports whether a container has its empty id.
func (a *auditor) sentinel(ctx context.Context, key int) (bool, error) {
	rdb, k := a.sh.q.rdb, a.sh.keys[key]
	switch key {
	case keyMeta:
		return true, nil // it has none
	case keyPending, keyProcessing, keyDead, keyConsumers:
		err := rdb.ZScore(ctx, k, "").Err()
		if errors.Is(err, redis.Nil) {
			return false, nil
		}
		return true, err
	default:
		return rdb.HExists(ctx, k, "").Result()
	}
}

// hashFields scans a hash with its values: HSCAN NOVALUES is younger than the servers supported.
func hashFields(ctx context.Context, rdb redis.UniversalClient, key string, cursor uint64) *redis.ScanCmd {
	return rdb.HScan(ctx, key, cursor, "", maxBatch/5)
}

// scan walks one container and checks its ids batch by batch.
func (a *auditor) scan(ctx context.Context, next func(cursor uint64) *redis.ScanCmd) error {
	var cursor uint64
	for {
		page, c, err := next(cursor).Result()
		if err != nil {
			return a.sh.q.scriptError("audit", err)
		}
		var ids []string
		for i := 0; i < len(page); i += 2 {
			if page[i] != "" {
				ids = append(ids, page[i])
			}
		}
		for len(ids) > 0 {
			n := min(len(ids), maxBatch)
			if err := a.check(ctx, ids[:n]); err != nil {
				return err
			}
			ids = ids[n:]
		}
		if a.o.Progress != nil {
			a.o.Progress(a.rep.Checked, a.total)
		}
		if cursor = c; cursor == 0 {
			return nil
		}
	}
}

func (a *auditor) check(ctx context.Context, ids []string) error {
	args := []any{len(ids)}
	for _, id := range ids {
		args = append(args, id)
	}
	reply, err := a.sh.run(ctx, a.sh.q.scripts.audit, args, nil)
	if err != nil {
		return err
	}
	list, ok := reply.([]any)
	if !ok {
		return errReply
	}
	a.rep.Checked += int64(len(ids))
	for i := 0; i+1 < len(list); i += 2 {
		at, err := number(list[i])
		if err != nil || at < 1 || at > int64(len(ids)) {
			return errReply
		}
		invariant, detail, _ := strings.Cut(text(list[i+1]), " ")
		a.breach(invariant, ids[at-1], detail)
	}
	return nil
}
