package console

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/http"
	"slices"
)

// A trail writes down who changes what: what is asked for, before anything is done; the ids of each step, as soon as it is done; and
// how it ended. So what was done before a failure is known, the end of this process among them. Ids, never what tasks carry.
type trail struct {
	log *slog.Logger
	ctx context.Context // of the request, for the log's handler
}

// idsALine bounds lines: collectors of logs cut long ones.
const idsALine = 50

// begin writes down what is asked for.
func (c *Console) begin(r *http.Request, o *order) *trail {
	t := &trail{c.log.With("change", rand.Text()[:8], "user", userOf(r), "peer", r.RemoteAddr, "do", o.Do, "queue", o.Queue), r.Context()}
	const asked = "console: change asked"
	switch {
	case o.All:
		t.log.InfoContext(t.ctx, asked, "all", true, "reason", o.Filter.Reason, "type", o.Filter.Type, "until", o.Filter.Until)
	case o.Do == "move":
		t.log.InfoContext(t.ctx, asked, "ids", shownAll(o.IDs), "at", o.At, "in", o.In)
	default:
		for ids := range slices.Chunk(o.IDs, idsALine) {
			t.log.InfoContext(t.ctx, asked, "ids", shownAll(ids))
		}
	}
	return t
}

// batch writes down what a step has done, what it was refused, and what it may have done or not: no answer came.
func (t *trail) batch(ids []string, errs []error) {
	for len(ids) > 0 {
		var done, refused, unsure []string
		var first error
		n := min(len(ids), idsALine)
		for i, id := range ids[:n] {
			switch {
			case errs[i] == nil:
				done = append(done, id)
				continue
			case whyNot(errs[i]) == "server":
				unsure = append(unsure, id)
			default:
				refused = append(refused, id)
			}
			if first == nil {
				first = errs[i]
			}
		}
		attrs := []slog.Attr{slog.Any("ids", shownAll(done))}
		level := slog.LevelInfo
		if first != nil {
			level = slog.LevelWarn
			attrs = append(attrs, slog.Any("refused", shownAll(refused)), slog.Any("unsure", shownAll(unsure)), slog.Any("error", first))
		}
		t.log.LogAttrs(t.ctx, level, "console: change", attrs...)
		ids, errs = ids[n:], errs[n:]
	}
}

// end writes down how it ended.
func (t *trail) end(o *order, done *outcome) {
	attrs := []slog.Attr{slog.Int("ok", done.ok), slog.Int("failed", sum(done.failed))}
	if o.All {
		attrs = append(attrs, slog.Bool("all_seen", !done.more && done.err == nil))
	}
	level := slog.LevelInfo
	if done.err != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.Any("error", done.err))
	}
	t.log.LogAttrs(t.ctx, level, "console: change ended", attrs...)
}

func shownAll(ids []string) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = shown(id)
	}
	return out
}
