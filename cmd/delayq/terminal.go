package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// terminalWidth is how wide w is, and false if it is no terminal on which the cursor can move: a pipe, a file, a test.
func terminalWidth(w io.Writer) (int, bool) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return 0, false
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil || width <= 0 {
		width = 80
	}
	return width, true
}

// bar is a progress bar on a terminal, and nothing elsewhere.
type bar struct {
	*progressbar.ProgressBar
	w io.Writer
}

// newBar counts up to total, which is -1 if nobody knows.
func newBar(w io.Writer, total int64, unit string) *bar {
	_, visible := terminalWidth(w)
	opts := []progressbar.Option{
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetVisibility(visible),
		progressbar.OptionThrottle(100 * time.Millisecond),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionFullWidth(),
		progressbar.OptionUseANSICodes(true),
	}
	if unit == "bytes" {
		opts = append(opts, progressbar.OptionShowBytes(true))
	} else {
		opts = append(opts, progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString(unit))
	}
	return &bar{progressbar.NewOptions64(total, opts...), w}
}

func (b *bar) done() { _ = b.Finish() }

// Printf prints a line above the bar.
func (b *bar) Printf(format string, args ...any) {
	_ = b.Clear()
	fmt.Fprintf(b.w, format, args...)
}

// live is a block of lines at the end of a terminal that is drawn over and over. What is written to it scrolls by above.
type live struct {
	w io.Writer

	mu    sync.Mutex
	block string // as drawn last
}

func (l *live) draw(block string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replace("", block)
}

// Write prints whole lines above the block.
func (l *live) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replace(string(p), l.block)
	return len(p), nil
}

// replace takes the block away, prints above, and draws the next block, in one write so that nothing flickers.
func (l *live) replace(above, block string) {
	var out strings.Builder
	if n := strings.Count(l.block, "\n"); n > 0 {
		out.WriteString(ansi.CursorUp(n) + "\r" + ansi.EraseScreenBelow)
	}
	out.WriteString(above)
	width, terminal := terminalWidth(l.w)
	for line := range strings.Lines(block) {
		if terminal { // where a line that wraps would make two, and the next redraw would miss one
			line = ansi.Truncate(strings.TrimSuffix(line, "\n"), width, "…") + "\n"
		}
		out.WriteString(line)
	}
	l.block = block
	_, _ = lipgloss.Fprint(l.w, out.String()) // with the colours this terminal has
}
