"use strict";
// Text goes into the page as text nodes, never as HTML, so that nothing in a model's names can
// become code.

const DATA = JSON.parse(document.getElementById("data").textContent);
const CATEGORIES = DATA.categories.map(([name, label]) => ({ name, label }));
const CAPACITY = DATA.device_capacity_bytes;
const GPU = DATA.device_name || `${formatBytes(CAPACITY ?? 0)} GPU`;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// As units.format_bytes in Python, to the last digit: halves go to the even neighbour.
function formatBytes(bytes) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(bytes) < size) continue;
    const halves = (bytes * 200) / size; // exact: size is a power of two
    const isTie = Number.isInteger(halves) && halves % 2 !== 0;
    const hundredths = isTie ? 2 * Math.round(halves / 4) : null;
    return `${isTie ? (hundredths / 100).toFixed(2) : (bytes / size).toFixed(2)} ${unit}`;
  }
  return `${bytes} B`;
}
const formatCount = (count) => count.toLocaleString("en-US");
function formatShare(part, whole) {
  if (!whole || !part) return "0 %";
  const percent = (100 * part) / whole;
  return percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(percent < 10 ? 1 : 0)} %`;
}
function shortCount(count) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  return String(count);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const labelOf = (name) => CATEGORIES.find((c) => c.name === name)?.label ?? name;
const usedIn = (...parts) =>
  CATEGORIES.map((c) => c.name).filter((name) => parts.some((found) => found[name]));
const bytesOf = (bytes, kind = "bytes") =>
  el("span", { class: kind, "data-bytes": bytes, title: `${formatCount(bytes)} bytes` },
    formatBytes(bytes));
const bytesOrDash = (bytes) =>
  bytes ? bytesOf(bytes) : el("span", { class: "none", "data-bytes": 0 }, "–");
const swatch = (category) => el("i", { class: `swatch c-${category}`, "aria-hidden": "true" });
const code = (text) => el("code", {}, text);
// Backticks mark code, as in the texts of the terminal.
const marked = (text) =>
  text.split("`").map((part, i) => (i % 2 ? code(part) : part)).filter((part) => part !== "");
const legend = (names) =>
  el("ul", { class: "legend" }, names.map((name) => el("li", {}, swatch(name), labelOf(name))));

// A section with a heading; nothing to show hides it.
function section(id, title, finding, ...children) {
  const node = document.getElementById(id);
  node.hidden = !children.length;
  node.replaceChildren(
    el("div", { class: "heading" }, el("h2", { id: `${id}-title` }, title),
      finding ? el("p", { class: "finding" }, finding) : null),
    ...children.flat().filter(Boolean));
}

function table(id, columns, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": id },
    el("table", { id },
      el("thead", {}, el("tr", {}, columns.map(([text, kind]) =>
        el("th", { scope: "col", class: kind }, text)))),
      el("tbody", {}, rows)));
}

// A bar of parts; `whole` is what the full width stands for.
function bar(parts, whole, label, hasLimit = false) {
  const track = el("div", { class: "track", role: "img", "aria-label": label });
  for (const name of usedIn(parts)) {
    const title = `${labelOf(name)}: ${formatBytes(parts[name])}`;
    const part = el("span", { class: `part c-${name}`, title });
    part.style.width = `${(100 * parts[name]) / whole}%`;
    track.append(part);
  }
  if (hasLimit && CAPACITY) {
    const limit = el("span", { class: "limit", title: `${GPU}: ${formatBytes(CAPACITY)}` });
    limit.style.left = `${(100 * CAPACITY) / whole}%`;
    track.append(limit);
  }
  return track;
}

// Tensors at the peak and, on top, what CUDA and its allocator use.
function deviceParts(prediction) {
  const reserved = prediction.device_bytes - prediction.context_bytes;
  return {
    ...prediction.by_category,
    cuda_context: prediction.context_bytes,
    allocator_slack: Math.max(0, reserved - prediction.peak_bytes),
  };
}

function renderHeadline(prediction) {
  const needed = prediction.device_bytes;
  const whole = Math.max(needed, CAPACITY ?? 0);
  const parts = deviceParts(prediction);
  document.getElementById("headline").replaceChildren(...[
    el("h1", {}, DATA.title),
    el("p", { class: "subject" }, code(prediction.model), ", one training step on ",
      prediction.device === "cuda" ? "a GPU" : `the ${prediction.device.toUpperCase()}`,
      DATA.predictions.length > 1 ? [", with ", el("b", {}, prediction.name)] : null),
    el("p", { class: "verdict" }, ...verdict(needed)),
    el("div", { class: "gauge" }, bar(parts, whole, `${formatBytes(needed)} by category`, true),
      CAPACITY ? limitLabel(CAPACITY / whole) : null),
    legend(usedIn(parts)),
    facts(prediction),
    closest(prediction),
  ].filter(Boolean));
}

