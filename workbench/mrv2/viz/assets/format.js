// Helpers of all parts: numbers as people read them, sorted arrays, DOM elements.

function formatNs(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 999.5e3) return `${Number((ns / 1e3).toPrecision(4))} us`;
  if (size < 999.5e6) return `${Number((ns / 1e6).toPrecision(4))} ms`;
  return `${Number((ns / 1e9).toPrecision(4))} s`;
}

function formatBytes(num) {
  for (const unit of ["B", "kB", "MB"]) {
    if (Math.abs(num) < 999.5) return `${Number(num.toPrecision(3))} ${unit}`;
    num /= 1000;
  }
  return `${Number(num.toPrecision(3))} GB`;
}

function shortened(text, room) {
  return text.length <= room ? text : text.slice(0, Math.max(room - 1, 1)) + "\u2026";
}

// First position in sorted `array[from, to)` whose value is not below `value`.
function lowerBound(array, value, from = 0, to = array.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (array[middle] < value) from = middle + 1;
    else to = middle;
  }
  return from;
}

// A DOM element with attributes and children; text is never parsed as HTML.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
