package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/delayq/toolkit/delayq"
)

// burials are the two verbs for dead letters; they differ in what is done with a batch.
type burials struct {
	target
	name, done string // the verb, and what it has done
	act        func(q *delayq.Queue, ctx context.Context, ids ...string) error

	all, yes, dryRun bool
	reason, typ      string
	limit            int64
	json             bool
}

func newReplay() *cobra.Command {
	d := &burials{name: "replay", done: "replayed", act: (*delayq.Queue).Replay}
	return d.command("Put dead letters back, due now", "puts dead letters back into the queue, due now and with their attempts at zero")
}

func newPurge() *cobra.Command {
	d := &burials{name: "purge", done: "purged", act: (*delayq.Queue).Purge}
	return d.command("Delete dead letters for good", "deletes dead letters for good; their ids are free at once")
}

func (d *burials) command(short, long string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   d.name + " ID... | --all | --reason REASON | --type TYPE",
		Short: short,
		Long: d.name + " " + long + `. Name them by id, or choose with --reason and --type, which can be combined, or --all.

A choice is walked oldest first, a page at a time, up to --limit; those that die while it goes on are left alone. It wants a yes on
a terminal, or --yes. --dry-run counts and changes nothing.

Exit status: 0 done, 1 one of them was no dead letter, or Redis failed, 2 wrong usage.`,
		Example: "  delayq " + d.name + " --queue orders cancel-order:42\n  delayq " + d.name + " --queue orders --reason no_handler --type mail.send --dry-run",
		RunE: func(cmd *cobra.Command, ids []string) error {
			if err := d.check(ids); err != nil {
				return err
			}
			return d.inspect(cmd.Context(), func(q *delayq.Queue) error {
				if len(ids) > 0 {
					return d.named(cmd, q, ids)
				}
				return d.chosen(cmd, q)
			})
		},
	}
	d.flags(cmd)
	f := cmd.Flags()
	f.BoolVar(&d.all, "all", false, "all dead letters")
	f.StringVar(&d.reason, "reason", "", "those with this `reason`, such as no_handler, timeout, error")
	f.StringVar(&d.typ, "type", "", "those of this `type`")
	f.Int64Var(&d.limit, "limit", 0, "no more than so many; 0 for no limit")
	f.BoolVar(&d.yes, "yes", false, "do not ask")
	f.BoolVar(&d.dryRun, "dry-run", false, "count those that would be "+d.done+", and change nothing")
	f.BoolVar(&d.json, "json", false, "print JSON: {"+d.done+", matched, looked_at, failed: [{id, error}]}")
	return cmd
}

func (d *burials) check(ids []string) error {
	choice := d.all || d.reason != "" || d.typ != ""
	switch {
	case len(ids) > 0 && (choice || d.limit != 0 || d.dryRun):
		return usagef("want ids, or a choice with its flags, not both")
	case len(ids) == 0 && !choice:
		return usagef("want ids, --reason, --type, or --all")
	case d.all && (d.reason != "" || d.typ != ""):
		return usagef("--all: leave it out with --reason or --type")
	case d.reason != "" && !slices.Contains(delayq.Reasons(), d.reason): // it would find nothing, and say so as if all were well
		return usagef("--reason: want one of %s", strings.Join(delayq.Reasons(), ", "))
	case d.limit < 0:
		return usagef("--limit: want 0 or more")
	}
	return nil
}

type failedLetter struct {
	ID    string `json:"id"`
	Error string `json:"error"`
}

// burialCounts is what became of it.
type burialCounts struct {
	Done     int64          `json:"-"`
	Matched  int64          `json:"matched"`
	LookedAt int64          `json:"looked_at"`
	Failed   []failedLetter `json:"failed"`
}

// batch acts on some, at most 500, and takes down which of them failed. Only an error of the whole call is returned.
func (d *burials) batch(ctx context.Context, q *delayq.Queue, ids []string, c *burialCounts) error {
	err := d.act(q, ctx, ids...)
	var each *delayq.BatchError
	switch {
	case err == nil:
		c.Done += int64(len(ids))
		return nil
	case !errors.As(err, &each) || len(each.Errs) != len(ids):
		return err
	}
	for i, one := range each.Errs {
		if one == nil {
			c.Done++
			continue
		}
		if !errors.Is(one, delayq.ErrNotFound) && !errors.Is(one, delayq.ErrInvalid) {
			return one
		}
		c.Failed = append(c.Failed, failedLetter{ids[i], "no such dead letter"})
	}
	return nil
}

