package delayq

import "testing"

// A caller may be handed the lead in the very moment in which its context ends.
func TestACallerThatGoesPassesTheLeadOn(t *testing.T) {
	first, second := &waiter{wake: make(chan bool, 2)}, &waiter{wake: make(chan bool, 2)}
	c := &committer{flying: 1, queue: []*waiter{first, second}}
	c.pass()
	if _, answered := c.leave(first); answered || len(second.wake) != 1 || c.flying != 1 {
		t.Errorf("answered %v, the next was told %d times, %d calls are under way", answered, len(second.wake), c.flying)
	}
	if _, answered := c.leave(second); answered || c.flying != 0 || len(c.queue) != 0 {
		t.Errorf("answered %v, %d calls are under way for %d callers", answered, c.flying, len(c.queue))
	}
}

func TestACallerThatGoesTakesAnAnswerThatIsThere(t *testing.T) {
	w := &waiter{wake: make(chan bool, 2), res: Result{ID: "x"}}
	c := &committer{flying: 2}
	w.wake <- true // it was asked to lead, and another leader took its task along
	w.wake <- false
	if res, answered := c.leave(w); !answered || res.ID != "x" || c.flying != 1 {
		t.Errorf("%+v, answered %v, %d calls are under way", res, answered, c.flying)
	}
}
