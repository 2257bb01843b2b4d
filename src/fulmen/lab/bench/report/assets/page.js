// The page: a panel with controls, curves and a sortable table for every suite, and what surrounds them.

const data = JSON.parse(document.getElementById("data").textContent);
const VIEWS = { speed: "Time", speedup: "Speedup", tokens: "Tokens/s", rate: "GFLOP/s", memory: "Memory" };
const MODES = { fwd: "Forward", bwd: "Backward", total: "Both" };
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4"];
const UNITS = { speed: "ms", speedup: "×", tokens: "tokens/s", rate: "GFLOP/s", memory: "MiB" };

/** The figures of one view as {title, columns, lengths, figure(column, n), published}; null where nothing was measured. */
function figures(group, view, mode) {
  const metric = view === "memory" ? "memory" : "speed";
  const tables = (mode === "total" ? ["fwd", "bwd"] : [mode]).map((one) => group.tables[`${metric}-${one}`]);
  if (tables.some((table) => !table) || (mode === "total" && metric === "memory")) return null;
  const cell = (column, n) => sum(tables.map((table) => table.cells[column]?.[n]));
  const base = (n) => cell(group.baseline, n);
  const flops = (column, n) => tables.reduce((all, table) => all + (table.flops[column]?.[n] ?? NaN), 0);
  const printed = tables.every((table) => table.published) ? tables.map((table) => table.published) : null;
  // What a time is divided into; its spread goes along.
  const over = { speedup: (_, n) => base(n)?.value, tokens: (_, n) => group.tokens[n] * 1e3, rate: (column, n) => flops(column, n) / 1e6 }[view];
  const missing = { speedup: `${group.baseline} has no time at this length`, rate: "its products are not counted" };
  const figure = (column, n) => {
    const found = cell(column, n);
    if (!over || !found?.value) return found;
    const whole = over(column, n);
    if (!Number.isFinite(whole)) return { skipped: missing[view] };
    const spread = found.p20 && view !== "speedup" ? { p20: whole / found.p80, p80: whole / found.p20 } : {};
    const noisy = found.noisy || (view === "speedup" && base(n).noisy);
    return { value: whole / found.value, noisy, ...spread };
  };
  const columns = tables[0].columns, lengths = tables[0].lengths;
  if ((view === "rate" || view === "tokens") && !columns.some((column) => lengths.some((n) => figure(column, n)?.value))) return null;
  const comparable = view === "speed" || view === "speedup" || view === "memory";
  return {
    tables, columns, lengths, figure,
    published: comparable && printed && publishedCurves(printed, view === "speedup" ? group.baseline : null),
  };
}

function sum(cells) {
  if (cells.length === 1) return cells[0];
  const missing = cells.find((cell) => !cell || cell.value === undefined);
  if (cells.includes(missing)) return missing;
  const noisy = cells.some((cell) => cell.noisy), total = (key) => cells[0][key] + cells[1][key];
  return { value: total("value"), noisy, ...(cells.every((cell) => cell.p20) ? { p20: total("p20"), p80: total("p80") } : {}) };
}

function publishedCurves(tables, baseline) {
  const value = (column, n) => tables.reduce((total, table) => total + (table.curves[column]?.[n] ?? NaN), 0);
  const curves = {};
  for (const column of Object.keys(tables[0].curves))
    for (const n of Object.keys(tables[0].curves[column])) {
      const y = baseline ? value(baseline, n) / value(column, n) : value(column, n);
      if (Number.isFinite(y)) (curves[column] ??= []).push({ x: Number(n), y });
    }
  return { gpu: tables[0].gpu, sizes: tables[0].sizes, title: tables[0].title, source: tables[0].source, curves };
}

