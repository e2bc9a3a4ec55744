package ledger_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
)

func TestPage(t *testing.T) {
	eachMode(t, func(r *rig) {
		at := time.Now().Add(-time.Hour).Truncate(time.Microsecond)
		var tasks []delayq.LedgerTask
		for i := range 60 { // three at each instant
			task := newTask(fmt.Sprintf("t%02d", i))
			task.Due.At = at.Add(time.Duration(i/3) * time.Microsecond)
			tasks = append(tasks, task)
		}
		rows := r.insert(tasks...)
		token := newToken()
		r.claim(claimOf(token), rows[10:20]...)
		var ends []delayq.LedgerEnd
		for _, row := range rows[15:20] {
			ends = append(ends, end(row.ID, token, delayq.LedgerBury))
		}
		r.finish(ends...)
		_, err := r.q.Cancel(r.Context(), nil, []string{"t59"})
		r.ok(err)
		for kind, want := range map[delayq.LedgerKind]int{
			delayq.LedgerOpenRows: 54, delayq.LedgerWaitingRows: 49, delayq.LedgerRunningRows: 5, delayq.LedgerDeadRows: 5,
		} {
			var got []delayq.LedgerRow
			p := delayq.LedgerPage{Kind: kind, Limit: 4}
			for {
				page, err := r.q.Page(r.Context(), p)
				r.ok(err)
				if len(page) == 0 {
					break
				}
				got = append(got, page...)
				last := page[len(page)-1]
				p.After = delayq.LedgerMark{At: last.RunAt, ID: last.ID}
				if kind == delayq.LedgerDeadRows {
					p.After.At = last.EndedAt
				}
			}
			seen := map[string]bool{}
			for i, row := range got {
				if row.Payload != nil || seen[row.ID] || i > 0 && kind != delayq.LedgerDeadRows && row.ID < got[i-1].ID {
					r.Errorf("kind %d: %+v", kind, row)
				}
				seen[row.ID] = true
			}
			if len(got) != want {
				r.Errorf("kind %d: %d rows, want %d", kind, len(got), want)
			}
		}
		var ids []string // of one instant, since one call buried them
		for p := (delayq.LedgerPage{Kind: delayq.LedgerDeadRows, Limit: 2, Newest: true}); ; {
			page, err := r.q.Page(r.Context(), p)
			r.ok(err)
			if len(page) == 0 {
				break
			}
			for _, row := range page {
				ids = append(ids, row.ID)
				p.After = delayq.LedgerMark{At: row.EndedAt, ID: row.ID}
			}
		}
		if got := strings.Join(ids, " "); got != "t19 t18 t17 t16 t15" {
			r.Errorf("newest first: %s", got)
		}
		_, err = r.q.Page(r.Context(), delayq.LedgerPage{Kind: delayq.LedgerOpenRows, Limit: 2, Newest: true})
		r.is(err, delayq.ErrInvalid)
		until, err := r.q.Page(r.Context(), delayq.LedgerPage{Kind: delayq.LedgerOpenRows, Until: at.Add(time.Microsecond), Limit: 100})
		if err != nil || len(until) != 6 {
			r.Error(len(until), err)
		}
		late := newTask("late")
		late.Due.In = 2 * time.Hour
		r.insert(late)
		counts := func(most int, horizon time.Duration, want delayq.LedgerCounts) {
			r.Helper()
			if got, err := r.q.Counts(r.Context(), most, horizon); err != nil || got != want {
				r.Errorf("%+v %v, want %+v", got, err, want)
			}
		}
		counts(100, time.Hour, delayq.LedgerCounts{Open: 55, Later: 1, Dead: 5})
		counts(100, 0, delayq.LedgerCounts{Open: 55, Dead: 5})
		counts(3, time.Hour, delayq.LedgerCounts{Open: 3, Later: 1, Dead: 3})
	})
}
