package reconciler_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/delayq/ledger"
	"github.com/delayq/toolkit/reconciler"
)

// The walk takes the real ledger and the real Redis through random interleavings of the protocol's steps and of its faults, and
// holds them to its invariants. Messages are lost by making a call on a handle whose Redis is not there, and late, swapped or
// repeated by keeping rows and showing them again. Leases run out when the walk says so, each of the two by itself.
var (
	walkTime = flag.Duration("protocol.time", 12*time.Second, "how long to walk")
	walkSeed = flag.Uint64("protocol.seed", 0, "the walk to repeat; 0 = another each time")
)

const horizon = time.Hour

var walkIDs = []string{"a", "b", "c"}

// A lap is one walk on one queue.
type lap struct {
	*rig
	rand  *rand.Rand
	mute  *delayq.Queue // its messages do not arrive
	trace []string
	tasks map[string]*followed
	kept  []delayq.LedgerRow // messages that may come late
	recs  []*reconciler.Reconciler
}

// followed is what the walk knows of one id.
type followed struct {
	exists    bool
	version   string // the payload that was acknowledged last
	due       bool   // by the due time acknowledged last
	cancelled bool   // acknowledged, and not enqueued again since
	stopping  bool   // told to stop
	ended     bool
	effects   int // committed together with the completion, of this generation
	holder    *held
	all       []*held
}

type held struct {
	lease   *delayq.Lease
	crashed bool
	ledger  bool // its lease in the ledger has run out
	over    bool // finished, given back, or taken over
	last    string
}

func TestProtocolWalk(t *testing.T) {
	base := newRig(t, delayq.Config{Horizon: horizon})
	seed := *walkSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-protocol.seed %d", seed)
	laps, steps := 0, 0
	for began := time.Now(); time.Since(began) < *walkTime && !t.Failed(); laps++ {
		l := newLap(base, rand.New(rand.NewPCG(seed, uint64(laps)))) //nolint:gosec // a walk that can be repeated
		steps += l.walk(80)
		if *walkSeed != 0 && laps > 2000 {
			break
		}
	}
	t.Logf("%d laps, %d steps", laps, steps)
	if laps < 3 {
		t.Errorf("only %d laps", laps)
	}
}

func newLap(base *rig, r *rand.Rand) *lap {
	l := &lap{rig: &rig{T: base.T, rdb: base.rdb, pool: base.pool, cfg: base.cfg}, rand: r, tasks: map[string]*followed{}}
	l.open(fmt.Sprintf("walk-%d", r.Uint64()))
	nobody := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	err := nobody.Close() // it fails at once, and nothing is sent again
	l.ok(err)
	l.mute, err = delayq.Open(l.Context(), nobody, l.q.Name(), l.cfg)
	l.ok(err)
	l.recs = []*reconciler.Reconciler{l.another(), l.another()}
	for _, id := range walkIDs {
		l.tasks[id] = &followed{}
	}
	return l
}

func (l *lap) note(format string, args ...any) {
	l.trace = append(l.trace, fmt.Sprintf(format, args...))
}

func (l *lap) wrong(invariant, format string, args ...any) {
	l.Helper()
	l.Errorf("%s: %s\nafter\n  %s", invariant, fmt.Sprintf(format, args...), strings.Join(l.trace, "\n  "))
}

// handle is the queue, or the one whose messages get lost.
func (l *lap) handle() (*delayq.Queue, string) {
	if l.rand.IntN(3) == 0 {
		return l.mute, " (message lost)"
	}
	return l.q, ""
}

func (l *lap) walk(steps int) int {
	actions := []func(){
		l.enqueue, l.enqueue, l.enqueue, l.lease, l.lease, l.lease, l.lease, l.finish, l.finish, l.finish, l.complete, l.extend, l.crash, l.expireLedger,
		l.expireLedger, l.expireRedis, l.expireRedis, l.cancel, l.reschedule, l.replay, l.flush, l.lateMessage, l.lateMessage, l.reconcile, l.slice,
		l.retention, l.pieces, l.timePasses, l.claimAgain,
	}
	for n := range steps {
		l.keep()
		actions[l.rand.IntN(len(actions))]()
		if l.Failed() {
			return n
		}
	}
	l.settle()
	return steps
}

func (l *lap) id() string { return walkIDs[l.rand.IntN(len(walkIDs))] }

func (l *lap) row(id string) *delayq.LedgerRow {
	rows, err := l.q.LedgerQueue().Rows(l.Context(), []string{id}, true)
	l.ok(err)
	if len(rows) == 0 {
		return nil
	}
	return &rows[0]
}