function suitePanel(suite) {
  // The mode that is shown is the wanted one, where a view has it.
  const state = { group: 0, view: "speed", mode: "fwd", wanted: "fwd", hidden: new Set(), published: false, sort: null };
  // A colour for each column, and where there are several runs of it a dash for each run.
  const colors = {}, dashes = {}, own = (name) => name.split(" [")[0];
  const places = { ours: 0, other: 0 }, shades = { ours: 5, other: 6 }, runs = [];
  for (const { name, kind } of suite.columns) {
    const family = kind === "ours" ? "ours" : "other", run = name.slice(own(name).length);
    if (!runs.includes(run)) runs.push(run);
    dashes[name] = DASHES[runs.indexOf(run) % DASHES.length];
    const before = suite.columns.find((other) => own(other.name) === own(name)).name;
    if (before !== name) colors[name] = colors[before];
    else if (family === "other" && name === suite.groups[0].baseline) colors[name] = "var(--ink)";
    else colors[name] = `var(--${family}${places[family]++ % shades[family]})`;
  }
  const about = (name) => suite.groups[state.group].columns[name] ?? { title: name, about: "", owner: "", kind: "" };
  const label = (name) => [about(name).title, ...(about(name).title === name ? [] : [html("span", { class: "code mono" }, own(name))])];
  const swatch = (name) => html("span", { class: dashes[name] ? "swatch dashed" : "swatch", style: `color:${colors[name]}` });
  const controls = html("div", { class: "controls" }), title = html("div", { class: "title mono" });
  const chart = html("div", { class: "chart" }), legend = html("div", { class: "legend" });
  const table = html("div", { class: "scroll" }), notes = html("div", { class: "notes" });
  const text = html("pre"), details = html("details", {}, html("summary", {}, "As text, in the published form"), text);
  const panel = html("div", { class: "panel" }, controls, title, chart, legend, table, notes, details);

  const change = (changes) => { Object.assign(state, changes); draw(); };
  function segmented(labels, key, label) {
    const buttons = Object.entries(labels).map(([value, name]) => html("button", {
      type: "button", "aria-pressed": String(state[key] === value), "data-value": value,
      disabled: settle({ [key]: value }) === null,
      onclick: () => change({ ...settle({ [key]: value }), ...(key === "mode" ? { wanted: value } : {}) }),
    }, name));
    return html("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
  }
  /** The changes, with another mode where the wanted one was not measured; null if nothing fits. */
  function settle(changes) {
    const wanted = { ...state, ...changes };
    const modes = changes.mode ? [changes.mode] : [wanted.wanted, "fwd", "bwd", "total"];
    const mode = modes.find((one) => figures(suite.groups[wanted.group], wanted.view, one));
    return mode ? { ...changes, mode } : null;
  }

  function drawControls() {
    const boxes = [segmented(VIEWS, "view", "What is shown"), segmented(MODES, "mode", "Pass")];
    if (suite.groups.length > 1) {
      const options = suite.groups.map((group, i) => html("option", { value: i, selected: i === state.group }, group.label));
      boxes.push(html("select", { "aria-label": "Sizes", onchange: (event) => chooseGroup(Number(event.target.value)) }, ...options));
    }
    const published = current().published;
    if (published) {
      const box = html("input", { type: "checkbox", onchange: (event) => change({ published: event.target.checked }) });
      box.checked = state.published;
      boxes.push(html("label", { class: "switch", title: `${published.title}; ${published.source}` }, box, `Published: ${published.gpu}, ${published.sizes}`));
    }
    const save = (name, make) => html("button", { type: "button", "data-save": name, onclick: make }, name);
    boxes.push(html("div", { class: "files" }, save("SVG", saveSvg), save("CSV", saveCsv)));
    controls.replaceChildren(...boxes);
  }
  function chooseGroup(group) {
    const before = { ...state };
    Object.assign(state, { group, sort: null });
    const settled = settle({}) ?? (Object.assign(state, { view: "speed" }), settle({}));
    change(settled ?? before);
  }
  const current = () => figures(suite.groups[state.group], state.view, state.mode);
  const fileName = (ending) => `${[suite.name, suite.groups[state.group].label, state.view, state.mode].join("-").replace(/[^\w.]+/g, "-")}.${ending}`;
  const saveSvg = () => download(fileName("svg"), "image/svg+xml", svgText(chart.querySelector("svg")));
  function saveCsv() {
    const found = current(), quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const lines = [["column", "owner", "unit", ...found.lengths].map(quoted).join(",")];
    for (const name of found.columns)
      lines.push([quoted(name), quoted(about(name).owner), quoted(UNITS[state.view]), ...found.lengths.map((n) => found.figure(name, n)?.value ?? "")].join(","));
    download(fileName("csv"), "text/csv", `${lines.join("\n")}\n`);
  }

  function drawCurves(found, group) {
    const unit = UNITS[state.view];
    const series = found.columns.filter((column) => !state.hidden.has(column)).map((name) => ({
      name, title: about(name).title, code: own(name), color: colors[name], dash: dashes[name], base: name === group.baseline,
      points: found.lengths.map((n) => [n, found.figure(name, n)]).filter(([, cell]) => cell?.value).map(([x, cell]) => ({
        x, y: cell.value, low: cell.p20, high: cell.p80, noisy: cell.noisy, text: `${number(cell.value)} ${unit}`,
        more: cell.p20 ? `${number(cell.p20)} to ${number(cell.p80)}` : cell.workspace !== undefined ? `${number(cell.workspace)} workspace` : "",
      })),
    }));
    if (state.published && found.published)
      for (const [name, points] of Object.entries(found.published.curves))
        if (!state.hidden.has(name))
          series.push({
            name: `${name} (${found.published.gpu}, ${found.published.sizes})`, title: name, color: colors[name] ?? "var(--faint)", published: true, of: name,
            points: points.map((p) => ({ ...p, text: `${number(p.y)} ${unit}` })),
          });
    const what = `${suite.name}: ${VIEWS[state.view]} by ${group.ticks ? "run" : "length"}, on logarithmic axes`;
    const against = state.view === "speedup" ? `× over ${group.baseline}` : unit;
    const printed = found.published && `dashed: published, ${found.published.gpu}, ${found.published.sizes}`;
    drawChart(chart, series, { axis: group.axis, ticks: group.ticks, unit: against, ratio: state.view === "speedup", label: what, published: printed });
  }

  function drawLegend(found) {
    const buttons = found.columns.map((name) => html("button", {
      type: "button", "aria-pressed": String(!state.hidden.has(name)), "data-column": name, title: describe(name),
      onclick: (event) => toggle(name, event.shiftKey, found.columns),
    }, swatch(name), ...label(name), badge(name)));
    legend.replaceChildren(...buttons, html("span", { class: "hint" }, "click to hide, shift-click to show one alone"));
  }
  function toggle(name, alone, columns) {
    const others = columns.filter((column) => column !== name);
    const isAlone = !state.hidden.has(name) && others.every((column) => state.hidden.has(column));
    if (alone) state.hidden = new Set(isAlone ? [] : others);
    else if (!state.hidden.delete(name)) state.hidden.add(name);
    draw();
  }
  const describe = (name) => about(name).about;
  const badge = (name) => html("span", { class: `badge ${about(name).kind}` }, about(name).owner);

  function drawTable(found, group) {
    // Reasons that differ only after their colon share a mark, and their note tells of each.
    const reasons = new Map();
    const mark = (reason, where) => {
      const kind = reason.split(":")[0];
      reasons.set(kind, [...(reasons.get(kind) ?? []), { reason, text: `${where}${reason.slice(kind.length).replace(":", "")}` }]);
      return [...reasons.keys()].indexOf(kind) + 1;
    };
    const note = ([kind, cells]) => (new Set(cells.map((cell) => cell.reason)).size === 1 ? cells[0].reason : `${kind}: ${cells.map((cell) => cell.text).join("; ")}`);
    const better = state.view === "speed" || state.view === "memory" ? Math.min : Math.max;
    const best = Object.fromEntries(found.lengths.map((n) => {
      const values = found.columns.map((column) => found.figure(column, n)?.value).filter(Boolean);
      return [n, values.length ? better(...values) : null];
    }));
    const errors = found.columns.some((column) => worst(found, column) !== null);
    const spreads = found.columns.some((column) => spread(found, column) !== null);
    const heads = [["name", `Column, ${UNITS[state.view]}`], ...found.lengths.map((n) => [n, group.ticks?.[n] ?? `${group.axis} = ${n}`])];
    if (spreads) heads.push(["spread", "Spread"]);
    if (errors) heads.push(["error", "Error"]);
    const hints = { spread: "p20 to p80 of the sittings, the largest of all lengths", error: "against float64" };
    const head = heads.map(([key, label]) => html("th", { scope: "col", "aria-sort": state.sort?.key === key && state.sort.direction },
      html("button", { type: "button", "data-key": key, title: hints[key] ?? null, onclick: () => sortBy(key) }, label)));
    const rows = sorted(found).map((name) => {
      const figuresOf = found.lengths.map((n) => {
        const cell = found.figure(name, n);
        if (!cell?.value) {
          const why = cell?.skipped ?? "not run";
          return html("td", { class: "none", title: why }, "–", html("sup", {}, String(mark(why, `${name} at ${n}`))));
        }
        return html("td", { class: cell.value === best[n] && "best", title: explain(cell) }, `${cell.noisy ? "~" : ""}${number(cell.value)}`);
      });
      const error = worst(found, name), wide = spread(found, name);
      if (spreads) figuresOf.push(html("td", { class: "none" }, wide === null ? "–" : `${(100 * wide).toFixed(0)}%`));
      if (errors) figuresOf.push(html("td", { class: "none" }, error === null ? "–" : error.toExponential(1)));
      const head = html("th", { scope: "row" }, swatch(name), ...label(name), badge(name), html("small", {}, describe(name)));
      return html("tr", { "data-column": name }, head, ...figuresOf);
    });
    table.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows)));
    const noisy = found.columns.some((column) => found.lengths.some((n) => found.figure(column, n)?.noisy));
    const checked = errors ? `Error: against float64, at ${found.tables[0].checked || "a small size"}, not at these lengths.` : "";
    notes.hidden = reasons.size === 0 && !noisy && !errors;
    notes.replaceChildren(html("ol", {}, ...[...reasons].map((entry) => html("li", {}, note(entry)))), html("p", {}, checked), html("p", {}, noisy ? `~ ${data.noise}` : ""));
  }
  /** The largest over all lengths, as a share of the fastest. */
  function spread(found, column) {
    const cells = found.lengths.map((n) => found.figure(column, n)).filter((cell) => cell?.value && cell.p20);
    return cells.length ? Math.max(...cells.map((cell) => (cell.p80 - cell.p20) / cell.value)) : null;
  }
  function worst(found, column) {
    const errors = found.tables.map((table) => table.errors[column]).filter((error) => error !== undefined);
    return errors.length ? Math.max(...errors) : null;
  }
  function explain(cell) {
    const parts = [];
    if (cell.p20 !== undefined) parts.push(`p20 to p80: ${number(cell.p20)} to ${number(cell.p80)} ${UNITS[state.view]}`);
    if (cell.sittings !== undefined) parts.push(`the fastest of ${cell.sittings} sittings${cell.lead === undefined ? "" : `, the next ${(100 * cell.lead).toFixed(0)}% slower`}`);
    if (cell.first_call !== undefined) parts.push(`first call ${number(cell.first_call)} ms`);
    for (const part of ["inputs", "outputs", "workspace"]) if (cell[part] !== undefined) parts.push(`${part} ${number(cell[part])} MiB`);
    return parts.join("\n");
  }
  function sortBy(key) {
    const again = state.sort?.key === key;
    if (again && state.sort.direction === "descending") change({ sort: null });
    else change({ sort: { key, direction: again ? "descending" : "ascending" } });
  }
  /** The columns in the published order, or sorted by one length, by error or by name; those without a figure last. */
  function sorted(found) {
    if (!state.sort) return found.columns;
    const { key, direction } = state.sort, sign = direction === "ascending" ? 1 : -1;
    if (key === "name") return [...found.columns].sort((a, b) => sign * a.localeCompare(b));
    const special = { error: worst, spread }[key];
    const value = (column) => (special ? special(found, column) : found.figure(column, key)?.value) ?? null;
    const known = found.columns.filter((column) => value(column) !== null), unknown = found.columns.filter((column) => value(column) === null);
    return [...known.sort((a, b) => sign * (value(a) - value(b))), ...unknown];
  }

  function draw() {
    const group = suite.groups[state.group], found = current();
    drawControls();
    title.textContent = found.tables.map((one) => one.title).join(" + ") + (group.section ? ` · ${group.section}` : "");
    drawLegend(found);
    drawCurves(found, group);
    drawTable(found, group);
    text.textContent = found.tables.map((one) => one.text).join("\n\n");
    if (drawn) history.replaceState(null, "", `#${suite.name}?${link()}`);
    drawn = true;
  }
  /** The view as the words of an address; `restore` reads them. */
  function link() {
    const words = { group: state.group || "", view: state.view, mode: state.wanted, published: state.published ? 1 : "" };
    const pairs = Object.entries(words).filter(([, word]) => word !== "");
    return new URLSearchParams([...pairs, ...[...state.hidden].map((name) => ["hide", name])]).toString();
  }
  function restore(words) {
    const group = Number(words.get("group") ?? 0), hide = words.getAll("hide").filter((name) => colors[name]);
    if (suite.groups[group]) state.group = group;
    if (VIEWS[words.get("view")]) state.view = words.get("view");
    if (MODES[words.get("mode")]) state.wanted = words.get("mode");
    Object.assign(state, { hidden: new Set(hide), published: words.get("published") === "1" });
  }
  let drawn = false;
  /** The view of an address, if it is one of this suite, else the first that has figures. */
  function goTo(address) {
    const [of, words] = address.split("?");
    if (of === suite.name && words) restore(new URLSearchParams(words));
    Object.assign(state, settle({}) ?? (state.view = "speed", settle({})) ?? (state.view = "memory", settle({})));
  }
  goTo(location.hash.slice(1));
  addEventListener("hashchange", () => { goTo(location.hash.slice(1)); drawn = false; draw(); });
  let width = 0;
  new ResizeObserver(() => { if (chart.clientWidth !== width) { width = chart.clientWidth; drawCurves(current(), suite.groups[state.group]); } }).observe(chart);
  draw();
  return html("section", { id: suite.name, "data-suite": suite.name }, html("h2", {}, suite.title), html("p", { class: "subject" }, suite.subject), panel);
}

