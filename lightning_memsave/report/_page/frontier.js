
// Plans as points: memory against time. Each shows its call when hovered or focused.
function renderFrontier({ plans, budget_bytes: budget, unchanged_bytes: unchanged }) {
  const chosen = plans.find((plan) => plan.is_chosen);
  const plot = el("div", { class: "plot frontier" });
  const tip = el("div", { class: "tip", role: "presentation", hidden: true });
  const kinds = ["bitwise", "rounding", "approximate"]
    .filter((kind) => plans.some((plan) => plan.exactness === kind));
  section("frontier", "Memory against time", chosen
    ? ["The plan needs ", el("b", {}, formatBytes(chosen.device_bytes)), " and ",
        el("b", {}, ratio(chosen.time_ratio)), " the time of the unchanged step, which needs ",
        `${formatBytes(unchanged)}.`] : null,
  plot,
  el("ul", { class: "legend" }, kinds.map((kind) =>
    el("li", {}, el("i", { class: `swatch x-${kind}`, "aria-hidden": "true" }), kind)),
  el("li", {}, "filled: predicted as a whole; hollow: estimated")),
  el("p", { class: "hint" }, "Hover over a point, or move to it with the Tab key, to see what to "
    + "type. Times are estimated ratios, not measured."));
  let width;
  const draw = () => {
    width = plot.clientWidth || 900;
    plot.replaceChildren(frontierPicture(plans, budget, unchanged, width, plot, tip), tip);
  };
  new ResizeObserver(() => plot.clientWidth !== width && draw()).observe(plot);
  draw();
}

const ratio = (time) => `${time.toFixed(2)} ×`;

function frontierPicture(plans, budget, unchanged, width, plot, tip) {
  const [left, right, top, bottom] = [76, width - 30, 26, 332];
  const most = Math.max(unchanged, ...plans.map((plan) => plan.device_bytes));
  // A budget far above all plans would press them into a corner.
  const isDrawn = budget <= 1.6 * most;
  const ticks = niceTicks(1.04 * (isDrawn ? Math.max(most, budget) : most));
  const times = ratioTicks([1, ...plans.map((plan) => plan.time_ratio)]);
  const [first, last] = [times[0], times.at(-1)];
  const x = (time) => left + ((time - first) * (right - left)) / (last - first);
  const y = (bytes) => bottom - (bytes * (bottom - top)) / ticks.top;
  return svg("svg", { viewBox: `0 0 ${width} 380`, width, height: 380, role: "group",
    "aria-label": `${plans.length} plans: memory against time` },
  ticks.values.map(([bytes, label]) => [
    svg("line", { class: "grid", x1: left, x2: right, y1: y(bytes), y2: y(bytes) }),
    svg("text", { class: "tick", x: left - 8, y: y(bytes) + 4 }, label)]),
  times.map((time) => svg("text", { class: "time", x: x(time), y: bottom + 20 }, ratio(time))),
  svg("text", { class: "time", x: (left + right) / 2, y: bottom + 42 },
    "time of a step, of the unchanged one"),
  isDrawn
    ? svg("g", { class: "budget" },
      svg("line", { x1: left, x2: right, y1: y(budget), y2: y(budget) }),
      svg("text", { x: right, y: y(budget) - 6 }, `budget ${formatBytes(budget)}`))
    : svg("g", { class: "budget" },
      svg("text", { x: right, y: 14 }, `↑ budget ${formatBytes(budget)}`)),
  svg("path", { class: "steps",
    d: `M${plans.map((plan) => `${x(plan.time_ratio)},${y(plan.device_bytes)}`).join("L")}` }),
  svg("text", { class: "time", x: x(1), y: y(unchanged) + 24 }, "unchanged"),
  point({ x: x(1), y: y(unchanged), kind: "unchanged", plot, tip,
    lines: [["unchanged: ", el("b", {}, formatBytes(unchanged)), ", 1.00 × the time"]] }),
  plans.map((plan) => point({
    x: x(plan.time_ratio), y: y(plan.device_bytes), plot, tip,
    kind: `x-${plan.exactness}${plan.is_verified ? "" : " hollow"}${plan.is_chosen ? " chosen" : ""}`,
    lines: [[plan.is_chosen ? "the plan: " : "", el("b", {},
      `${plan.is_verified ? "" : "about "}${formatBytes(plan.device_bytes)}`),
    `, ${ratio(plan.time_ratio)} the time, ${plan.exactness}`
      + `${plan.device_bytes > budget ? ", does not fit" : ""}`], [code(plan.how)]],
  })));
}

function point({ x, y, kind, lines, plot, tip }) {
  const paragraphs = lines.map((line) => el("p", {}, line));
  const label = paragraphs.map((line) => line.textContent).join(": ");
  const show = () => {
    tip.replaceChildren(...paragraphs);
    tip.hidden = false;
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, x - tip.offsetWidth / 2))}px`;
    const above = y - tip.offsetHeight - 14;
    tip.style.top = `${above >= 0 ? above : y + 16}px`;
  };
  const hide = () => { tip.hidden = true; };
  return svg("g", { class: `point ${kind}`, tabindex: "0", role: "img", "aria-label": label,
    onpointerenter: show, onpointerleave: hide, onfocus: show, onblur: hide },
  // Above and to the right of a point there is no other one.
  kind.endsWith("chosen") ? [svg("circle", { class: "ring", cx: x, cy: y, r: 11 }),
    svg("text", { class: "name", x: x + 12, y: y - 10 }, "the plan")] : null,
  svg("circle", { class: "target", cx: x, cy: y, r: 14 }),
  svg("circle", { class: "dot", cx: x, cy: y, r: 6 }));
}

// Round ratios that enclose all of them.
function ratioTicks(times) {
  const [least, most] = [Math.min(...times), Math.max(...times)];
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    .find((size) => (most - least) / size <= 6) ?? most - least;
  const from = Math.floor(least / step - 0.3);
  const to = Math.max(from + 1, Math.ceil(most / step + 0.3));
  return [...Array(to - from + 1).keys()].map((k) => (from + k) * step);
}

if (DATA.frontier) renderFrontier(DATA.frontier);
