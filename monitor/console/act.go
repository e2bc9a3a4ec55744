package console

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
)

const (
	mostChosen    = 500
	confirmWithin = 10 * time.Minute
	mostForm      = 1 << 20
)

// An order is a change that an operator asks for.
type order struct {
	Do     string // "replay", "purge", "cancel", "run", "move"
	Queue  string
	IDs    []string
	All    bool // all that the filter shows, instead of IDs
	Filter filter
	At     time.Time     // of "move"
	In     time.Duration // of "move", instead of At
	From   string        // "task" or "dead": where it was asked for
}

// parts are all that a confirmation is for.
func (o *order) parts() []string {
	return append([]string{
		"confirm", o.Do, o.Queue, strconv.FormatBool(o.All), o.Filter.Reason, o.Filter.Type, stamp(o.Filter.Until), stamp(o.At), o.In.String(), o.From,
	}, o.IDs...)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return strconv.FormatInt(t.UnixMilli(), 10)
}

func unstamp(s string) (time.Time, bool) {
	if s == "" {
		return time.Time{}, true
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return time.UnixMilli(n), err == nil
}

// back is where the operator goes after it.
func (o *order) back(gone bool) string {
	to := "/queue/" + segment(o.Queue)
	if o.From == "task" && len(o.IDs) == 1 && !gone {
		return to + "/task/" + segment(o.IDs[0])
	}
	to += "/dead"
	if q := o.Filter.query(); len(q) > 0 {
		to += "?" + q.Encode()
	}
	return to
}

// readOrder reads the form of a change.
func readOrder(queue string, f url.Values) (*order, error) {
	o := &order{Queue: queue, Do: f.Get("do"), From: f.Get("from"), Filter: filter{Reason: f.Get("reason"), Type: f.Get("type")}}
	if do, all := strings.CutSuffix(o.Do, "-all"); all {
		o.Do, o.All = do, true
	}
	o.All = o.All || f.Get("all") == "true"
	for _, part := range f["id"] {
		id, ok := unsegment(part)
		if !ok {
			return nil, errBadForm
		}
		if !slices.Contains(o.IDs, id) {
			o.IDs = append(o.IDs, id)
		}
		if len(o.IDs) > mostChosen {
			return nil, errTooMuch
		}
	}
	until, ok := unstamp(f.Get("until"))
	if !ok {
		return nil, errBadForm
	}
	o.Filter.Until = until
	dead := o.Do == "replay" || o.Do == "purge"
	switch {
	case dead && o.All:
		o.IDs = nil
	case len(o.IDs) == 0:
		return nil, errNothing
	case dead:
	case o.All || len(o.IDs) != 1:
		return nil, errBadForm
	case o.Do == "move":
		return o, o.readDue(f)
	case o.Do != "cancel" && o.Do != "run":
		return nil, errBadForm
	}
	return o, nil
}

// readDue reads the new due time: an instant, or how long from now.
func (o *order) readDue(f url.Values) (err error) {
	at, in := strings.TrimSpace(f.Get("at")), strings.TrimSpace(f.Get("in"))
	switch {
	case (at == "") == (in == ""):
		return errOneTime
	case in != "":
		if o.In, err = time.ParseDuration(strings.ReplaceAll(in, " ", "")); err != nil || o.In < 0 {
			return errBadTime
		}
		return nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00", "2006-01-02T15:04:05", "2006-01-02T15:04"} { // the last two are UTC
		if o.At, err = time.Parse(layout, at); err == nil {
			return nil
		}
	}
	return errBadTime
}

// form is the order as hidden fields of the page that asks whether it is meant.
func (o *order) form() []field {
	fs := []field{{"do", o.Do}, {"from", o.From}, {"reason", o.Filter.Reason}, {"type", o.Filter.Type}, {"until", stamp(o.Filter.Until)}}
	if o.All {
		fs = append(fs, field{"all", "true"})
	}
	if !o.At.IsZero() {
		fs = append(fs, field{"at", o.At.UTC().Format(time.RFC3339Nano)})
	} else if o.Do == "move" {
		fs = append(fs, field{"in", o.In.String()})
	}
	for _, id := range o.IDs {
		fs = append(fs, field{"id", segment(id)})
	}
	return fs
}

type field struct{ Name, Value string }

type confirmData struct {
	Order   *order
	Fields  []field
	Some    []string // the first ids
	Count   int
	AtLeast bool // there are more than were counted
	Back    string
}

// act makes a change: first it asks whether that is meant, and with the answer it does it.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if c.cfg.ReadOnly {
		c.log.Warn("console: refused a change, the console is read-only", "user", userOf(r), "peer", r.RemoteAddr)
		c.fail(w, r, errReadOnly)
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, mostForm)
	if err := r.ParseForm(); err != nil {
		c.fail(w, r, errBadForm)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), workFor+patience)
	defer cancel()
	name, _ := unsegment(r.PathValue("queue"))
	o, err := readOrder(name, r.PostForm)
	if err != nil {
		c.fail(w, r, err)
		return
	}
	q, err := c.opened(ctx, r)
	if r.PostForm.Get("sure") == "" {
		if err != nil {
			c.fail(w, r, err)
			return
		}
		c.ask(ctx, w, r, q, o)
		return
	}
	if err != nil {
		c.audit(r, o, &outcome{do: o.Do, failed: map[string]int{whyNot(err): max(1, len(o.IDs))}, first: o.IDs[:min(len(o.IDs), 5)], err: err})
		c.fail(w, r, err)
		return
	}
	ends, err := strconv.ParseInt(r.PostForm.Get("ends"), 10, 64)
	if err != nil || c.now().Unix() > ends || !c.signed(r.PostForm.Get("sure"), append(o.parts(), userOf(r), r.PostForm.Get("ends"))...) {
		c.fail(w, r, errExpired)
		return
	}
	done := o.run(ctx, q)
	c.audit(r, o, &done)
	http.Redirect(w, r, c.withNotice(o.back(done.gone), &done), http.StatusSeeOther)
}

