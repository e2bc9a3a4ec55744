"use strict";
const texts = JSON.parse(document.getElementById("texts").textContent);
const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* storage may be off */ } };

// Times in the viewer's zone. What the server wrote is UTC, and stays in the title.
const two = (n) => String(n).padStart(2, "0");
const localTime = (d) => `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
function localize(root) {
  for (const el of root.querySelectorAll("time[datetime]")) {
    const at = new Date(el.dateTime);
    if (!Number.isNaN(at.getTime())) el.textContent = localTime(at);
  }
}
function zoneName() {
  const minutes = -new Date().getTimezoneOffset();
  const name = Intl.DateTimeFormat().resolvedOptions().timeZone || "";
  return `${name} (UTC${minutes < 0 ? "−" : "+"}${two(Math.floor(Math.abs(minutes) / 60))}:${two(Math.abs(minutes) % 60)})`;
}
localize(document);
document.getElementById("zone").textContent = zoneName();
document.body.addEventListener("htmx:after:swap", () => localize(document));

// A reload must not tell again of what was done before.
if (location.search.includes("done=")) {
  const url = new URL(location.href);
  url.searchParams.delete("done");
  history.replaceState(history.state, "", url);
}

// Everything that is live follows this one beat, and rests while nobody sees it.
const beat = 5000;
const alive = () => document.querySelector("[hx-trigger]") || document.querySelector(".charts");
if (alive()) setInterval(() => { if (!document.hidden) document.body.dispatchEvent(new CustomEvent("tick")); }, beat);
const pulse = document.getElementById("pulse");
function connected(ok) {
  pulse.hidden = ok;
  pulse.textContent = ok ? "" : texts.stopped;
}
document.body.addEventListener("htmx:error", () => connected(false));
document.body.addEventListener("htmx:after:request", () => connected(true));

const themes = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
const themeNow = () => document.documentElement.dataset.theme || "auto";
function nextTheme() {
  const theme = themes[(themes.indexOf(themeNow()) + 1) % themes.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  remember("delayq-theme", theme);
  themeButton.textContent = texts["theme_" + theme];
  document.dispatchEvent(new CustomEvent("theme"));
}
themeButton.hidden = false;
themeButton.textContent = texts["theme_" + themeNow()];
themeButton.addEventListener("click", nextTheme);
document.addEventListener("keys:theme", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new CustomEvent("theme")));

// Dead letters: choose all, and how many are chosen.
const all = document.getElementById("choose-all");
const form = document.getElementById("dead-form");
if (all && form) {
  const boxes = [...form.querySelectorAll("input[name=id]")];
  const show = () => {
    const n = boxes.filter((b) => b.checked).length;
    document.getElementById("chosen").textContent = n ? `${texts.chosen} ${n}` : "";
    all.checked = n === boxes.length;
    all.indeterminate = n > 0 && n < boxes.length;
    for (const b of boxes) b.closest("tr").classList.toggle("chosen", b.checked);
  };
  all.hidden = false;
  all.addEventListener("change", () => { for (const b of boxes) b.checked = all.checked; show(); });
  form.addEventListener("change", show);
  addEventListener("pageshow", show); // the browser may have kept what was chosen
}

// The form takes UTC; with this script the viewer types the time of their own zone.
const move = document.getElementById("move");
if (move) {
  document.getElementById("move-zone").textContent = texts.local_zone;
  const at = document.getElementById("move-at");
  move.addEventListener("formdata", (e) => {
    const when = new Date(at.value);
    if (at.value && !Number.isNaN(when.getTime())) e.formData.set("at", when.toISOString());
  });
}
