// Draws the pictures of the page with Observable Plot. Every figure is also in a table of the page; nothing is fetched.
"use strict";
(() => {
  const pictures = JSON.parse(document.getElementById("data").textContent);
  const MIB = 2 ** 20;
  const PURPOSES = {
    "outside the step": "#cdbfa8", "pools of FSDP2's streams": "#b8a9c9",
    "weights": "#4e79a7", "optimizer state": "#76b7b2", "inputs": "#8c8cd9", "gradients": "#e15759", "feature maps": "#f28e2b",
    "logits": "#ffbe7d", "held to rebuild": "#d4b02a", "fetched": "#b07aa1", "encoded": "#d37295", "rebuilt": "#59a14f",
    "generator states": "#9d7660", "in use": "#a0a7ae", "workspace": "#6b7178",
  };
  const WORK = {
    "forward": "#4e79a7", "backward": "#e15759", "update": "#76b7b2", "rebuild": "#59a14f", "encode": "#d37295",
    "decode": "#b07aa1", "wait": "#d4b02a", "copy": "#8c8cd9",
  };
  const KINDS = { "observed": "#a0a7ae", "planned": "#59a14f", "unplanned": "#e15759" };

  const bytes = (n) => {
    if (Math.abs(n) < 1024) return `${Math.round(n)} B`;
    let value = n;
    for (const unit of ["KiB", "MiB", "GiB"]) {
      value /= 1024;
      if (Math.abs(value) < 1023.995) return `${value.toFixed(2)} ${unit}`;
    }
    return `${(value / 1024).toFixed(2)} TiB`;
  };
  const ms = (s) => (s < 0.01 ? `${(1e3 * s).toFixed(3)} ms` : `${(1e3 * s).toFixed(1)} ms`);
  // ticks at round numbers of the unit that fits the largest value
  const scaleOf = (top) => (top >= 2 ** 31 ? [2 ** 30, "GiB"] : top >= 2 * MIB ? [MIB, "MiB"] : top >= 2048 ? [1024, "KiB"] : [1, "B"]);
  const secondsOf = (top) => (top >= 2 ? [1, "s"] : top >= 2e-3 ? [1e3, "ms"] : [1e6, "us"]);
  const present = (colors, names) => ({ domain: Object.keys(colors).filter((n) => names.has(n)), range: Object.keys(colors).filter((n) => names.has(n)).map((n) => colors[n]) });

  const budgetRule = (budget, scale, width) => [
    Plot.ruleY([budget / scale], { stroke: "currentColor", strokeDasharray: "5,4" }),
    Plot.text([`budget ${bytes(budget)}`], { y: () => budget / scale, frameAnchor: "right", textAnchor: "end", dy: -7, fill: "currentColor", stroke: "var(--plot-background)", strokeWidth: 4 }),
  ];

  const draw = {
    stack(d, width) {
      const [scale, unit] = scaleOf(d.top);
      const areas = [];
      for (const s of d.series) d.points.forEach((p, i) => areas.push({ p, y: s.nbytes[i] / scale, name: s.name }));
      const totals = d.points.map((p, i) => {
        const parts = d.series.filter((s) => s.nbytes[i]).sort((a, b) => b.nbytes[i] - a.nbytes[i]);
        const total = d.series.reduce((sum, s) => sum + s.nbytes[i], 0);
        const [what, layer, tensor] = d.says[i];
        const lines = [`${bytes(total)} at point ${p}`, what, layer && `layer: ${layer}`, tensor && `tensor: ${tensor}`];
        return { p, y: total / scale, says: [...lines, ...parts.slice(0, 6).map((s) => `${s.name}: ${bytes(s.nbytes[i])}`)].filter(Boolean).join("\n") };
      });
      const peak = { p: d.peak.point, y: d.peak.nbytes / scale };
      const last = d.points[d.points.length - 1];
      const fits = d.budget && d.budget <= 1.6 * d.top;
      return Plot.plot({
        width, height: Math.min(380, Math.max(260, width * 0.4)), marginLeft: 52, marginTop: 34, marginRight: 14,
        x: { label: "points of the step →", domain: [0, Math.max(1, last)], tickFormat: "d" },
        y: { label: `↑ ${unit}`, domain: [0, (1.12 * Math.max(d.top, fits ? d.budget : 0)) / scale], grid: true },
        color: { ...present(PURPOSES, new Set(d.series.map((s) => s.name))), legend: true },
        marks: [
          Plot.areaY(areas, { x: "p", y: "y", fill: "name", order: d.series.map((s) => s.name), curve: "step-after", fillOpacity: 0.9 }),
          Plot.ruleX(d.phases.slice(1), { x: "first", stroke: "currentColor", strokeOpacity: 0.45 }),
          Plot.text(d.phases.filter((f) => f.last - f.first > 0.05 * last), { x: (f) => (f.first + f.last) / 2, text: "name", frameAnchor: "top", dy: -26, fill: "currentColor" }),
          ...(fits ? budgetRule(d.budget, scale) : []),
          Plot.dot([peak], { x: "p", y: "y", r: 4, fill: "var(--ground)", stroke: "currentColor", strokeWidth: 2 }),
          Plot.text([peak], { x: "p", y: "y", text: () => `peak ${bytes(d.peak.nbytes)}`, dy: -12, textAnchor: peak.p > 0.7 * last ? "end" : peak.p < 0.3 * last ? "start" : "middle", fontWeight: "bold", fill: "currentColor", stroke: "var(--plot-background)", strokeWidth: 4 }),
          Plot.ruleX(totals, Plot.pointerX({ x: "p", stroke: "currentColor" })),
          Plot.tip(totals, Plot.pointerX({ x: "p", y: "y", title: "says", lineWidth: 34, fill: "var(--ground)" })),
          Plot.ruleY([0]),
        ],
      });
    },

    frontier(d, width) {
      const [scale, unit] = scaleOf(d.unmodified);
      const [times, time] = secondsOf(Math.max(d.run.seconds, ...d.plans.map((p) => p[1])));
      const plans = d.plans.map(([n, s, solver]) => ({ x: n / scale, y: s * times, says: `${bytes(n)} at the peak\n${ms(s)} extra a step\nfound by: ${solver}` }));
      const run = { x: d.run.nbytes / scale, y: d.run.seconds * times };
      const right = run.x > plans[0].x + 0.8 * (plans[plans.length - 1].x - plans[0].x);  // else it is free above and to the right
      return Plot.plot({
        width, height: Math.min(360, Math.max(260, width * 0.4)), marginLeft: 52, marginBottom: 40, marginTop: 26, marginRight: 20,
        x: { label: `peak of a step, ${unit} →`, grid: true, nice: true },
        y: { label: `↑ extra ${time} a step`, grid: true, zero: true, nice: true },
        marks: [
          Plot.line(plans, { x: "x", y: "y", curve: "step-after", stroke: "#4e79a7", strokeWidth: 2 }),
          Plot.dot(plans, { x: "x", y: "y", r: 2, fill: "#4e79a7" }),
          ...(d.budget && d.budget <= 1.3 * d.unmodified ? [
            Plot.ruleX([d.budget / scale], { stroke: "currentColor", strokeDasharray: "5,4" }),
            Plot.text([`budget ${bytes(d.budget)}`], { x: () => d.budget / scale, frameAnchor: "top", dy: -12, fill: "currentColor" }),
            Plot.dot([{ x: d.budget / scale, y: d.bound * times }], { x: "x", y: "y", symbol: "triangle", r: 5, stroke: "currentColor", fill: "var(--ground)" }),
          ] : []),
          Plot.dot([run], { x: "x", y: "y", r: 6, fill: "#e15759", stroke: "var(--ground)", strokeWidth: 2 }),
          Plot.text([run], { x: "x", y: "y", text: () => `this plan: ${ms(d.run.seconds)}`, dx: right ? -12 : 12, dy: -12, textAnchor: right ? "end" : "start", fontWeight: "bold", fill: "currentColor", stroke: "var(--plot-background)", strokeWidth: 4 }),
          Plot.tip(plans, Plot.pointer({ x: "x", y: "y", title: "says", fill: "var(--ground)" })),
          Plot.ruleY([0]),
        ],
      });
    },

    lanes(d, width) {
      const [times, time] = secondsOf(d.seconds);
      const spans = d.spans.map(([lane, what, from, to, says]) => ({ lane, what, x1: from * times, x2: to * times, says: `${what}: ${ms(to - from)} from ${ms(from)}\n${says}` }));
      return Plot.plot({
        width, height: 70 + 46 * d.lanes.length, marginLeft: 84, marginRight: 14,
        x: { label: `${time} since the step began →`, domain: [0, d.seconds * times || 1] },
        y: { domain: d.lanes, label: null, padding: 0.15 },
        color: { ...present(WORK, new Set(spans.map((s) => s.what))), legend: true },
        marks: [
          Plot.barX(spans, { x1: "x1", x2: "x2", y: "lane", fill: "what" }),
          Plot.tip(spans, Plot.pointer({ x: (s) => (s.x1 + s.x2) / 2, y: "lane", title: "says", lineWidth: 34, fill: "var(--ground)" })),
        ],
      });
    },

    rects(d, width) {
      const [scale, unit] = scaleOf(d.arena);
      const rects = d.rects.map(([first, until, nbytes, offset]) => ({ first, until, y1: offset / scale, y2: (offset + nbytes) / scale, nbytes, says: `${bytes(nbytes)} at address ${bytes(offset)}\nfrom request ${first} until ${until}` }));
      return Plot.plot({
        width, height: Math.min(420, Math.max(260, width * 0.45)), marginLeft: 52, marginRight: 14,
        x: { label: "requests of the step →", domain: [0, Math.max(d.period, ...d.rects.map((r) => r[1]))], tickFormat: "d" },
        y: { label: `↑ address, ${unit}`, domain: [0, d.arena / scale] },
        color: { type: "log", scheme: "YlGnBu", label: "bytes of the buffer", legend: true, tickFormat: bytes, ticks: width < 500 ? 2 : 4 },
        marks: [
          Plot.rect(rects, { x1: "first", x2: "until", y1: "y1", y2: "y2", fill: "nbytes", stroke: "var(--ground)", strokeWidth: 0.4 }),
          Plot.tip(rects, Plot.pointer({ x: (r) => (r.first + r.until) / 2, y: (r) => (r.y1 + r.y2) / 2, title: "says", fill: "var(--ground)" })),
          Plot.ruleX([d.period], { stroke: "currentColor", strokeDasharray: "5,4" }),
        ],
      });
    },

    steps(d, width) {
      const steps = d.steps.map(([step, kind, predicted, measured, seconds]) => ({ step, kind, predicted, measured, seconds }));
      const known = steps.flatMap((s) => [s.predicted, s.measured]).filter((n) => n !== null);
      const top = Math.max(1, ...known, d.budget || 0);
      const [scale, unit] = scaleOf(top);
      for (const s of steps) {
        const said = (n) => (n === null ? "no" : bytes(n));
        s.says = `step ${s.step}, ${s.kind}\nmeasured: ${said(s.measured)}\npredicted: ${said(s.predicted)}${s.seconds === null ? "" : `\nwall time: ${ms(s.seconds)}`}`;
        s.y = (s.measured ?? s.predicted ?? 0) / scale;
      }
      return Plot.plot({
        width, height: 280, marginLeft: 52, marginTop: 26, marginRight: 14,
        x: { label: "step →", domain: [0, steps[steps.length - 1].step + 1], tickFormat: (x) => (Number.isInteger(x) ? `${x}` : "") },
        y: { label: `↑ peak, ${unit}`, domain: [0, (1.12 * top) / scale], grid: true },
        color: { ...present(KINDS, new Set(steps.filter((s) => s.measured !== null).map((s) => s.kind))), legend: steps.some((s) => s.measured !== null) },
        marks: [
          ...(d.budget && known.length && d.budget <= 4 * Math.max(...known) ? budgetRule(d.budget, scale) : []),
          Plot.ruleY(steps.filter((s) => s.predicted !== null), { x1: (s) => s.step - 0.5, x2: (s) => s.step + 0.5, y: (s) => s.predicted / scale, stroke: "currentColor", strokeWidth: 2 }),
          Plot.dot(steps.filter((s) => s.measured !== null), { x: "step", y: (s) => s.measured / scale, fill: "kind", r: Math.max(1.5, Math.min(4, width / steps.length / 3)) }),
          Plot.tip(steps, Plot.pointerX({ x: "step", y: "y", title: "says", fill: "var(--ground)" })),
          Plot.ruleY([0]),
        ],
      });
    },
  };

  const places = [...document.querySelectorAll("[data-picture]")];
  const widths = new Map();
  let printing = false;
  const show = (place) => {
    const width = printing ? 700 : Math.floor(place.clientWidth);
    if (!width || widths.get(place) === width) return;
    widths.set(place, width);
    const picture = pictures[Number(place.dataset.picture)];
    place.replaceChildren(draw[picture.kind](picture.data, Math.max(280, width)));
    place.classList.add("drawn");
  };
  places.forEach(show);
  const resized = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach((entry) => show(entry.target))));
  places.forEach((place) => resized.observe(place));
  // paper has another width than the window; and what is folded there is lost, so the short tables are unfolded
  const unfolded = [];
  addEventListener("beforeprint", () => {
    printing = true;
    places.forEach(show);
    unfolded.push(...document.querySelectorAll("details.printed:not([open])"));
    unfolded.forEach((table) => { table.open = true; });
  });
  addEventListener("afterprint", () => {
    printing = false;
    places.forEach(show);
    unfolded.splice(0).forEach((table) => { table.open = false; });
  });
})();
