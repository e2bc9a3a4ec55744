package console

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// shotsVar names a folder for screenshots, such as ../../docs/img.
const shotsVar = "DELAYQ_CONSOLE_SHOTS"

//go:embed testdata/axe/axe.min.js
var axe string

// A browser is a tab of a real Chromium that looks at a rig. What goes wrong in it fails the test.
type browser struct {
	*rig
	ctx     context.Context
	scripts bool

	mu       sync.Mutex
	troubles []string
}

func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("DELAYQ_REQUIRE_SERVERS") == "1" {
		t.Fatal("chromium is not on the PATH; install it")
	}
	t.Skip("chromium is not on the PATH; install it to run this test")
	return ""
}

// browse opens a tab. Without scripts it is a browser that has them switched off.
func (r *rig) browse(scripts bool) *browser {
	r.Helper()
	opts := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(chromium(r.T)), chromedp.UserDataDir(r.TempDir()), chromedp.WindowSize(1360, 900),
	}
	for _, flag := range []string{
		"headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update",
		"disable-sync", "hide-scrollbars",
	} {
		opts = append(opts, chromedp.Flag(flag, true))
	}
	opts = append(opts, chromedp.Flag("host-resolver-rules", "MAP queues.example 127.0.0.1"))
	alloc, stop := chromedp.NewExecAllocator(r.Context(), opts...)
	r.Cleanup(stop)
	ctx, end := chromedp.NewContext(alloc)
	r.Cleanup(end)
	b := &browser{rig: r, ctx: ctx, scripts: scripts}
	r.ok(chromedp.Listen(ctx, b.heard)) // starts the browser, and a deadline here would end it
	command(b, network.Enable, network.EnableParams{})
	command(b, log.Enable, cdp.Empty{})
	command(b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !scripts})
	command(b, emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: r.zone})
	r.Cleanup(func() { b.calm() })
	return b
}

// heard notes what a page must not do: log errors, break the policy, open a dialog, ask another server.
func (b *browser) heard(event any) {
	trouble := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		trouble = "exception: " + e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			trouble += " " + e.ExceptionDetails.Exception.Description
		}
	case *runtime.EventConsoleAPICalled:
		if e.Type == "error" || e.Type == "warning" {
			trouble = "console: " + string(e.Type)
			for _, arg := range e.Args {
				trouble += fmt.Sprintf(" %s %s", arg.Value, arg.Description)
			}
		}
	case *log.EventEntryAdded:
		trouble = fmt.Sprintf("log: %s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL)
	case *page.EventJavascriptDialogOpening:
		trouble = "dialog: " + e.Message
	case *network.EventRequestWillBeSent:
		if !strings.HasPrefix(e.Request.URL, b.web.URL) && !strings.HasPrefix(e.Request.URL, "data:") {
			trouble = "foreign request: " + e.Request.URL
		}
	}
	if trouble != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.troubles = append(b.troubles, trouble)
	}
}

// calm fails the test for all that was heard so far, but for what contains one of these words.
func (b *browser) calm(but ...string) {
	b.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.troubles {
		known := false
		for _, word := range but {
			known = known || strings.Contains(t, word)
		}
		if !known {
			b.Error(t)
		}
	}
	b.troubles = nil
}

// where says which page it is, for a failure.
func (b *browser) where() string {
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	text, err := chromedp.Run(ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
	return fmt.Sprintf("%.3000s (%v)", text, err)
}

func do[T any](b *browser, a chromedp.Action[T]) T {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
	defer cancel()
	v, err := chromedp.Run(ctx, a)
	if err != nil {
		b.Fatalf("%v, at %s", err, b.where())
	}
	return v
}

func command[P, R any](b *browser, c cdp.Command[P, R], params P) {
	b.Helper()
	do(b, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, c, params) })
}

func (b *browser) open(path string) {
	b.Helper()
	do(b, chromedp.Navigate(b.web.URL+path))
	do(b, chromedp.WaitReady(chromedp.CSS("#main")))
	if b.scripts { // all has its place
		b.until(`!document.querySelector(".charts") || document.querySelectorAll(".charts canvas").length === 4`)
	}
}

func (b *browser) tap(selector string) { b.Helper(); do(b, chromedp.Click(chromedp.CSS(selector))) }

func (b *browser) write(selector, text string) {
	b.Helper()
	do(b, chromedp.SendKeys(chromedp.CSS(selector), text))
}

// js evaluates an expression of any type that JSON has.
func js[T any](b *browser, expr string) T {
	b.Helper()
	return do(b, chromedp.Evaluate[T](expr))
}

// step is a part of a test, of which the others may go on without.
func (b *browser) step(name string, f func(t *testing.T)) {
	whole := b.T
	whole.Run(name, func(t *testing.T) {
		b.T = t
		defer func() { b.T = whole }()
		f(t)
	})
}

// until waits for an expression to be true.
func (b *browser) until(expr string) {
	b.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
		ok, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("document.readyState === 'complete' && Boolean("+expr+")"))
		cancel()
		if err == nil && ok {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("not true: %s (%v), at %s", expr, err, b.where())
		}
	}
}

// click leads to another page, whose heading must have this text.
func (b *browser) click(selector, heading string) {
	b.Helper()
	b.tap(selector)
	b.until(fmt.Sprintf("document.querySelector('h1')?.textContent.includes(%q)", heading))
}

// press presses a key as a keyboard does: what it would type does not come if the page has taken it.
func (b *browser) press(key string) {
	b.Helper()
	p := input.DispatchKeyEventParams{Type: "keyDown", Key: key, Text: key}
	if key == "Escape" {
		p.Text, p.WindowsVirtualKeyCode = "", 27
	}
	command(b, input.DispatchKeyEvent, p)
	p.Type, p.Text = "keyUp", ""
	command(b, input.DispatchKeyEvent, p)
}

// notice waits for the word on what has been done.
func (b *browser) notice(text string) {
	b.Helper()
	b.until(fmt.Sprintf("document.querySelector('#notice')?.textContent.includes(%q)", text))
}

// sound runs axe on the page as it is, and checks that nothing of what tasks carry has run.
func (b *browser) sound() {
	b.Helper()
	do(b, chromedp.Evaluate[chromedp.Void](axe+";undefined"))
	type violation struct {
		ID    string `json:"id"`
		Help  string `json:"help"`
		Nodes []struct {
			HTML           string `json:"html"`
			FailureSummary string `json:"failureSummary"`
		} `json:"nodes"`
	}
	found := do(b, chromedp.Evaluate[[]violation](
		`axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}).then((r) => r.violations)`,
		chromedp.EvalAwaitPromise))
	for _, v := range found {
		b.Errorf("axe: %s: %s", v.ID, v.Help)
		for _, n := range v.Nodes[:min(3, len(v.Nodes))] {
			b.Errorf("  %.300s\n  %s", n.HTML, n.FailureSummary)
		}
	}
	if js[bool](b, "'pwned' in window") {
		b.Error("a task's text ran as a script")
	}
}

// narrow makes it a phone.
func (b *browser) narrow() {
	b.Helper()
	do(b, chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile, chromedp.EmulateScale(2)))
}

// scheme is what the system prefers, "light" or "dark".
func (b *browser) scheme(name string) {
	b.Helper()
	command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}},
	})
}

// shot writes a picture of the page, if somebody wants them.
func (b *browser) shot(name string) {
	b.Helper()
	dir := os.Getenv(shotsVar)
	if dir == "" {
		return
	}
	png := do(b, chromedp.CaptureScreenshot())
	b.ok(os.MkdirAll(dir, 0o755))
	b.ok(os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644))
}
