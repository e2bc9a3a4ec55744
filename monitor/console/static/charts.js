"use strict";
// The four charts. Points come from /series, as arrays: see point in series.go.
(() => {
  const box = document.querySelector(".charts");
  if (!box || typeof uPlot === "undefined") return;
  const texts = JSON.parse(document.getElementById("texts").textContent);
  const kinds = {
    depth: [["due", 1, "--c1", true], ["pending", 2, "--c2"], ["processing", 3, "--c3"], ["dead", 4, "--c4"]],
    oldest: [["oldest", 5, "--c1", true]],
    rate: [["in", 6, "--c2"], ["done", 7, "--c3", true], ["failed", 8, "--c4"]],
    late: [["p50", 9, "--c2"], ["p99", 10, "--c1"]],
  };
  const least = { depth: 1, oldest: 1, rate: 1, late: 0.01 }; // or a scale of nothing would be all zeros
  const keep = 4 * 3600;
  let span = 900;
  let points = [];
  let charts = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const two = (n) => String(n).padStart(2, "0");
  const clock = (t, secs) => { const d = new Date(t * 1000); return `${two(d.getHours())}:${two(d.getMinutes())}${secs ? ":" + two(d.getSeconds()) : ""}`; };
  const short = (v) => {
    if (v == null) return "–";
    for (const [unit, by] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(v) >= by) return `${+(v / by).toFixed(1)}${unit}`;
    return String(+v.toFixed(Math.abs(v) < 1 ? 3 : Math.abs(v) < 10 ? 2 : 0));
  };
  const shown = () => {
    const until = Date.now() / 1000;
    return points.filter((p) => p[0] >= until - span);
  };
  const dataOf = (lines, pts) => [pts.map((p) => p[0]), ...lines.map((l) => pts.map((p) => p[l[1]] ?? null))];

  function draw() {
    for (const c of charts) c.plot.destroy();
    charts = [];
    const pts = shown();
    for (const figure of box.querySelectorAll("figure")) {
      const lines = kinds[figure.dataset.chart];
      const host = figure.querySelector(".plot");
      const axis = { stroke: css("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 } };
      const plot = new uPlot({
        width: Math.max(host.clientWidth, 160), height: 150, cursor: { y: false, points: { size: 6 }, sync: { key: "delayq" } },
        legend: { show: false }, padding: [8, 8, 0, 0],
        scales: { x: { time: true, range: () => [Date.now() / 1000 - span, Date.now() / 1000] }, y: { range: (u, lo, hi) => [0, Math.max(hi ?? 0, least[figure.dataset.chart]) * 1.1] } },
        axes: [
          { ...axis, space: 60, values: (u, ticks) => ticks.map((t) => clock(t, span < 300)), size: 24 },
          { ...axis, space: 28, values: (u, ticks) => ticks.map(short), size: 44 },
        ],
        series: [
          {},
          ...lines.map(([name, , colour, fill]) => ({
            label: texts[name], stroke: css(colour), width: 1.5, fill: fill ? css(colour) + "22" : undefined, points: { show: false },
          })),
        ],
        hooks: { setCursor: [(u) => legend(u, lines, figure)] },
      }, dataOf(lines, pts), host);
      charts.push({ plot, lines, figure });
    }
    describe(pts);
  }

  // The values under the cursor, or else the last ones.
  const lastOf = (pts) => [...pts].reverse().find((p) => p.length > 1);
  function legend(plot, lines, figure) {
    const at = plot.cursor.idx;
    const pts = shown();
    let point = at == null ? lastOf(pts) : pts[at];
    if (at == null && point && point[0] < Date.now() / 1000 - 30) point = undefined; // that is not now
    let box = figure.querySelector(".legend");
    if (!box) {
      box = document.createElement("p");
      box.className = "legend";
      for (const [name, , colour] of lines) {
        const key = document.createElement("span");
        const swatch = document.createElement("i");
        swatch.style.background = `var(${colour})`;
        key.append(swatch, `${texts[name]} `, document.createElement("b"));
        box.append(key);
      }
      box.append(document.createElement("span"));
      figure.append(box);
    }
    box.querySelectorAll("b").forEach((b, i) => { b.textContent = point ? short(point[lines[i][1]]) : "–"; });
    box.lastChild.textContent = at == null || !point ? "" : clock(point[0], true);
  }

  // What a chart shows, for those who cannot see it: the last values.
  function describe(pts) {
    const last = lastOf(pts);
    for (const c of charts) {
      const canvas = c.plot.root.querySelector("canvas");
      const words = last ? c.lines.map(([name, at]) => `${texts[name]} ${short(last[at])}`).join(", ") : texts.nothing;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${c.figure.querySelector("figcaption").textContent}: ${words}`);
      legend(c.plot, c.lines, c.figure);
    }
  }

  async function load() {
    const since = points.length ? points[points.length - 1][0] : Date.now() / 1000 - keep;
    let fresh;
    try {
      const answer = await fetch(`/series?since=${since}&queue=${encodeURIComponent(box.dataset.queue)}`);
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) return;
      fresh = await answer.json();
    } catch { return; } // the next beat tries again
    for (const p of fresh) if (!points.length || p[0] > points[points.length - 1][0]) points.push(p);
    points = points.filter((p) => p[0] >= Date.now() / 1000 - keep);
    if (!charts.length) draw();
    const pts = shown();
    for (const c of charts) c.plot.setData(dataOf(c.lines, pts));
    describe(pts);
    box.dataset.points = points.length;
  }

  const range = box.querySelector(".range");
  range.hidden = false;
  range.addEventListener("click", (e) => {
    const button = e.target.closest("button");
    if (!button) return;
    span = Number(button.dataset.span);
    for (const b of range.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b === button));
    draw();
  });
  document.addEventListener("theme", draw);
  new ResizeObserver(() => { for (const c of charts) c.plot.setSize({ width: Math.max(c.plot.root.parentElement.clientWidth, 160), height: 150 }); }).observe(box);
  document.body.addEventListener("tick", load);
  load();
})();
