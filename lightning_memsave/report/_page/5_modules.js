const tree = { open: null, key: "order", descending: false, query: "", focus: null };

// Modules come without what is inside them; here each gets the sums of its subtree.
function buildTree(prediction) {
  const byName = new Map();
  const node = (name, className) => ({
    name, className, order: byName.size, parameters: 0, parts: {}, total: 0, children: [],
    label: name || "(whole model)",
  });
  const root = node("", prediction.model);
  byName.set("", root);
  for (const [index, parameters, ...bytes] of prediction.modules) {
    const [name, className] = DATA.module_names[index];
    const found = byName.get(name) ?? node(name, className);
    found.className = className;
    found.own = { parameters, parts: Object.fromEntries(
      bytes.map((value, i) => [CATEGORIES[i].name, value])) };
    if (byName.has(name)) continue;
    byName.set(name, found);
    let above = name;
    do above = above.slice(0, Math.max(0, above.lastIndexOf("."))); while (!byName.has(above));
    const parent = byName.get(above);
    found.parent = parent;
    found.label = above ? name.slice(above.length + 1) : name;
    parent.children.push(found);
  }
  const nodes = [...byName.values()];
  for (const start of nodes)
    for (let up = start; up && start.own; up = up.parent) {
      up.parameters += start.own.parameters;
      for (const [name, value] of Object.entries(start.own.parts)) {
        up.parts[name] = (up.parts[name] ?? 0) + value;
        up.total += value;
      }
    }
  return { root, nodes };
}

function renderModules(prediction) {
  const section = document.getElementById("modules");
  section.hidden = !prediction.modules.length;
  if (section.hidden) return;
  const { root, nodes } = buildTree(prediction);
  tree.open ??= firstOpen(root);
  const used = CATEGORIES.map((c) => c.name).filter((name) => root.parts[name]);
  const columns = [
    { key: "order", label: "Module" }, { key: "parameters", label: "Parameters" },
    { key: "total", label: "Bytes" }, { label: "Share of the peak" },
    ...used.map((name) => ({ key: name, label: labelOf(name), category: name })),
  ];
  const body = el("tbody", {});
  const draw = () => drawRows(body, root, used, prediction.peak_bytes);
  const search = el("input", {
    type: "search", placeholder: "Find a module or class", value: tree.query,
    "aria-label": "Find a module or class", id: "module-search",
    oninput: (event) => { tree.query = event.target.value.trim().toLowerCase(); draw(); },
  });
  const all = (open) => () => {
    tree.open = new Set(open ? nodes.map((n) => n.name) : [""]);
    draw();
  };
  const head = el("tr", {}, columns.map((column) => sortableHead(column, () => {
    for (const th of head.children)
      if (th.dataset.key) th.setAttribute("aria-sort", sortState(th.dataset.key));
    draw();
  })));
  const rest = prediction.peak_bytes - root.total;
  section.replaceChildren(
    heading("modules", "Which module holds it", ...biggest(root)),
    el("div", { class: "tools" }, search,
      el("button", { type: "button", id: "open-all", onclick: all(true) }, "Open all"),
      el("button", { type: "button", id: "close-all", onclick: all(false) }, "Close all")),
    el("div", { class: "scroll" }, el("table", { id: "module-table", role: "treegrid",
      "aria-label": "Modules with what they hold at the peak" },
    el("thead", {}, head), body)),
    el("p", { class: "hint" }, "At the peak, each module with all that is inside it. ",
      rest > 0 ? `${formatBytes(rest)} belong to no module.` : "",
      prediction.modules_depth
        ? ` Modules below level ${prediction.modules_depth} are summed into those above.` : ""),
  );
  body.addEventListener("keydown", (event) => moveInTree(event, body, draw));
  draw();
}

function biggest(root) {
  let node = root;
  const heaviest = (n) => n.children.reduce((a, b) => (b.total > (a?.total ?? 0) ? b : a), null);
  for (let next = heaviest(node); next && next.total > 0.6 * node.total; next = heaviest(node))
    node = next;
  if (node === root) node = heaviest(root) ?? root;
  return node === root ? [] : [code(node.name), ` holds ${formatShare(node.total, root.total)} `,
    "of what the modules hold."];
}

// Open the heaviest ones until there is something to read, but no long lists.
function firstOpen(root) {
  const open = new Set([""]);
  let rows = [...root.children];
  for (;;) {
    const next = rows.filter((n) => n.children.length && n.children.length <= 12)
      .sort((a, b) => b.total - a.total)[0];
    if (!next || rows.length + next.children.length > 14) return open;
    open.add(next.name);
    rows = rows.filter((n) => n !== next).concat(next.children);
  }
}

