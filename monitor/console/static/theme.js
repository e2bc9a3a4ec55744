// Before anything is drawn, so that a page does not flash in the other colours.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("delayq-theme"); } catch { /* storage may be off */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
