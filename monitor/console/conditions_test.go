package console

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/delayq/toolkit/delayq"
)

func TestHostileTasks(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{ShowPayloads: true})
	q := r.queue("hostile", delayq.Config{})
	for _, id := range hostile {
		r.add(q, id, `<img src=x onerror=window.pwned=1>`, time.Hour)
	}
	b := r.browse(true)
	b.open("/queue/hostile?state=pending")
	b.until(fmt.Sprintf(`document.querySelectorAll("#tasks tbody tr").length === %d`, len(hostile)))
	b.sound()
	for i, id := range hostile {
		b.open("/queue/hostile?state=pending")
		// The link on the page leads to the task, and its own actions reach it.
		b.click(`#tasks tbody tr a`, "")
		b.until(`document.querySelector("#move")`)
		if i < 3 {
			b.sound()
		}
		b.click(`button[value=cancel]`, "Cancel this task?")
		b.click(`#sure`, "")
		b.notice("The task is cancelled.")
		r.wantState(q, delayq.StateCancelled, id)
		if js[bool](b, "'pwned' in window") {
			t.Errorf("%q ran as a script", id)
		}
		// It is found as a person would type it.
		b.open("/search?find=" + encode(shown(id)))
		b.until(`document.querySelector("main").textContent.includes("Cancelled")`)
	}
}

func TestPhone(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{})
	shop(r)
	go r.c.Run(t.Context())
	b := r.browse(true)
	b.narrow()
	b.open("/")
	b.until(`document.querySelector(".charts").dataset.points >= 2`) // so that there are rates
	for i, path := range []string{"/", "/queue/orders?state=pending", "/queue/orders/dead", "/queue/orders/task/release-stock-001", "/dead", "/search?find=x"} {
		b.open(path)
		b.until(`document.documentElement.scrollWidth <= innerWidth`)
		b.sound()
		b.shot(fmt.Sprintf("phone-%d", i))
	}
}

func TestWithoutScripts(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one", "two", "three")
	b := r.browse(false)
	for _, path := range []string{"/", "/queue/orders", "/queue/orders/task/one", "/dead", "/queue/orders/dead"} {
		b.open(path)
	}
	b.tap(`input[value=two]`)
	b.tap(`button[value=replay]`)
	do(b, chromedp.WaitVisible(chromedp.CSS("#sure")))
	b.tap("#sure")
	do(b, chromedp.WaitVisible(chromedp.CSS("#notice")))
	r.wantState(q, delayq.StateDue, "two")
	r.wantState(q, delayq.StateDead, "one", "three")
}

func TestLoginInABrowser(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{Token: "a token of some length", ReadOnly: true})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one")
	b := r.browse(true)
	b.open("/queue/orders/task/one")
	b.until(`location.pathname === "/login"`)
	b.sound()
	b.write("#token", "something else at all\r")
	b.until(`document.querySelector("#wrong")`)
	b.sound()
	b.calm("Failed to load resource")
	b.write("#token", "a token of some length\r")
	b.until(`document.querySelector("h1").textContent === "one"`) // where it was going
	if js[string](b, "document.cookie") != "" {
		t.Error("scripts can read the session")
	}
	if js[bool](b, `document.querySelector("form[action*=act]") !== null`) {
		t.Error("a read-only console offers changes")
	}
	b.sound()
	b.click(".tools form button", "Log in")
	b.open("/")
	b.until(`location.pathname === "/login"`)
}

// Without TLS and under a name, browsers do not say where a request comes from but by its Origin.
func TestLoginOverPlainHTTP(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{Token: "a token of some length"})
	q := r.queue("orders", delayq.Config{})
	r.kill(q, "t", "one")
	r.web.URL = strings.Replace(r.web.URL, "127.0.0.1", "queues.example", 1)
	b := r.browse(true)
	b.open("/queue/orders/task/one")
	b.write("#token", "a token of some length\r")
	b.until(`document.querySelector("h1").textContent === "one"`)
	b.click(`button[value=purge]`, "Purge dead letters?")
	b.click(`#sure`, "Dead letters")
	b.notice("1 dead letter is deleted.")
	r.wantState(q, "", "one")
	r.wantLog("user=token")
}

// What is said without the database is as good to read as the rest.
func TestDatabaseAwayInABrowser(t *testing.T) {
	chromium(t)
	r, led, pool := booked(t, Config{})
	q := r.queue("shop", delayq.Config{Ledger: led})
	r.add(q, "one", "t", 0)
	r.add(r.queue("plain", delayq.Config{}), "here", "t", time.Hour)
	b := r.browse(true)
	b.open("/queue/shop")
	b.until(`document.querySelector("#tasks").textContent.includes("one")`)
	pool.Close()
	b.until(`document.querySelector("#live").textContent.includes("The ledger cannot be read")`) // by itself
	b.sound()
	for i, path := range []string{"/", "/queue/shop", "/queue/plain/task/here", "/dead", "/search?find=here"} {
		b.open(path)
		b.sound()
		b.shot(fmt.Sprintf("no-database-%d", i))
	}
	b.calm("Failed to load resource")
}

func TestRedisGoesAndComesBack(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{})
	q := r.queue("orders", delayq.Config{})
	r.add(q, "one", "t", time.Hour)
	b := r.browse(true)
	b.open("/")
	b.until(`document.querySelector("#row-orders")`)
	r.server.Pause()
	b.until(`document.querySelector("#summary").textContent.includes("Redis does not answer")`)
	b.until(`!document.querySelector("#row-orders")`) // no numbers of before
	b.sound()
	b.shot("redis-down")
	b.open("/queue/orders")
	b.until(`document.querySelector("h1").textContent.includes("Redis does not answer")`)
	b.sound()
	r.server.Resume()
	b.until(`document.querySelector("#live .facts")`)
	b.open("/")
	b.until(`document.querySelector("#row-orders")`)
	b.calm("Failed to load resource")
}
