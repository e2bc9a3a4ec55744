package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"

	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/monitor/doctor"
)

// Exit codes of the doctor, as its --help tells them.
const (
	exitWarnings = 3
	exitCritical = 4
)

type visit struct {
	monitoring
	watch   time.Duration
	audit   bool
	verbose bool
	json    bool
}

func newDoctor() *cobra.Command {
	var v visit
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say in plain words what is wrong, and what to do",
		Long: `doctor looks at queues twice, some seconds apart, and walks from the trigger (does anybody ask for work?) over the state (where are the
tasks, is Redis well?) and the execution (what do runs end with?) to what lies downstream (the ledger, what handlers call). It says
what it has looked at, what is wrong with the figures, and what to type. It changes nothing and makes no queue, and it is
for when servers are down too.

What comes later in the list is often only the consequence of what comes first.

Exit status: 0 all is well, 3 warnings (somebody must look in working hours), 4 critical (tasks are late or lost now, or nobody can tell);
1 it could not say, 2 wrong usage.`,
		Example: `  delayq doctor
  delayq doctor --queue orders --watch-for 30s
  delayq doctor --json | jq '.findings[] | select(.severity == "critical")'`,
		Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error { return v.run(cmd) },
	}
	v.lookFlags(cmd)
	f := cmd.Flags()
	f.DurationVar(&v.watch, "watch-for", 5*time.Second, "time between the two looks; 0 looks once, and sees nothing that grows")
	f.BoolVar(&v.audit, "audit", false, "read through all data too, as delayq audit does; takes time")
	f.BoolVarP(&v.verbose, "verbose", "v", false, "with many queues too, show everything that is well")
	f.BoolVar(&v.json, "json", false, "print JSON: {at, worst, queues, findings}; durations in ns")
	return cmd
}

// lookFlags are the flags of those who look at queues once or now and then.
func (m *monitoring) lookFlags(cmd *cobra.Command) {
	m.redis.flags(cmd, redisDefault)
	m.booked.flags(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&m.config.Queues, "queue", nil, "`names` of queues, with commas or as several flags; default all that there are")
	f.IntVar(&m.config.MostQueues, "most-queues", 100, "look at no more than these, the first by name")
	f.DurationVar(&m.config.Timeout, "timeout", 5*time.Second, "longest wait for the servers' answers at a look")
	f.DurationVar(&m.config.StaleAfter, "stale-after", time.Minute, "a consumer that is silent for so long is stale")
	f.DurationVar(&m.config.StuckAfter, "stuck-after", 5*time.Minute, "a consumer that lives without progress for so long is stuck")
}

func (v *visit) run(cmd *cobra.Command) error {
	if v.watch < 0 || v.watch > time.Hour {
		return usagef("--watch-for: want 0 to 1h")
	}
	m, done, err := v.open()
	if err != nil {
		return err
	}
	defer done()
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
	defer stop()
	r, err := v.diagnose(ctx, cmd, m)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if v.json {
		err = printJSON(out, r)
	} else {
		err = v.print(out, r)
	}
	switch {
	case err != nil:
		return err
	case r.Worst == doctor.Critical:
		return &statusError{exitCritical, errReported}
	case r.Worst == doctor.Warning:
		return &statusError{exitWarnings, errReported}
	}
	return nil
}

func (v *visit) diagnose(ctx context.Context, cmd *cobra.Command, m *monitor.Monitor) (*doctor.Report, error) {
	o := doctor.Options{
		Watch: v.watch, Timeout: v.config.Timeout, StaleAfter: v.config.StaleAfter, StuckAfter: v.config.StuckAfter,
		Redis: v.config.Redis, Audit: v.audit,
	}
	if led, ok := v.config.Ledger.(*lateLedger); ok {
		o.Database = led.now
	}
	stderr := cmd.ErrOrStderr()
	if _, terminal := terminalWidth(stderr); terminal && v.watch > 0 {
		defer countDown(ctx, &live{w: stderr}, v.watch)()
	}
	var bar *bar
	o.Progress = func(queue string, done, total int64) {
		if bar == nil {
			bar = newBar(stderr, -1, "entries")
		}
		bar.Describe(queue)
		bar.ChangeMax64(max(total, done))
		_ = bar.Set64(done)
	}
	r := doctor.Diagnose(ctx, m, o)
	if bar != nil {
		bar.done()
	}
	if ctx.Err() != nil {
		return nil, failf("interrupted")
	}
	return r, nil
}

