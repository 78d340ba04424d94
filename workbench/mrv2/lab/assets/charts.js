// Small charts as SVG, and numbers as people read them.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's hues, told apart with any colour vision; requests take them in turn
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function titled(text) {
  const node = document.createElementNS(SVG, "title");
  node.textContent = text;
  return node;
}

function shownNumber(value, digits = 1) {
  if (value == null || !Number.isFinite(value)) return "\u2013";
  if (Math.abs(value) >= 1e5) return `${(value / 1e3).toFixed(0)}k`;
  return value.toFixed(Math.abs(value) >= 1000 ? 0 : digits).replace(/\B(?=(\d{3})+(?!\d))(?<!\..*)/g, "\u202f");
}

// A line over the last `seconds`, with a mark where something was changed.
function sparkline(root, { t, v }, seconds, marks, label) {
  const width = 200, height = 36, pad = 3;
  const low = Math.min(...v, v.length ? Infinity : 0), high = Math.max(...v, v.length ? -Infinity : 1);
  const span = high - low || Math.abs(high) || 1, base = high === low ? low - span / 2 : low;
  const x = (at) => width * (1 + at / seconds), y = (value) => height - pad - ((value - base) / span) * (height - 2 * pad);
  const points = t.map((at, i) => `${x(at).toFixed(1)},${y(v[i]).toFixed(1)}`);
  const parts = marks.map((mark) => svg("line", { class: "mark", x1: x(mark.t), x2: x(mark.t), y1: 0, y2: height }, titled(`step ${mark.step}: ${mark.label}`)));
  if (points.length > 1) {
    parts.push(svg("path", { class: "area", d: `M${points[0].split(",")[0]},${height} L${points.join(" L")} L${points.at(-1).split(",")[0]},${height}Z` }));
    parts.push(svg("polyline", { class: "line", points: points.join(" ") }));
  }
  root.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...parts));
}

// Horizontal bars: rows of {label, parts: [{share, class, title}], text}.
function barRows(rows) {
  return make("div", { class: "bars" }, ...rows.flatMap(({ label, parts, text }) => [
    make("span", { class: "bar-label", title: label }, label),
    make("span", { class: "bar-track" }, ...parts.map(({ share, kind, title }) =>
      make("i", { class: `bar ${kind}`, style: `width:${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`, title: title || "" }))),
    make("span", { class: "bar-text" }, text),
  ]));
}

// A grid of squares: cells [{hue, title, text, dim}].
function blockGrid(cells, label) {
  return make("div", { class: "blocks", role: "img", "aria-label": label }, ...cells.map(({ hue, title, pattern }) =>
    make("i", { class: pattern || "", style: hue ? `background-color:${hue}` : "", title })));
}

// Which request sits in which row, step by step; rows down, steps to the right.
function batchGrid({ ids, rows, steps }) {
  const cell = 16, left = 44, top = 18, width = left + steps.length * cell, height = top + rows * cell + 4;
  const parts = [];
  for (let row = 0; row < rows; row++)
    if (row % 2 === 0 || rows < 12) parts.push(svg("text", { x: left - 6, y: top + row * cell + 12, "text-anchor": "end" }, `row ${row}`));
  steps.forEach((step, i) => {
    if (i % 4 === 0) parts.push(svg("text", { x: left + i * cell, y: 11 }, String(step.step)));
    for (const [row, request, tokens, place] of step.cells)
      parts.push(svg("rect", { x: left + i * cell + 1, y: top + row * cell + 1, width: cell - 2, height: cell - 2, rx: 2, fill: HUES[request % HUES.length] },
        titled(`step ${step.step} (${step.runner}): row ${row} = ${ids[request]}, place ${place} in the batch, ${tokens} token${tokens > 1 ? "s" : ""}`)),
      svg("text", { class: "place", x: left + i * cell + cell / 2, y: top + row * cell + 12, "text-anchor": "middle" }, String(place)));
  });
  return make("div", { class: "scroll" }, svg("svg", { class: "grid", width, height, role: "img", "aria-label": "rows of the batch by step" }, ...parts));
}
