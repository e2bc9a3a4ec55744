package delayq

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"
)

// getBooked describes a task by its row, or a task that only Redis has.
func (q *Queue) getBooked(ctx context.Context, id string) (*Info, error) {
	rows, err := q.lq.Rows(ctx, []string{id}, true)
	if err != nil {
		return nil, err
	}
	if len(rows) > 0 {
		in := q.infoOf(&rows[0], time.Now())
		return &in, nil
	}
	infos, err := q.shard(id).get(ctx, []string{id})
	if err != nil {
		return nil, err
	}
	if infos[0] == nil || infos[0].State == StateDone || infos[0].State == StateCancelled {
		return nil, ErrNotFound // the row is gone, and a tombstone of it says nothing
	}
	return infos[0], nil
}

func (q *Queue) infoOf(row *LedgerRow, now time.Time) Info {
	in := Info{
		Task: Task{
			ID: row.ID, Type: row.Type, Key: row.Key, Payload: row.Payload, Queue: q.name, EnqueuedAt: stampTime(row.Stamp),
			Failed: row.Failed, Lost: row.Lost, Deliveries: row.Deliveries, Attempt: row.Failed + row.Lost + 1, Due: row.RunAt,
		},
		Reason: row.Reason, LastError: row.LastError, LeasedAt: row.StartedAt, CancelRequested: row.CancelRequested, At: row.RunAt,
	}
	switch row.Status {
	case LedgerRunning:
		in.State, in.At = StateProcessing, row.LockedUntil
		if !row.LockedUntil.After(now) {
			in.State = StateDue
		}
	case LedgerSucceeded:
		in.State, in.At = StateDone, row.EndedAt
	case LedgerCancelled:
		in.State, in.At = StateCancelled, row.EndedAt
	case LedgerDead:
		in.State, in.At = StateDead, row.EndedAt
	default:
		in.State = StatePending
		if !row.RunAt.After(now) {
			in.State = StateDue
		}
	}
	return in
}

// listBooked pages through the ledger. Dead letters begin with those that only Redis has, the quarantined.
func (q *Queue) listBooked(ctx context.Context, o ListOptions, limit int) (*Page, error) {
	if o.State == StateDead && !strings.HasPrefix(o.Cursor, "l") {
		o.Cursor = strings.TrimPrefix(o.Cursor, "q")
		page, err := q.listRedis(ctx, o, limit)
		switch {
		case err != nil && !errors.Is(err, ErrInvalid) && away(err): // the rest can be shown without
			page = &Page{}
		case err != nil:
			return nil, err
		case page.Next != "":
			page.Next = "q" + page.Next
			return page, nil
		}
		rest, err := q.pageBooked(ctx, o.State, LedgerMark{}, limit)
		if err != nil {
			return nil, err
		}
		rest.Tasks = append(page.Tasks, rest.Tasks...) // up to twice the limit on this one page
		return rest, nil
	}
	var after LedgerMark
	if o.Cursor != "" {
		raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(o.Cursor, "l"))
		var m struct {
			At time.Time
			ID []byte
		}
		if err != nil || json.Unmarshal(raw, &m) != nil {
			return nil, errCursor(o.Cursor)
		}
		after = LedgerMark{m.At, string(m.ID)}
	}
	return q.pageBooked(ctx, o.State, after, limit)
}

// newestMark is where a listing of dead letters from the last to die stands: in Redis, and in the ledger.
type newestMark struct {
	Redis []mark    `json:"r"`
	At    time.Time `json:"a,omitzero"`
	ID    []byte    `json:"i,omitempty"`
}

