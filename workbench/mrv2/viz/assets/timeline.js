// The timeline on a page: draws the tiles that a source hands over, with plotly.
// A source answers request(window, width, deliver), select(row, index, deliver) and nextTick(at, direction);
// times are nanoseconds from the start of the trace, the axis shows seconds.

const MARGIN = { r: 16, t: 6, b: 34 };
const ZOOM = 1.6, PAN = 0.25, CLICK_PX = 4;

class TimelineView {
  constructor(root, Plotly, spec, source, options = {}) {
    Object.assign(this, { root, Plotly, source, options });
    this.window = options.window || [0, spec.span];
    this.spec = spec;
    this.tile = this.waiting = this.selection = null;
    this.dragging = false;
    this.build();
    this.take(spec);
    this.setTheme(options.theme || detectTheme(root));
    // a notebook may build the view before it stands on the page: only then is there a background to fit
    let isPlaced = Boolean(options.theme) || root.isConnected;
    this.observers = [new ResizeObserver(() => {
      if (!isPlaced && root.isConnected) {
        isPlaced = true;
        this.setTheme(detectTheme(root));
      }
      this.resize();
    })];
    this.observers[0].observe(this.plot);
    if (!options.theme) this.observers.push(onThemeChange(() => this.setTheme(detectTheme(root))));
  }

  destroy() {
    this.observers.forEach((observer) => observer.disconnect());
    removeEventListener("pointerup", this.pointerUp, true);
    // plotly must not lose its plot while it draws
    Promise.resolve(this.drawn).finally(() => this.Plotly.purge(this.plot));
    this.root.replaceChildren();
  }

  // ---- the page

  build() {
    const button = (text, title, act) => make("button", { type: "button", title, "aria-label": title, onclick: act }, text);
    this.status = make("output", { class: "mrv2-status", "aria-live": "polite" });
    this.toolbar = make("div", { class: "mrv2-toolbar", role: "toolbar", "aria-label": "timeline" },
      button("\u25c0", "earlier (left arrow)", () => this.pan(-PAN)), button("\u25b6", "later (right arrow)", () => this.pan(PAN)),
      button("+", "zoom in (+)", () => this.zoom(1 / ZOOM)), button("\u2212", "zoom out (-)", () => this.zoom(ZOOM)),
      button("all", "whole trace (0)", () => this.show([0, this.spec.span])),
      button("sync", "next host sync (n; previous: p)", () => this.toTick(1)),
      button("\u25d0", "light or dark (t)", () => this.setTheme(this.theme.name === "dark" ? "light" : "dark")),
      this.status);
    this.legend = make("div", { class: "mrv2-legend" });
    this.plot = make("div", { class: "mrv2-plot" });
    this.tip = make("div", { class: "mrv2-tip", role: "tooltip", hidden: true });
    this.detail = make("div", { class: "mrv2-detail", "aria-live": "polite" });
    this.root.classList.add("mrv2-timeline");
    Object.entries({ tabindex: 0, role: "application", "aria-label": "timeline: arrow keys move, plus and minus zoom, 0 shows all" })
      .forEach(([key, value]) => this.root.setAttribute(key, value));
    this.root.replaceChildren(this.toolbar, this.legend, this.plot, this.detail, this.tip);
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("mousemove", (event) => this.hover(event));
    this.plot.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    // plotly covers the page while the button is down, so clicks are told from drags here
    this.plot.addEventListener("pointerdown", (event) => { this.pressed = [event.clientX, event.clientY]; }, true);
    this.pointerUp = (event) => this.release(event);
    addEventListener("pointerup", this.pointerUp, true);
  }

  setTheme(name) {
    this.theme = this.spec.themes[name];
    for (const key of ["background", "text", "muted", "grid", "accent"]) this.root.style.setProperty(`--mrv2-${key}`, this.theme[key]);
    this.draw();
  }

  get width() {
    return Math.max(Math.round(this.plot.clientWidth - this.left - MARGIN.r), 50);
  }

  resize() {
    if (this.plot.clientWidth && this.width !== this.askedWidth) this.ask();
  }

  // ---- windows

  show(window) {
    const span = this.spec.span, width = Math.min(Math.max(window[1] - window[0], 10), 1.2 * span);
    const middle = Math.min(Math.max((window[0] + window[1]) / 2, 0), span);
    this.window = [middle - width / 2, middle + width / 2];
    this.ask();
  }

  // Show an event with its surroundings and mark it.
  centreOn(start, end) {
    const length = Math.max(end - start, 1), now = this.window[1] - this.window[0];
    const half = Math.min(Math.max(now, 4 * length), Math.max(40 * length, 50000)) / 2, middle = (start + end) / 2;
    this.highlight = [start, end];
    this.show([middle - half, middle + half]);
  }

  pan(share) {
    const by = share * (this.window[1] - this.window[0]);
    this.show([this.window[0] + by, this.window[1] + by]);
  }

  zoom(factor, at = (this.window[0] + this.window[1]) / 2) {
    this.show(this.window.map((edge) => at + (edge - at) * factor));
  }

