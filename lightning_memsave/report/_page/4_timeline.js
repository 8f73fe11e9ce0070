const MARGIN = { top: 30, right: 10, bottom: 44, left: 64 };
const hidden = new Set(); // categories that the reader switched off

function renderTimeline(prediction) {
  const section = document.getElementById("timeline");
  const { timeline, peak } = prediction;
  section.hidden = !timeline.phases.length;
  if (section.hidden) return;
  const names = CATEGORIES.map((c) => c.name).filter((n) => timeline.by_category[n]?.some(Boolean));
  const drawn = sum(names.map((name) => timeline.by_category[name][timeline.peak_index]));
  const plot = el("div", {
    class: "plot", tabindex: "0", role: "slider", "aria-label": "Point in the step",
    "aria-valuemin": 0, "aria-valuemax": timeline.phases.length - 1,
  });
  section.replaceChildren(...[
    heading("timeline", "Memory through the step", "The most, ",
      el("b", {}, formatBytes(prediction.peak_bytes)), peak.phase ? `, is alive in ${peak.phase}` : "",
      peak.module ? [" while ", code(peak.module), " runs"] : null,
      peak.op ? [" (", code(peak.op), ")"] : null, "."),
    plot,
    chartLegend(names, timeline),
    el("p", { class: "hint" }, "Each step to the right is one operation. Point at the chart, or use ",
      "the arrow keys; a category can be switched off.",
      drawn !== prediction.peak_bytes
        ? ` Drawn is ${prediction.is_extrapolated ? "a copy of the model with fewer blocks" : "a step"}`
          + ` whose peak is ${formatBytes(drawn)}.` : "",
      timeline.merged > 1 ? ` Each point is the largest of up to ${timeline.merged} neighbours.` : ""),
    phaseTable(prediction),
  ].filter(Boolean));
  new Chart(plot, timeline, names);
}

function chartLegend(names, timeline) {
  return el("ul", { class: "legend switches", "aria-label": "Categories, with bytes at the peak" },
    el("li", { class: "legend-title" }, "At the peak"),
    names.map((name) => el("li", {}, el("button", {
      type: "button", "aria-pressed": String(!hidden.has(name)), "data-category": name,
      onclick: (event) => {
        if (!hidden.delete(name)) hidden.add(name);
        event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(name)));
        document.querySelector("#timeline .plot").dispatchEvent(new Event("redraw"));
      },
    }, swatch(name), labelOf(name), " ",
    bytesOf(timeline.by_category[name][timeline.peak_index])))));
}