const sortState = (key) =>
  key !== tree.key ? "none" : tree.descending ? "descending" : "ascending";

function sortableHead({ key, label, category }, redraw) {
  if (!key) return el("th", { scope: "col", class: "share" }, label);
  const sort = () => {
    // Figures start with the largest, names with the model's own order.
    tree.descending = tree.key === key ? !tree.descending : key !== "order";
    tree.key = key;
    redraw();
  };
  return el("th", { scope: "col", "data-key": key, "aria-sort": sortState(key) },
    el("button", { type: "button", onclick: sort }, category ? swatch(category) : null, label));
}

function drawRows(body, root, used, peak) {
  const matches = (n) => `${n.name}\n${n.className}`.toLowerCase().includes(tree.query);
  const inside = (n) => matches(n) || n.children.some(inside);
  const value = (n) => tree.key in n ? n[tree.key] : n.parts[tree.key] ?? 0;
  const sorted = (list) => [...list].sort((a, b) =>
    (tree.descending ? -1 : 1) * (value(a) - value(b)) || a.order - b.order);
  const rows = [];
  const add = (n, level, place, size) => {
    const isOpen = n.children.length > 0 && (tree.query ? n.children.some(inside)
      : tree.open.has(n.name));
    rows.push(moduleRow(n, { level, place, size, isOpen }, used, peak, () => {
      if (!tree.open.delete(n.name)) tree.open.add(n.name);
      tree.focus = n.name;
      drawRows(body, root, used, peak);
    }));
    if (!isOpen) return;
    const below = sorted(tree.query ? n.children.filter(inside) : n.children);
    below.forEach((child, i) => add(child, level + 1, i + 1, below.length));
  };
  if (!tree.query || inside(root)) add(root, 1, 1, 1);
  const hadFocus = body.contains(document.activeElement);
  body.replaceChildren(...(rows.length ? rows : [el("tr", {},
    el("td", { colspan: 4 + used.length, class: "text" }, "No module has this in its name."))]));
  const current = rows.find((row) => row.dataset.name === tree.focus) ?? rows[0];
  current?.setAttribute("tabindex", "0");
  if (hadFocus) current?.focus();
}

function moduleRow(n, { level, place, size, isOpen }, used, peak, toggle) {
  const isParent = n.children.length > 0;
  const name = el("td", { class: "module" },
    el("span", { class: isParent ? "twist" : "twist leaf", "aria-hidden": "true" }),
    el("span", { class: "module-name", title: n.name || n.label }, n.label), " ",
    el("span", { class: "class-name" }, n.className));
  name.style.setProperty("--level", level - 1);
  return el("tr", {
    role: "row", tabindex: "-1", "data-name": n.name, "aria-level": level,
    "aria-posinset": place, "aria-setsize": size, "aria-expanded": isParent ? String(isOpen) : null,
    class: isParent ? "parent" : null, onclick: isParent ? toggle : null,
  }, name,
  el("td", { title: formatCount(n.parameters), "data-parameters": n.parameters },
    n.parameters ? shortCount(n.parameters) : el("span", { class: "none" }, "–")),
  el("td", { class: "total" }, bytesOrDash(n.total)),
  el("td", { class: "share" }, el("div", {},
    bar(n.parts, peak, { label: formatShare(n.total, peak) }),
    el("span", {}, formatShare(n.total, peak)))),
  used.map((category) => el("td", { "data-category": category }, bytesOrDash(n.parts[category]))));
}

function moveInTree(event, body, draw) {
  const row = event.target.closest("tr[data-name]");
  if (!row) return;
  const rows = [...body.rows];
  const i = rows.indexOf(row);
  const expanded = row.getAttribute("aria-expanded");
  const above = () => rows.slice(0, i).reverse()
    .find((r) => Number(r.ariaLevel) < Number(row.ariaLevel));
  let to = null;
  if (event.key === "ArrowDown") to = rows[i + 1];
  else if (event.key === "ArrowUp") to = rows[i - 1];
  else if (event.key === "Home") to = rows[0];
  else if (event.key === "End") to = rows.at(-1);
  else if (event.key === "ArrowRight" && expanded === "true") to = rows[i + 1];
  else if (event.key === "ArrowLeft" && expanded !== "true") to = above();
  else if (["Enter", " ", "ArrowLeft", "ArrowRight"].includes(event.key)) {
    if (expanded !== null) row.click();
  } else return;
  event.preventDefault();
  if (!to) return;
  tree.focus = to.dataset.name;
  row.setAttribute("tabindex", "-1");
  to.setAttribute("tabindex", "0");
  to.focus();
}
