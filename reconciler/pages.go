package reconciler

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/delayq/toolkit/delayq"
)

// pageSize is a step: some milliseconds of each server.
const pageSize = 500

// ledgerPage checks the next open rows against Redis, those due first. Reading the ledger first is right in this direction: a row
// that moves on meanwhile has a newer revision, and then Redis keeps that.
func (r *Reconciler) ledgerPage(ctx context.Context, s *state) error {
	p := delayq.LedgerPage{Kind: delayq.LedgerOpenRows, After: delayq.LedgerMark{At: s.Mark.At, ID: string(s.Mark.ID)}, Limit: pageSize}
	if h := r.q.Horizon(); h > 0 {
		p.Until = time.Now().Add(h)
	}
	rows, err := r.lq.Page(ctx, p)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		s.Phase, s.Shard, s.Cursor = phaseRedis, 0, ""
		return nil
	}
	wants := make([]delayq.LedgerWant, len(rows))
	for i, row := range rows {
		wants[i] = delayq.LedgerWant{ID: row.ID, Rev: row.Rev}
		if row.Status == delayq.LedgerRunning && row.LockedUntil.Before(time.Now()) {
			s.Counts.RunningTooLong++
		}
	}
	found, err := r.m.Check(ctx, wants)
	if err != nil {
		return err
	}
	if err := r.repair(ctx, s, wants, found); err != nil {
		return err
	}
	last := rows[len(rows)-1]
	s.Mark = mark{last.RunAt, []byte(last.ID)}
	s.Counts.Rows += int64(len(rows))
	return nil
}

// repair brings to Redis what it lacks or has old.
func (r *Reconciler) repair(ctx context.Context, s *state, wants []delayq.LedgerWant, found []delayq.Finding) error {
	if sabotage != "" {
		overlook(wants, found)
	}
	var ids, broken []string
	for i, f := range found {
		switch f {
		case delayq.FoundWhole, delayq.FoundNewer:
			continue
		case delayq.FoundAbsent:
			s.Counts.Restored++
		case delayq.FoundOlder:
			s.Counts.Moved++
		case delayq.FoundQuarantined:
			s.Counts.Lifted++
		case delayq.FoundBroken:
			broken = append(broken, wants[i].ID)
			continue
		}
		ids = append(ids, wants[i].ID)
	}
	if len(broken) > 0 {
		if _, err := r.mend(ctx, s, broken); err != nil {
			return err
		}
	}
	if len(ids) == 0 {
		return nil
	}
	s.Counts.Drift += int64(len(ids))
	return r.show(ctx, s, ids)
}

// mostBytes bounds the payloads that are read at once.
const mostBytes = 8 << 20

// show brings rows to Redis as they are now. A Redis that is full gets what fits, and the pass goes on: it is the drops of its last
// phase that make room.
func (r *Reconciler) show(ctx context.Context, s *state, ids []string) error {
	ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return len(id) > longestID })
	for ids := range slices.Chunk(ids, max(mostBytes/max(r.q.MaxPayload(), 1), 1)) {
		rows, err := r.lq.Rows(ctx, ids, true)
		if err != nil {
			return err
		}
		shown, err := r.m.Show(ctx, rows, delayq.Showing{Now: time.Now()})
		s.Counts.Repaired += int64(shown.Put + shown.Dropped)
		if err != nil && !errors.Is(err, delayq.ErrFull) {
			return err
		}
		if shown.Newer > 0 {
			if err := r.unconfirmed(ctx, s, ids); err != nil {
				return err
			}
		}
	}
	return nil
}

// unconfirmed counts those of ids that are open and not in Redis although they were just put there: Redis has refused them, because it
// remembers their end at a newer revision. The rows are read again, since most refusals are tasks that have just moved on.
func (r *Reconciler) unconfirmed(ctx context.Context, s *state, ids []string) error {
	rows, err := r.lq.Rows(ctx, ids, false)
	if err != nil {
		return err
	}
	now := time.Now()
	var wants []delayq.LedgerWant
	for i := range rows {
		if r.q.InRedis(&rows[i], now) {
			wants = append(wants, delayq.LedgerWant{ID: rows[i].ID, Rev: rows[i].Rev})
		}
	}
	found, err := r.m.Check(ctx, wants)
	for _, f := range found {
		if f == delayq.FoundAbsent {
			s.Counts.Unconfirmed++
		}
	}
	return err
}