function limitLabel(share) {
  const label = el("span", { class: "limit-label" }, GPU);
  label.style.left = `${100 * share}%`;
  // Stays inside at both ends.
  label.style.transform = `translateX(${share > 0.85 ? -100 : share < 0.15 ? 0 : -50}%)`;
  return label;
}

function verdict(needed) {
  const figure = bytesOf(needed, "bytes big");
  if (!CAPACITY) return [figure, el("span", { class: "says" }, "needed for this step")];
  const spare = CAPACITY - needed;
  const gpu = DATA.device_name ? `${GPU} (${formatBytes(CAPACITY)})` : GPU;
  return spare >= 0
    ? [figure, el("span", { class: "says fits" }, el("b", {}, `✓ Fits the ${gpu}`),
        `, ${formatBytes(spare)} to spare`)]
    : [figure, el("span", { class: "says too-big" }, el("b", {}, `✕ Does not fit the ${gpu}`),
        `: ${formatBytes(-spare)} too much`)];
}

function facts(prediction) {
  const { peak, by_category: parts, num_parameters: count } = prediction;
  // Gradients may be alive in another phase than that of the peak.
  const perParameter = sum(["parameter", "weight_copy", "gradient", "optimizer_state"]
    .map((name) => Math.max(parts[name],
      ...Object.values(prediction.by_phase).map((phase) => phase.by_category[name]))));
  const rows = [
    ["Tensors at the peak", bytesOf(prediction.peak_bytes), peak.phase && `in ${peak.phase}`],
    prediction.reserved_bytes != null &&
      ["Reserved by the allocator", bytesOf(prediction.reserved_bytes),
        `${formatBytes(prediction.reserved_bytes - prediction.peak_bytes)} of it unused`],
    prediction.context_bytes > 0 &&
      ["CUDA context", bytesOf(prediction.context_bytes), "outside torch"],
    prediction.host_bytes > 0 &&
      ["Host memory", bytesOf(prediction.host_bytes), "not included"],
    count > 0 &&
      ["Parameters", el("span", { title: formatCount(count) }, shortCount(count)),
        `${(perParameter / count).toFixed(1)} bytes each with gradient and state`],
  ];
  return el("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value),
      more ? el("dd", { class: "more" }, more) : null)));
}

// If the setting shown does not fit, offer the first one that does.
function closest(shown) {
  const { predictions } = DATA;
  if (!CAPACITY || predictions.length < 2 || shown.device_bytes <= CAPACITY) return null;
  const fitting = predictions.filter((p) => p.device_bytes <= CAPACITY);
  const best = fitting[0]
    ?? predictions.reduce((a, b) => (b.device_bytes < a.device_bytes ? b : a));
  return el("p", { class: "others" }, fitting.length
    ? (fitting.length > 1 ? `${fitting.length} of ${predictions.length} settings fit; the first is `
      : `1 of ${predictions.length} settings fits: `)
    : "None of these settings fits; the closest is ",
  el("button", { type: "button", class: "link", onclick: () => show(best.index) }, best.name),
  ` with ${formatBytes(best.device_bytes)}.`);
}

function renderComparison() {
  const { predictions } = DATA;
  if (predictions.length < 2) return;
  const whole = Math.max(CAPACITY ?? 0, ...predictions.map((p) => p.device_bytes));
  const smallest = predictions.reduce((a, b) => (b.device_bytes < a.device_bytes ? b : a));
  const [first] = predictions;
  section("comparison", "Settings side by side", smallest === first
    ? [`No other setting needs less than ${first.name}.`]
    : [el("b", {}, smallest.name), ` needs ${formatBytes(smallest.device_bytes)}: `,
        `${formatShare(first.device_bytes - smallest.device_bytes, first.device_bytes)} less than `,
        el("b", {}, first.name), "."],
  legend(usedIn(...predictions.map(deviceParts))),
  el("div", { class: "bars", role: "group", "aria-label": "Choose the setting shown below" },
    predictions.map((prediction) => comparisonBar(prediction, whole))));
}

