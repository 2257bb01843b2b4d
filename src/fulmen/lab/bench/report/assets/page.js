// The page: a panel with controls, curves and a sortable table for every suite, and what surrounds them.

const data = JSON.parse(document.getElementById("data").textContent);
const VIEWS = { speed: "Time", speedup: "Speedup", memory: "Memory" };
const MODES = { fwd: "Forward", bwd: "Backward", total: "Both" };
const UNITS = { speed: "ms", speedup: "×", memory: "MiB" };

/** The figures of one view as {title, columns, lengths, figure(column, n), published}; null where nothing was measured. */
function figures(group, view, mode) {
  const metric = view === "memory" ? "memory" : "speed";
  const tables = (mode === "total" ? ["fwd", "bwd"] : [mode]).map((one) => group.tables[`${metric}-${one}`]);
  if (tables.some((table) => !table) || (mode === "total" && metric === "memory")) return null;
  const cell = (column, n) => sum(tables.map((table) => table.cells[column]?.[n]));
  const base = (n) => cell(group.baseline, n)?.value;
  const printed = tables.every((table) => table.published) ? tables.map((table) => table.published) : null;
  const figure = (column, n) => {
    const found = cell(column, n);
    if (view !== "speedup" || !found?.value) return found;
    return base(n) ? { value: base(n) / found.value } : { skipped: `${group.baseline} has no time at this length` };
  };
  return {
    tables, columns: tables[0].columns, lengths: tables[0].lengths, figure,
    published: printed && publishedCurves(printed, view === "speedup" ? group.baseline : null),
  };
}

function sum(cells) {
  if (cells.length === 1) return cells[0];
  const missing = cells.find((cell) => !cell || cell.value === undefined);
  if (cells.includes(missing)) return missing;
  return { value: cells[0].value + cells[1].value, error: Math.max(...cells.map((cell) => cell.error ?? 0)) || undefined };
}

function publishedCurves(tables, baseline) {
  const value = (column, n) => tables.reduce((total, table) => total + (table.curves[column]?.[n] ?? NaN), 0);
  const curves = {};
  for (const column of Object.keys(tables[0].curves))
    for (const n of Object.keys(tables[0].curves[column])) {
      const y = baseline ? value(baseline, n) / value(column, n) : value(column, n);
      if (Number.isFinite(y)) (curves[column] ??= []).push({ x: Number(n), y });
    }
  return { gpu: tables[0].gpu, title: tables[0].title, source: tables[0].source, curves };
}

