package delayq

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// patience is for enqueues of ids that other transactions are about to insert. They wait here, not in the database, whose
// connections others need, and one at a time asks again.
type patience struct {
	mu   sync.Mutex
	ids  map[string]int // how many wait for each
	turn sync.Mutex
}

// has reports whether somebody waits for an id: then nobody else takes it into a call that others share.
func (p *patience) has(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ids[id] > 0
}

func (p *patience) add(id string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ids == nil {
		p.ids = map[string]int{}
	}
	if p.ids[id] += n; p.ids[id] == 0 {
		delete(p.ids, id)
	}
}

// patiently goes on with an enqueue that was answered ErrBusy, alone, until that transaction has ended or ctx has.
func (sh *shard) patiently(ctx context.Context, e *entry, res Result) Result {
	if !errors.Is(res.Err, ErrBusy) {
		return res
	}
	p := &sh.patience
	p.add(e.task.ID, 1)
	defer p.add(e.task.ID, -1)
	for wait := 20 * time.Millisecond; errors.Is(res.Err, ErrBusy); wait = min(2*wait, time.Second) {
		select {
		case <-ctx.Done():
			res.Err = &TaskError{"enqueue", sh.q.name, e.task.ID, ctx.Err()}
			return res
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
		if p.turn.TryLock() {
			res = sh.enqueue(ctx, []*entry{e})[0]
			p.turn.Unlock()
		}
	}
	return res
}
