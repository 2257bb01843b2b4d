"use strict";
// A log-log chart in SVG: curves with their spread, a crosshair, and what every curve is at the pointer's length.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Three significant digits, never an exponent. */
function number(value) {
  if (value === 0) return "0";
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(decimals, 3), maximumFractionDigits: decimals });
}

/** A tick's value without the noise of binary fractions. */
const plain = (value) => Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 9 });

/** 1, 2, 5 of every decade; only 1 where the range is wide. */
function ticks(low, high) {
  const steps = Math.log10(high / low) > 3.2 ? [1] : [1, 2, 5];
  const found = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade++)
    for (const step of steps) {
      const value = step * 10 ** decade;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  return found;
}

function range(values, margin) {
  const low = Math.min(...values), high = Math.max(...values);
  return low === high ? [low / 2, high * 2] : [low / margin, high * margin];
}

/**
 * Draws into `host`. A series has `name`, `title` and `code`, `color`, `dash`, `points` of {x, y, low, high, text, more}, and may be `base`, or `published`
 * and then the counterpart `of` another series; `options` are the axis' name, the `unit` of y, and whether 1 is marked, as for ratios.
 */
function drawChart(host, series, options) {
  host.replaceChildren();
  const all = series.flatMap((one) => one.points);
  if (all.length === 0) {
    host.append(html("div", { class: "nothing" }, "Nothing to draw: no cell of the chosen columns has a value here."));
    return;
  }
  const width = Math.max(280, host.clientWidth - 8), height = Math.round(Math.min(430, Math.max(260, width * 0.5)));
  const named = width > 700;  // where there is room, curves carry their names
  const left = 58, right = named ? 96 : 16, top = 26, bottom = 40;
  const [x0, x1] = options.ticks ? [0.5, Math.max(...all.map((p) => p.x)) + 0.5] : range(all.map((p) => p.x), 1.12);
  const marked = options.ratio ? [1] : [];
  const [y0, y1] = range([...all.flatMap((p) => [p.low ?? p.y, p.high ?? p.y]), ...marked], 1.25);
  const scale = (value, low, high, from, to) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
  const x = (value) => (options.ticks ? left + ((value - x0) / (x1 - x0)) * (width - right - left) : scale(value, x0, x1, left, width - right));
  const y = (value) => scale(value, y0, y1, height - bottom, top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": options.label });

  for (const value of ticks(y0, y1)) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, plain(value)));
  }
  const lengths = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
  let labelled = Infinity;
  for (const value of [...lengths].reverse()) {  // the last one always has its label
    root.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - bottom }));
    // Of a run its date, and below that its version.
    const words = (options.ticks?.[value] ?? String(value)).split(" ");
    if (labelled - x(value) > (options.ticks ? 72 : 44)) {
      for (const [i, word] of words.entries())
        root.append(svg("text", { x: x(value), y: height - bottom + 16 + 13 * i, "text-anchor": "middle" }, word));
      labelled = x(value);
    }
  }
  root.append(svg("text", { x: left - 8, y: 14, "text-anchor": "start" }, options.unit));
  root.append(svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, options.axis));
  if (options.ratio) root.append(svg("line", { class: "one", x1: left, x2: width - right, y1: y(1), y2: y(1) }));

  for (const one of series) {
    const kind = one.published ? "series published" : one.base ? "series base" : "series";
    const group = svg("g", { class: kind, "data-name": one.name });
    group.style.color = one.color;
    const points = [...one.points].sort((a, b) => a.x - b.x);
    const through = (some, value) => some.map((p) => `${x(p.x).toFixed(1)} ${y(value(p)).toFixed(1)}`).join("L");
    const spread = points.filter((p) => p.low);
    if (spread.length > 1)
      group.append(svg("path", { class: "band", fill: "currentColor",
        d: `M${through(spread, (p) => p.high)}L${through([...spread].reverse(), (p) => p.low)}Z` }));
    if (points.length)
      group.append(svg("path", { class: "line", d: `M${through(points, (p) => p.y)}`, stroke: "currentColor", "stroke-dasharray": one.dash || "none" }));
    for (const p of points)
      group.append(svg("circle", { class: p.noisy ? "noisy" : "", cx: x(p.x), cy: y(p.y), r: one.published ? 2 : 3.2, fill: "currentColor" }));
    root.append(group);
  }
  if (named) nameCurves(root, series, width - right + 8, y, [top, height - bottom]);
  host.append(root);
  follow(host, root, series, lengths, { ...options, x, top, bottom: height - bottom, width });
}

