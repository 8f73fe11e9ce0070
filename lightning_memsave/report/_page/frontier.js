
// Plans as points, memory against time. The nearest one, or the focused one, shows its call.
function renderFrontier(frontier) {
  const { plans, unchanged_bytes: unchanged } = frontier;
  const chosen = plans.find((plan) => plan.is_chosen);
  const kinds = ["bitwise", "rounding", "approximate"]
    .filter((kind) => plans.some((plan) => plan.exactness === kind));
  const plot = el("div", { class: "plot frontier" });
  section("frontier", "Memory against time", chosen
    ? ["The plan needs ", el("b", {}, formatBytes(chosen.device_bytes)), " and ",
        el("b", {}, times(chosen.time_ratio)), " the time of the unchanged step, which needs ",
        `${formatBytes(unchanged)}.`] : null,
  plot,
  el("ul", { class: "legend" }, kinds.map((kind) =>
    el("li", {}, el("i", { class: `swatch x-${kind}`, "aria-hidden": "true" }), kind)),
  el("li", { class: "legend-title" }, "filled: predicted as a whole; hollow: estimated")),
  el("p", { class: "hint" }, "Hover over a point, or move to it with the Tab key, to see what to "
    + "type. Times are estimated ratios, not measured."));
  new FrontierChart(plot, frontier);
}

const times = (ratio) => `${ratio.toFixed(2)} ×`;

class FrontierChart {
  constructor(plot, { plans, budget_bytes: budget, unchanged_bytes: unchanged }) {
    Object.assign(this, { plot, plans, budget, unchanged });
    this.tip = el("div", { class: "tip", role: "presentation", hidden: true });
    const leave = () => { this.tip.hidden = true; };
    for (const kind of ["pointermove", "pointerdown"])
      plot.addEventListener(kind, (event) => this.point(event));
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("focusout", leave);
    new ResizeObserver(() => plot.clientWidth !== this.width && this.draw()).observe(plot);
    this.draw();
  }

  draw() {
    this.width = this.plot.clientWidth || 900;
    const [left, right, top, bottom] = [76, this.width - 30, 26, 332];
    const most = Math.max(this.unchanged, ...this.plans.map((plan) => plan.device_bytes));
    // A budget far above all plans would press them into a corner.
    const isDrawn = this.budget <= 1.6 * most;
    const ticks = niceTicks(1.04 * (isDrawn ? Math.max(most, this.budget) : most));
    const ratios = ratioTicks([1, ...this.plans.map((plan) => plan.time_ratio)],
      Math.max(2, Math.min(6, Math.floor(this.width / 130))));
    const [first, last] = [ratios[0], ratios.at(-1)];
    const x = (ratio) => left + ((ratio - first) * (right - left)) / (last - first);
    const y = (bytes) => bottom - (bytes * (bottom - top)) / ticks.top;
    this.points = [
      this.mark(x(1), y(this.unchanged), "unchanged",
        [["unchanged: ", el("b", {}, formatBytes(this.unchanged)), `, ${times(1)} the time`]]),
      ...this.plans.map((plan) => this.mark(x(plan.time_ratio), y(plan.device_bytes),
        `x-${plan.exactness}${plan.is_verified ? "" : " hollow"}`, this.describe(plan))),
    ];
    const chosen = this.points[1 + this.plans.findIndex((plan) => plan.is_chosen)];
    const limit = isDrawn ? y(this.budget) : 20;
    this.plot.replaceChildren(svg("svg", {
      viewBox: `0 0 ${this.width} 380`, width: this.width, height: 380, role: "group",
      "aria-label": `${this.plans.length} plans: memory against time`,
    },
    ticks.values.map(([bytes, label]) => [
      svg("line", { class: "grid", x1: left, x2: right, y1: y(bytes), y2: y(bytes) }),
      svg("text", { class: "tick", x: left - 8, y: y(bytes) + 4 }, label)]),
    ratios.map((ratio) =>
      svg("text", { class: "time", x: x(ratio), y: bottom + 20 }, times(ratio))),
    svg("text", { class: "time", x: (left + right) / 2, y: bottom + 42 },
      "time of a step; the unchanged one is 1"),
    svg("g", { class: "budget" },
      isDrawn ? svg("line", { x1: left, x2: right, y1: limit, y2: limit }) : null,
      svg("text", { x: right, y: limit - 6 },
        `${isDrawn ? "" : "↑ "}budget ${formatBytes(this.budget)}`)),
    svg("path", { class: "steps",
      d: `M${this.points.slice(1).map((at) => `${at.x},${at.y}`).join("L")}` }),
    svg("text", { class: "time", x: x(1), y: y(this.unchanged) - 12 }, "unchanged"),
    this.points.map((at) => at.node),
    chosen ? svg("g", { class: "chosen", "aria-hidden": "true" },
      svg("circle", { class: "ring", cx: chosen.x, cy: chosen.y, r: 11 }),
      // Above and to the right of a plan there is no other one.
      svg("text", { x: chosen.x + 12, y: chosen.y - 10 }, "the plan")) : null), this.tip);
  }

  describe(plan) {
    const size = `${plan.is_verified ? "" : "about "}${formatBytes(plan.device_bytes)}`;
    const fits = plan.fits ? "" : ", does not fit";
    return [
      [plan.is_chosen ? "the plan: " : "", el("b", {}, size),
        `, ${times(plan.time_ratio)} the time, ${plan.exactness}${fits}`],
      [code(plan.how)],
    ];
  }

  mark(x, y, kind, lines) {
    const texts = lines.map((line) => el("p", {}, line));
    const at = { x, y, texts };
    at.node = svg("g", {
      class: `point ${kind}`, tabindex: "0", role: "img",
      "aria-label": texts.map((text) => text.textContent).join(": "), onfocus: () => this.show(at),
    }, svg("circle", { class: "halo", cx: x, cy: y, r: 14 }),
    svg("circle", { class: "dot", cx: x, cy: y, r: 6 }));
    return at;
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const distance = (at) =>
      Math.hypot(at.x - (event.clientX - box.left), at.y - (event.clientY - box.top));
    const nearest = this.points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    if (distance(nearest) < 40) this.show(nearest);
    else this.tip.hidden = true;
  }

  show({ x, y, texts }) {
    this.tip.replaceChildren(...texts);
    this.tip.hidden = false;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x - this.tip.offsetWidth / 2))}px`;
    const above = y - this.tip.offsetHeight - 16;
    this.tip.style.top = `${above >= 0 ? above : y + 18}px`;
  }
}

// Round ratios that enclose all of them.
function ratioTicks(ratios, count) {
  const [least, most] = [Math.min(...ratios), Math.max(...ratios)];
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    .find((size) => (most - least) / size <= count) ?? most - least;
  const from = Math.floor(least / step - 0.3);
  const to = Math.max(from + 1, Math.ceil(most / step + 0.3));
  return [...Array(to - from + 1).keys()].map((k) => (from + k) * step);
}

if (DATA.frontier) renderFrontier(DATA.frontier);
