package console

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/delayq/toolkit/delayq"
)

// shop fills a rig with queues as a shop has them, and runs workers on two of them until the test ends.
func shop(r *rig) (orders, mail *delayq.Queue) {
	orders = r.queue("orders", delayq.Config{Shards: 3})
	mail = r.queue("mail/eu", delayq.Config{})
	idle := r.queue("billing:invoices", delayq.Config{})
	for i := range 24 {
		r.add(idle, fmt.Sprintf("invoice:%d", 7000+i), "invoice.send", time.Duration(i+1)*time.Hour)
	}
	r.kill(orders, "order.cancel", hostile...) // the newest come first
	r.kill(orders, "stock.release", ids("release-stock", 5)...)
	r.kill(orders, "order.cancel", ids("cancel-order", 60)...)
	for i := range 120 {
		r.add(orders, fmt.Sprintf("cancel-order:%d", 41000+i), "order.cancel", time.Duration(i+30)*time.Minute)
	}
	quiet := slog.New(slog.DiscardHandler)
	work := func(q *delayq.Queue, name string, h func(context.Context, *delayq.Task) error) {
		w := delayq.NewWorker(delayq.HandlerFunc(h), q)
		w.WorkerConfig = delayq.WorkerConfig{Consumer: name, Concurrency: 8, MaxPoll: 100 * time.Millisecond, Logger: quiet}
		ctx, stop := context.WithCancel(r.Context())
		done := make(chan struct{})
		go func() { defer close(done); _, _ = w.Run(ctx) }()
		r.Cleanup(func() { stop(); <-done })
	}
	work(orders, "worker-7f9c-a", func(context.Context, *delayq.Task) error { return nil })
	work(orders, "worker-7f9c-b", func(context.Context, *delayq.Task) error { return nil })
	for i := range 40 {
		_, err := mail.Enqueue(r.Context(), delayq.Task{ID: fmt.Sprintf("welcome:%d", i), Type: "mail.send", RunAt: time.Now().Add(time.Duration(i-200) * time.Second)})
		r.ok(err)
	}
	ctx, stop := context.WithCancel(r.Context())
	done := make(chan struct{})
	go func() { // orders come in all the time
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			_, _ = orders.Enqueue(ctx, delayq.Task{ID: fmt.Sprintf("live:%d", i), Type: "order.cancel", Delay: time.Duration(i%40) * 50 * time.Millisecond})
			time.Sleep(25 * time.Millisecond)
		}
	}()
	r.Cleanup(func() { stop(); <-done })
	return orders, mail
}

