// The same tensor of each block is one line: "16 × 150.00 MiB" in `h.*.mlp`.
function groupTensors(tensors) {
  const groups = new Map();
  for (const tensor of tensors) {
    const place = tensor.module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
    const key = JSON.stringify([{ ...tensor, module: place }]);
    if (!groups.has(key)) groups.set(key, { tensor, place, modules: [] });
    groups.get(key).modules.push(tensor.module);
  }
  return [...groups.values()]
    .map((group) => ({ ...group, total: group.tensor.num_bytes * group.modules.length }))
    .sort((a, b) => b.total - a.total);
}

function renderTensors(prediction) {
  const section = document.getElementById("tensors");
  const tensors = prediction.largest_tensors;
  section.hidden = !tensors.length;
  if (section.hidden) return;
  const groups = groupTensors(tensors);
  const head = [["Bytes", "total"], ["", "share wide"], ["Number", "times"], ["Category", "text"],
    ["Module", "text"], ["Shape", "text wide"], ["Made by", "text wide"]];
  section.replaceChildren(
    heading("tensors", "The largest tensors at the peak",
      `These ${tensors.length} are ${formatShare(sum(tensors.map((t) => t.num_bytes)),
        prediction.peak_bytes)} of it.`),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Largest tensors" },
      el("table", { id: "tensor-table" },
        el("thead", {}, el("tr", {}, head.map(([text, kind]) =>
          el("th", { scope: "col", class: kind }, text)))),
        el("tbody", {}, groups.map((group) => tensorRow(group, groups[0].total))))),
  );
}

function tensorRow({ tensor, place, modules, total }, most) {
  const { category, num_bytes: each, shape, dtype, op, phase } = tensor;
  return el("tr", {},
    el("td", { class: "total" }, bytesOf(total)),
    el("td", { class: "share wide" },
      bar({ [category]: total }, most, { label: labelOf(category) })),
    el("td", { class: "times" }, modules.length > 1 ? [`${modules.length} × `, bytesOf(each)] : "1"),
    el("td", { class: "text" }, swatch(category), labelOf(category)),
    el("td", { class: "text", title: modules.join("\n") },
      code(modules.length > 1 ? place : tensor.module || "–")),
    el("td", { class: "text wide" }, shape.map(formatCount).join(" × ") || "–",
      el("span", { class: "class-name" }, ` ${dtype}`)),
    el("td", { class: "text wide" }, op ? [code(op), phase ? ` in ${phase}` : ""] : "before the step"));
}

function renderRemarks(prediction) {
  const list = (title, lines) => (lines.length
    ? [el("h3", {}, title), el("ul", {}, lines.map((line) => el("li", {}, marked(line))))] : []);
  const settings = Object.entries(prediction.settings);
  document.getElementById("remarks").replaceChildren(...[
    heading("remarks", "How to read this"),
    ...list("Notes", DATA.notes),
    ...(settings.length ? [el("h3", {}, "Settings"), el("dl", { class: "settings" },
      settings.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))))] : []),
    ...list("Asked for, and without effect",
      Object.entries(prediction.ineffective).map(([name, why]) => `${name} ${why}`)),
    ...list("Taken for granted", prediction.assumptions),
    ...list("Guessed, because the model depends on its data", prediction.guesses),
    el("p", { class: "hint" }, `Predicted in ${prediction.seconds.toFixed(1)} s`,
      prediction.is_extrapolated ? ", from copies of the model with fewer blocks." : "."),
  ]);
}

function renderAnswers() {
  const section = document.getElementById("answers");
  section.hidden = !DATA.tables.length;
  section.replaceChildren(...DATA.tables.flatMap(({ title, columns, rows }) => [
    el("div", { class: "heading" }, el("h2", {}, title)),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el("table", { class: "answers" },
        el("thead", {}, el("tr", {}, columns.map((text) =>
          el("th", { scope: "col", class: "text" }, text)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text) =>
          el("td", { class: "text" }, marked(text)))))))),
  ]));
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

function prepareTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  label();
}

// Paper cannot unfold anything.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});

function start() {
  DATA.predictions.forEach((prediction, index) => { prediction.index = index; });
  const choice = document.getElementById("setting");
  choice.append(...DATA.predictions.map((p, i) => el("option", { value: i }, p.name)));
  choice.addEventListener("change", () => show(Number(choice.value)));
  document.getElementById("chooser").hidden = DATA.predictions.length < 2;
  prepareTheme();
  renderAnswers();
  renderComparison();
  show(0);
}
start();
