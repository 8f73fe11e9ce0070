"use strict";
// What all parts of the page use. Text goes into the page as text nodes, never as HTML, so that
// nothing in a model's names can become code.

const DATA = JSON.parse(document.getElementById("data").textContent);
const CATEGORIES = DATA.categories.map(([name, label]) => ({ name, label }));
const CAPACITY = DATA.device_capacity_bytes;
// What the card is called, with its size where that is not the name.
const cardName = () => DATA.device_name || `${formatBytes(CAPACITY)} card`;
const BEYOND_TENSORS = ["cuda_context", "allocator_slack"];
const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// As units.format_bytes in Python, to the last digit: halves go to the even neighbour.
function formatBytes(bytes) {
  for (const [size, unit] of UNITS) {
    if (Math.abs(bytes) < size) continue;
    const halves = (bytes * 200) / size; // exact: size is a power of two
    const isTie = Number.isInteger(halves) && halves % 2 !== 0;
    const hundredths = isTie ? 2 * Math.round(halves / 4) : null;
    return `${isTie ? (hundredths / 100).toFixed(2) : (bytes / size).toFixed(2)} ${unit}`;
  }
  return `${bytes} B`;
}
const formatCount = (count) => count.toLocaleString("en-US");
const formatShare = (part, whole) => {
  if (!whole || !part) return "0 %";
  const percent = (100 * part) / whole;
  return percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(percent < 10 ? 1 : 0)} %`;
};
function shortCount(count) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  return String(count);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const labelOf = (name) => CATEGORIES.find((c) => c.name === name)?.label ?? name;
const exact = (bytes) => `${formatCount(bytes)} bytes`;
const bytesOf = (bytes, attributes = {}) =>
  el("span", { class: "bytes", "data-bytes": bytes, title: exact(bytes), ...attributes },
    formatBytes(bytes));
const swatch = (category) => el("i", { class: `swatch c-${category}`, "aria-hidden": "true" });
const code = (text) => el("code", {}, text);
// Backticks mark code, as in the texts of the terminal.
const marked = (text) =>
  text.split("`").map((part, i) => (i % 2 ? code(part) : part)).filter((part) => part !== "");
const heading = (id, text, ...more) =>
  el("div", { class: "heading" }, el("h2", { id: `${id}-title` }, text),
    more.length ? el("p", { class: "finding" }, ...more) : null);

// A bar of parts; `whole` is what the full width stands for.
function bar(parts, whole, { label, capacity } = {}) {
  const track = el("div", { class: "track", role: "img", "aria-label": label });
  for (const { name } of CATEGORIES) {
    if (!parts[name]) continue;
    const part = el("span", {
      class: `part c-${name}`, title: `${labelOf(name)}: ${formatBytes(parts[name])}`,
    });
    part.style.width = `${(100 * parts[name]) / whole}%`;
    track.append(part);
  }
  if (capacity) {
    const limit = el("span", { class: "limit", title: `Card: ${DATA.device_name ? `${DATA.device_name}, ` : ""}${formatBytes(capacity)}` });
    limit.style.left = `${(100 * capacity) / whole}%`;
    track.append(limit);
  }
  return track;
}

const legend = (names) =>
  el("ul", { class: "legend" }, names.map((name) => el("li", {}, swatch(name), labelOf(name))));

// Tensors at the peak and, on top, what CUDA and its allocator take.
function deviceParts(prediction) {
  const parts = { ...prediction.by_category };
  const reserved = prediction.device_bytes - prediction.context_bytes;
  parts.allocator_slack += Math.max(0, reserved - prediction.peak_bytes);
  parts.cuda_context += prediction.context_bytes;
  return parts;
}

// Timelines come as differences between points, in which most figures are 0.
for (const { timeline } of DATA.predictions) {
  timeline.phases = timeline.phases.flatMap(([phase, count]) => Array(count).fill(phase));
  for (const changes of Object.values(timeline.by_category))
    for (let i = 1; i < changes.length; i++) changes[i] += changes[i - 1];
}