// redisPage checks the next entries of Redis against the ledger. Redis first is the order that needs no grace: an entry is made
// only after the commit of its row, so a later look into the ledger sees it.
func (r *Reconciler) redisPage(ctx context.Context, s *state) error {
	if s.Shard >= r.q.Shards() || sabotage == "reconcile-one-way" {
		s.Phase = phaseDone
		return nil
	}
	entries, next, err := r.m.Entries(ctx, s.Shard, s.Cursor)
	if err != nil {
		return err
	}
	for rest := entries; len(rest) > 0; {
		n := min(len(rest), pageSize)
		if err := r.entries(ctx, s, rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	s.Counts.Entries += int64(len(entries))
	if s.Cursor = next; next == "" {
		s.Shard++
	}
	return nil
}

// longestID is the longest that a task can have; somebody may have planted another in Redis.
const longestID = 256

func (r *Reconciler) entries(ctx context.Context, s *state, page []delayq.LedgerWant) error {
	ids := make([]string, 0, len(page))
	seen := make(map[string]int64, len(page))
	for _, e := range page { // a scan may give one twice
		if _, twice := seen[e.ID]; !twice && len(e.ID) <= longestID {
			ids = append(ids, e.ID)
		}
		seen[e.ID] = e.Rev // one that is longer stays, and is unknown
	}
	var rows []delayq.LedgerRow
	var err error
	if len(ids) > 0 {
		rows, err = r.lq.Rows(ctx, ids, false)
	}
	if err != nil {
		return err
	}
	now := time.Now()
	var ended []delayq.LedgerRow
	var older []delayq.LedgerWant
	for i := range rows {
		row := &rows[i]
		rev := seen[row.ID]
		delete(seen, row.ID)
		switch {
		case !r.q.InRedis(row, now):
			ended = append(ended, *row)
		case row.Rev != rev:
			older = append(older, delayq.LedgerWant{ID: row.ID, Rev: row.Rev})
		}
	}
	if len(ended) > 0 {
		shown, err := r.m.Show(ctx, ended, delayq.Showing{Now: now})
		s.Counts.Drift += int64(shown.Dropped)
		s.Counts.Dropped += int64(shown.Dropped)
		s.Counts.Repaired += int64(shown.Dropped)
		if err != nil {
			return err
		}
	}
	if len(older) > 0 { // or changed since the page was read: look again, and atomically
		found, err := r.m.Check(ctx, older)
		if err != nil {
			return err
		}
		if err := r.repair(ctx, s, older, found); err != nil {
			return err
		}
	}
	var unknown []delayq.Suspect
	for id, rev := range seen {
		unknown = append(unknown, delayq.Suspect{ID: id, Rev: rev})
	}
	return r.quarantine(ctx, s, unknown)
}

func (r *Reconciler) quarantine(ctx context.Context, s *state, unknown []delayq.Suspect) error {
	if len(unknown) == 0 {
		return nil
	}
	n, err := r.m.Quarantine(ctx, unknown, delayq.ReasonUnbooked, "redis has this task and the ledger does not know it")
	s.Counts.Drift += int64(n)
	s.Counts.Quarantined += int64(n)
	s.Counts.Repaired += int64(n)
	return err
}

// strays looks for what is in Redis in pieces, or without a revision.
func (r *Reconciler) strays(ctx context.Context, s *state) error {
	if s.Shard >= r.q.Shards() {
		s.LastStrays = time.Now()
		s.Phase, s.Shard, s.Cursor = phaseLedger, 0, ""
		return nil
	}
	ids, next, err := r.m.Strays(ctx, s.Shard, s.Cursor)
	if err != nil {
		return err
	}
	for len(ids) > 0 {
		n := min(len(ids), pageSize)
		if err := r.straysOf(ctx, s, ids[:n]); err != nil {
			return err
		}
		ids = ids[n:]
	}
	if s.Cursor = next; next == "" {
		s.Shard++
	}
	return nil
}

func (r *Reconciler) straysOf(ctx context.Context, s *state, ids []string) error {
	whole, err := r.mend(ctx, s, ids)
	if err != nil {
		return err
	}
	if len(whole) == 0 {
		return nil
	}
	adopted, unknown, err := r.q.Adopt(ctx, whole)
	s.Counts.Drift += int64(adopted)
	s.Counts.Adopted += int64(adopted)
	s.Counts.Repaired += int64(adopted)
	if err != nil {
		return err
	}
	suspects := make([]delayq.Suspect, len(unknown))
	for i, id := range unknown {
		suspects[i] = delayq.Suspect{ID: id}
	}
	return r.quarantine(ctx, s, suspects)
}

// mend removes what is in pieces and puts back what the ledger has of it; it returns the ids that are whole but have no
// revision.
func (r *Reconciler) mend(ctx context.Context, s *state, ids []string) (whole []string, err error) {
	n, whole, err := r.m.Mend(ctx, ids)
	s.Counts.Mended += int64(n)
	s.Counts.Drift += int64(n)
	if err != nil || n == 0 {
		return whole, err
	}
	return whole, r.show(ctx, s, ids)
}