/** In the margin, where no curve runs, at the height of each curve's last point; moved apart where they would overlap. Of
 * several runs of a column the first has its name: the others are dashed, in its colour. */
function nameCurves(root, series, x, y, [top, bottom]) {
  const labels = series.filter((one) => !one.published && !one.dash && one.points.length).map((one) => {
    const last = one.points.reduce((a, b) => (b.x > a.x ? b : a));
    return { name: one.code, color: one.color, y: y(last.y) };
  }).sort((a, b) => a.y - b.y);
  for (const [i, label] of labels.entries()) label.y = Math.max(label.y, top + 4, i ? labels[i - 1].y + 14 : 0);
  for (let i = labels.length - 1; i >= 0; i--)
    labels[i].y = Math.min(labels[i].y, i === labels.length - 1 ? bottom : labels[i + 1].y - 14);
  for (const label of labels) {
    const text = svg("text", { class: "name", x, y: label.y + 4 }, label.name);
    text.style.fill = label.color;
    root.append(text);
  }
}

function follow(host, root, series, lengths, frame) {
  const cross = svg("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
  const tip = html("div", { class: "tip", hidden: true });
  root.append(cross);
  host.append(tip);
  const measured = Object.fromEntries(series.filter((one) => !one.published).map((one) => [one.name, one]));
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  host.onpointerleave = hide;
  host.onpointermove = host.onpointerdown = (event) => {
    const box = root.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) * frame.width) / box.width;
    const n = lengths.reduce((best, one) => (Math.abs(frame.x(one) - pointer) < Math.abs(frame.x(best) - pointer) ? one : best));
    const at = (one) => one?.points.find((p) => p.x === n);
    const published = Object.fromEntries(series.filter((one) => one.published).map((one) => [one.of, one]));
    const rows = series.filter((one) => at(one) && !(one.published && at(measured[one.of])));
    tip.replaceChildren(html("b", {}, frame.ticks ? frame.ticks[n] : `${frame.axis} = ${n}`));
    for (const one of rows.sort((a, b) => at(b).y - at(a).y)) {
      const swatch = html("span", { class: one.published || one.dash ? "swatch dashed" : "swatch", style: `color:${one.color}` });
      const point = at(one), printed = one.published ? null : at(published[one.name]);
      const more = printed ? `${printed.text} published` : point.more;
      const code = one.title === one.name ? null : html("span", { class: "code mono" }, one.published ? "published" : one.code);
      tip.append(html("div", {}, swatch, html("span", {}, one.title), code, html("span", { class: "value" }, `${point.noisy ? "~" : ""}${point.text}`),
        more ? html("span", { class: "more" }, more) : null));
    }
    if (series.some((one) => one.published)) tip.append(html("small", {}, frame.published));
    for (const position of ["x1", "x2"]) cross.setAttribute(position, frame.x(n));
    cross.setAttribute("visibility", "visible");
    tip.hidden = false;
    const pixels = (frame.x(n) * box.width) / frame.width;
    const beside = pixels + 14 + tip.offsetWidth > box.width ? pixels - 14 - tip.offsetWidth : pixels + 14;
    tip.style.left = `${Math.max(0, Math.min(beside, box.width - tip.offsetWidth))}px`;
    tip.style.top = "24px";
  };
}