// keep puts a message aside, as if it were under way.
func (l *lap) keep() {
	if row := l.row(l.id()); row != nil {
		l.kept = append(l.kept, *row)
		if len(l.kept) > 6 {
			l.kept = slices.Delete(l.kept, 0, 1)
		}
	}
}

func (l *lap) lateMessage() {
	if len(l.kept) == 0 {
		return
	}
	row := l.kept[l.rand.IntN(len(l.kept))]
	l.note("late message of %s at revision %d, %s", row.ID, row.Rev, row.Status)
	_, err := l.q.Mirror().Show(l.Context(), []delayq.LedgerRow{row}, delayq.Showing{Now: time.Now()})
	l.ok(err)
}

func (l *lap) enqueue() {
	id := l.id()
	f := l.tasks[id]
	version := fmt.Sprintf("v%d", l.rand.Uint32())
	due := l.rand.IntN(3) > 0
	delay := time.Duration(0)
	if !due {
		delay = []time.Duration{10 * time.Minute, 2 * time.Hour}[l.rand.IntN(2)]
	}
	policy := []delayq.Conflict{delayq.Keep, delayq.Replace}[l.rand.IntN(2)]
	task := delayq.Task{ID: id, Type: "t", Payload: []byte(version), Delay: delay, Conflict: policy}
	var res delayq.Result
	var err error
	switch l.rand.IntN(4) {
	case 0: // rolled back
		err = pgx.BeginFunc(l.Context(), l.pool, func(tx pgx.Tx) error {
			_, err := l.q.EnqueueTx(l.Context(), tx, task)
			l.ok(err)
			return errBack
		})
		if !errors.Is(err, errBack) {
			l.Fatal(err)
		}
		l.note("enqueue %s %s, rolled back", id, version)
		return
	case 1: // without a message
		err = pgx.BeginFunc(l.Context(), l.pool, func(tx pgx.Tx) (err error) {
			res, err = l.q.EnqueueTx(l.Context(), tx, task)
			return err
		})
	case 2:
		err = ledger.BeginFunc(l.Context(), l.pool, func(tx *ledger.Tx) (err error) {
			res, err = l.q.EnqueueTx(l.Context(), tx, task)
			return err
		})
	default:
		q, _ := l.handle()
		res, err = q.Enqueue(l.Context(), task)
	}
	l.ok(err)
	l.note("enqueue %s %s in %s: %s", id, version, delay, res.Outcome)
	switch {
	case res.Outcome == delayq.Created && f.exists && !f.cancelled && !f.stopping:
		l.wrong("DUPLICATE", "%s was created although it is known", id)
	case res.Outcome == delayq.Created:
		*f = followed{exists: true, version: version, due: due, all: f.all}
	case res.Outcome == delayq.Replaced:
		f.version, f.due = version, due
	}
}

var errBack = errors.New("rolled back")

func (l *lap) lease() {
	q, lost := l.handle() // a mute one leases from the ledger
	got, err := q.Lease(l.Context(), delayq.LeaseOptions{Max: 1 + l.rand.IntN(3), Lease: time.Hour, Consumer: "c"})
	l.ok(err)
	for _, le := range got {
		l.started(le, lost)
	}
	// A takeover of one that was told to stop ends it instead.
	for id, f := range l.tasks {
		if h := f.holder; h != nil && !h.over && h.ledger && f.stopping {
			if row := l.row(id); row != nil && row.Status == delayq.LedgerCancelled {
				h.over, f.cancelled = true, true
			}
		}
	}
}

func (l *lap) started(le *delayq.Lease, how string) {
	f := l.tasks[le.ID]
	l.note("start %s %s, lost %d%s", le.ID, le.Payload, le.Lost, how)
	switch {
	case !f.exists:
		l.wrong("UNEXPECTED", "%s runs and was never committed", le.ID)
	case f.cancelled:
		l.wrong("CANCEL", "%s runs after its cancel", le.ID)
	case f.stopping:
		l.wrong("CANCEL", "%s runs again after it was told to stop", le.ID)
	case f.ended:
		l.wrong("DUP", "%s runs after its end", le.ID)
	case !f.due:
		l.wrong("EARLY", "%s runs before its time", le.ID)
	case string(le.Payload) != f.version:
		l.wrong("PAYLOAD", "%s runs %s, acknowledged was %s", le.ID, le.Payload, f.version)
	case f.holder != nil && !f.holder.over && !f.holder.ledger:
		l.wrong("OVERLAP", "%s runs twice at once", le.ID)
	}
	lost := 0
	for _, h := range f.all {
		if h.ledger && h.last == f.version {
			lost++
		}
	}
	if le.Lost > lost {
		l.wrong("CHARGE", "%s has lost %d leases, %d have run out", le.ID, le.Lost, lost)
	}
	if f.holder != nil {
		f.holder.over = true
	}
	f.holder = &held{lease: le, last: f.version}
	f.all = append(f.all, f.holder)
}

