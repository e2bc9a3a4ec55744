package console

import (
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
)

// Consumers whose run has ended are told as such, last, and counted as nothing: on the page of a queue that is watched and of another.
func TestConsumersThatHaveEnded(t *testing.T) {
	t.Parallel()
	for name, watched := range map[string][]string{"watched": nil, "not watched": {"another"}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{}, func(m *monitor.Config) { m.StaleAfter, m.Queues = time.Second, watched })
			q := r.queue("orders", delayq.Config{})
			lease := func(who string) {
				t.Helper()
				_, err := q.Lease(t.Context(), delayq.LeaseOptions{Max: 1, Lease: time.Second, Consumer: who})
				r.ok(err)
			}
			lease("a-that-ended")
			time.Sleep(1100 * time.Millisecond) // silence is told by Redis' clock
			lease("b-that-calls")
			page := r.get("/queue/orders", 200)
			ended, calls := strings.Index(page, "a-that-ended"), strings.Index(page, "b-that-calls")
			if calls < 0 || ended < calls || !strings.Contains(page[ended:], "Ended") {
				t.Errorf("who calls is at %d, who has ended at %d:\n%s", calls, ended, page)
			}
			if strings.Contains(page, "1 silent") || !strings.Contains(page, "1 healthy") {
				t.Errorf("counted as silent:\n%s", page)
			}
		})
	}
}
