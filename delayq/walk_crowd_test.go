package delayq_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/scripts/servers"
	"github.com/redis/go-redis/v9"
)

// TestCrowd lets producers, workers that dawdle, lose leases and settle in every way, and cancellers loose on one queue at
// once, and then holds what each of them was told against what Redis has counted.
func TestCrowd(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: servers.SharedRedis(t).Addr()})
	defer rdb.Close()
	q, err := delayq.Open(t.Context(), rdb, servers.QueueName(t), delayq.Config{Shards: 4, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	c := &crowd{T: t, q: q, ids: map[string]*crowdTask{}, told: map[string]int64{}}
	ctx, stop := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer stop()
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() { c.produce(ctx, fmt.Sprint("p", i)) })
	}
	for i := range 6 {
		wg.Go(func() { c.work(ctx, fmt.Sprint("w", i), false) })
	}
	for range 2 {
		wg.Go(func() { c.meddle(ctx) })
	}
	wg.Wait()

	// From now on everything that is leased succeeds, until nothing is left.
	ctx, stop = context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	c.work(ctx, "last", true)
	c.check()
}

// A crowd is what all were told. Only calls that are answered count: nothing here breaks connections.
type crowd struct {
	*testing.T
	q    *delayq.Queue
	mu   sync.Mutex
	ids  map[string]*crowdTask
	list []string         // ids to meddle with, the newest and what was just leased last
	told map[string]int64 // answers by kind
}

type crowdTask struct {
	added         bool // no enqueue is under way
	acked, buried int
	cancels       []delayq.Cancellation
	spans         []crowdSpan
}

// A crowdSpan is a time in which a lease was surely held: from the reply until it was settled, or its deadline.
type crowdSpan struct {
	from, to time.Time
	token    string
}

// ok is for calls whose answer is no error, whatever it is.
func (c *crowd) ok(err error) {
	if err != nil {
		c.Error(err)
	}
}

func (c *crowd) count(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told[what] += int64(n)
}

// produce enqueues tasks, some of them twice at the same time.
func (c *crowd) produce(ctx context.Context, name string) {
	for n := 0; ctx.Err() == nil; n++ {
		tasks := make([]delayq.Task, 1+rand.IntN(8))
		for i := range tasks {
			tasks[i] = delayq.Task{ID: fmt.Sprint(name, " ", n, " ", i), Type: "crowd", Delay: rand.N(300 * time.Millisecond)}
		}
		var results [2][]delayq.Result
		var wg sync.WaitGroup
		for k := range 1 + rand.IntN(2) {
			wg.Go(func() {
				var err error
				results[k], err = c.q.EnqueueMany(c.Context(), tasks)
				c.ok(err)
			})
		}
		for range 3 { // single calls travel together
			wg.Go(func() {
				r, err := c.q.Enqueue(c.Context(), tasks[rand.IntN(len(tasks))])
				c.ok(err)
				c.tally(r)
			})
		}
		wg.Wait()
		c.tally(slices.Concat(results[0], results[1])...)
		c.mu.Lock()
		for _, t := range tasks { // only now may it be cancelled: its end would let a second enqueue create it again
			if known := c.ids[t.ID]; known != nil {
				c.list = append(c.list, t.ID)
				known.added = true
			}
		}
		c.mu.Unlock()
		time.Sleep(rand.N(5 * time.Millisecond))
	}
}

func (c *crowd) tally(results ...delayq.Result) {
	for _, r := range results {
		if r.Outcome.Duplicate() {
			c.count("duplicate", 1)
			continue
		}
		c.count("created", 1)
		c.task(r.ID)
	}
}

func (c *crowd) task(id string) *crowdTask {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ids[id] == nil {
		c.ids[id] = &crowdTask{}
	}
	return c.ids[id]
}

// meddle cancels and reschedules.
func (c *crowd) meddle(ctx context.Context) {
	for ctx.Err() == nil {
		time.Sleep(rand.N(3 * time.Millisecond))
		c.mu.Lock()
		id := ""
		if len(c.list) > 0 {
			id = c.list[max(0, len(c.list)-1-rand.IntN(50))]
		}
		c.mu.Unlock()
		if id == "" {
			continue
		}
		if rand.IntN(2) == 0 {
			if c.q.RescheduleIn(c.Context(), id, rand.N(100*time.Millisecond)) == nil {
				c.count("rescheduled", 1)
			}
			continue
		}
		got, err := c.q.Cancel(c.Context(), id)
		c.ok(err)
		t := c.task(id)
		c.mu.Lock()
		t.cancels = append(t.cancels, got)
		c.mu.Unlock()
	}
}

