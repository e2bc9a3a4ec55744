package delayq

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// A model is what one shard should do, written from the headers of the scripts with maps and sorting where they have ZSETs,
// and with nothing of the package's own. It is exact: every code, score, entry and counter. Times are in microseconds, as
// scores are.
type model struct {
	now, high int64 // high is the latest that now ever was
	ret       int64 // tombstone retention
	tasks     map[string]*modelTask
	tombs     [2]map[string]string // generations: id -> token or "cancelled"
	cur       int                  // the current one
	rotate    int64
	ends      map[string]modelEnd
	req       map[string]modelReq
	consumers map[string]int64
	beats     map[string]string
	base      map[string][]modelRunner
	version   int64            // of cancellations
	acked     int64            // the last time
	count     map[string]int64 // counters and buckets, named as in meta
	late      [2]float64       // least and most of the sum of lateness, which is an estimate
}

// A modelTask is in one place at a time, so I1 holds by construction.
type modelTask struct {
	place string // pending, processing or dead
	score int64
	blob  string
	entry *modelEntry // nil until the first lease
	fault string      // "reason\ntext"
}

type modelEntry struct {
	flag                     byte
	token                    string
	deliveries, failed, lost int
	start                    int64 // ms
}

type (
	modelEnd struct{ at, high int64 }
	modelReq struct {
		token    string
		deadline int64
	}
	modelRunner struct {
		gen int64
		id  string
	}
	modelLease struct {
		token, consumer, group string
		max, cap, keep         int
		lease                  int64
		register, dues         bool
	}
	modelLeased struct {
		code, now, next, stay, version, deadline int64
		ids                                      []string
		dues                                     []int64 // before the lease; nil in a repeat
		stopped                                  int     // ended as cancelled on the way
	}
	modelItem struct {
		id, blob string
		at       int64 // absolute, or
		delay    int64
	}
	modelLoan struct{ id, token string }
)

func newModel(now, retention int64) *model {
	return &model{
		now: now, high: now, ret: retention, tasks: map[string]*modelTask{}, tombs: [2]map[string]string{{}, {}},
		ends: map[string]modelEnd{}, req: map[string]modelReq{}, consumers: map[string]int64{}, beats: map[string]string{},
		base: map[string][]modelRunner{}, count: map[string]int64{},
	}
}

func (m *model) forget(consumer string) {
	delete(m.consumers, consumer)
	delete(m.req, consumer)
	delete(m.beats, consumer)
}

func (m *model) beat(consumer, said string) {
	for name, at := range m.consumers {
		if at <= m.now-3600e6 {
			m.forget(name)
		}
	}
	m.consumers[consumer] = m.now
	delete(m.beats, consumer)
	if said != "" {
		m.beats[consumer] = fmt.Sprintf("%d %s", m.now, said)
	}
}

func (e *modelEntry) String() string {
	if e == nil {
		return ""
	}
	return fmt.Sprintf("%c%s%d:%d:%d:%d", e.flag, e.token, e.deliveries, e.failed, e.lost, e.start)
}

func (t *modelTask) is(place string) bool { return t != nil && t.place == place }

// holds: the fence is flag and token.
func (t *modelTask) holds(token string) bool {
	return t != nil && t.entry != nil && (t.entry.flag == 'L' || t.entry.flag == 'C') && t.entry.token == token
}

func ceilMS(us int64) int64 { return (us + 999) / 1000 }

// step moves the clock.
func (m *model) step(us int64) {
	m.now += us
	m.high = max(m.high, m.now)
}

// in lists places, lowest score first, then by id.
func (m *model) in(places ...string) []string {
	ids := slices.DeleteFunc(slices.Collect(maps.Keys(m.tasks)), func(id string) bool {
		return !slices.Contains(places, m.tasks[id].place)
	})
	slices.SortFunc(ids, func(a, b string) int {
		return cmp.Or(cmp.Compare(m.tasks[a].score, m.tasks[b].score), strings.Compare(a, b))
	})
	return ids
}

// due is the part of a place whose time has come.
func (m *model) due(place string) []string {
	return slices.DeleteFunc(m.in(place), func(id string) bool { return m.tasks[id].score > m.now })
}

