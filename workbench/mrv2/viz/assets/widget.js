// Notebook side: the kernel answers the questions, plotly's source travels once a page.

// Plotly as this page has it, asked from the kernel by the first widget that needs it.
function pagePlotly(model) {
  const key = "mrv2-plotly-" + model.get("plotly_version");
  const page = (globalThis.mrv2Page ??= {});
  page[key] ??= new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error("the kernel did not send plotly; run the cell again")), 30000);
    const arrived = async (message, buffers) => {
      if (message.kind !== "plotly") return;
      clearTimeout(timer);
      model.off("msg:custom", arrived);
      try { resolve(runScript(await gunzip(buffers[0]))); } catch (error) { reject(error); }
    };
    model.on("msg:custom", arrived);
    model.send({ kind: "plotly" });
  }).catch((error) => { delete page[key]; throw error; });
  return page[key];
}

async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Run a classic script and return what it left as window.Plotly; what the page had there is put back.
function runScript(source) {
  const before = globalThis.Plotly;
  const node = document.createElement("script");
  node.textContent = new TextDecoder().decode(source);
  document.head.append(node);
  node.remove();
  const mine = globalThis.Plotly;
  if (before) globalThis.Plotly = before;
  return mine;
}

// A typed array from the bytes that a message carried, copied so that it is aligned.
function typed(view, Type) {
  return new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

function decodeTile(raw) {
  const { bars, cells, ticks } = raw;
  return {
    ...raw,
    bars: { ...bars, row: typed(bars.row, Uint16Array), index: typed(bars.index, Int32Array), start: typed(bars.start, Float64Array),
      end: typed(bars.end, Float64Array), hue: typed(bars.hue, Uint8Array), name: typed(bars.name, Int32Array),
      step: typed(bars.step, Float64Array), corr: typed(bars.corr, Float64Array), bytes: typed(bars.bytes, Float64Array) },
    cells: { ...cells, share: typed(cells.share, Uint8Array), hue: typed(cells.hue, Uint8Array), events: typed(cells.events, Int32Array) },
    ticks: { ...ticks, time: typed(ticks.time, Float64Array) },
  };
}

// A source whose answers come from the kernel; only the newest question counts.
class KernelSource {
  constructor(model, view) {
    Object.assign(this, { model, id: Math.random().toString(36).slice(2), serial: 0, shown: 0 });
    this.handlers = {
      "change:tile": () => {
        const tile = model.get("tile");
        // a tile without a view was pushed by the kernel and is for all
        if (!tile?.bars || (tile.view && (tile.view !== this.id || tile.serial < this.shown))) return;
        // a tile that came with another recording waits for its rows
        if (!tile.view && model.get("spec") !== view()?.spec) return;
        if (tile.view) this.shown = tile.serial;
        this.deliver?.(decodeTile(tile));
      },
      "msg:custom": (message) => {
        if (message.kind === "links") this.chosen?.(message.links);
        if (message.kind === "tick" && message.at !== null) view().goTo(message.at);
      },
    };
    Object.entries(this.handlers).forEach(([name, act]) => model.on(name, act));
  }

  close() {
    Object.entries(this.handlers).forEach(([name, act]) => this.model.off(name, act));
  }

  request(window, width, deliver) {
    this.deliver = deliver;
    this.model.send({ kind: "tile", view: this.id, serial: ++this.serial, window, width });
  }

  select(row, index, deliver) {
    this.chosen = deliver;
    this.model.send({ kind: "select", row, index });
  }

  nextTick(at, direction) {
    this.model.send({ kind: "tick", at, direction });
    return undefined;
  }
}

function renderTimeline({ model, el }) {
  const root = make("div");
  const problem = make("div", { class: "mrv2-error", role: "alert", hidden: true });
  el.append(problem, root);
  let view = null, source = null, closed = false;
  const showError = () => {
    problem.textContent = model.get("error");
    problem.hidden = !model.get("error");
  };
  const onView = () => { const [a, b] = model.get("view"); view?.show([a, b]); };
  const onCentre = () => { const [start, end] = model.get("centre"); view?.centreOn(start, end); };
  const start = (Plotly) => {
    if (closed) return;
    source = new KernelSource(model, () => view);
    const tile = model.get("tile"), window = tile?.window ?? model.get("view");
    view = new TimelineView(root, Plotly, model.get("spec"), source, { window, theme: model.get("theme") || undefined });
    if (tile?.bars) view.accept(decodeTile(tile));
  };
  const replace = () => {
    const tile = model.get("tile");
    if (view && tile?.bars) view.replace(model.get("spec"), tile.window, decodeTile(tile));
  };
  model.on("change:error", showError);
  model.on("change:view", onView);
  model.on("change:centre", onCentre);
  model.on("change:spec", replace);
  showError();
  root.textContent = "loading the timeline \u2026";
  pagePlotly(model).then(start).catch((error) => { problem.textContent = String(error.message || error); problem.hidden = false; });
  return () => {
    closed = true;
    model.off("change:error", showError);
    model.off("change:view", onView);
    model.off("change:centre", onCentre);
    model.off("change:spec", replace);
    source?.close();
    view?.destroy();
  };
}

function renderTable({ model, el }) {
  const root = make("div");
  el.append(root);
  const show = () => new EventTable(root, model.get("spec"), (row) => model.send({ kind: "row", row }));
  model.on("change:spec", show);
  show();
  return () => model.off("change:spec", show);
}