  toTick(direction) {
    const at = this.source.nextTick(direction > 0 ? this.highlight?.[0] ?? this.window[0] : this.highlight?.[0] ?? this.window[1], direction);
    if (at !== undefined) this.goTo(at);
  }

  goTo(at) {
    const half = (this.window[1] - this.window[0]) / 2;
    this.highlight = [at, at];
    this.show([at - half, at + half]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => this.pan(-PAN), ArrowRight: () => this.pan(PAN), ArrowUp: () => this.zoom(1 / ZOOM), ArrowDown: () => this.zoom(ZOOM),
      "+": () => this.zoom(1 / ZOOM), "=": () => this.zoom(1 / ZOOM), "-": () => this.zoom(ZOOM),
      0: () => this.show([0, this.spec.span]), Home: () => this.show([0, this.spec.span]),
      n: () => this.toTick(1), p: () => this.toTick(-1), Escape: () => this.select(null),
      t: () => this.setTheme(this.theme.name === "dark" ? "light" : "dark"),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // ---- tiles

  ask() {
    this.askedWidth = this.width;
    this.options.onWindow?.(this.window);
    // until the answer is there, what is known moves along
    if (this.tile && !this.source.isImmediate) this.slide();
    this.source.request(this.window, this.askedWidth, (tile) => this.accept(tile));
  }

  slide() {
    const range = this.window.map((edge) => edge * SECOND), now = this.plot.layout.xaxis.range;
    if (range.some((edge, i) => edge !== now[i])) this.Plotly.relayout(this.plot, { "xaxis.range": range });
  }

  accept(tile) {
    // drawing during a drag would fight with plotly's own
    if (this.dragging) { this.waiting = tile; return; }
    this.waiting = null;
    this.tile = tile;
    this.rowStart = new Map();
    const rows = tile.bars.row;
    for (let i = 0; i < rows.length; i++) if (i === 0 || rows[i] !== rows[i - 1]) this.rowStart.set(rows[i], i);
    this.draw();
  }

  take(spec) {
    this.spec = spec;
    this.left = 18 + CHAR_PX * Math.max(...spec.labels.map(([text]) => text.length));
    this.legend.replaceChildren(...spec.hues.filter((_, i) => spec.usedHues.includes(i)).map(
      (hue) => make("span", {}, make("i", { style: `background:${hue.colour}` }), hue.label)));
  }

  // Another recording in the place of this one.
  replace(spec, window, tile) {
    this.take(spec);
    Object.assign(this, { window, selection: null, highlight: null });
    this.detail.textContent = "";
    this.accept(tile);
  }

  draw() {
    if (!this.tile) return;
    const began = performance.now();
    const drawn = this.Plotly.react(this.plot, tracesOf(this), this.layout(), { displayModeBar: false, scrollZoom: true, doubleClick: false, responsive: false });
    if (!this.listening) {
      this.listening = true;
      this.plot.on("plotly_relayouting", () => { this.dragging = true; this.tip.hidden = true; });
      this.plot.on("plotly_relayout", () => this.moved());
    }
    this.drawn = Promise.resolve(drawn).then(() => {
      this.root.dataset.drawMs = (performance.now() - began).toFixed(1);
      this.root.dataset.window = this.window.map((edge) => Math.round(edge)).join(",");
    });
    const [a, b] = this.window;
    this.status.textContent = `${formatNs(a)} to ${formatNs(b)} (${formatNs(b - a)})`;
  }

  moved() {
    this.dragging = false;
    const range = this.plot.layout.xaxis.range.map((edge) => edge / SECOND);
    const moved = range.some((edge, i) => Math.abs(edge - this.window[i]) > 1e-6 * (this.window[1] - this.window[0]));
    if (moved) this.show(range);
    else if (this.waiting) this.accept(this.waiting);
  }

  layout() {
    const { theme, spec } = this;
    return {
      width: this.plot.clientWidth, height: spec.height + MARGIN.t + MARGIN.b, margin: { l: this.left, ...MARGIN },
      paper_bgcolor: theme.background, plot_bgcolor: theme.background, font: { family: spec.font, size: 12, color: theme.text },
      hovermode: false, dragmode: "pan", showlegend: false, shapes: highlightOf(this),
      xaxis: { range: this.window.map((edge) => edge * SECOND), ticksuffix: "s", exponentformat: "SI", minexponent: 1, showexponent: "all",
               gridcolor: theme.grid, zeroline: false, nticks: 8, ticklabeloverflow: "allow" },
      yaxis: { range: [spec.height, 0], fixedrange: true, showgrid: false, zeroline: false, ticklabeloverflow: "allow",
               tickvals: spec.labels.map(([, y]) => y), ticktext: spec.labels.map(([text]) => text) },
    };
  }

  // ---- pointing and choosing

  // What lies under the pointer: {row, at, bar} with `bar` undefined in rows of cells and in gaps.
  under(event) {
    const box = this.plot.getBoundingClientRect();
    const x = event.clientX - box.left - this.left, y = event.clientY - box.top - MARGIN.t;
    if (!this.tile || x < 0 || x > this.width) return null;
    const row = this.spec.boxes.findIndex(([top, bottom]) => y >= top && y <= bottom);
    if (row < 0) return null;
    const perPx = (this.window[1] - this.window[0]) / this.width, at = this.window[0] + x * perPx, { bars } = this.tile;
    const first = this.rowStart.get(row);
    if (first === undefined) return { row, at };
    let last = first;
    while (last < bars.row.length && bars.row[last] === row) last++;
    const next = lowerBound(bars.start, at, first, last);
    // the bar that holds the instant, else the nearest within two pixels
    const near = [next - 1, next].filter((i) => i >= first && i < last)
      .map((i) => [i, Math.max(bars.start[i] - at, at - bars.end[i], 0) / perPx]).filter(([, distance]) => distance <= 2).sort((p, q) => p[1] - q[1]);
    return { row, at, bar: near[0]?.[0] };
  }

  lines({ row, at, bar }) {
    const lines = bar === undefined ? this.cellLines(row, at) : this.barLines(bar);
    const { time, count, name } = this.tile.ticks, perPx = (this.window[1] - this.window[0]) / this.width;
    const near = lowerBound(time, at - 2 * perPx);
    if (near < time.length && time[near] <= at + 2 * perPx) lines.push(count[near] > 1 ? `${count[near]} host syncs here` : `host sync: ${name[near]}`);
    return lines.length ? lines : null;
  }

  cellLines(row, at) {
    const { cells, covered } = this.tile, i = cells.rows.indexOf(row);
    const bin = Math.floor(((at - covered[0]) / (covered[1] - covered[0])) * cells.bins), cell = i * cells.bins + bin;
    if (i < 0 || bin < 0 || bin >= cells.bins || !cells.share[cell]) return [];
    const share = (cells.share[cell] / 255) * 100;
    return [this.spec.rows[row].label, `${share < 1 ? "under 1" : share.toFixed(0)} % busy, ${cells.events[cell]} begin here`,
      `mostly ${this.spec.hues[cells.hue[cell]].label}; zoom in for events`];
  }

  barLines(bar) {
    const { bars } = this.tile, length = bars.end[bar] - bars.start[bar];
    const out = [bars.name[bar] < 0 ? `step ${bars.step[bar]}` : bars.names[bars.name[bar]],
      `${formatNs(length)} at ${(bars.start[bar] / 1e6).toFixed(6)} ms`, this.spec.rows[bars.row[bar]].label];
    if (bars.step[bar] >= 0 && bars.name[bar] >= 0) out.push(`step ${bars.step[bar]}`);
    if (bars.corr[bar] >= 0) out.push(`correlation ${bars.corr[bar]}`);
    if (bars.bytes[bar] >= 0) out.push(formatBytes(bars.bytes[bar]) + (length > 0 ? `, ${Number((bars.bytes[bar] / length).toPrecision(3))} GB/s` : ""));
    return out;
  }

  hover(event) {
    const found = this.under(event), lines = found && this.lines(found);
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.replaceChildren(...lines.map((line, i) => make(i ? "div" : "b", {}, line)));
    const box = this.root.getBoundingClientRect(), x = event.clientX - box.left, onRight = x > box.width / 2;
    this.tip.style.left = onRight ? "auto" : `${x + 14}px`;
    this.tip.style.right = onRight ? `${box.width - x + 14}px` : "auto";
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
  }

  release(event) {
    const pressed = this.pressed;
    this.pressed = null;
    if (!pressed || Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) > CLICK_PX) return;
    this.root.focus({ preventScroll: true });
    if (event.timeStamp - (this.lastClick ?? -1e9) < 350) { this.show([0, this.spec.span]); return; }
    this.lastClick = event.timeStamp;
    const found = this.under(event);
    this.select(found && found.bar !== undefined ? found : null);
  }

  select(found) {
    this.highlight = null;
    this.selection = null;
    this.detail.textContent = "";
    if (found) {
      const { bars } = this.tile;
      this.detail.textContent = this.barLines(found.bar).join(" \u00b7 ");
      this.source.select(bars.row[found.bar], bars.index[found.bar], (links) => this.linked(links));
    }
    this.draw();
  }

  linked(links) {
    this.selection = links;
    if (links.to.length) {
      const [, start, end] = links.from, [, first, firstEnd] = links.to[0];
      const launched = this.spec.rows[links.from[0]].table === "api";
      const [call, op] = launched ? [[start, end], first] : [[first, firstEnd], start];
      const count = links.total ?? links.to.length;
      this.detail.textContent += launched
        ? ` \u2192 ${count} operation${count === 1 ? "" : "s"} on the device, the first ${formatNs(op - call[0])} after the call began`
        : ` \u2190 launched by a call that began ${formatNs(op - call[0])} earlier`;
    }
    this.draw();
  }

}

// ---- themes