func (m *model) tomb(id string) string {
	if v := m.tombs[m.cur][id]; v != "" && m.now < m.rotate+m.ret {
		return v
	}
	if m.now < m.rotate {
		return m.tombs[1-m.cur][id]
	}
	return ""
}

// end removes a task and remembers how it ended.
func (m *model) end(id, how string) {
	if m.now >= m.rotate {
		m.tombs[1-m.cur] = map[string]string{}
		if m.now >= m.rotate+m.ret {
			m.tombs[m.cur] = map[string]string{}
			m.rotate = m.now + m.ret
		} else {
			m.rotate += m.ret
		}
		m.cur = 1 - m.cur
	}
	m.tombs[m.cur][id] = how
	m.ends[id] = modelEnd{m.now, m.high}
	if how == "cancelled" {
		m.count["c:cancelled"]++
	}
	delete(m.tasks, id)
}

func (m *model) enqueue(items []modelItem, replace, resent bool) []int {
	codes := make([]int, len(items))
	for i, it := range items {
		t, tomb := m.tasks[it.id], m.tomb(it.id)
		switch {
		case t != nil && t.blob == it.blob:
			codes[i] = 2
		case t.is("processing"):
			codes[i] = -4
		case t.is("dead"):
			codes[i] = -5
		case t != nil && replace:
			codes[i] = 3
			m.count["c:replaced"]++
		case t != nil:
			codes[i] = -3
		case tomb != "" && tomb != "cancelled":
			codes[i] = -6
		case tomb != "" && resent:
			codes[i] = 4
		default:
			codes[i] = 1
			m.count["c:created"]++
			delete(m.ends, it.id)
			if tomb != "" {
				delete(m.tombs[0], it.id)
				delete(m.tombs[1], it.id)
			}
		}
		if codes[i] < 0 {
			m.count["c:duplicate"]++
		}
		if codes[i] == 1 || codes[i] == 3 {
			m.tasks[it.id] = &modelTask{place: "pending", score: m.at(it, i), blob: it.blob}
		}
	}
	return codes
}

// at is the due time of the i-th item of a call: its place keeps the order of equal ones.
func (m *model) at(it modelItem, i int) int64 {
	if it.at != 0 {
		return 1000*ceilMS(it.at) + int64(i)
	}
	return m.now + 1000*ceilMS(it.delay) + int64(i) + 1
}

func (m *model) baton(c modelLease) (stay int64, changed []modelRunner) {
	list := m.base[c.group]
	i := slices.IndexFunc(list, func(r modelRunner) bool { return r.id == c.consumer })
	switch {
	case c.group == "" || i >= 0 && i < c.keep:
		return 1, nil
	case i >= 0 || !c.register && len(list) >= c.keep:
		return 0, nil
	}
	gen := m.now
	for _, r := range list {
		gen = max(gen, r.gen+1)
	}
	list = append([]modelRunner{{gen, c.consumer}}, list...)
	return 1, list[:min(len(list), c.keep)]
}