// ask shows what would be done.
func (c *Console) ask(ctx context.Context, w http.ResponseWriter, r *http.Request, q *delayq.Queue, o *order) {
	d := confirmData{Order: o, Count: len(o.IDs), Some: o.IDs[:min(len(o.IDs), 20)], Back: o.back(false)}
	if o.All {
		// What dies after this page was shown is not meant. Letters are dated by Redis' clock, to the millisecond; this machine's may be off.
		stats, err := q.Stats(ctx)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		o.Filter.Until = stats.Now.Truncate(time.Millisecond).Add(time.Millisecond)
		d.AtLeast = true
		all, err := o.each(ctx, q, lookFor, mostLooked*5, func(ids []string) {
			d.Count += len(ids)
			d.Some = append(d.Some, ids[:min(len(ids), 20-len(d.Some))]...)
		})
		if err != nil {
			c.fail(w, r, err)
			return
		}
		d.AtLeast = !all
		if d.Count == 0 && all {
			c.fail(w, r, errNothing)
			return
		}
	}
	ends := strconv.FormatInt(c.now().Add(confirmWithin).Unix(), 10)
	d.Fields = append(o.form(), field{"ends", ends}, field{"sure", c.sign(append(o.parts(), userOf(r), ends)...)})
	c.show(w, r, http.StatusOK, "confirm", text("confirm."+o.Do+".title"), d)
}

// each walks through the dead letters that the filter shows, and says whether it came to the end.
func (o *order) each(ctx context.Context, q *delayq.Queue, budget time.Duration, most int, fn func(ids []string)) (bool, error) {
	opts := delayq.ListOptions{State: delayq.StateDead, Limit: 250}
	for began, looked := time.Now(), 0; ; {
		page, err := q.List(ctx, opts)
		if err != nil {
			return false, err
		}
		looked += len(page.Tasks)
		var ids []string
		for i := range page.Tasks {
			if o.Filter.match(&page.Tasks[i]) {
				ids = append(ids, page.Tasks[i].ID)
			}
		}
		if len(ids) > 0 {
			fn(ids)
		}
		if page.Next == "" {
			return true, nil
		}
		if looked >= most || time.Since(began) > budget {
			return false, nil
		}
		opts.Cursor = page.Next
	}
}

// The bounds of one change of all that a filter shows.
const (
	workFor  = 20 * time.Second
	mostWork = 50_000
)

