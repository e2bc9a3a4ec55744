package console

import (
	"context"
	"errors"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// A breaker lets Redis go away when something has come to pass.
type breaker struct {
	redis.Hook
	on     atomic.Bool
	broken func() bool
}

func (b *breaker) DialHook(next redis.DialHook) redis.DialHook { return next }

func (b *breaker) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (b *breaker) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if b.on.Load() && b.broken() {
			return errors.New("connection lost")
		}
		return next(ctx, cmd)
	}
}

// logged are the ids of an attribute of the audit's lines, and the most of them on a line.
func (r *rig) logged(msg, attr string) (all []string, most int) {
	r.Helper()
	for line := range strings.Lines(r.log.String()) {
		found := regexp.MustCompile(` ` + attr + `="?\[([^\]]*)\]`).FindStringSubmatch(line)
		if !strings.Contains(line, `msg="`+msg+`"`) || found == nil {
			continue
		}
		ids := strings.Fields(found[1])
		all, most = append(all, ids...), max(most, len(ids))
	}
	slices.Sort(all)
	return all, most
}

// What was done before Redis went away is in the audit, with what was wanted before that.
func TestAuditOfWhatWasDoneInPart(t *testing.T) {
	t.Parallel()
	for name, form := range map[string]url.Values{
		"all":    {"do": {"purge-all"}, "from": {"dead"}, "type": {"t"}, "reason": {"permanent"}},
		"chosen": {"do": {"purge"}, "from": {"dead"}, "id": ids("x", 400)},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{})
			q := r.queue("orders", delayq.Config{})
			r.kill(q, "t", ids("x", 400)...)
			sure := r.confirmed("/queue/orders/act", form)
			if strings.Contains(r.log.String(), "console: change") {
				t.Error("a question is in the audit")
			}
			cut := &breaker{broken: func() bool { return strings.Contains(r.log.String(), `msg="console: change"`) }}
			r.rdb.AddHook(cut)
			cut.on.Store(true)
			r.ask("POST", "/queue/orders/act", nil, sure)
			cut.on.Store(false)
			var gone, left []string
			for _, id := range ids("x", 400) {
				if r.state(q, id) == "" {
					gone = append(gone, id)
				} else {
					left = append(left, id)
				}
			}
			done, most := r.logged("console: change", "ids")
			if len(gone) == 0 || len(left) == 0 || !slices.Equal(done, gone) || most > idsALine {
				t.Errorf("%d are gone, %d are left, %d are in the audit, %d on a line", len(gone), len(left), len(done), most)
			}
			wanted, most := r.logged("console: change asked", "ids")
			unsure, _ := r.logged("console: change", "unsure")
			if name == "chosen" && (!slices.Equal(wanted, ids("x", 400)) || !slices.Equal(unsure, left) || most > idsALine) {
				t.Errorf("%d were asked for, %d on a line; %d are unsure", len(wanted), most, len(unsure))
			}
			log := r.log.String()
			asked, first := strings.Index(log, `msg="console: change asked"`), strings.Index(log, `msg="console: change"`)
			if asked < 0 || asked > first || !strings.Contains(log[first:], `msg="console: change ended"`) {
				t.Errorf("asked at %d, done at %d:\n%s", asked, first, log)
			}
			if name == "all" {
				r.wantLog("user=local", "all=true reason=permanent type=t until=20", "all_seen=false")
			}
			if strings.Contains(log, "window.pwned") {
				t.Error("a payload or an error of a handler is in the log")
			}
		})
	}
}

// A step that was refused for some says for which.
func TestAuditOfRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one", "two")
	sure := r.confirmed("/queue/orders/act", url.Values{"do": {"replay"}, "from": {"dead"}, "id": {"one", "two"}})
	r.ok(q.Purge(t.Context(), "two"))
	r.post("/queue/orders/act", sure, 200)
	r.wantLog(`queue=orders ids=[one] refused=[two] unsure=[]`, "ok=1 failed=1")
}