// work leases and settles until ctx ends, or the last worker until nothing is left, which acks all.
func (c *crowd) work(ctx context.Context, name string, last bool) {
	for ctx.Err() == nil {
		length := 100*time.Millisecond + rand.N(200*time.Millisecond)
		if last {
			length = 5 * time.Second
		}
		leases, err := c.q.Lease(c.Context(), delayq.LeaseOptions{Max: 1 + rand.IntN(20), Lease: length, Consumer: name})
		c.ok(err)
		got := time.Now()
		c.count("leased", len(leases))
		for _, l := range leases {
			if l.Due.After(got) {
				c.Errorf("%s was leased %s before it was due", l.ID, l.Due.Sub(got))
			}
			if t := c.task(l.ID); rand.IntN(10) == 0 {
				c.mu.Lock()
				if t.added {
					c.list = append(c.list, l.ID)
				}
				c.mu.Unlock()
			}
		}
		if len(leases) == 0 {
			if last {
				s, err := c.q.Stats(c.Context())
				c.ok(err)
				if s.Pending+s.Due+s.Processing == 0 {
					return
				}
			}
			time.Sleep(rand.N(5 * time.Millisecond))
			continue
		}
		switch how := rand.IntN(20); {
		case last || how < 12:
			c.settle(got, leases)
		case how < 14: // too long
			time.Sleep(length + rand.N(50*time.Millisecond))
			c.settle(got, leases)
		case how < 16: // long, and renewed mostly in time
			for range 2 {
				time.Sleep(length/2 + rand.N(length*2/3))
				c.extend(length, leases)
			}
			c.settle(got, leases)
		case how < 18: // only one of them
			c.settle(got, leases[:1])
			c.leave(got, leases[1:])
		default: // gone
			c.leave(got, leases)
		}
	}
	if last {
		c.Error("not everything has ended")
	}
}

// held notes how long a lease was surely held.
func (c *crowd) held(l *delayq.Lease, from, to time.Time) {
	t := c.task(l.ID)
	c.mu.Lock()
	defer c.mu.Unlock()
	if from.Before(to) {
		t.spans = append(t.spans, crowdSpan{from, to, l.Token()})
	}
}

func (c *crowd) leave(got time.Time, leases []*delayq.Lease) {
	for _, l := range leases {
		c.held(l, got, l.Deadline)
	}
}

func (c *crowd) extend(length time.Duration, leases []*delayq.Lease) {
	before := make([]time.Time, len(leases))
	for i, l := range leases {
		before[i] = l.Deadline
	}
	for i, err := range each(c.q.Extend(c.Context(), length, leases...), len(leases)) {
		c.answered("extend", leases[i], before[i], err)
	}
}

// settle ends leases in one of the four ways.
func (c *crowd) settle(got time.Time, leases []*delayq.Lease) {
	verb := []string{"ack", "ack", "ack", "ack", "release", "retry", "bury"}[rand.IntN(7)]
	if leases[0].Failed+leases[0].Deliveries > 10 {
		verb = "ack"
	}
	delay := rand.N(100 * time.Millisecond)
	sent := time.Now()
	var errs []error
	switch verb {
	case "ack":
		errs = each(c.q.Ack(c.Context(), leases...), len(leases))
	case "release":
		errs = each(c.q.Release(c.Context(), delay, leases...), len(leases))
	case "retry":
		for _, l := range leases {
			errs = append(errs, c.q.Retry(c.Context(), l, delay, errors.New("no luck")))
		}
	case "bury":
		for _, l := range leases {
			errs = append(errs, c.q.Bury(c.Context(), l, delayq.Permanent(errors.New("no hope"))))
		}
	}
	for i, l := range leases {
		until := sent // who may settle after the deadline has still had the task, and nobody else
		if errs[i] != nil && until.After(l.Deadline) {
			until = l.Deadline
		}
		c.held(l, got, until)
		c.answered(verb, l, l.Deadline, errs[i])
	}
}

// answered books the answer to one lease that was good until deadline at least.
func (c *crowd) answered(verb string, l *delayq.Lease, deadline time.Time, err error) {
	t := c.task(l.ID)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.told[verb]++
		switch verb {
		case "ack":
			t.acked++
		case "bury":
			t.buried++
		}
	case errors.Is(err, delayq.ErrLeaseLost):
		c.told["stale"]++
		if time.Now().Before(deadline) {
			c.Errorf("%s of %s: lease lost %s before its deadline", verb, l.ID, time.Until(deadline))
		}
	case errors.Is(err, delayq.ErrCancelled) && verb != "ack":
		c.told["told to stop"]++
	case errors.Is(err, delayq.ErrNotFound) && verb == "extend" && time.Now().After(deadline): // extend looks at no tombstone
	default:
		c.Errorf("%s of %s: %v", verb, l.ID, err)
	}
}