// countDown shows how long the time between the looks still is, until it is over or the returned function is called.
func countDown(ctx context.Context, screen *live, d time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		end := time.Now().Add(d)
		for left := d; left > 0; left = time.Until(end) {
			screen.draw(faint.Render(fmt.Sprintf("looking twice, %.0f s left", left.Seconds())) + "\n")
			if !sleep(ctx, min(left, 200*time.Millisecond)) {
				break
			}
		}
		screen.draw("")
	}()
	return func() { cancel(); <-gone }
}

// now is the database's clock, once its schema has been found right.
func (l *lateLedger) now(ctx context.Context) (t time.Time, err error) {
	if _, err = l.open(ctx); err == nil {
		err = l.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&t)
	}
	return t, err
}

var questions = map[doctor.Stage]string{
	doctor.Trigger:    "does anybody ask for work?",
	doctor.State:      "where are the tasks, and is Redis well?",
	doctor.Execution:  "what do runs end with?",
	doctor.Downstream: "the ledger, and what handlers call",
}

// manyQueues is from how many on what is well is summed up.
const manyQueues = 4

func (v *visit) print(w io.Writer, r *doctor.Report) error {
	width, terminal := terminalWidth(w)
	if !terminal {
		width = 0
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s   %s", bold.Render("delayq doctor"), v.redis.shown())
	if len(r.Queues) > 0 {
		fmt.Fprintf(&b, "   %s", plural(len(r.Queues), "queue"))
	}
	if r.Watched > 0 {
		fmt.Fprintf(&b, ", watched for %s", brief(r.Watched))
	}
	b.WriteByte('\n')
	for i, stage := range doctor.Stages {
		fmt.Fprintf(&b, "\n%s %s\n", bold.Render(fmt.Sprintf("%d %s:", i+1, stage)), faint.Render(questions[stage]))
		v.printStage(&b, r, stage, width)
	}
	fmt.Fprintf(&b, "\n%s\n", verdict(r))
	_, err := lipgloss.Fprint(w, b.String())
	return err
}

func (v *visit) printStage(b *strings.Builder, r *doctor.Report, stage doctor.Stage, width int) {
	lines, well := 0, 0
	for _, f := range r.Findings {
		switch {
		case f.Stage != stage:
			continue
		case f.Severity == doctor.OK && f.Queue != "" && len(r.Queues) >= manyQueues && !v.verbose:
			well++
			continue
		}
		lines++
		subject := ""
		if f.Queue != "" {
			subject = f.Queue + ": "
		}
		hang(b, "  "+mark(f.Severity)+" ", subject+f.What, width)
		if f.Do != "" {
			hang(b, "      ", f.Do, width)
		}
		if f.Severity >= doctor.Warning && f.Runbook != "" {
			hang(b, "      ", faint.Render("see "+f.Runbook), width)
		}
	}
	if well > 0 {
		fmt.Fprintf(b, "  %s %d more things are well\n", mark(doctor.OK), well)
	} else if lines == 0 {
		fmt.Fprintf(b, "  %s nothing to look at\n", faint.Render("-"))
	}
}

// hang writes text that is broken to the width behind the first line's head; width 0 breaks nothing.
func hang(b *strings.Builder, head, text string, width int) {
	indent := lipgloss.Width(head)
	if width > indent+20 {
		text = ansi.Wordwrap(text, width-indent, "")
	}
	b.WriteString(head + strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", indent)) + "\n")
}

var (
	fine    = lipgloss.NewStyle().Foreground(lipgloss.Green)
	warning = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Yellow)
)

func mark(s doctor.Severity) string {
	switch s {
	case doctor.Critical:
		return bad.Render("✗")
	case doctor.Warning:
		return warning.Render("!")
	case doctor.Info:
		return faint.Render("i")
	}
	return fine.Render("✓")
}

func verdict(r *doctor.Report) string {
	var n [doctor.Critical + 1]int
	for _, f := range r.Findings {
		n[f.Severity]++
	}
	switch r.Worst {
	case doctor.Critical:
		return bad.Render(fmt.Sprintf("%d critical, %s, %s well", n[doctor.Critical], plural(n[doctor.Warning], "warning"), plural(n[doctor.OK], "thing")))
	case doctor.Warning:
		return warning.Render(fmt.Sprintf("%s, %s well", plural(n[doctor.Warning], "warning"), plural(n[doctor.OK], "thing")))
	}
	return good.Render(fmt.Sprintf("all is well: %s looked at", plural(n[doctor.OK]+n[doctor.Info], "thing")))
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
