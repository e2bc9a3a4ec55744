package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/delayq/toolkit/monitor"
)

type top struct {
	monitoring
	every time.Duration
	once  bool
	json  bool
}

func newTop() *cobra.Command {
	var t top
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show all queues live",
		Long: `top shows the queues of a Redis, the one whose oldest due task has waited longest first, with rates from the difference of two
looks. q or Ctrl-C ends it. Where the output is no terminal, or with --once or --json, it looks twice, prints once, and ends.
It changes nothing. $NO_COLOR takes the colours away.

  OLDEST     how long the oldest due task has waited: look at this before the numbers
  IN/S       enqueued, OUT/S succeeded, FAIL/S failed attempts
  CONSUMERS  healthy, then those that are stale (silent) and stuck (alive without progress)

Exit status: 0 shown, 1 Redis is away (once), 2 wrong usage. A queue that cannot be read says so in its row.`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return t.run(cmd) },
	}
	t.lookFlags(cmd)
	f := cmd.Flags()
	f.DurationVar(&t.every, "every", time.Second, "time between two looks")
	f.BoolVar(&t.once, "once", false, "print once and end")
	f.BoolVar(&t.json, "json", false, "print once, as JSON: {at, server, queues, unlisted}; rates a second, durations in ns")
	return cmd
}

func (t *top) run(cmd *cobra.Command) error {
	if t.every < 100*time.Millisecond || t.every > time.Hour {
		return usagef("--every: want 100ms to 1h")
	}
	m, done, err := t.open()
	if err != nil {
		return err
	}
	defer done()
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if _, terminal := terminalWidth(cmd.OutOrStdout()); t.once || t.json || !terminal {
		return t.print(ctx, cmd.OutOrStdout(), m)
	}
	ctx, restore := untilKey(ctx)
	defer restore()
	screen := live{w: cmd.OutOrStdout()}
	defer fmt.Fprint(cmd.OutOrStdout(), "\r")
	var before *monitor.View
	for {
		now := m.Look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		text := t.text(newTopView(before, now), screenHeight(cmd.OutOrStdout()))
		screen.draw(rawLines(text))
		if before = now; !sleep(ctx, t.every) {
			return nil
		}
	}
}

// rawLines is text for a terminal that hands on each key: there a line does not begin at the left by itself.
func rawLines(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("\r" + line)
	}
	return b.String()
}

// untilKey ends the context when somebody types q or Ctrl-C, for which the terminal must hand on each key.
func untilKey(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	fd := int(os.Stdin.Fd())
	if !term.IsTerminal(fd) {
		return ctx, cancel
	}
	state, err := term.MakeRaw(fd)
	if err != nil {
		return ctx, cancel
	}
	go func() {
		key := make([]byte, 1)
		for {
			if n, err := os.Stdin.Read(key); err != nil || n > 0 && (key[0] == 'q' || key[0] == 'Q' || key[0] == 3) {
				cancel()
				return
			}
		}
	}()
	return ctx, func() { _ = term.Restore(fd, state); cancel() }
}

// screenHeight is how many lines w has; 24 when it does not say.
func screenHeight(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if _, height, err := term.GetSize(int(f.Fd())); err == nil && height > 0 {
			return height
		}
	}
	return 24
}

func (t *top) print(ctx context.Context, w io.Writer, m *monitor.Monitor) error {
	before := m.Look(ctx)
	if before.Server.Err == nil && !sleep(ctx, t.every) {
		return failf("interrupted")
	}
	v := newTopView(before, m.Look(ctx))
	if v.err != nil {
		return v.err
	}
	if t.json {
		return printJSON(w, v)
	}
	_, err := lipgloss.Fprint(w, t.text(v, 0))
	return err
}

// topView is what top shows.
type topView struct {
	At      time.Time      `json:"at"`
	Server  monitor.Server `json:"server"`
	Queues  []topQueue     `json:"queues"`
	LeftOut int            `json:"left_out"`
	// Unlisted says why queues may be missing.
	Unlisted string `json:"unlisted,omitempty"`
	err      error  // nothing can be shown
}

