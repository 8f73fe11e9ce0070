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
    el("div", { class: "gauge" },
      bar(parts, whole, { label: `${formatBytes(needed)} by category`, capacity: CAPACITY }),
      CAPACITY ? limitLabel(CAPACITY / whole) : null),
    legend(CATEGORIES.map((c) => c.name).filter((name) => parts[name])),
    facts(prediction),
    others(prediction),
  ].filter(Boolean));
}

function limitLabel(share) {
  const label = el("span", { class: "limit-label" }, cardName());
  label.style.left = `${100 * share}%`;
  // Stays inside at both ends.
  label.style.transform = `translateX(${share > 0.85 ? -100 : share < 0.15 ? 0 : -50}%)`;
  return label;
}

function verdict(needed) {
  const figure = bytesOf(needed, { class: "bytes big" });
  if (!CAPACITY) return [figure, el("span", { class: "says" }, "is what this step needs")];
  const spare = CAPACITY - needed;
  const card = DATA.device_name ? `${cardName()} (${formatBytes(CAPACITY)})` : cardName();
  return spare >= 0
    ? [figure, el("span", { class: "says fits" }, el("b", {}, `✓ Fits the ${card}`),
        `, ${formatBytes(spare)} to spare`)]
    : [figure, el("span", { class: "says too-big" }, el("b", {}, `✕ Does not fit the ${card}`),
        `: ${formatBytes(-spare)} too much`)];
}

function facts(prediction) {
  const { peak, by_category: parts } = prediction;
  const count = prediction.num_parameters;
  const perParameter = sum(["parameter", "weight_copy", "gradient", "optimizer_state"]
    .map((name) => Math.max(parts[name],
      ...Object.values(prediction.by_phase).map((phase) => phase.by_category[name]))));
  const rows = [
    ["Tensors at the peak", bytesOf(prediction.peak_bytes), peak.phase && `in ${peak.phase}`],
    prediction.reserved_bytes != null &&
      ["Reserved by the allocator", bytesOf(prediction.reserved_bytes),
        `${formatBytes(prediction.reserved_bytes - prediction.peak_bytes)} of it unused`],
    prediction.context_bytes > 0 &&
      ["CUDA context", bytesOf(prediction.context_bytes), "outside of torch"],
    prediction.host_bytes > 0 &&
      ["On the host", bytesOf(prediction.host_bytes), "not part of the total"],
    count > 0 &&
      ["Parameters", el("span", { title: formatCount(count) }, shortCount(count)),
        `${(perParameter / count).toFixed(1)} bytes each with gradient and state`],
  ];
  return el("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value),
      more ? el("dd", { class: "more" }, more) : null)));
}

// Where the setting shown does not fit, the one that changes least and does is worth a line.
function others(shown) {
  const { predictions } = DATA;
  if (!CAPACITY || predictions.length < 2 || shown.device_bytes <= CAPACITY) return null;
  const fitting = predictions.filter((p) => p.device_bytes <= CAPACITY);
  const closest = fitting[0]
    ?? predictions.reduce((a, b) => (b.device_bytes < a.device_bytes ? b : a));
  return el("p", { class: "others" }, fitting.length
    ? `${fitting.length} of ${predictions.length} settings fit; the first that does is `
    : "None of the settings here fits; the closest is ",
  el("button", { type: "button", class: "link", onclick: () => show(closest.index) }, closest.name),
  ` with ${formatBytes(closest.device_bytes)}.`);
}
