package delayq

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// State is where a task stands.
type State string

// The states. Pending and due are one ZSET, told apart by the clock; a task whose lease has run out is due.
const (
	StatePending    State = "pending" // waits for its due time, or for its retry
	StateDue        State = "due"
	StateProcessing State = "processing"
	StateDead       State = "dead"
	StateDone       State = "done"      // remembered for the retention
	StateCancelled  State = "cancelled" // remembered for the retention
)

// Info is what the queue knows of one task.
type Info struct {
	Task
	State State `json:"state"`
	// At is when the task falls or fell due, its lease runs out, or it died, by the state.
	At time.Time `json:"at,omitzero"`
	// Reason (one of the Reason constants) and LastError are of the last failed attempt.
	Reason    string `json:"reason,omitempty"`
	LastError string `json:"last_error,omitempty"`
	// LeasedAt is when the last lease began.
	LeasedAt time.Time `json:"leased_at,omitzero"`
	// CancelRequested: the task runs and is told to stop.
	CancelRequested bool `json:"cancel_requested,omitempty"`
}

// Get describes a task. Of a finished one only the state is left. Errors: ErrNotFound.
func (q *Queue) Get(ctx context.Context, id string) (*Info, error) {
	if id == "" || len(id) > maxID {
		return nil, &TaskError{"get", q.name, id, &InputError{"ID", "1 to 256 bytes", fmt.Sprintf("%d bytes", len(id))}}
	}
	if q.lq != nil {
		in, err := q.getBooked(ctx, id)
		if err != nil {
			return nil, &TaskError{"get", q.name, id, err}
		}
		return in, nil
	}
	infos, err := q.shard(id).get(ctx, []string{id})
	if err != nil {
		return nil, &TaskError{"get", q.name, id, err}
	}
	if infos[0] == nil {
		return nil, &TaskError{"get", q.name, id, ErrNotFound}
	}
	return infos[0], nil
}

// get describes ids of one shard; nil for those that are not there.
func (sh *shard) get(ctx context.Context, ids []string) ([]*Info, error) {
	infos := make([]*Info, 0, len(ids))
	for len(infos) < len(ids) {
		ask := ids[len(infos):]
		args := []any{sh.q.clock(), len(ask), maxReply}
		for _, id := range ask {
			args = append(args, id)
		}
		reply, err := sh.run(ctx, sh.q.scripts.get, args, nil)
		if err != nil {
			return nil, err
		}
		list, ok := reply.([]any)
		if !ok || len(list) < 2 {
			return nil, errReply
		}
		now, err := number(list[0])
		if err != nil {
			return nil, err
		}
		for i, raw := range list[1:] {
			f, ok := raw.([]any)
			if !ok || len(f) != 7 {
				return nil, errReply
			}
			infos = append(infos, sh.info(ask[i], f, time.UnixMicro(now)))
		}
	}
	return infos, nil
}

func (sh *shard) info(id string, f []any, now time.Time) *Info {
	waiting, running, died, blob, entry, last, tomb := text(f[0]), text(f[1]), text(f[2]), text(f[3]), text(f[4]), text(f[5]), text(f[6])
	in := &Info{Task: Task{ID: id, Queue: sh.q.name}}
	switch {
	case waiting != "":
		in.State, in.At = StatePending, scoreTime(waiting)
		in.Due = in.At
		if !in.At.After(now) {
			in.State = StateDue
		}
	case running != "":
		in.State, in.At = StateProcessing, scoreTime(running)
		if !in.At.After(now) {
			in.State = StateDue
		}
	case died != "":
		in.State, in.At = StateDead, scoreTime(died)
	case tomb == "cancelled":
		in.State = StateCancelled
		return in
	case tomb != "":
		in.State = StateDone
		return in
	default:
		return nil
	}
	if err := decode([]byte(blob), &in.Task); err != nil {
		in.LastError = err.Error()
	}
	if len(entry) > 17 {
		in.CancelRequested = entry[0] == 'C'
		c, start := cutLast(entry[17:], ":")
		in.counts(c)
		if n, err := strconv.ParseInt(start, 10, 64); err == nil {
			in.LeasedAt = time.UnixMilli(n)
		}
	} else {
		in.Attempt = 1
	}
	if last != "" {
		in.Reason, in.LastError, _ = strings.Cut(last, "\n")
	}
	return in
}

func cutLast(s, sep string) (before, after string) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i+len(sep):]
}

// ListOptions choose a page of tasks.
type ListOptions struct {
	State  State  // StatePending, StateDue, StateProcessing or StateDead
	Limit  int    // tasks a page; 0 means 50, at most 500
	Cursor string // Page.Next of the page before, with the same State and NewestFirst; empty for the first
	// NewestFirst is of StateDead alone: the last to die comes first, instead of the oldest.
	NewestFirst bool
}

// A Page is a part of a listing, soonest due first (of dead letters the oldest first, unless asked otherwise).
type Page struct {
	Tasks []Info `json:"tasks"`
	Next  string `json:"next,omitempty"` // cursor of the next page, empty on the last
}

// A mark is the last task of one state of one shard that a listing has shown.
type mark struct {
	Score string `json:"s,omitempty"`
	ID    []byte `json:"i,omitempty"`
}