// claimAgain repeats a claim whose answer was lost: it is granted again, and nothing is charged.
func (l *lap) claimAgain() {
	f := l.tasks[l.id()]
	h := f.holder
	if h == nil || h.over || h.ledger {
		return
	}
	before := l.row(h.lease.ID)
	token := []byte(nil)
	_, err := fmt.Sscanf(h.lease.Token(), "%x", &token)
	l.ok(err)
	rows, err := l.q.LedgerQueue().Claim(l.Context(), delayq.LedgerClaim{Token: string(token), Lease: time.Hour, Consumer: "c", MaxLost: 100},
		[]delayq.LedgerWant{{ID: h.lease.ID, Rev: before.Rev}})
	l.ok(err)
	l.note("claim of %s repeated", h.lease.ID)
	if len(rows) != 1 || rows[0].Status != delayq.LedgerRunning || rows[0].Lost != before.Lost || rows[0].Deliveries != before.Deliveries {
		l.wrong("REPEAT", "the repeat of a claim is answered %+v, the row was %+v", rows, before)
	}
}

// someone is a lease that a consumer has or believes to have.
func (l *lap) someone() (*followed, *held) {
	f := l.tasks[l.id()]
	if len(f.all) == 0 {
		return nil, nil
	}
	h := f.all[l.rand.IntN(len(f.all))]
	if l.rand.IntN(2) == 0 {
		h = f.all[len(f.all)-1]
	}
	if h.crashed {
		return nil, nil
	}
	return f, h
}

func (l *lap) finish() {
	f, h := l.someone()
	if f == nil {
		return
	}
	q, lost := l.handle()
	id := h.lease.ID
	before := l.row(id)
	var err error
	verb := []string{"ack", "retry", "give back", "snooze", "bury"}[l.rand.IntN(5)]
	switch verb {
	case "ack":
		err = q.Ack(l.Context(), h.lease)
	case "retry":
		err = q.Retry(l.Context(), h.lease, 0, errBack)
	case "give back":
		err = q.Release(l.Context(), 0, h.lease)
	case "snooze":
		err = q.Release(l.Context(), 20*time.Minute, h.lease)
	case "bury":
		err = q.Bury(l.Context(), h.lease, errBack)
	}
	mine := f.holder == h && !h.over
	l.note("%s of %s by %.4s: %v%s", verb, id, h.lease.Token(), err, lost)
	after := l.row(id)
	if !mine {
		if (before == nil) != (after == nil) || before != nil && (before.Rev != after.Rev || before.Status != after.Status || before.Token != after.Token) {
			l.wrong("STALE", "a stale %s changed %+v to %+v", verb, before, after)
		}
		return
	}
	h.over = true
	switch {
	case errors.Is(err, delayq.ErrCancelled):
		if !f.stopping {
			l.wrong("CANCEL", "%s ended as cancelled without a cancel", id)
		}
		f.cancelled = true
	case err != nil:
		l.wrong("FINISH", "%s of the holder: %v", verb, err)
	case verb == "ack" || verb == "bury":
		f.ended, f.stopping = true, false
	case f.stopping:
		l.wrong("CANCEL", "%s goes on after it was told to stop", id)
	default:
		f.due = verb != "snooze" && (verb == "retry" || f.due)
	}
}

// complete ends a task in the handler's transaction, with an effect.
func (l *lap) complete() {
	f, h := l.someone()
	if f == nil {
		return
	}
	mine := f.holder == h && !h.over
	commit := l.rand.IntN(3) > 0
	err := pgx.BeginFunc(l.Context(), l.pool, func(tx pgx.Tx) error {
		if err := l.q.CompleteTx(l.Context(), tx, &h.lease.Task); err != nil {
			return err
		}
		if !commit {
			return errBack
		}
		return nil
	})
	l.note("complete %s by %.4s, commit %v: %v", h.lease.ID, h.lease.Token(), commit, err)
	if err == nil {
		f.effects++
		if !mine || f.effects > 1 {
			l.wrong("DUPTX", "%s has %d effects, the last of its holder: %v", h.lease.ID, f.effects, mine)
		}
		f.ended, f.stopping, h.over = true, false, true
		return
	}
	if mine && !errors.Is(err, errBack) {
		l.wrong("FINISH", "the holder cannot complete: %v", err)
	}
}