func (m *model) lease(c modelLease) modelLeased {
	r := modelLeased{code: 1, now: m.now, version: m.version, next: -1}
	var changed []modelRunner
	r.stay, changed = m.baton(c)
	_, seen := m.consumers[c.consumer]
	m.consumers[c.consumer] = m.now

	if last := m.req[c.consumer]; last.token == c.token && last.deadline > m.now {
		r.code, r.next, r.deadline = 2, m.now, last.deadline
		for _, id := range m.in("processing") {
			if t := m.tasks[id]; t.score == last.deadline && t.holds(c.token) {
				r.ids = append(r.ids, id)
			}
		}
		return r
	}
	if changed != nil {
		m.base[c.group] = changed
	}
	for name, at := range m.consumers {
		if !seen && at <= m.now-3600e6 {
			m.forget(name)
		}
	}

	expired := m.due("processing")
	for _, id := range expired[:min(len(expired), c.max)] {
		t := m.tasks[id]
		if t.entry.flag == 'C' {
			m.end(id, "cancelled")
			r.stopped++
			continue
		}
		t.place, t.entry.flag = "pending", 'E'
		t.entry.lost++
		m.count["c:expired"]++
	}

	bytes := 0
	due := m.due("pending")
	for _, id := range due[:min(len(due), c.max)] {
		if bytes += len(m.tasks[id].blob); bytes > c.cap && len(r.ids) > 0 {
			break
		}
		r.ids = append(r.ids, id)
	}
	soonest := int64(math.MaxInt64)
	for id, t := range m.tasks {
		if t.place != "dead" && !slices.Contains(r.ids, id) {
			soonest = min(soonest, t.score)
		}
	}
	if len(due) > len(r.ids) {
		soonest = m.now
	}
	if soonest < math.MaxInt64 {
		r.next = soonest
	}
	if len(r.ids) == 0 {
		return r
	}

	r.deadline = m.now + 1000*ceilMS(c.lease)
	var late []float64
	for _, id := range r.ids {
		t := m.tasks[id]
		r.dues = append(r.dues, t.score)
		late = append(late, float64(m.now-t.score)/1000)
		if t.entry == nil {
			t.entry = &modelEntry{}
		}
		t.place, t.score = "processing", r.deadline
		t.entry.flag, t.entry.token, t.entry.start = 'L', c.token, m.now/1000
		t.entry.deliveries++
	}
	m.req[c.consumer] = modelReq{c.token, r.deadline}
	least, most := 0.0, 0.0
	for _, ms := range late {
		from, to := m.histogram("l:", ms)
		least, most = least+max(from, late[len(late)-1]), most+min(to, late[0])
	}
	m.late[0] += least - 1 // a call's sum is rounded
	m.late[1] += most + 1
	return r
}

// histogram counts a duration and returns the bounds of its bucket, in ms.
func (m *model) histogram(prefix string, ms float64) (from, to float64) {
	for _, to := range []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000, 300000, 3600000} {
		if ms <= to {
			m.count[fmt.Sprint(prefix, int64(to))]++
			return from, to
		}
		from = to
	}
	m.count[prefix+"inf"]++
	return from, math.Inf(1)
}

// settle answers a batch from what was before it. left is the flag that the verb leaves, by which it knows its own repeat.
func (m *model) settle(loans []modelLoan, left byte, apply func(i int, id string, t *modelTask)) []int {
	codes := make([]int, len(loans))
	for i, l := range loans {
		t, tomb := m.tasks[l.id], m.tomb(l.id)
		entry := t != nil && t.entry != nil
		switch {
		case t.holds(l.token) && t.entry.flag == 'C' && left != 0:
			codes[i] = 4
		case t.holds(l.token):
			codes[i] = 1
		case left == 0 && tomb == l.token, left != 0 && entry && t.entry.flag == left && t.entry.token == l.token:
			codes[i] = 2
		case left != 0 && !entry && tomb == "cancelled":
			codes[i] = 4
		case entry || tomb != "":
			codes[i] = -1
			m.count["c:stale"]++
		default:
			codes[i] = -2
		}
	}
	for i, l := range loans {
		t := m.tasks[l.id]
		switch {
		case codes[i] == 1:
			apply(i, l.id, t)
		case codes[i] == 4 && t.holds(l.token):
			m.end(l.id, "cancelled")
		}
	}
	return codes
}

func (m *model) ack(loans []modelLoan) []int {
	sum := 0.0
	codes := m.settle(loans, 0, func(_ int, id string, t *modelTask) {
		took := max(0, float64(m.now)/1000-float64(t.entry.start))
		m.histogram("d:", took)
		sum += took
		m.acked = m.now
		m.end(id, t.entry.token)
	})
	if sum >= 1 {
		m.count["d:sum"] += int64(math.RoundToEven(sum))
	}
	return codes
}

func (m *model) extend(loans []modelLoan, lease int64) []int {
	codes := make([]int, len(loans))
	for i, l := range loans {
		t := m.tasks[l.id]
		switch {
		case t == nil || t.entry == nil:
			codes[i] = -2
		case !t.holds(l.token):
			codes[i] = -1
			m.count["c:stale"]++
		default:
			codes[i] = 1
			if t.entry.flag == 'C' {
				codes[i] = -7
			}
			t.score = m.now + 1000*ceilMS(lease)
		}
	}
	return codes
}