type topQueue struct {
	Name             string        `json:"name"`
	Error            string        `json:"error,omitempty"`
	RedisOnly        bool          `json:"redis_only,omitempty"`
	Pending          int64         `json:"pending"`
	Due              int64         `json:"due"`
	Processing       int64         `json:"processing"`
	Dead             int64         `json:"dead"`
	OldestDueAge     time.Duration `json:"oldest_due_age_ns"`
	EnqueuedPerSec   *float64      `json:"enqueued_per_second"` // null without two looks at the same data
	SucceededPerSec  *float64      `json:"succeeded_per_second"`
	FailedPerSec     *float64      `json:"failed_per_second"`
	ConsumersHealthy int           `json:"consumers_healthy"`
	ConsumersStale   int           `json:"consumers_stale"`
	ConsumersStuck   int           `json:"consumers_stuck"`
	LastRun          time.Time     `json:"last_run,omitzero"`
}

func newTopView(before, now *monitor.View) *topView {
	v := &topView{At: now.At, Server: now.Server, LeftOut: now.LeftOut, err: now.Server.Err, Queues: make([]topQueue, 0, len(now.Queues))}
	if now.FindErr != nil {
		if v.Unlisted = message(now.FindErr); len(now.Queues) == 0 {
			v.err = cmp.Or(v.err, now.FindErr)
		}
	}
	for i := range now.Queues {
		v.Queues = append(v.Queues, newTopQueue(before, &now.Queues[i]))
	}
	slices.SortStableFunc(v.Queues, func(a, b topQueue) int {
		return cmp.Or(cmp.Compare(b.OldestDueAge, a.OldestDueAge), strings.Compare(a.Name, b.Name))
	})
	return v
}

func newTopQueue(before *monitor.View, q *monitor.QueueView) topQueue {
	row := topQueue{Name: q.Name, RedisOnly: q.RedisOnly, ConsumersHealthy: q.Healthy, ConsumersStale: q.Stale, ConsumersStuck: q.Stuck}
	if q.Err != nil {
		row.Error = message(q.Err)
	}
	s := q.Stats
	if s == nil {
		return row
	}
	row.Pending, row.Due, row.Processing, row.Dead, row.OldestDueAge, row.LastRun = s.Pending, s.Due, s.Processing, s.Dead, s.OldestDueAge, s.LastRun
	if before == nil {
		return row
	}
	i := slices.IndexFunc(before.Queues, func(old monitor.QueueView) bool { return old.Name == q.Name && old.Stats != nil })
	if i < 0 {
		return row
	}
	old := before.Queues[i].Stats
	over := s.Now.Sub(old.Now).Seconds()
	if over <= 0 || s.Created < old.Created || s.Leased < old.Leased { // other data by now: counters only rise
		return row
	}
	rate := func(now, before int64) *float64 {
		r := float64(max(0, now-before)) / over
		return &r
	}
	var failed, failedBefore int64
	for reason, n := range s.Failed {
		failed, failedBefore = failed+n, failedBefore+old.Failed[reason]
	}
	row.EnqueuedPerSec, row.SucceededPerSec, row.FailedPerSec = rate(s.Created, old.Created), rate(s.Succeeded, old.Succeeded), rate(failed, failedBefore)
	return row
}

