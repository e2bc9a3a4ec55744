package console

import (
	"cmp"
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/delayq/toolkit/monitor"
)

const (
	fresh     = 2 * time.Second // a view so young is shown again
	spacing   = 4 * time.Second // samples of the charts are no closer
	period    = 10 * time.Second
	mostKept  = 1440 // samples a queue: 4 h at the period
	allKept   = 100 * mostKept
	leastKept = 60 // more than rates and quantiles look back
	rateOver  = time.Minute
	quantOver = 5 * time.Minute
)

// views looks at the queues for all who ask, at most once in a while, and keeps samples for the charts.
type views struct {
	look func(context.Context) *monitor.View
	once singleflight.Group

	mu     sync.Mutex
	last   *monitor.View
	seen   time.Time
	series map[string]*series // by queue; "" is all of them together
}

func newViews(look func(context.Context) *monitor.View) *views {
	return &views{look: look, series: map[string]*series{}}
}

// now is what the queues look like, at most fresh ago.
func (v *views) now(ctx context.Context) (*monitor.View, error) {
	v.mu.Lock()
	last, seen := v.last, v.seen
	v.mu.Unlock()
	if last != nil && time.Since(seen) < fresh {
		return last, nil
	}
	// The one that is let go by its own caller still serves the others.
	found := v.once.DoChan("", func() (any, error) {
		view := v.look(context.WithoutCancel(ctx))
		v.keep(view)
		return view, nil
	})
	select {
	case got := <-found:
		return got.Val.(*monitor.View), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (v *views) run(ctx context.Context) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		_, _ = v.now(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (v *views) keep(view *monitor.View) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.last, v.seen = view, time.Now()
	if view.Server.Err != nil {
		return
	}
	all := sample{at: view.At}
	complete := view.Listed
	most := kept(len(view.Queues))
	here := map[string]bool{"": true}
	for i := range view.Queues {
		q := &view.Queues[i]
		here[q.Name] = true
		if q.Stats == nil {
			complete = false
			continue
		}
		s := sampleOf(view.At, q)
		v.of(q.Name).add(s, most)
		all.plus(&s)
	}
	if complete { // or the sums would dip for a queue that did not answer
		v.of("").add(all, mostKept)
	}
	if !view.Listed { // a queue that is missing may be there all the same
		return
	}
	for name := range v.series { // so that names that come and go do not pile up
		if !here[name] {
			delete(v.series, name)
		}
	}
}

// kept is how many samples each of so many queues has, so that the memory for all is bounded.
func kept(queues int) int { return min(mostKept, max(leastKept, allKept/max(queues, 1))) }

// blind is why a view shows nothing, nil when it shows something: while one server is away the other's queues go on.
func blind(view *monitor.View) error {
	if view.Server.Err == nil && len(view.Queues) > 0 {
		return nil
	}
	return cmp.Or(view.Server.Err, view.Err)
}

func (v *views) of(name string) *series {
	if v.series[name] == nil {
		v.series[name] = &series{}
	}
	return v.series[name]
}

// points are the samples of a queue since a time.
func (v *views) points(queue string, since time.Time) []point {
	v.mu.Lock()
	defer v.mu.Unlock()
	if s := v.series[queue]; s != nil {
		return s.since(since)
	}
	return nil
}

// recent is what a queue has done of late.
func (v *views) recent(queue string) recent {
	v.mu.Lock()
	defer v.mu.Unlock()
	if s := v.series[queue]; s != nil {
		return s.recent()
	}
	return recent{}
}
