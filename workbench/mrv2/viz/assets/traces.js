// What a view of the timeline hands to plotly: its tile as traces, in the order in which they are painted.

const SECOND = 1e-9;
const MAX_LABELS = 400, MAX_OUTLINES = 20, CHAR_PX = 6.6;

function tracesOf(view) {
  const { tile, spec, theme } = view;
  return [...cellTraces(tile, spec, theme), bandTrace(tile, spec, theme), ...outlineTraces(tile, spec), tickTrace(tile, spec), labelTrace(view),
    ...linkTraces(view.selection, spec, theme)];
}

const middleOf = ([top, bottom]) => (top + bottom) / 2;

// One heat map a row: evenly spaced cells are an image of one pixel a cell, which plotly draws at once.
function cellTraces({ cells, covered }, { levels, boxes, hues }, theme) {
  const dx = ((covered[1] - covered[0]) * SECOND) / (cells.bins || 1);
  return cells.rows.map((row, i) => {
    const line = new Float64Array(cells.bins);
    for (let bin = 0; bin < cells.bins; bin++) {
      const share = cells.share[i * cells.bins + bin];
      line[bin] = share ? cells.hue[i * cells.bins + bin] * levels + Math.floor(((share - 1) * levels) / 255) + 0.5 : NaN;
    }
    const [top, bottom] = boxes[row];
    return { type: "heatmap", name: "cells", x0: covered[0] * SECOND + dx / 2, dx, y0: middleOf(boxes[row]), dy: bottom - top, z: [line],
      zmin: 0, zmax: hues.length * levels, colorscale: theme.density, showscale: false, hoverinfo: "skip" };
  });
}

// Every other step, over the full height.
function bandTrace({ bands }, { height }, theme) {
  const x = [], y = [];
  for (const [start, end, , shaded] of bands) {
    if (!shaded) continue;
    const x0 = start * SECOND, x1 = end * SECOND;
    x.push(x0, x1, x1, x0, x0, null);
    y.push(0, 0, height, height, 0, null);
  }
  return { type: "scatter", name: "steps", x, y, mode: "none", fill: "toself", fillcolor: theme.band, hoverinfo: "skip" };
}

// One trace of closed outlines for each hue; what is shorter than a pixel is drawn a pixel wide.
function outlineTraces({ bars, window, width }, { boxes, hues }) {
  const pixel = (window[1] - window[0]) / width, counts = new Array(hues.length).fill(0);
  for (const hue of bars.hue) counts[hue]++;
  const traces = hues.map((hue, i) => ({ type: "scatter", name: hue.label, x: new Float64Array(6 * counts[i]), y: new Float64Array(6 * counts[i]),
    mode: "none", fill: "toself", fillcolor: hue.colour, hoverinfo: "skip" }));
  const at = counts.fill(0);
  for (let i = 0; i < bars.row.length; i++) {
    const x0 = bars.start[i] * SECOND, x1 = Math.max(bars.end[i], bars.start[i] + pixel) * SECOND, [top, bottom] = boxes[bars.row[i]];
    const { x, y } = traces[bars.hue[i]], first = at[bars.hue[i]];
    x.set([x0, x1, x1, x0, x0, NaN], first);
    y.set([top, top, bottom, bottom, top, NaN], first);
    at[bars.hue[i]] = first + 6;
  }
  return traces;
}

// One line that runs up and down, turning outside the plot: a line with gaps would be an element for each tick.
function tickTrace({ ticks }, { height, hues }) {
  const x = [], y = [];
  if (ticks.lines) ticks.time.forEach((time, i) => {
    x.push(time * SECOND, time * SECOND);
    y.push(...(i % 2 ? [height + 4, -4] : [-4, height + 4]));
  });
  const colour = hues.find((hue) => hue.key === "wait").colour;
  return { type: "scatter", name: "host syncs", x, y, mode: "lines", hoverinfo: "skip",
    // a browser without a GPU paints many dots slowly
    line: { width: 1, color: colour, dash: ticks.time.length > 60 ? "solid" : "dot" } };
}

// The short text of a bar.
function labelOf({ name, short, step }, i) {
  return name[i] < 0 ? String(step[i]) : short[name[i]];
}

// Texts of the bars that have room for one, in the middle of what is visible of them.
function labelTrace({ tile: { bars }, spec, window: [a, b], width }) {
  let found = [];
  for (let i = 0; i < bars.row.length; i++) {
    const low = Math.max(bars.start[i], a), high = Math.min(bars.end[i], b);
    const room = Math.trunc((((high - low) / (b - a)) * width - 4) / CHAR_PX);
    if (room >= 3) found.push([i, (low + high) / 2, room]);
  }
  if (found.length > MAX_LABELS) found = found.sort((x, y) => y[2] - x[2]).slice(0, MAX_LABELS);
  return { type: "scatter", name: "labels", mode: "text", hoverinfo: "skip", x: found.map(([, at]) => at * SECOND),
    y: found.map(([i]) => middleOf(spec.boxes[bars.row[i]])), text: found.map(([i, , room]) => shortened(labelOf(bars, i), room)),
    textfont: { size: 11, color: found.map(([i]) => spec.hues[bars.hue[i]].ink) } };
}

// Places to outline; many in one row become one, or their outlines would hide them.
function outlined(places) {
  const byRow = new Map();
  for (const place of places) byRow.set(place[0], [...(byRow.get(place[0]) ?? []), place]);
  return [...byRow].flatMap(([row, mine]) => mine.length <= MAX_OUTLINES ? mine
    : [[row, Math.min(...mine.map(([, start]) => start)), Math.max(...mine.map(([, , end]) => end))]]);
}

// The chosen event and its partners outlined, and a line from the call to the first operation.
function linkTraces(selection, { boxes, rows }, { accent }) {
  const outline = { type: "scatter", name: "selected", x: [], y: [], mode: "lines", hoverinfo: "skip", line: { width: 2, color: accent } };
  const line = { type: "scatter", name: "link", x: [], y: [], mode: "lines+markers", hoverinfo: "skip", line: { width: 1.5, color: accent },
    marker: { size: 7, symbol: "arrow", angleref: "previous", color: accent } };
  if (!selection) return [outline, line];
  const { from, to } = selection;
  for (const [row, start, end] of [from, ...outlined(to)]) {
    const [top, bottom] = boxes[row], x0 = start * SECOND, x1 = end * SECOND;
    outline.x.push(x0, x1, x1, x0, x0, null);
    outline.y.push(top, top, bottom, bottom, top, null);
  }
  if (to.length) {
    const ends = [from, to[0]];
    if (rows[from[0]].table === "ops") ends.reverse();
    line.x = ends.map(([, start]) => start * SECOND);
    line.y = ends.map(([row]) => middleOf(boxes[row]));
  }
  return [outline, line];
}

// The place that a table row, a key or a call pointed at, as a layout shape.
function highlightOf({ highlight, window, width, theme: { accent } }) {
  if (!highlight) return [];
  const [start, end] = highlight, pixel = (window[1] - window[0]) / width;
  return [{ type: "rect", x0: start * SECOND, x1: Math.max(end, start + pixel) * SECOND, yref: "paper", y0: 0, y1: 1, layer: "below",
    fillcolor: accent, opacity: 0.25, line: { width: 1, color: accent } }];
}