// listNewestBooked merges the dead letters of the ledger with those that only Redis has, the quarantined, by time.
func (q *Queue) listNewestBooked(ctx context.Context, cursor string, limit int) (*Page, error) {
	l := q.listing(ListOptions{State: StateDead, NewestFirst: true})
	var after LedgerMark
	if cursor != "" {
		text, ok := strings.CutPrefix(cursor, newestCursor)
		raw, err := base64.RawURLEncoding.DecodeString(text)
		var m newestMark
		if !ok || err != nil || json.Unmarshal(raw, &m) != nil || len(m.Redis) != len(l.marks) {
			return nil, errCursor(cursor)
		}
		l.marks, after = m.Redis, LedgerMark{m.At, string(m.ID)}
	}
	items, err := l.items(ctx, limit+1)
	if err != nil && !away(err) { // the rest can be shown without
		return nil, err
	}
	rows, err := q.lq.Page(ctx, LedgerPage{Kind: LedgerDeadRows, After: after, Limit: limit + 1, Newest: true})
	if err != nil {
		return nil, err
	}
	inRedis, booked := 0, 0 // on this page
	for inRedis+booked < min(limit, len(items)+len(rows)) {
		if booked == len(rows) || inRedis < len(items) && scoreTime(items[inRedis].score).After(rows[booked].EndedAt) {
			inRedis++
		} else {
			booked++
		}
	}
	full, now := inRedis+booked < len(items)+len(rows), time.Now()
	page := &Page{Tasks: make([]Info, booked)}
	for i := range page.Tasks {
		page.Tasks[i] = q.infoOf(&rows[i], now)
		after = LedgerMark{rows[i].EndedAt, rows[i].ID}
	}
	if err := q.withPayloads(ctx, page.Tasks); err != nil {
		return nil, err
	}
	quarantined, err := l.show(ctx, items[:inRedis])
	if err != nil {
		return nil, err
	}
	page.Tasks = append(page.Tasks, quarantined...)
	slices.SortStableFunc(page.Tasks, func(a, b Info) int { return b.At.Compare(a.At) })
	if full {
		raw, err := json.Marshal(newestMark{l.marks, after.At, []byte(after.ID)})
		if err != nil {
			return nil, errors.Join(errReply, err)
		}
		page.Next = newestCursor + base64.RawURLEncoding.EncodeToString(raw)
	}
	return page, nil
}

func (q *Queue) pageBooked(ctx context.Context, state State, after LedgerMark, limit int) (*Page, error) {
	now := time.Now()
	p := LedgerPage{Kind: LedgerWaitingRows, After: after, Limit: limit + 1}
	switch state {
	case StatePending:
		if p.After.At.Before(now) {
			p.After = LedgerMark{At: now}
		}
	case StateDue:
		p.Kind, p.Until = LedgerOpenRows, now
	case StateProcessing:
		p.Kind = LedgerRunningRows
	case StateDead:
		p.Kind = LedgerDeadRows
	}
	page := &Page{Tasks: []Info{}}
	for {
		rows, err := q.lq.Page(ctx, p)
		if err != nil {
			return nil, err
		}
		for i := range rows {
			row := &rows[i]
			if q.infoOf(row, now).State == state {
				if len(page.Tasks) == limit {
					page.Next = "l" + base64.RawURLEncoding.EncodeToString(markJSON(p.After))
					return page, q.withPayloads(ctx, page.Tasks)
				}
				page.Tasks = append(page.Tasks, q.infoOf(row, now))
			}
			p.After = LedgerMark{row.RunAt, row.ID}
			if p.Kind == LedgerDeadRows {
				p.After.At = row.EndedAt
			}
		}
		if len(rows) < p.Limit {
			return page, q.withPayloads(ctx, page.Tasks)
		}
	}
}

func markJSON(m LedgerMark) []byte {
	raw, _ := json.Marshal(struct { // a time and bytes: it cannot fail
		At time.Time
		ID []byte
	}{m.At, []byte(m.ID)})
	return raw
}

// withPayloads fills in what pages leave out.
func (q *Queue) withPayloads(ctx context.Context, infos []Info) error {
	for len(infos) > 0 {
		n := min(len(infos), maxBatch)
		ids := make([]string, n)
		at := make(map[string]int, n)
		for i := range n {
			ids[i], at[infos[i].ID] = infos[i].ID, i
		}
		rows, err := q.lq.Rows(ctx, ids, true)
		if err != nil {
			return err
		}
		for i := range rows {
			infos[at[rows[i].ID]].Payload = rows[i].Payload
		}
		infos = infos[n:]
	}
	return nil
}
