package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"charm.land/lipgloss/v2"

	"github.com/delayq/toolkit/delayq"
)

// How often the numbers are shown on a terminal, and on a pipe.
const (
	redraw = 250 * time.Millisecond
	report = 5 * time.Second
)

// summary is what dev found, and what it took.
type summary struct {
	account
	Invocations int64   `json:"invocations"`
	RedisCalls  int64   `json:"redis_calls"`
	ElapsedS    float64 `json:"elapsed_s"`
	*Booked             // nil without a ledger
}

func (s *summary) ok() bool {
	return s.Lost == 0 && s.Early == 0 && s.DuplicateEffects == 0 && (s.Booked == nil || s.StockErrors == 0)
}

// view shows dev at work: a block of numbers on a terminal, a line now and then elsewhere, nothing there with --json.
type view struct {
	live
	terminal, quiet bool
	head, database  string
	console         string // the address of the web console
	muted           atomic.Bool
	began           time.Time
	sys             *system
	q               *delayq.Queue // on a connection that is not counted
}

func newView(w io.Writer, d *dev) *view {
	_, terminal := terminalWidth(w)
	return &view{live: live{w: w}, terminal: terminal, quiet: d.json && !terminal}
}

// show settles what stands above the numbers.
func (v *view) show(d *dev) {
	v.head = fmt.Sprintf("redis %s   queue %s", d.shown(), d.queue)
	if d.database.url != "" {
		v.database = d.database.shown()
	}
	if d.page != nil {
		v.console = "http://" + d.page.Addr().String() + "/"
	}
}

// mute lets nothing out any more.
func (v *view) mute() { v.muted.Store(true) }

// say prints a line above the numbers, if anybody looks.
func (v *view) say(format string, args ...any) {
	if !v.quiet {
		v.note(format, args...)
	}
}

// note prints a line whoever looks.
func (v *view) note(format string, args ...any) { fmt.Fprintf(&v.live, format+"\n", args...) }

// Write prints log lines above the numbers, but not with every invocation that a server keeps its settings to itself, as the
// embedded one does.
func (v *view) Write(p []byte) (int, error) {
	if v.muted.Load() || bytes.Contains(p, []byte("code="+uncheckedCode)) {
		return len(p), nil
	}
	return v.live.Write(p)
}

// run shows the numbers until ctx ends. placing tells which half dev is in.
func (v *view) run(ctx, placing context.Context) {
	if v.quiet {
		return
	}
	v.began = time.Now()
	every := report
	if v.terminal {
		every = redraw
	} else {
		fmt.Fprintln(v.w, v.head)
		if v.database != "" {
			fmt.Fprintln(v.w, "database", v.database)
		}
		if v.console != "" {
			fmt.Fprintln(v.w, "console", v.console)
		}
	}
	for sleep(ctx, every) {
		stats, err := v.q.Stats(ctx)
		if err != nil {
			continue // those who do the work say so
		}
		if v.terminal {
			v.draw(v.block(stats, placing.Err() != nil))
		} else {
			fmt.Fprintln(v.w, v.line(stats))
		}
	}
	v.draw("")
}

// line is the numbers on one line.
func (v *view) line(stats *delayq.Stats) string {
	a := v.sys.shop.books.account()
	return fmt.Sprintf("orders %d  paid %d  expired %d  pending %d  due %d  processing %d  done %d  dead %d  late p99 %.1f ms",
		a.Placed, a.Paid, a.Expired, stats.Pending, stats.Due, stats.Processing, stats.Succeeded, stats.Dead, a.Lateness.P99)
}

// block is the numbers on a few lines.
func (v *view) block(stats *delayq.Stats, draining bool) string {
	a := v.sys.shop.books.account()
	phase := "Ctrl-C stops, drains and prints the summary"
	if draining {
		phase = "draining; Ctrl-C again ends it at once"
	}
	rows := [][]string{
		{"orders", num(a.Placed, "placed"), num(a.Paid, "paid"), num(a.Expired, "expired"), num(a.Lost, "open")},
		{"tasks", num(stats.Pending, "pending"), num(stats.Due, "due"), num(stats.Processing, "processing"), num(stats.Succeeded, "done"), num(stats.Dead, "dead")},
		{"lateness", ms(a.Lateness.P50, "p50"), ms(a.Lateness.P99, "p99"), ms(a.Lateness.Max, "max")},
		{"function", num(v.sys.cloud.started.Load(), "invocations"), num(v.sys.cloud.running.Load(), "running"), num(v.sys.calls.n.Load(), "Redis calls")},
	}
	if m := &v.sys.mended; v.sys.kept != nil {
		rows = append(rows, []string{"ledger", num(m.passes.Load(), "passes"), num(m.drift.Load(), "drift"), num(m.repaired.Load(), "repaired")})
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s   %s   %s\n", bold.Render("delayq dev"), v.head, faint.Render(brief(time.Since(v.began).Truncate(time.Second))))
	if v.database != "" { // on a line of its own, as neither URL may be cut
		fmt.Fprintf(&b, "database %s\n", v.database)
	}
	if v.console != "" {
		fmt.Fprintf(&b, "console %s\n", v.console)
	}
	b.WriteByte('\n')
	for _, row := range rows {
		gap := 2
		line := "  " + faint.Width(8).Render(row[0])
		for _, cell := range row[1:] {
			line += strings.Repeat(" ", gap) + cell
			gap = max(2, cellWidth-lipgloss.Width(cell))
		}
		b.WriteString(line + "\n")
	}
	return b.String() + "\n" + faint.Render(phase) + "\n"
}

// cellWidth lets five cells stand on a line of 80.
const cellWidth = 14

var (
	bold  = lipgloss.NewStyle().Bold(true)
	faint = lipgloss.NewStyle().Faint(true)
	good  = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Green)
	bad   = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Red)
)

func num[N int | int64](n N, what string) string {
	return fmt.Sprintf("%s %s", bold.Render(fmt.Sprint(n)), faint.Render(what))
}

func ms(v float64, what string) string {
	return fmt.Sprintf("%s %s", faint.Render(what), bold.Render(fmt.Sprintf("%.1f ms", v)))
}

// end prints the summary.
func (v *view) end(w io.Writer, s *summary, asJSON bool) error {
	if asJSON {
		return printJSON(w, s)
	}
	verdict := good.Render("nothing lost, nothing early, no effect twice")
	if !s.ok() {
		verdict = bad.Render(fmt.Sprintf("%d lost, %d early, %d effects twice", s.Lost, s.Early, s.DuplicateEffects))
	}
	ledger := ""
	if s.Booked != nil {
		ledger = fmt.Sprintf("ledger    %d reconciler passes, drift %d, %d repaired\n", s.Passes, s.Drift, s.Repaired)
		stock := good.Render("taken minus released is what the orders say")
		if s.StockErrors > 0 {
			stock = bad.Render(fmt.Sprintf("%d products and orders are wrong", s.StockErrors))
		}
		ledger += "stock     " + stock + "\n"
	}
	_, err := lipgloss.Fprintf(w, `orders    %d placed, %d paid, %d expired
tasks     %d cancelled before they ran, %d stale runs refused
lateness  p50 %.1f ms, p99 %.1f ms, max %.1f ms
cost      %d invocations, %d Redis calls, %.1f s
%sverdict   %s
`, s.Placed, s.Paid, s.Expired, s.Cancelled, s.StaleRefused, s.Lateness.P50, s.Lateness.P99, s.Lateness.Max,
		s.Invocations, s.RedisCalls, s.ElapsedS, ledger, verdict)
	return err
}