function comparisonBar(prediction, whole) {
  const needed = prediction.device_bytes;
  const fits = needed <= CAPACITY;
  return el("button", {
    type: "button", class: "bar-row", "data-index": prediction.index, "aria-pressed": "false",
    onclick: () => show(prediction.index),
  },
  el("span", { class: "bar-name" }, prediction.name),
  bar(deviceParts(prediction), whole, `${formatBytes(needed)} by category`, true),
  el("span", { class: "bar-value" }, bytesOf(needed),
    CAPACITY ? el("span", { class: fits ? "fits" : "too-big" }, fits ? " ✓" : " ✕",
      el("span", { class: "unseen" }, fits ? " fits" : " does not fit")) : null));
}

function renderTimeline(prediction) {
  const { timeline, peak } = prediction;
  if (!timeline.phases.length) return section("timeline", "");
  const names = CATEGORIES.map((c) => c.name).filter((n) => timeline.by_category[n]?.some(Boolean));
  const at = (name) => timeline.by_category[name][timeline.peak_index];
  const drawn = sum(names.map(at));
  const plot = el("div", { class: "plot", role: "img", "aria-label":
    `Memory during the step: peak of ${formatBytes(drawn)} in ${peak.phase}` });
  section("timeline", "Memory during the step",
    ["Peak: ", el("b", {}, formatBytes(prediction.peak_bytes)),
      peak.phase ? ` in ${peak.phase}` : "",
      peak.module ? [" while ", code(peak.module), " runs"] : null,
      peak.op ? [" (", code(peak.op), ")"] : null, "."],
    plot,
    el("ul", { class: "legend" }, el("li", { class: "legend-title" }, "At the peak"),
      names.map((name) => el("li", {}, swatch(name), labelOf(name), " ", bytesOf(at(name))))),
    el("p", { class: "hint" }, "Each point is one or a few operations. Hover over the chart for sizes.",
      drawn !== prediction.peak_bytes
        ? ` The chart shows a step with a peak of ${formatBytes(drawn)}.` : ""),
    phaseTable(prediction));
  new Chart(plot, timeline, names);
}

class Chart {
  constructor(plot, timeline, names) {
    Object.assign(this, { plot, timeline, names, count: timeline.phases.length });
    this.tip = el("div", { class: "tip", role: "presentation", hidden: true });
    for (const kind of ["pointermove", "pointerdown"])
      plot.addEventListener(kind, (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => plot.clientWidth !== this.width && this.draw()).observe(plot);
    this.draw();
  }

  // Points are steps, not slopes: memory does not change between two operations.
  x(i) { return 64 + (i * this.inner) / this.count; }
  y(bytes) { return this.bottom - (bytes * (this.bottom - 30)) / this.top; }

  draw() {
    this.width = this.plot.clientWidth || 900;
    this.height = this.width < 560 ? 300 : 400;
    this.bottom = this.height - 44;
    this.inner = this.width - 74;
    let below = new Array(this.count).fill(0);
    const bands = this.names.map((name) => {
      const above = below.map((bytes, i) => bytes + this.timeline.by_category[name][i]);
      const band = { name, below, above };
      below = above;
      return band;
    });
    this.total = below;
    const ticks = niceTicks(Math.max(...this.total));
    this.top = ticks.top;
    this.cursor = svg("line", { class: "cursor", y1: 30, y2: this.bottom, visibility: "hidden" });
    this.plot.replaceChildren(svg("svg", {
      viewBox: `0 0 ${this.width} ${this.height}`, width: this.width, height: this.height,
      "aria-hidden": "true",
    },
    this.phases(),
    ticks.values.map(([bytes, label]) => [
      svg("line", { class: "grid", x1: 64, x2: this.width - 10, y1: this.y(bytes), y2: this.y(bytes) }),
      svg("text", { class: "tick", x: 56, y: this.y(bytes) + 4 }, label),
    ]),
    bands.map((band) => svg("path", {
      class: `area c-${band.name}`, "data-category": band.name, d: this.area(band),
    })),
    this.peak(), this.cursor), this.tip);
  }

  area({ below, above }) {
    const edge = (values, order) => order.flatMap((i) => {
      const ends = [this.x(i).toFixed(1), this.x(i + 1).toFixed(1)];
      return (order[0] === 0 ? ends : ends.reverse()).map((x) => `${x},${this.y(values[i]).toFixed(1)}`);
    });
    const forth = [...Array(this.count).keys()];
    return `M${edge(above, forth).join("L")}L${edge(below, forth.toReversed()).join("L")}Z`;
  }

  phases() {
    const nodes = [];
    for (let start = 0, end; start < this.count; start = end) {
      const phase = this.timeline.phases[start];
      for (end = start; this.timeline.phases[end] === phase; end++);
      const [left, width] = [this.x(start), this.x(end) - this.x(start)];
      nodes.push(
        svg("rect", { class: `phase p-${phase}`, x: left, width, y: 30, height: this.bottom - 30 }),
        svg("rect", { class: `strip p-${phase}`, x: left + 0.5, width: Math.max(0.5, width - 1),
          y: this.bottom + 8, height: 22, rx: 3 }));
      if (width > 7 * phase.length + 8)
        nodes.push(svg("text", { class: "phase-name", x: left + width / 2, y: this.bottom + 23 }, phase));
    }
    return nodes;
  }

  peak() {
    const i = this.timeline.peak_index;
    const x = (this.x(i) + this.x(i + 1)) / 2;
    const anchor = x > this.width - 130 ? "end" : x < 134 ? "start" : "middle";
    return svg("g", { class: "peak" },
      svg("line", { x1: x, x2: x, y1: 22, y2: this.bottom }),
      svg("circle", { cx: x, cy: this.y(this.total[i]), r: 4.5 }),
      svg("text", { x, y: 16, "text-anchor": anchor }, `peak ${formatBytes(this.total[i])}`));
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
  }

  point(event) {
    const inside = event.clientX - this.plot.getBoundingClientRect().left - 64;
    const i = Math.floor((inside * this.count) / this.inner);
    if (i < 0 || i >= this.count) return this.leave();
    const x = (this.x(i) + this.x(i + 1)) / 2;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, x);
    this.cursor.setAttribute("visibility", "visible");
    this.tip.replaceChildren(
      el("p", {}, el("b", {}, bytesOf(this.total[i])), ` in ${this.timeline.phases[i]}`,
        el("span", { class: "where" }, ` point ${i + 1} of ${this.count}`)),
      el("table", {}, this.names.toReversed().map((name) => el("tr", { "data-category": name },
        el("th", {}, swatch(name), labelOf(name)),
        el("td", {}, bytesOf(this.timeline.by_category[name][i])),
        el("td", {}, formatShare(this.timeline.by_category[name][i], this.total[i]))))));
    this.tip.hidden = false;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    const left = x + 16 > room ? x - this.tip.offsetWidth - 16 : x + 16;
    this.tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
  }
}