// text is the table, cut to the height of a screen; 0 cuts nothing.
func (t *top) text(v *topView, height int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s   %s   %s   %s\n", bold.Render("delayq top"), t.redis.shown(), serverLine(v), faint.Render(v.At.Format("15:04:05")))
	switch {
	case v.err != nil:
		fmt.Fprintln(&b, bad.Render(message(v.err)))
	case v.Unlisted != "":
		fmt.Fprintln(&b, warning.Render("queues may be missing: "+v.Unlisted))
	}
	rows := [][]string{{"QUEUE", "OLDEST", "DUE", "PENDING", "RUNNING", "DEAD", "IN/S", "OUT/S", "FAIL/S", "CONSUMERS"}}
	shown := v.Queues
	const around = 6 // the head, what is wrong, the titles, the last lines, and where the cursor stands
	if room := max(1, height-around); height > 0 && len(shown) > room {
		shown = shown[:room]
	}
	for i := range shown {
		rows = append(rows, shown[i].cells())
	}
	b.WriteByte('\n')
	writeColumns(&b, rows)
	if more := len(v.Queues) - len(shown) + v.LeftOut; more > 0 {
		fmt.Fprintln(&b, faint.Render(fmt.Sprintf("and %d more queues", more)))
	}
	if len(v.Queues) == 0 && v.err == nil {
		fmt.Fprintln(&b, faint.Render("no queues"))
	}
	return b.String()
}

func serverLine(v *topView) string {
	s := v.Server
	if s.Err != nil {
		return bad.Render("away")
	}
	line := "version " + cmp.Or(s.Version, "unknown")
	if s.MemoryMax > 0 && s.MemoryUsed >= 0 {
		line += fmt.Sprintf(", memory %.0f %%", 100*float64(s.MemoryUsed)/float64(s.MemoryMax))
	}
	return faint.Render(line)
}

func (q *topQueue) cells() []string {
	name := q.Name
	if q.Error != "" && q.LastRun.IsZero() && q.Pending+q.Due+q.Processing+q.Dead == 0 {
		return []string{name, bad.Render(ansi.Truncate(q.Error, 100, "…"))}
	}
	if q.RedisOnly {
		name += faint.Render(" (Redis only)")
	}
	oldest := "-"
	if q.Due > 0 {
		oldest = brief(q.OldestDueAge)
		switch {
		case q.OldestDueAge > 15*time.Minute:
			oldest = bad.Render(oldest)
		case q.OldestDueAge > 2*time.Minute:
			oldest = warning.Render(oldest)
		}
	}
	fail := perSecond(q.FailedPerSec)
	if q.FailedPerSec != nil && *q.FailedPerSec > 0 {
		fail = warning.Render(fail)
	}
	return []string{
		name, oldest, fmt.Sprint(q.Due), fmt.Sprint(q.Pending), fmt.Sprint(q.Processing), fmt.Sprint(q.Dead),
		perSecond(q.EnqueuedPerSec), perSecond(q.SucceededPerSec), fail, q.consumers(),
	}
}

func (q *topQueue) consumers() string {
	text := fmt.Sprint(q.ConsumersHealthy)
	switch {
	case q.ConsumersHealthy == 0 && q.Due > 0:
		text = bad.Render("none healthy")
	case q.ConsumersHealthy > 0:
		text = fine.Render(text)
	}
	if q.ConsumersStale > 0 {
		text += faint.Render(fmt.Sprintf(", %d stale", q.ConsumersStale))
	}
	if q.ConsumersStuck > 0 {
		text += bad.Render(fmt.Sprintf(", %d stuck", q.ConsumersStuck))
	}
	return text
}

func perSecond(r *float64) string {
	if r == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *r)
}

// writeColumns aligns cells by the width that is seen, colours aside: the first and the last to the left, the others to the right.
func writeColumns(b *strings.Builder, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		if len(row) < len(widths) {
			widths[0] = max(widths[0], lipgloss.Width(row[0])) // an error runs through
			continue
		}
		for i, cell := range row {
			widths[i] = max(widths[i], lipgloss.Width(cell))
		}
	}
	for n, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			gap := strings.Repeat(" ", max(0, widths[i]-lipgloss.Width(cell)))
			switch {
			case i == 0:
				line.WriteString(cell + gap)
			case i == len(widths)-1 || len(row) < len(widths):
				line.WriteString("  " + cell)
			default:
				line.WriteString("  " + gap + cell)
			}
		}
		text := strings.TrimRight(line.String(), " ")
		if n == 0 {
			text = faint.Render(text)
		}
		b.WriteString(text + "\n")
	}
}