func (l *lap) extend() {
	f, h := l.someone()
	if f == nil {
		return
	}
	q, _ := l.handle()
	err := q.Extend(l.Context(), time.Hour, h.lease)
	mine := f.holder == h && !h.over
	l.note("extend %s by %.4s: %v", h.lease.ID, h.lease.Token(), err)
	switch {
	case mine && (err == nil) == f.stopping && !errors.Is(err, delayq.ErrCancelled):
		l.wrong("HEARTBEAT", "of the holder of %s: %v", h.lease.ID, err)
	case mine:
		h.ledger = false // an expired one that nobody took may be renewed
	case !errors.Is(err, delayq.ErrLeaseLost):
		l.wrong("STALE", "a stale heartbeat of %s: %v", h.lease.ID, err)
	}
}

func (l *lap) crash() {
	if f, h := l.someone(); f != nil {
		h.crashed = true
		l.note("crash of %s's %.4s", h.lease.ID, h.lease.Token())
	}
}

func (l *lap) expireLedger() {
	id := l.id()
	f := l.tasks[id]
	if f.holder == nil || f.holder.over {
		return
	}
	l.note("ledger lease of %s runs out", id)
	l.exec("update delayq.task set locked_until = clock_timestamp() - interval '1 second' where id = $1 and status = 'running' and queue = (select id from delayq.queue where name = $2)",
		[]byte(id), l.q.Name())
	f.holder.ledger = true
}

func (l *lap) expireRedis() {
	id := l.id()
	l.note("redis lease of %s runs out", id)
	l.ok(l.rdb.ZAddXX(l.Context(), l.key+"processing", redis.Z{Score: 1, Member: id}).Err())
}

func (l *lap) cancel() {
	id := l.id()
	f := l.tasks[id]
	q, lost := l.handle()
	got, err := q.Cancel(l.Context(), id)
	l.ok(err)
	l.note("cancel %s: %s%s", id, got, lost)
	switch got {
	case delayq.Cancelled, delayq.AlreadyCancelled:
		f.cancelled, f.stopping = true, true
		if f.holder != nil {
			f.holder.over = true
		}
	case delayq.Running:
		f.stopping = true
	}
}

func (l *lap) reschedule() {
	id := l.id()
	f := l.tasks[id]
	q, lost := l.handle()
	d := []time.Duration{0, 10 * time.Minute, 2 * time.Hour}[l.rand.IntN(3)]
	err := q.RescheduleIn(l.Context(), id, d)
	l.note("reschedule %s in %s: %v%s", id, d, err, lost)
	if err == nil {
		f.due = d == 0
	}
}

func (l *lap) replay() {
	id := l.id()
	f := l.tasks[id]
	row := l.row(id)
	q, lost := l.handle()
	if row == nil {
		return // that would take it back from quarantine
	}
	err := q.Replay(l.Context(), id)
	l.note("replay %s: %v%s", id, err, lost)
	if err == nil {
		f.ended, f.due, f.effects, f.holder = false, true, 0, nil
	}
}

func (l *lap) flush() {
	l.note("redis loses everything")
	l.lose()
}

// pieces loses a part of Redis' data.
func (l *lap) pieces() {
	id := l.id()
	switch what := []string{"tasks", "revs", "state", "pending", "processing"}[l.rand.IntN(5)]; what {
	case "pending", "processing":
		l.note("redis loses %s from %s", id, what)
		l.ok(l.rdb.ZRem(l.Context(), l.key+what, id).Err())
	case "revs": // alone it makes the entry look like one from before the ledger, which is adopted: so with its record
		l.note("redis loses revision and record of %s", id)
		l.ok(l.rdb.HDel(l.Context(), l.key+"revs", id).Err())
		l.ok(l.rdb.HDel(l.Context(), l.key+"tasks", id).Err())
	default:
		l.note("redis loses %s of %s", what, id)
		l.ok(l.rdb.HDel(l.Context(), l.key+what, id).Err())
	}
}

// timePasses brings tasks that wait in the ledger alone into the horizon, at the same revision.
func (l *lap) timePasses() {
	id := l.id()
	f := l.tasks[id]
	tag, err := l.pool.Exec(l.Context(), `update delayq.task set run_at = clock_timestamp() where id = $1 and status in ('pending', 'retry')
		and run_at > clock_timestamp() + interval '1 hour' and queue = (select id from delayq.queue where name = $2)`, []byte(id), l.q.Name())
	l.ok(err)
	if tag.RowsAffected() == 1 {
		l.note("%s falls due", id)
		f.due = true
	}
}

