function renderComparison() {
  const section = document.getElementById("comparison");
  const { predictions } = DATA;
  section.hidden = predictions.length < 2;
  if (section.hidden) return;
  const whole = Math.max(CAPACITY ?? 0, ...predictions.map((p) => p.device_bytes));
  const smallest = predictions.reduce((a, b) => (b.device_bytes < a.device_bytes ? b : a));
  const [first] = predictions;
  const used = CATEGORIES.map((c) => c.name)
    .filter((name) => predictions.some((p) => deviceParts(p)[name]));
  section.replaceChildren(
    heading("comparison", "The settings side by side", smallest === first
      ? `Nothing here needs less than ${first.name}.`
      : [el("b", {}, smallest.name), ` needs ${formatBytes(smallest.device_bytes)}: `,
          `${formatShare(first.device_bytes - smallest.device_bytes, first.device_bytes)} less than `,
          el("b", {}, first.name), "."]),
    legend(used),
    el("div", { class: "bars", role: "group", "aria-label": "Choose the setting shown below" },
      predictions.map((prediction) => comparisonBar(prediction, whole))),
    el("details", {},
      el("summary", {}, "The same as a table"), comparisonTable(used)),
  );
}

function comparisonBar(prediction, whole) {
  const needed = prediction.device_bytes;
  const fits = CAPACITY && needed <= CAPACITY;
  return el("button", {
    type: "button", class: "bar-row", "data-index": prediction.index, "aria-pressed": "false",
    onclick: () => show(prediction.index),
  },
  el("span", { class: "bar-name" }, prediction.name),
  bar(deviceParts(prediction), whole, {
    label: `${formatBytes(needed)} by category`, capacity: CAPACITY,
  }),
  el("span", { class: "bar-value" }, bytesOf(needed),
    CAPACITY ? el("span", { class: fits ? "fits" : "too-big" }, fits ? " ✓" : " ✕",
      el("span", { class: "unseen" }, fits ? " fits" : " does not fit")) : null));
}

function comparisonTable(used) {
  const [first] = DATA.predictions;
  const differing = [...new Set(DATA.predictions.flatMap((p) => Object.keys(p.settings)))]
    .filter((key) => new Set(DATA.predictions.map((p) => p.settings[key])).size > 1);
  const head = ["Setting", "Needs", "Change", ...used.map(labelOf), ...differing.map(words)];
  const rows = DATA.predictions.map((prediction) => {
    const parts = deviceParts(prediction);
    const change = prediction.device_bytes - first.device_bytes;
    return el("tr", {}, el("th", { scope: "row" }, prediction.name),
      el("td", {}, bytesOf(prediction.device_bytes)),
      el("td", {}, prediction === first ? "–"
        : `${change > 0 ? "+" : change < 0 ? "−" : ""}${formatShare(Math.abs(change), first.device_bytes)}`),
      used.map((name) => el("td", { "data-category": name }, bytesOrDash(parts[name]))),
      differing.map((key) => el("td", { class: "text" }, prediction.settings[key] ?? "–")));
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" },
    el("table", { id: "comparison-table" },
      el("thead", {}, el("tr", {}, head.map((text, i) =>
        el("th", { scope: "col", class: i > 2 + used.length ? "text" : null }, text)))),
      el("tbody", {}, rows)));
}

const words = (key) => {
  const text = key.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
};
const bytesOrDash = (bytes) =>
  bytes ? bytesOf(bytes) : el("span", { class: "none", "data-bytes": 0 }, "–");