// Round figures on the axis, in the unit that the top calls for.
function niceTicks(most) {
  const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]
    .find(([bytes]) => most >= bytes) ?? [1, "B"];
  const rough = most / size / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const count = Math.max(1, Math.ceil(most / size / step - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) + (step / power === 2.5 ? 1 : 0);
  const values = [...Array(count + 1).keys()].map((k) =>
    [k * step * size, k ? `${(k * step).toFixed(digits)} ${unit}` : "0"]);
  return { top: count * step * size, values };
}

function phaseTable(prediction) {
  const phases = Object.entries(prediction.by_phase);
  if (!phases.length) return null;
  const used = usedIn(...phases.map(([, memory]) => memory.by_category));
  return table("phase-table", ["Peak in", "Tensors", ...used.map(labelOf)].map((text) => [text]),
    phases.map(([phase, memory]) => el("tr", {},
      el("th", { scope: "row" }, phase), el("td", {}, bytesOf(memory.peak_bytes)),
      used.map((name) => el("td", {}, bytesOrDash(memory.by_category[name]))))));
}

function renderModules(prediction) {
  const lines = prediction.modules.map((line) => ({ ...line, total: sum(Object.values(line.memory)) }));
  if (!lines.length) return section("modules", "");
  const [root] = lines;
  const used = usedIn(root.memory);
  const rest = prediction.peak_bytes - root.total;
  section("modules", "Memory by module", heaviest(lines),
    table("module-table",
      [["Module"], ["Parameters"], ["Bytes", "total"], ["Share of the peak", "share"],
        ...used.map((name) => [[swatch(name), labelOf(name)]])],
      lines.map((line) => moduleRow(line, used, prediction.peak_bytes))),
    el("p", { class: "hint" }, "At the peak; each module includes its submodules, and equal blocks "
      + "share a line.", rest > 0 ? ` ${formatBytes(rest)} belong to no module.` : ""));
}