const deadPage = 500

func (d *burials) named(cmd *cobra.Command, q *delayq.Queue, ids []string) error {
	c := burialCounts{Matched: int64(len(ids)), LookedAt: int64(len(ids)), Failed: []failedLetter{}}
	for from := 0; from < len(ids); from += deadPage {
		if err := d.batch(cmd.Context(), q, ids[from:min(from+deadPage, len(ids))], &c); err != nil {
			return err
		}
	}
	return d.report(cmd, &c)
}

func (d *burials) chosen(cmd *cobra.Command, q *delayq.Queue) error {
	ctx := cmd.Context()
	stats, err := q.Stats(ctx)
	if err != nil {
		return err
	}
	c := burialCounts{Failed: []failedLetter{}}
	if stats.Dead > 0 && !d.dryRun {
		if err := d.confirm(cmd, stats.Dead); err != nil {
			return err
		}
	}
	if err := d.walk(ctx, cmd.ErrOrStderr(), q, stats, &c); err != nil {
		// What is done is done: it is told, and the error after it.
		return errors.Join(d.report(cmd, &c), err)
	}
	return d.report(cmd, &c)
}

// walk goes over the dead letters that were there at the time of stats.
func (d *burials) walk(ctx context.Context, stderr io.Writer, q *delayq.Queue, stats *delayq.Stats, c *burialCounts) error {
	bar := newBar(stderr, max(stats.Dead, 1), "dead letters")
	defer bar.done()
	for cursor := ""; ; {
		page, err := q.List(ctx, delayq.ListOptions{State: delayq.StateDead, Limit: deadPage, Cursor: cursor})
		if err != nil {
			return err
		}
		var ids []string
		for i := range page.Tasks {
			in := &page.Tasks[i]
			if in.At.After(stats.Now) || d.reason != "" && in.Reason != d.reason || d.typ != "" && in.Type != d.typ {
				continue
			}
			if d.limit > 0 && c.Matched == d.limit {
				break
			}
			c.Matched++
			ids = append(ids, in.ID)
		}
		c.LookedAt += int64(len(page.Tasks))
		if len(ids) > 0 && !d.dryRun {
			if err := d.batch(ctx, q, ids, c); err != nil {
				return err
			}
		}
		_ = bar.Set64(min(c.LookedAt, max(stats.Dead, 1)))
		beyond := len(page.Tasks) > 0 && page.Tasks[len(page.Tasks)-1].At.After(stats.Now) // oldest first
		if cursor = page.Next; cursor == "" || beyond || d.limit > 0 && c.Matched == d.limit {
			return nil
		}
	}
}

// confirm asks, if somebody is there to answer.
func (d *burials) confirm(cmd *cobra.Command, dead int64) error {
	if d.yes {
		return nil
	}
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return usagef("--yes: wanted where nobody can be asked; --dry-run only counts")
	}
	what := fmt.Sprintf("all %d dead letters", dead)
	if !d.all {
		what = fmt.Sprintf("those of the %d dead letters that match", dead)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s %s of queue %s? [y/N] ", d.name, what, d.queue)
	answer, _ := bufio.NewReader(in).ReadString('\n') // no answer is a no
	if answer = strings.ToLower(strings.TrimSpace(answer)); answer != "y" && answer != "yes" {
		return failf("nothing %s", d.done)
	}
	return nil
}

func (d *burials) report(cmd *cobra.Command, c *burialCounts) error {
	out := cmd.OutOrStdout()
	var err error
	if d.json {
		err = printJSON(out, struct {
			Replayed *int64 `json:"replayed,omitempty"`
			Purged   *int64 `json:"purged,omitempty"`
			DryRun   bool   `json:"dry_run,omitempty"`
			*burialCounts
		}{only(d.done == "replayed", &c.Done), only(d.done == "purged", &c.Done), d.dryRun, c})
	} else {
		for _, f := range c.Failed {
			fmt.Fprintf(out, "%s  %s\n", printable(f.ID), f.Error)
		}
		if d.dryRun {
			_, err = fmt.Fprintf(out, "%d would be %s, of %d looked at\n", c.Matched, d.done, c.LookedAt)
		} else {
			_, err = fmt.Fprintf(out, "%d %s\n", c.Done, d.done)
		}
	}
	if err == nil && len(c.Failed) > 0 {
		err = errReported
	}
	return err
}

func only(want bool, n *int64) *int64 {
	if want {
		return n
	}
	return nil
}