class Chart {
  constructor(plot, timeline, names) {
    Object.assign(this, { plot, timeline, names, at: timeline.peak_index });
    this.count = timeline.phases.length;
    this.tip = el("div", { class: "tip", role: "presentation", hidden: true });
    plot.addEventListener("redraw", () => this.draw());
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerdown", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("focus", () => plot.matches(":focus-visible") && this.look(this.at));
    plot.addEventListener("blur", () => this.leave());
    plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => plot.clientWidth !== this.width && this.draw()).observe(plot);
    this.draw();
    this.describe(this.at);
  }

  // Points are steps, not slopes: memory does not change between two operations.
  x(i) { return MARGIN.left + (i * this.inner) / this.count; }
  y(bytes) { return this.height - MARGIN.bottom - (bytes * this.drop) / this.top; }

  draw() {
    this.width = this.plot.clientWidth || 900;
    this.height = this.width < 560 ? 300 : 400;
    this.inner = this.width - MARGIN.left - MARGIN.right;
    this.drop = this.height - MARGIN.top - MARGIN.bottom;
    const shown = this.names.filter((name) => !hidden.has(name));
    this.stack();
    const ticks = niceTicks(Math.max(...this.total));
    this.top = ticks.top;
    this.cursor = svg("line", {
      class: "cursor", y1: MARGIN.top, y2: this.height - MARGIN.bottom, visibility: "hidden",
    });
    const drawing = svg("svg", {
      viewBox: `0 0 ${this.width} ${this.height}`, width: this.width, height: this.height,
      "aria-hidden": "true",
    },
    this.drawPhases(),
    ticks.values.map(([bytes, label]) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right,
        y1: this.y(bytes), y2: this.y(bytes) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: this.y(bytes) + 4 }, label),
    ]),
    shown.map((name) => svg("path", { class: `area c-${name}`, "data-category": name,
      d: this.area(name), "stroke-width": this.isThin(name) ? 0 : 0.6 })),
    this.drawPeak(), this.cursor);
    this.plot.replaceChildren(drawing, this.tip);
  }

  // Where the area of each category begins and ends at each point.
  stack() {
    let below = new Array(this.count).fill(0);
    this.bands = {};
    for (const name of this.names) {
      if (hidden.has(name)) continue;
      const above = below.map((bytes, i) => bytes + this.timeline.by_category[name][i]);
      this.bands[name] = [below, above];
      below = above;
    }
    this.total = below;
  }

  // An edge would hide an area that is as thin as itself.
  isThin(name) {
    return (Math.max(...this.timeline.by_category[name]) * this.drop) / this.top < 2;
  }

  area(name) {
    const [below, above] = this.bands[name];
    const edge = (values, order) => order.flatMap((i) => {
      const y = this.y(values[i]).toFixed(1);
      const ends = [this.x(i).toFixed(1), this.x(i + 1).toFixed(1)];
      return (order[0] === 0 ? ends : ends.reverse()).map((x) => `${x},${y}`);
    });
    const forth = [...Array(this.count).keys()];
    return `M${edge(above, forth).join("L")}L${edge(below, forth.reverse()).join("L")}Z`;
  }

  drawPhases() {
    const nodes = [];
    for (let start = 0, end; start < this.count; start = end) {
      const phase = this.timeline.phases[start];
      for (end = start; this.timeline.phases[end] === phase; end++);
      const [left, width] = [this.x(start), this.x(end) - this.x(start)];
      nodes.push(
        svg("rect", { class: `phase p-${phase}`, x: left, width, y: MARGIN.top, height: this.drop }),
        svg("rect", { class: `strip p-${phase}`, x: left + 0.5, width: Math.max(0.5, width - 1),
          y: this.height - MARGIN.bottom + 8, height: 22, rx: 3 }));
      if (width > 7 * phase.length + 8)
        nodes.push(svg("text", { class: "phase-name", x: left + width / 2,
          y: this.height - MARGIN.bottom + 23 }, phase));
    }
    return nodes;
  }

  drawPeak() {
    const { peak_index: i, by_category: parts } = this.timeline;
    const total = sum(this.names.map((name) => parts[name][i]));
    const x = (this.x(i) + this.x(i + 1)) / 2;
    const anchor = x > this.width - 130 ? "end" : x < MARGIN.left + 70 ? "start" : "middle";
    return svg("g", { class: "peak" },
      svg("line", { x1: x, x2: x, y1: MARGIN.top - 8, y2: this.height - MARGIN.bottom }),
      svg("circle", { cx: x, cy: this.y(this.total[i]), r: 4.5 }),
      svg("text", { x, y: MARGIN.top - 14, "text-anchor": anchor }, `peak ${formatBytes(total)}`));
  }

  point(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left - MARGIN.left;
    const i = Math.floor((x * this.count) / this.inner);
    if (i < 0 || i >= this.count) this.leave();
    else this.look(i);
  }

  key(event) {
    const page = Math.max(1, Math.round(this.count / 20));
    const to = {
      ArrowLeft: this.at - 1, ArrowRight: this.at + 1, ArrowDown: this.at - 1,
      ArrowUp: this.at + 1, PageDown: this.at - page, PageUp: this.at + page, Home: 0,
      End: this.count - 1, Enter: this.timeline.peak_index, Escape: -1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (event.key === "Escape") this.leave();
    else this.look(Math.min(this.count - 1, Math.max(0, to)));
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
  }

  describe(i) {
    this.plot.setAttribute("aria-valuenow", i);
    const total = sum(this.names.map((name) => this.timeline.by_category[name][i]));
    const parts = this.names.map((name) =>
      `${labelOf(name)} ${formatBytes(this.timeline.by_category[name][i])}`);
    this.plot.setAttribute("aria-valuetext",
      `${this.timeline.phases[i]}, ${formatBytes(total)}: ${parts.join(", ")}`);
    return total;
  }

  look(i) {
    this.at = i;
    const total = this.describe(i);
    const x = (this.x(i) + this.x(i + 1)) / 2;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, x);
    this.cursor.setAttribute("visibility", "visible");
    this.tip.replaceChildren(
      el("p", {}, el("b", {}, bytesOf(total)), ` in ${this.timeline.phases[i]}`,
        el("span", { class: "where" }, ` point ${i + 1} of ${this.count}`)),
      el("table", {}, [...this.names].reverse().map((name) => el("tr", { "data-category": name },
        el("th", {}, swatch(name), labelOf(name)),
        el("td", {}, bytesOf(this.timeline.by_category[name][i])),
        el("td", {}, formatShare(this.timeline.by_category[name][i], total))))));
    this.tip.hidden = false;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    const left = x + 16 > room ? x - this.tip.offsetWidth - 16 : x + 16;
    this.tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
    this.tip.style.top = `${MARGIN.top + 8}px`;
  }
}

// Round figures on the axis, in the unit that the top calls for.
function niceTicks(most) {
  const [size, unit] = UNITS.find(([bytes]) => most >= bytes) ?? [1, "B"];
  const rough = most / size / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const num = Math.max(1, Math.ceil(most / size / step - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) + (step / power === 2.5 ? 1 : 0);
  const values = [...Array(num + 1).keys()].map((k) =>
    [k * step * size, k ? `${(k * step).toFixed(digits)} ${unit}` : "0"]);
  return { top: num * step * size, values };
}

function phaseTable(prediction) {
  const phases = Object.entries(prediction.by_phase);
  if (!phases.length) return null;
  const used = CATEGORIES.map((c) => c.name)
    .filter((name) => phases.some(([, memory]) => memory.by_category[name]));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases" },
    el("table", { id: "phase-table" },
      el("thead", {}, el("tr", {}, ["Peak in", "Tensors", ...used.map(labelOf)]
        .map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, phases.map(([phase, memory]) => el("tr", {},
        el("th", { scope: "row" }, phase), el("td", {}, bytesOf(memory.peak_bytes)),
        used.map((name) => el("td", {}, bytesOrDash(memory.by_category[name]))))))));
}
