package console

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/delayq/toolkit/delayq"
)

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
	more   bool           // there is more to do: the bounds were met
	gone   bool           // the one task is no more
	err    error
}

// atOnce is how many chosen ones are done before it is written down which.
const atOnce = 100

// run does it, and tells after each of its calls which ids that was for, with the error of each.
func (o *order) run(ctx context.Context, q *delayq.Queue, tell func(ids []string, errs []error)) outcome {
	done := outcome{do: o.Do, failed: map[string]int{}}
	count := func(ids []string, err error) {
		errs := each(err, len(ids))
		tell(ids, errs)
		for _, err := range errs {
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
		for ids := range slices.Chunk(o.IDs, atOnce) {
			count(ids, on(ctx, ids...))
		}
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

func sum(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}
