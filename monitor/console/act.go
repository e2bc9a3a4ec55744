package console

import (
	"cmp"
	"context"
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
	if err == nil && r.PostForm.Get("sure") == "" {
		c.ask(ctx, w, r, q, o)
		return
	}
	if !c.meant(r, o) {
		c.fail(w, r, cmp.Or(err, error(errExpired)))
		return
	}
	t := c.begin(r, o)
	done := outcome{do: o.Do}
	if err != nil {
		done.failed, done.err = map[string]int{whyNot(err): max(1, len(o.IDs))}, err
		t.end(o, &done)
		c.fail(w, r, err)
		return
	}
	done = o.run(ctx, q, t.batch)
	t.end(o, &done)
	http.Redirect(w, r, c.withNotice(o.back(done.gone), &done), http.StatusSeeOther)
}

// meant reports whether the form is that of the page that asked, for exactly this order, and not too old.
func (c *Console) meant(r *http.Request, o *order) bool {
	form := r.PostForm
	ends, err := strconv.ParseInt(form.Get("ends"), 10, 64)
	return err == nil && c.now().Unix() <= ends && c.signed(form.Get("sure"), append(o.parts(), userOf(r), form.Get("ends"))...)
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