func (m *model) retry(loans []modelLoan, delays []int64, faults, blobs []string) []int {
	return m.settle(loans, 'R', func(i int, _ string, t *modelTask) {
		t.place, t.score, t.entry.flag, t.fault = "pending", m.now+1000*delays[i]+int64(i)+1, 'R', faults[i]
		t.entry.failed++
		if blobs[i] != "" {
			t.blob = blobs[i]
		}
		m.failed(faults[i])
		m.count["c:retried"]++
	})
}

func (m *model) failed(fault string) {
	reason, _, _ := strings.Cut(fault, "\n")
	m.count["f:"+reason]++
}

func (m *model) release(loans []modelLoan, delays []int64) []int {
	return m.settle(loans, 'X', func(i int, _ string, t *modelTask) {
		t.place, t.score, t.entry.flag = "pending", m.now+1000*delays[i]+int64(i)+1, 'X'
		m.count["c:released"]++
	})
}

func (m *model) bury(loans []modelLoan, most, charge int, faults []string) []int {
	buried := false
	codes := m.settle(loans, 'B', func(i int, _ string, t *modelTask) {
		t.place, t.score, t.entry.flag, t.fault = "dead", m.now+int64(i)+1, 'B', faults[i]
		t.entry.failed += charge
		m.failed(faults[i])
		m.count["c:buried"]++
		buried = true
	})
	if dead := m.in("dead"); buried && len(dead) > most {
		for _, id := range dead[:min(len(dead)-most, 2*len(loans))] {
			delete(m.tasks, id)
			m.count["c:trimmed"]++
		}
	}
	return codes
}

func (m *model) cancel(ids []string) []int {
	flagged := false
	codes := make([]int, len(ids))
	for i, id := range ids {
		t, tomb := m.tasks[id], m.tomb(id)
		switch {
		case t.is("dead"):
			codes[i] = -5
		case t.is("processing") && t.score > m.now:
			codes[i] = 6
			flagged = flagged || t.entry.flag == 'L'
			t.entry.flag = 'C'
		case t != nil:
			codes[i] = 1
			m.end(id, "cancelled")
		case tomb == "cancelled":
			codes[i] = 5
		case tomb != "":
			codes[i] = 3
		default:
			codes[i] = -2
		}
	}
	if flagged {
		m.version++
	}
	return codes
}

func (m *model) reschedule(items []modelItem) []int {
	codes := make([]int, len(items))
	for i, it := range items {
		t := m.tasks[it.id]
		switch {
		case t.is("processing"):
			codes[i] = -4
		case t.is("dead"):
			codes[i] = -5
		case t != nil:
			codes[i] = 1
			t.score = m.at(it, i)
			m.count["c:rescheduled"]++
		case m.tomb(it.id) != "":
			codes[i] = -6
		default:
			codes[i] = -2
		}
	}
	return codes
}

func (m *model) onDead(ids []string, counter string, apply func(i int, id string)) []int {
	codes := make([]int, len(ids))
	for i, id := range ids {
		codes[i] = -2
		if m.tasks[id].is("dead") {
			codes[i] = 1
			m.count[counter]++
			apply(i, id)
		}
	}
	return codes
}

func (m *model) replay(ids []string) []int {
	return m.onDead(ids, "c:replayed", func(i int, id string) {
		m.tasks[id] = &modelTask{place: "pending", score: m.now + int64(i) + 1, blob: m.tasks[id].blob}
	})
}

func (m *model) purge(ids []string) []int {
	return m.onDead(ids, "c:purged", func(_ int, id string) { delete(m.tasks, id) })
}

// state is what Get answers.
func (m *model) state(id string) State {
	t, tomb := m.tasks[id], m.tomb(id)
	switch {
	case t.is("dead"):
		return StateDead
	case t != nil && t.score <= m.now:
		return StateDue
	case t != nil:
		return State(t.place)
	case tomb == "cancelled":
		return StateCancelled
	case tomb != "":
		return StateDone
	}
	return ""
}