function card(suite) {
  if (!suite.headline) return null;
  const { column, ratio, noisy, other, where } = suite.headline;
  return html("a", { class: "card", href: `#${suite.name}` },
    html("div", { class: "name" }, suite.name), html("div", { class: "ratio", title: noisy ? data.noise : null }, `${noisy ? "~" : ""}${number(ratio)}`, html("small", {}, "×")),
    html("div", { class: "where" }, html("b", {}, column), " against ", html("b", {}, other), ` ${where}`));
}

function download(name, type, text) {
  const link = html("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** A chart as a file of its own: what the page's style sheet says of its elements goes into them. */
function svgText(chart) {
  const copy = chart.cloneNode(true), styles = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "paint-order"];
  const [from, to] = [chart, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  from.forEach((element, i) => { for (const style of styles) to[i].style.setProperty(style, getComputedStyle(element).getPropertyValue(style)); });
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", chart.viewBox.baseVal.width);
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  return new XMLSerializer().serializeToString(copy);
}

function fill(id, ...children) { document.getElementById(id).replaceChildren(...children.filter(Boolean)); }

function start() {
  fill("machine", data.machine);
  fill("warning", ...data.warnings.map((text) => html("p", {}, text)));
  document.getElementById("warning").hidden = !data.warnings.length;
  fill("cards", ...data.suites.map(card));
  fill("suites-nav", ...data.suites.map((suite) => html("a", { href: `#${suite.name}` }, suite.name)), html("a", { href: "#environment" }, "environment"));
  fill("suites", ...data.suites.map(suitePanel));
  fill("facts", ...data.facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
  fill("backends", ...data.backends.map(([name, available, what]) =>
    html("li", { class: available ? "" : "off" }, html("span", { class: "dot" }), html("span", {}, name), html("span", {}, what))));
  fill("reasons", ...data.skipped.map(({ reason, cells }) => html("div", { class: "reason" }, html("p", {}, reason), html("div", {}, cells))));
  if (!data.skipped.length) document.getElementById("skipped").hidden = true;
  const shown = location.hash.slice(1).split("?")[0];
  if (location.hash.includes("?")) document.getElementById(shown)?.scrollIntoView({ behavior: "instant" });
}

function chooseTheme(theme) { document.documentElement.dataset.theme = theme; }
const dark = matchMedia("(prefers-color-scheme: dark)");
chooseTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => chooseTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
start();