func TestPages(t *testing.T) {
	chromium(t)
	r := newRig(t, Config{ShowPayloads: true})
	orders, _ := shop(r)
	go r.c.Run(t.Context())
	b := r.browse(true)

	b.step("overview", func(t *testing.T) {
		b.open("/")
		b.until(`document.querySelectorAll(".plot canvas").length === 4`)
		b.until(`document.querySelector(".charts").dataset.points >= 3`)
		b.until(`document.querySelectorAll("#queues tbody tr").length === 3`)
		if got := js[string](b, `document.querySelector("#queues tbody th").textContent`); got != "mail/eu" {
			t.Errorf("first is %q, want the queue with the oldest due task", got)
		}
		b.until(`document.querySelector("#summary").textContent.includes("1 of 3 queues needs a look")`)
		b.until(`/healthy/.test(document.querySelector("#row-orders").textContent)`)
		// It is alive.
		was := js[string](b, `document.querySelector("#row-orders").textContent`)
		b.until(fmt.Sprintf(`document.querySelector("#row-orders").textContent !== %q`, was))
		b.sound()
		b.shot("overview-light")
		b.scheme("dark")
		b.sound()
		b.shot("overview-dark")
		b.scheme("light")
		b.calm()
	})

	b.step("queue", func(t *testing.T) {
		b.open("/")
		b.click(`#row-orders th a`, "orders")
		b.until(`document.querySelector("#live").textContent.includes("worker-7f9c-a")`)
		b.click(`.tabs a[href*="pending"]`, "orders")
		first := js[string](b, `document.querySelector("#tasks tbody th a").textContent`)
		b.click(`[data-next]`, "orders")
		if got := js[string](b, `document.querySelector("#tasks tbody th a").textContent`); got == first {
			t.Errorf("the next page begins with %q as the first did", got)
		}
		b.until(`document.querySelector("time").textContent.match(/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$/)`)
		b.until(`document.querySelector("#zone").textContent.includes("+05:45")`)
		if js[bool](b, `document.querySelector("time").textContent === document.querySelector("time").title.slice(0, 19).replace("T", " ")`) {
			t.Error("times are not in the viewer's zone")
		}
		b.open("/queue/orders?state=pending")
		b.tap(`[data-span="3600"]`)
		b.until(`document.querySelector('[data-span="3600"]').getAttribute("aria-pressed") === "true" && document.querySelectorAll(".charts canvas").length === 4`)
		b.sound()
		b.tap("#theme")
		b.tap("#theme")
		b.until(`document.documentElement.dataset.theme === "dark"`)
		b.sound()
		b.until(`document.querySelector(".charts").dataset.points >= 3`)
		b.shot("queue-dark")
		b.open("/queue/orders") // the choice stays
		b.until(`document.documentElement.dataset.theme === "dark"`)
		b.tap("#theme")
		b.until(`!document.documentElement.dataset.theme`)
		for _, state := range []string{"due", "processing", "dead"} {
			b.open("/queue/orders?state=" + state)
			b.sound()
		}
		b.calm()
	})

	b.step("keys", func(t *testing.T) {
		b.open("/queue/orders?state=pending")
		b.press("?")
		b.until(`document.querySelector("#help").open`)
		b.sound()
		b.press("Escape")
		b.until(`!document.querySelector("#help").open`)
		b.press("j")
		b.press("j")
		b.press("k")
		b.press("j")
		second := js[string](b, `document.querySelectorAll("#tasks tbody th a")[1].textContent`)
		b.until(fmt.Sprintf(`document.activeElement.textContent === %q`, second))
		b.press("o")
		b.until(fmt.Sprintf(`document.querySelector("h1").textContent === %q`, second))
		b.press("u")
		b.until(`document.querySelector("h1").textContent === "orders"`)
		b.open("/queue/orders?state=pending")
		b.press("n")
		b.until(`location.search.includes("cursor=") && document.querySelector("[data-first]")`)
		b.press("p")
		b.until(`!location.search.includes("cursor=")`)
		for _, theme := range []string{"light", "dark", ""} {
			b.press("t")
			b.until(fmt.Sprintf(`(document.documentElement.dataset.theme || "") === %q`, theme))
		}
		b.open("/queue/orders/dead")
		b.press("k") // from nowhere: the last
		b.press("x")
		b.until(`document.querySelector("#dead-form tbody tr:last-child input").checked && document.querySelectorAll("#dead-form tbody :checked").length === 1`)
		b.press("g")
		b.press("d")
		b.until(`location.pathname === "/dead"`)
		b.press("g")
		b.press("o")
		b.until(`location.pathname === "/"`)
		b.press("/")
		b.until(`document.activeElement.id === "find"`)
		b.write("#find", "j?go") // it is text here
		b.until(`document.querySelector("#find").value === "j?go" && !document.querySelector("#help").open`)
		b.press("Escape")
		b.press("?")
		b.tap("#keys-on")
		b.tap("#help form button")
		b.press("g")
		b.press("d")
		b.press("?")
		if js[bool](b, `location.pathname !== "/" || document.querySelector("#help").open`) {
			t.Error("keys that are off do something")
		}
		do(b, chromedp.Evaluate[chromedp.Void](`localStorage.clear()`))
		b.calm()
	})

	b.step("search", func(t *testing.T) {
		b.open("/")
		b.write("#find", "cancel-order:41005\r")
		b.until(`document.querySelector("h1").textContent === "cancel-order:41005"`)
		b.open("/search?find=no-such-id")
		b.until(`document.querySelector("main").textContent.includes("none knows a task")`)
		b.sound()
		b.open("/search?find=orders")
		b.click("main a", "orders")
		b.calm()
	})

	b.step("task", func(t *testing.T) {
		const id = "cancel-order:41007"
		b.open("/queue/orders/task/" + id)
		b.until(`document.querySelector("pre:not(.error)").textContent.includes("</pre><script>")`)
		b.sound()
		b.write("#move-in", "90m")
		b.click(`#move button`, "Reschedule this task?")
		b.sound()
		b.click(`#sure`, id)
		b.notice("The task has its new due time.")
		in, err := orders.Get(t.Context(), id)
		r.ok(err)
		if d := time.Until(in.Due); d < 89*time.Minute || d > 90*time.Minute {
			t.Errorf("due in %s, want 90 min", d)
		}
		// A time is of the viewer's zone, which is 5:45 ahead.
		b.open("/queue/orders/task/" + id)
		do(b, chromedp.SetValue(chromedp.CSS("#move-at"), "2031-02-03T04:05"))
		b.click(`#move button`, "Reschedule this task?")
		b.click(`#sure`, id)
		in, err = orders.Get(t.Context(), id)
		r.ok(err)
		if got := in.Due.UTC().Format(time.RFC3339); got != "2031-02-02T22:20:00Z" {
			t.Errorf("due at %s", got)
		}
		b.click(`button[value=cancel]`, "Cancel this task?")
		b.click(`main a.button`, id) // no
		r.wantState(orders, delayq.StatePending, id)
		b.click(`button[value=cancel]`, "Cancel this task?")
		b.click(`#sure`, id)
		b.notice("The task is cancelled.")
		r.wantState(orders, delayq.StateCancelled, id)
		b.sound()
		const other = "cancel-order:41009"
		b.open("/queue/orders/task/" + other)
		b.click(`button[value=run]`, "Run this task now?")
		b.click(`#sure`, other)
		b.notice("The task is due now.")
		if js[bool](b, `location.search.includes("done")`) {
			t.Error("a reload would say again what was done")
		}
		b.open("/queue/orders/task/release-stock-001")
		b.sound()
		b.shot("task-dead")
		b.calm()
	})

	b.step("dead letters", func(t *testing.T) {
		b.open("/dead")
		b.sound()
		b.click("tbody a", "Dead letters")
		b.until(`document.querySelectorAll("#dead-form tbody tr").length === 50`)
		b.tap("#dead-form tbody tr:nth-child(1) input")
		b.tap("#dead-form tbody tr:nth-child(3) input")
		b.until(`document.querySelector("#chosen").textContent.includes("2")`)
		b.sound()
		b.shot("dead-letters")
		b.scheme("dark")
		b.sound()
		b.scheme("light")
		first := js[string](b, `document.querySelector("#dead-form tbody tr:nth-child(1) a").textContent`)
		second := js[string](b, `document.querySelector("#dead-form tbody tr:nth-child(2) a").textContent`)
		third := js[string](b, `document.querySelector("#dead-form tbody tr:nth-child(3) a").textContent`)
		b.click(`button[value=purge]`, "Purge dead letters?")
		b.until(`document.querySelectorAll(".ids li").length === 2`)
		b.sound()
		b.shot("confirm")
		b.click(`#sure`, "Dead letters")
		b.notice("2 dead letters are deleted.")
		b.sound()
		r.wantState(orders, "", first, third)
		r.wantState(orders, delayq.StateDead, second)
		b.write("#type", "stock.release")
		b.click(`.filter button`, "Dead letters")
		b.until(`document.querySelectorAll("#dead-form tbody tr").length === 5`)
		b.tap("#choose-all")
		b.until(`document.querySelector("#chosen").textContent.includes("5")`)
		b.click(`button[value=replay]`, "Replay dead letters?")
		b.click(`#sure`, "Dead letters")
		b.notice("5 dead letters are due again.")
		b.until(`document.querySelector("main").textContent.includes("None of those")`)
		b.open("/queue/orders/dead?reason=permanent")
		b.click(`button[value=purge-all]`, "Purge dead letters?")
		b.click(`#sure`, "Dead letters")
		b.notice("76 dead letters are deleted.")
		b.open("/queue/orders/dead")
		b.until(`document.querySelector("main").textContent.includes("There are no dead letters.")`)
		r.wantLog(`do=purge queue=orders`, `do=replay queue=orders`, `ok=76 failed=0`, `user=local`)
		b.calm()
	})

	b.step("errors", func(t *testing.T) {
		for _, path := range []string{"/nowhere", "/queue/nowhere", "/queue/orders/task/nothing", "/queue/orders?cursor=x", "/queue/orders?state=x"} {
			b.open(path)
			b.sound()
		}
		b.calm("Failed to load resource")
	})
}