// each takes a batch's error apart.
func each(err error, n int) []error {
	var batch *delayq.BatchError
	switch {
	case errors.As(err, &batch):
		return batch.Errs
	case n == 1:
		return []error{err}
	}
	return make([]error, n)
}

func (c *crowd) check() {
	rep, err := c.q.Audit(c.Context(), delayq.AuditOptions{})
	if err != nil {
		c.Fatal(err)
	}
	for _, v := range rep.Violations {
		c.Errorf("audit: %+v", v)
	}
	ends := map[delayq.State]int64{}
	for id, t := range c.ids {
		in, err := c.q.Get(c.Context(), id)
		if err != nil {
			c.Fatal(err)
		}
		ends[in.State]++
		asked := slices.Contains(t.cancels, delayq.Cancelled) || slices.Contains(t.cancels, delayq.Running)
		want := delayq.StateCancelled
		switch {
		case t.acked+t.buried > 1 || t.acked+t.buried == 0 && !asked:
			c.Errorf("%s: %d acks, %d burials, cancels %v", id, t.acked, t.buried, t.cancels)
		case t.acked == 1:
			want = delayq.StateDone
		case t.buried == 1:
			want = delayq.StateDead
		}
		if in.State != want {
			c.Errorf("%s is %s, should be %s", id, in.State, want)
		}
		said := map[delayq.Cancellation]delayq.State{
			delayq.Cancelled: delayq.StateCancelled, delayq.AlreadyCancelled: delayq.StateCancelled,
			delayq.Finished: delayq.StateDone, delayq.Dead: delayq.StateDead, delayq.Running: in.State,
		}
		once := 0
		for _, got := range t.cancels {
			if said[got] != in.State {
				c.Errorf("%s is %s, cancel said %s", id, in.State, got)
			}
			if got == delayq.Cancelled {
				once++
			}
		}
		if once > 1 {
			c.Errorf("%s was cancelled %d times", id, once)
		}
		slices.SortFunc(t.spans, func(a, b crowdSpan) int { return cmp.Compare(a.from.UnixNano(), b.from.UnixNano()) })
		for i := 1; i < len(t.spans); i++ {
			if a, b := t.spans[i-1], t.spans[i]; b.from.Before(a.to) {
				c.Errorf("%s was leased to %s until %s and to %s from %s", id, a.token, a.to, b.token, b.from)
			}
		}
	}
	s, err := c.q.Stats(c.Context())
	if err != nil {
		c.Fatal(err)
	}
	for _, is := range []struct {
		what      string
		got, want int64
	}{
		{"created", s.Created, int64(len(c.ids))},
		{"created, as told", s.Created, c.told["created"]},
		{"duplicates", s.Duplicates, c.told["duplicate"]},
		{"leased", s.Leased, c.told["leased"]},
		{"succeeded", s.Succeeded, c.told["ack"]},
		{"succeeded, as found", s.Succeeded, ends[delayq.StateDone]},
		{"retried", s.Retried, c.told["retry"]},
		{"released", s.Released, c.told["release"]},
		{"buried", s.Buried, c.told["bury"]},
		{"dead", s.Dead, ends[delayq.StateDead]},
		{"cancelled", s.Cancelled, ends[delayq.StateCancelled]},
		{"stale", s.Stale, c.told["stale"]},
		{"rescheduled", s.Rescheduled, c.told["rescheduled"]},
		{"all ends", s.Succeeded + s.Cancelled + s.Buried, s.Created},
		{"failed", s.Failed[delayq.ReasonError] + s.Failed[delayq.ReasonPermanent], s.Retried + s.Buried},
		{"open", s.Pending + s.Due + s.Processing + s.Missing, 0},
	} {
		if is.got != is.want {
			c.Errorf("%s: %d counted, should be %d", is.what, is.got, is.want)
		}
	}
	// Each lease ends once; some of them as cancelled.
	if rest := s.Leased - s.Succeeded - s.Retried - s.Released - s.Buried - s.Expired; rest < 0 || rest > s.Cancelled {
		c.Errorf("%d leases ended in no way that is counted", rest)
	}
	c.Logf("ends %v, told %v, %d expired", ends, c.told, s.Expired)
	for what, n := range map[string]int64{
		"expired": s.Expired, "stale": s.Stale, "duplicates": s.Duplicates, "cancelled": s.Cancelled,
	} {
		if n == 0 {
			c.Errorf("the crowd was too tame: %s 0", what)
		}
	}
}