// The path down to the module in which more than half of the bytes are.
function heaviest(lines) {
  const path = [];
  for (let at = 0; at < lines.length;) {
    const { depth, total } = lines[at];
    const end = lines.findIndex((line, i) => i > at && line.depth <= depth);
    const inside = lines.slice(at + 1, end < 0 ? undefined : end)
      .filter((line) => line.depth === depth + 1 && !line.label.startsWith("("));
    const next = inside.find((line) => line.total > 0.6 * total);
    if (!next) break;
    path.push(next);
    at = lines.indexOf(next);
  }
  return path.length ? [code(path.map((line) => line.label).join(".")),
    ` has ${formatShare(path.at(-1).total, lines[0].total)} of the memory of all modules.`] : null;
}

function moduleRow({ depth, label, class_name: kind, num_parameters: count, memory, total }, used, peak) {
  const name = el("td", { class: "module" }, el("span", { class: "module-name" },
    depth ? label : "(whole model)"), " ", el("span", { class: "class-name" }, kind));
  name.style.setProperty("--level", depth);
  return el("tr", {}, name,
    el("td", { title: formatCount(count), "data-parameters": count },
      count ? shortCount(count) : el("span", { class: "none" }, "–")),
    el("td", { class: "total" }, bytesOrDash(total)),
    el("td", { class: "share" }, el("div", {}, bar(memory, peak, formatShare(total, peak)),
      el("span", {}, formatShare(total, peak)))),
    used.map((category) => el("td", { "data-category": category }, bytesOrDash(memory[category]))));
}

function renderTensors(prediction) {
  const tensors = prediction.largest_tensors;
  if (!tensors.length) return section("tensors", "");
  const total = sum(tensors.map((tensor) => tensor.total_bytes));
  const count = sum(tensors.map((tensor) => tensor.modules.length));
  section("tensors", "Largest tensors at the peak",
    [`These ${count} tensors are ${formatShare(total, prediction.peak_bytes)} of the peak.`],
    table("tensor-table", [["Bytes", "total"], ["", "share wide"], ["Number", "times"],
      ["Category", "text"], ["Module", "text"], ["Shape", "text wide"], ["Created by", "text wide"]],
    tensors.map((tensor) => tensorRow(tensor, tensors[0].total_bytes))));
}

function tensorRow(tensor, most) {
  const { category, num_bytes: each, total_bytes: total, shape, modules, op, phase } = tensor;
  return el("tr", {},
    el("td", { class: "total" }, bytesOf(total)),
    el("td", { class: "share wide" }, bar({ [category]: total }, most, labelOf(category))),
    el("td", { class: "times" }, modules.length > 1 ? [`${modules.length} × `, bytesOf(each)] : "1"),
    el("td", { class: "text" }, swatch(category), labelOf(category)),
    el("td", { class: "text", title: modules.join("\n") }, code(tensor.module || "–")),
    el("td", { class: "text wide" }, shape.map(formatCount).join(" × ") || "–",
      el("span", { class: "class-name" }, ` ${tensor.dtype}`)),
    el("td", { class: "text wide" }, op ? [code(op), phase ? ` in ${phase}` : ""] : "before the step"));
}

function renderRemarks(prediction) {
  const list = (title, lines) => (lines.length
    ? [el("h3", {}, title), el("ul", {}, lines.map((line) => el("li", {}, marked(line))))] : []);
  const settings = Object.entries(prediction.settings);
  section("remarks", "Notes and assumptions", null,
    ...list("Notes", DATA.notes),
    ...(settings.length ? [el("h3", {}, "Settings"), el("dl", { class: "settings" },
      settings.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))))] : []),
    ...list("Requested, but without effect",
      Object.entries(prediction.ineffective).map(([name, why]) => `${name} ${why}`)),
    ...list("Assumptions", prediction.assumptions),
    ...list("Guesses, because the step depends on values", prediction.guesses),
    el("p", { class: "hint" }, `Predicted in ${prediction.seconds.toFixed(1)} s.`));
}

function show(index) {
  const prediction = DATA.predictions[index];
  renderHeadline(prediction);
  renderTimeline(prediction);
  renderModules(prediction);
  renderTensors(prediction);
  renderRemarks(prediction);
  document.getElementById("setting").value = String(index);
  for (const row of document.querySelectorAll(".bar-row"))
    row.setAttribute("aria-pressed", String(Number(row.dataset.index) === index));
}

DATA.predictions.forEach((prediction, index) => { prediction.index = index; });
const choice = document.getElementById("setting");
choice.append(...DATA.predictions.map((p, i) => el("option", { value: i }, p.name)));
choice.addEventListener("change", () => show(Number(choice.value)));
document.getElementById("chooser").hidden = DATA.predictions.length < 2;
renderComparison();
show(0);