// List pages through a state. Tasks that move meanwhile may be missed or shown twice; no page scans.
func (q *Queue) List(ctx context.Context, o ListOptions) (*Page, error) {
	switch o.State {
	case StatePending, StateDue, StateProcessing, StateDead:
	default:
		return nil, &InputError{"ListOptions.State", "pending, due, processing or dead", fmt.Sprintf("%.20q", string(o.State))}
	}
	limit := cmp.Or(o.Limit, 50)
	if limit < 1 || limit > maxBatch {
		return nil, &InputError{"ListOptions.Limit", "1 to 500", strconv.Itoa(limit)}
	}
	if o.NewestFirst && o.State != StateDead {
		return nil, &InputError{"ListOptions.NewestFirst", "false unless State is dead", "true"}
	}
	switch {
	case q.lq != nil && o.NewestFirst:
		return q.listNewestBooked(ctx, o.Cursor, limit)
	case q.lq != nil:
		return q.listBooked(ctx, o, limit)
	}
	return q.listRedis(ctx, o, limit)
}

func (q *Queue) listRedis(ctx context.Context, o ListOptions, limit int) (*Page, error) {
	l := q.listing(o)
	if err := l.from(o.Cursor); err != nil {
		return nil, err
	}
	items, err := l.items(ctx, limit+1)
	if err != nil {
		return nil, err
	}
	full := len(items) > limit
	if full {
		items = items[:limit]
	}
	page := &Page{}
	if page.Tasks, err = l.show(ctx, items); err != nil {
		return nil, err
	}
	if full {
		page.Next, err = l.next()
	}
	return page, err
}

// A listing is where one stands in a state of all shards. An expired lease is due, so of due tasks each shard has two parts.
type listing struct {
	q      *Queue
	state  State
	parts  []string // as list.lua calls them
	marks  []mark   // one for each part of each shard
	newest bool
}

// An item is a task that comes next in its part of a listing.
type item struct {
	mark  int
	id    string
	score string
	at    float64
}

func (q *Queue) listing(o ListOptions) *listing {
	l := &listing{q: q, state: o.State, parts: []string{string(o.State)}, newest: o.NewestFirst}
	if o.State == StateDue {
		l.parts = append(l.parts, "expired")
	}
	l.marks = make([]mark, len(q.shards)*len(l.parts))
	return l
}

// newestCursor begins the cursors of listings that go backwards: between shards one of the other kind would skip some.
const newestCursor = "n"

func errCursor(cursor string) error {
	return &InputError{"ListOptions.Cursor", "the Next of an earlier page of this queue", fmt.Sprintf("%d bytes", len(cursor))}
}

func (l *listing) from(cursor string) error {
	if cursor == "" {
		return nil
	}
	text, back := strings.CutPrefix(cursor, newestCursor)
	raw, err := base64.RawURLEncoding.DecodeString(text)
	var marks []mark
	if err != nil || back != l.newest || json.Unmarshal(raw, &marks) != nil || len(marks) != len(l.marks) {
		return errCursor(cursor)
	}
	l.marks = marks
	return nil
}

func (l *listing) next() (string, error) {
	raw, err := json.Marshal(l.marks)
	if err != nil {
		return "", errors.Join(errReply, err)
	}
	cursor := base64.RawURLEncoding.EncodeToString(raw)
	if l.newest {
		cursor = newestCursor + cursor
	}
	return cursor, nil
}

// items are what comes next, at most so many of each part, in order.
func (l *listing) items(ctx context.Context, most int) ([]item, error) {
	var items []item
	order, way := "", 1
	if l.newest {
		order, way = "newest", -1
	}
	for i, m := range l.marks {
		args := []any{l.q.clock(), l.parts[i%len(l.parts)], most, m.Score, m.ID, order}
		reply, err := l.q.shards[i/len(l.parts)].run(ctx, l.q.scripts.list, args, nil)
		if err != nil {
			return nil, err
		}
		list, ok := reply.([]any)
		if !ok {
			return nil, errReply
		}
		for k := 0; k+1 < len(list); k += 2 {
			it := item{mark: i, id: text(list[k]), score: text(list[k+1])}
			it.at, _ = strconv.ParseFloat(it.score, 64)
			items = append(items, it)
		}
	}
	slices.SortStableFunc(items, func(a, b item) int { return way * cmp.Compare(a.at, b.at) })
	return items, nil
}

// show describes items, and goes on behind them. Those that have moved meanwhile are left out.
func (l *listing) show(ctx context.Context, items []item) ([]Info, error) {
	byMark := make([][]string, len(l.marks))
	for _, it := range items {
		l.marks[it.mark] = mark{it.score, []byte(it.id)}
		byMark[it.mark] = append(byMark[it.mark], it.id)
	}
	found := map[string]*Info{}
	for i, ids := range byMark {
		if len(ids) == 0 {
			continue
		}
		infos, err := l.q.shards[i/len(l.parts)].get(ctx, ids)
		if err != nil {
			return nil, err
		}
		for k, in := range infos {
			found[ids[k]] = in
		}
	}
	shown := make([]Info, 0, len(items))
	for _, it := range items {
		if in := found[it.id]; in != nil && in.State == l.state {
			shown = append(shown, *in)
		}
	}
	return shown, nil
}