// retention deletes what has ended, and ids are free again.
func (l *lap) retention() {
	l.exec("delete from delayq.task where finished_at is not null and queue = (select id from delayq.queue where name = $1)", l.q.Name())
	l.note("retention")
	for id, f := range l.tasks {
		if f.exists && l.row(id) == nil {
			*f = followed{all: f.all}
		}
	}
}

func (l *lap) reconcile() {
	rep, err := l.recs[l.rand.IntN(2)].Pass(l.Context())
	l.ok(err)
	l.note("reconciled: drift %d", rep.Drift)
}

func (l *lap) slice() {
	_, err := l.recs[l.rand.IntN(2)].Slice(l.Context(), time.Millisecond)
	l.ok(err)
	l.note("a slice of a pass")
}

// settle ends the faults: one pass, and the two agree; a second one finds nothing; then leases run out, a consumer works, and
// every task has ended.
func (l *lap) settle() {
	l.note("faults end")
	_, err := l.r.Pass(l.Context())
	l.ok(err)
	l.agreement()
	before, err := l.r.Pass(l.Context())
	l.ok(err)
	if before.Drift != 0 {
		l.wrong("IDEM", "the second pass finds %+v", before.Counts)
	}
	audit, err := l.q.Audit(l.Context(), delayq.AuditOptions{})
	l.ok(err)
	for _, v := range audit.Violations {
		if v.Invariant != "I5" { // what went without a trace cannot be counted
			l.wrong("AUDIT", "%+v", v)
		}
	}
	for _, id := range walkIDs {
		l.timePasses()
		if f := l.tasks[id]; f.holder != nil && !f.holder.over {
			f.holder.ledger = true
		}
	}
	l.exec("update delayq.task set locked_until = clock_timestamp() - interval '1 second' where status = 'running' and queue = (select id from delayq.queue where name = $1)", l.q.Name())
	l.exec("update delayq.task set run_at = clock_timestamp() where status in ('pending', 'retry') and queue = (select id from delayq.queue where name = $1)", l.q.Name())
	l.lose()
	_, err = l.r.Pass(l.Context())
	l.ok(err)
	for _, f := range l.tasks {
		f.due = true
	}
	for range 20 {
		got, err := l.q.Lease(l.Context(), delayq.LeaseOptions{Max: 10, Lease: time.Hour, Consumer: "last"})
		l.ok(err)
		for _, le := range got {
			l.started(le, "")
			if err := l.q.Ack(l.Context(), le); err != nil && !errors.Is(err, delayq.ErrCancelled) {
				l.wrong("LOSS", "ack of %s: %v", le.ID, err)
			}
		}
		if len(got) == 0 {
			break
		}
	}
	for id, f := range l.tasks {
		row := l.row(id)
		if row == nil && f.exists || row != nil && row.Status.Open() {
			l.wrong("LOSS", "%s has not ended: %+v", id, row)
		}
	}
	n, err := l.rdb.HLen(l.Context(), l.key+"tasks").Result()
	l.ok(err)
	dead, err := l.rdb.ZCard(l.Context(), l.key+"dead").Result()
	l.ok(err)
	if n != dead { // each has one sentinel
		l.wrong("LOSS", "%d tasks are left in redis", n-1)
	}
	l.lose()
}

// agreement compares every row with every entry, by the raw keys.
func (l *lap) agreement() {
	ctx := context.WithoutCancel(l.Context())
	revs, err := l.rdb.HGetAll(ctx, l.key+"revs").Result()
	l.ok(err)
	for _, id := range walkIDs {
		row := l.row(id)
		died := l.rdb.ZScore(ctx, l.key+"dead", id).Err() == nil
		inRedis := row != nil && row.Status.Open() && (row.Status == delayq.LedgerRunning || row.RunAt.Before(time.Now().Add(horizon)))
		rev, there := revs[id]
		switch {
		case inRedis && (!there || rev != fmt.Sprint(row.Rev) || died):
			l.wrong("P7", "%s is open at %d; redis has %q, quarantined %v", id, row.Rev, rev, died)
		case !inRedis && row != nil && there:
			l.wrong("P7", "%s is %s and due %s; redis still has it at %s", id, row.Status, row.RunAt, rev)
		case row == nil && there && !died:
			l.wrong("P7", "%s is unknown to the ledger and can run from redis", id)
		}
	}
}
