"use strict";
// Keys, as the dialog behind "?" lists them. They can be switched off there, since some people's tools type for them.
(() => {
  const dialog = document.getElementById("help");
  const on = document.getElementById("keys-on");
  const opener = document.getElementById("help-open");
  const off = "delayq-keys-off";
  try { on.checked = localStorage.getItem(off) !== "yes"; } catch { /* storage may be off */ }
  on.addEventListener("change", () => { try { localStorage.setItem(off, on.checked ? "no" : "yes"); } catch { /* the same */ } });
  opener.hidden = false;
  opener.addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });

  const rows = () => [...document.querySelectorAll("[data-row]")].filter((r) => r.offsetParent !== null);
  const linkOf = (row) => (row.matches("a") ? row : row.querySelector("a"));
  const current = () => rows().find((r) => r.contains(document.activeElement));
  function step(by) {
    const all = rows();
    if (!all.length) return;
    const at = all.indexOf(current());
    const row = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1)];
    linkOf(row).focus();
    row.scrollIntoView({ block: "nearest" });
  }
  const go = (selector) => document.querySelector(selector)?.click();

  let g = 0;
  const after = { o: () => { location.href = "/"; }, d: () => { location.href = "/dead"; } };
  const keys = {
    "/": () => { const find = document.getElementById("find"); find?.focus(); find?.select(); },
    "?": () => dialog.showModal(),
    j: () => step(1),
    k: () => step(-1),
    o: () => current() && linkOf(current()).click(),
    x: () => current()?.querySelector("input[type=checkbox]")?.click(),
    n: () => go("[data-next]"),
    p: () => { if (document.querySelector("[data-first]")) history.back(); },
    u: () => go("[data-up]"),
    r: () => location.reload(),
    t: () => document.dispatchEvent(new CustomEvent("keys:theme")),
  };
  document.addEventListener("keydown", (e) => {
    const typing = e.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]");
    if (e.key === "Escape" && typing) { typing.blur(); return; }
    if (!on.checked || typing || dialog.open || e.ctrlKey || e.metaKey || e.altKey || e.isComposing) return;
    const second = Date.now() - g < 1500 && after[e.key];
    g = 0;
    if (second) { e.preventDefault(); second(); return; }
    if (e.key === "g") { g = Date.now(); return; }
    if (Object.hasOwn(keys, e.key)) { e.preventDefault(); keys[e.key](); }
  });
})();