function suitePanel(suite) {
  const state = { group: 0, view: "speed", mode: "fwd", hidden: new Set(), published: false, sort: null };
  const colors = {};
  suite.columns.forEach((column) => {
    const others = suite.columns.filter((one) => one.name !== suite.groups[0].baseline);
    const place = others.indexOf(column);
    colors[column.name] = place < 0 ? "var(--ink)" : `var(--s${place % 10})`;
  });
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
      onclick: () => change(settle({ [key]: value })),
    }, name));
    return html("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
  }
  /** The changes, with another mode where the wanted one was not measured; null if nothing fits. */
  function settle(changes) {
    const wanted = { ...state, ...changes };
    const modes = changes.mode ? [changes.mode] : [wanted.mode, "fwd", "bwd", "total"];
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
      boxes.push(html("label", { class: "switch", title: `${published.title}; ${published.source}` }, box, `Published, ${published.gpu}`));
    }
    controls.replaceChildren(...boxes);
  }
  function chooseGroup(group) {
    const before = { ...state };
    Object.assign(state, { group, sort: null });
    const settled = settle({}) ?? (Object.assign(state, { view: "speed" }), settle({}));
    change(settled ?? before);
  }
  const current = () => figures(suite.groups[state.group], state.view, state.mode);

  function drawCurves(found, group) {
    const unit = UNITS[state.view];
    const series = found.columns.filter((column) => !state.hidden.has(column)).map((name) => ({
      name, color: colors[name], base: name === group.baseline,
      points: found.lengths.map((n) => [n, found.figure(name, n)]).filter(([, cell]) => cell?.value).map(([x, cell]) => ({
        x, y: cell.value, low: cell.p20, high: cell.p80, text: `${number(cell.value)} ${unit}`,
        more: cell.p20 ? `${number(cell.p20)} to ${number(cell.p80)}` : cell.workspace !== undefined ? `${number(cell.workspace)} workspace` : "",
      })),
    }));
    if (state.published && found.published)
      for (const [name, points] of Object.entries(found.published.curves))
        if (!state.hidden.has(name))
          series.push({
            name: `${name} (${found.published.gpu})`, color: colors[name] ?? "var(--faint)", published: true, of: name,
            points: points.map((p) => ({ ...p, text: `${number(p.y)} ${unit}` })),
          });
    const label = `${suite.name}: ${VIEWS[state.view]} by length, on logarithmic axes`;
    const against = state.view === "speedup" ? `× over ${group.baseline}` : unit;
    drawChart(chart, series, { axis: group.axis, unit: against, ratio: state.view === "speedup", label });
  }

  function drawLegend(found) {
    const buttons = found.columns.map((name) => html("button", {
      type: "button", "aria-pressed": String(!state.hidden.has(name)), "data-column": name, title: describe(name),
      onclick: (event) => toggle(name, event.shiftKey, found.columns),
    }, html("span", { class: "swatch", style: `color:${colors[name]}` }), name));
    legend.replaceChildren(...buttons, html("span", { class: "hint" }, "click to hide, shift-click to show one alone"));
  }
  function toggle(name, alone, columns) {
    const others = columns.filter((column) => column !== name);
    const isAlone = !state.hidden.has(name) && others.every((column) => state.hidden.has(column));
    if (alone) state.hidden = new Set(isAlone ? [] : others);
    else if (!state.hidden.delete(name)) state.hidden.add(name);
    draw();
  }
  const describe = (name) => suite.columns.find((column) => column.name === name)?.about ?? "";

  function drawTable(found, group) {
    // Reasons that differ only after their colon share a mark, and their note tells of each.
    const reasons = new Map();
    const mark = (reason, where) => {
      const kind = reason.split(":")[0];
      reasons.set(kind, [...(reasons.get(kind) ?? []), { reason, text: `${where}${reason.slice(kind.length).replace(":", "")}` }]);
      return [...reasons.keys()].indexOf(kind) + 1;
    };
    const note = ([kind, cells]) => (new Set(cells.map((cell) => cell.reason)).size === 1 ? cells[0].reason : `${kind}: ${cells.map((cell) => cell.text).join("; ")}`);
    const better = state.view === "speedup" ? Math.max : Math.min;
    const best = Object.fromEntries(found.lengths.map((n) => {
      const values = found.columns.map((column) => found.figure(column, n)?.value).filter(Boolean);
      return [n, values.length ? better(...values) : null];
    }));
    const errors = found.columns.some((column) => worst(found, column) !== null);
    const heads = [["name", "Column"], ...found.lengths.map((n) => [n, `${group.axis} = ${n}`]), ...(errors ? [["error", "Error"]] : [])];
    const head = heads.map(([key, label]) => html("th", { scope: "col", "aria-sort": state.sort?.key === key && state.sort.direction },
      html("button", { type: "button", "data-key": key, onclick: () => sortBy(key) }, label)));
    const rows = sorted(found).map((name) => {
      const figuresOf = found.lengths.map((n) => {
        const cell = found.figure(name, n);
        if (!cell?.value) {
          const why = cell?.skipped ?? "not run";
          return html("td", { class: "none", title: why }, "–", html("sup", {}, String(mark(why, `${name} at ${n}`))));
        }
        return html("td", { class: cell.value === best[n] && "best", title: explain(cell) }, number(cell.value));
      });
      const error = worst(found, name);
      if (errors) figuresOf.push(html("td", { class: "none" }, error === null ? "–" : error.toExponential(1)));
      const label = html("th", { scope: "row" }, html("span", { class: "swatch", style: `color:${colors[name]}` }), name, html("small", {}, describe(name)));
      return html("tr", { "data-column": name }, label, ...figuresOf);
    });
    table.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows)));
    notes.hidden = reasons.size === 0;
    notes.replaceChildren(html("ol", {}, ...[...reasons].map((entry) => html("li", {}, note(entry)))));
  }
  function worst(found, column) {
    const errors = found.lengths.map((n) => found.figure(column, n)?.error).filter((error) => error !== undefined);
    return errors.length ? Math.max(...errors) : null;
  }
  function explain(cell) {
    const parts = [];
    if (cell.p20 !== undefined) parts.push(`p20 to p80: ${number(cell.p20)} to ${number(cell.p80)} ms`);
    if (cell.first_call !== undefined) parts.push(`first call ${number(cell.first_call)} ms`);
    if (cell.error !== undefined) parts.push(`error ${cell.error.toExponential(1)}`);
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
    const value = (column) => (key === "error" ? worst(found, column) : found.figure(column, key)?.value) ?? null;
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
  }
  const start = settle({}) ?? (state.view = "memory", settle({}));
  Object.assign(state, start);
  let width = 0;
  new ResizeObserver(() => { if (chart.clientWidth !== width) { width = chart.clientWidth; drawCurves(current(), suite.groups[state.group]); } }).observe(chart);
  draw();
  return html("section", { id: suite.name, "data-suite": suite.name }, html("h2", {}, suite.title), html("p", { class: "subject" }, suite.subject), panel);
}

function card(suite) {
  if (!suite.headline) return null;
  const { column, ratio, where } = suite.headline;
  return html("a", { class: "card", href: `#${suite.name}` },
    html("div", { class: "name" }, suite.name), html("div", { class: "ratio" }, number(ratio), html("small", {}, "×")),
    html("div", { class: "where" }, html("b", {}, column), ` faster ${where}`));
}

function fill(id, ...children) { document.getElementById(id).replaceChildren(...children.filter(Boolean)); }

function start() {
  fill("machine", data.machine);
  fill("cards", ...data.suites.map(card));
  fill("suites-nav", ...data.suites.map((suite) => html("a", { href: `#${suite.name}` }, suite.name)), html("a", { href: "#environment" }, "environment"));
  fill("suites", ...data.suites.map(suitePanel));
  fill("facts", ...data.facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
  fill("backends", ...data.backends.map(([name, available, what]) =>
    html("li", { class: available ? "" : "off" }, html("span", { class: "dot" }), html("span", {}, name), html("span", {}, what))));
  fill("reasons", ...data.skipped.map(({ reason, cells }) => html("div", { class: "reason" }, html("p", {}, reason), html("div", {}, cells))));
  if (!data.skipped.length) document.getElementById("skipped").hidden = true;
}

function chooseTheme(theme) { document.documentElement.dataset.theme = theme; }
const dark = matchMedia("(prefers-color-scheme: dark)");
chooseTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => chooseTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
start();