// An outcome is what has become of an order.
type outcome struct {
	do     string
	ok     int
	failed map[string]int // by the key of the reason
	first  []string       // ids
	more   bool           // there is more to do: the bounds were met
	gone   bool           // the one task is no more
	err    error
}

// run does it.
func (o *order) run(ctx context.Context, q *delayq.Queue) outcome {
	done := outcome{do: o.Do, failed: map[string]int{}}
	count := func(ids []string, err error) {
		if len(done.first) < 5 {
			done.first = append(done.first, ids[:min(len(ids), 5-len(done.first))]...)
		}
		for _, err := range each(err, len(ids)) {
			if err == nil {
				done.ok++
				continue
			}
			done.failed[whyNot(err)]++
			done.err = errors.Join(done.err, firstOf(done.err, err))
		}
	}
	on := q.Replay
	if o.Do == "purge" {
		on = q.Purge
	}
	switch {
	case o.All:
		whole, err := o.each(ctx, q, workFor, mostWork, func(ids []string) { count(ids, on(ctx, ids...)) })
		done.more = !whole
		if err != nil {
			done.failed[whyNot(err)]++
			done.err = errors.Join(done.err, firstOf(done.err, err))
		}
	case o.Do == "replay", o.Do == "purge":
		count(o.IDs, on(ctx, o.IDs...))
		done.gone = o.Do == "purge" && done.ok > 0
	case o.Do == "cancel":
		got, err := q.Cancel(ctx, o.IDs[0])
		if err == nil && got != delayq.Cancelled && got != delayq.Running {
			err = &refusal{key: "cancel." + strings.ReplaceAll(got.String(), " ", "_")}
		}
		if count(o.IDs, err); got == delayq.Running {
			done.do = "stop"
		}
	case o.Do == "run":
		count(o.IDs, q.RescheduleIn(ctx, o.IDs[0], 0))
	case o.At.IsZero():
		count(o.IDs, q.RescheduleIn(ctx, o.IDs[0], o.In))
	default:
		count(o.IDs, q.Reschedule(ctx, o.IDs[0], o.At))
	}
	return done
}

// each is the error of each item of a call of n.
func each(err error, n int) []error {
	var batch *delayq.BatchError
	if errors.As(err, &batch) && len(batch.Errs) == n {
		return batch.Errs
	}
	return slices.Repeat([]error{err}, n)
}

// firstOf keeps one error of many for the log.
func firstOf(have, err error) error {
	if have != nil {
		return nil
	}
	return err
}

// whyNot is the key of the text that says why a change did not go through.
func whyNot(err error) string {
	var r *refusal
	switch {
	case errors.As(err, &r):
		return r.key
	case errors.Is(err, delayq.ErrNotFound):
		return "not_found"
	case errors.Is(err, delayq.ErrRunning):
		return "running"
	case errors.Is(err, delayq.ErrDead):
		return "dead"
	case errors.Is(err, delayq.ErrFinished):
		return "finished"
	case errors.Is(err, delayq.ErrBusy):
		return "busy"
	case errors.Is(err, delayq.ErrInvalid):
		return "invalid"
	}
	return "server"
}

// audit writes down who has changed what: ids, never what the tasks carry.
func (c *Console) audit(r *http.Request, o *order, done *outcome) {
	ids := make([]string, len(done.first))
	for i, id := range done.first {
		ids[i] = shown(id)
	}
	attrs := []slog.Attr{
		slog.String("user", userOf(r)), slog.String("peer", r.RemoteAddr), slog.String("do", o.Do), slog.String("queue", o.Queue),
		slog.Any("ids", ids), slog.Int("ok", done.ok), slog.Int("failed", sum(done.failed)),
	}
	if o.All {
		attrs = append(attrs, slog.String("reason", o.Filter.Reason), slog.String("type", o.Filter.Type), slog.Bool("all_seen", !done.more))
	}
	if o.Do == "move" {
		attrs = append(attrs, slog.Time("at", o.At), slog.Duration("in", o.In))
	}
	level := slog.LevelInfo
	if done.err != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.Any("error", done.err))
	}
	c.log.LogAttrs(r.Context(), level, "console: change", attrs...)
}

func sum(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}
