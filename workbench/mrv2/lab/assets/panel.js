// The panel: header, metrics, knobs, tokens, tabs. Traits of the kernel are drawn; controls send messages.

const EFFECT_NAMES = { T: "same tokens", D: "same distribution", O: "changes the output" };
const STALE_MS = 6000;

function shownValue(value) {
  return value === true ? "on" : value === false ? "off" : String(value);
}

// What a change took beside the switch itself.
function costOf({ recomputed, caught_up: caughtUp, graphs, capture_ms: ms }) {
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  return [
    recomputed && `${many(recomputed, "request")} recomputed`, caughtUp && `${many(caughtUp, "request")} read again`,
    graphs && (ms == null ? `${many(graphs, "graph")} to capture` : `${many(graphs, "graph")} captured`),
  ].filter(Boolean).join(", ");
}

class PanelView {
  constructor(root, model) {
    Object.assign(this, { root, model, spec: model.get("spec"), shown: new Map(), lastBeat: performance.now(), explained: null });
    this.send = (message) => model.send(message);
    root.classList.add("mrv2-lab");
    this.build();
    this.setTheme();
    this.observer = onThemeChange(() => this.setTheme());
    // what stands behind the panel is known once it is on the page
    this.sized = new ResizeObserver(() => this.setTheme());
    this.sized.observe(root);
    this.events = {
      status: () => this.drawStatus(), knobs: () => this.drawKnobs(), metrics: () => this.drawMetrics(), streams: () => this.drawStreams(),
      window: () => this.drawWindow(), detail: () => this.drawDetail(), timeline: () => this.attachTimeline(),
      beat: () => { this.lastBeat = performance.now(); this.setStale(false); this.attachTimeline(); },
    };
    this.handlers = Object.entries(this.events).map(([name, act]) => [`change:${name}`, act]);
    this.handlers.forEach(([name, act]) => model.on(name, act));
    this.timer = setInterval(() => this.setStale(performance.now() - this.lastBeat > STALE_MS), 1000);
    this.openTab(model.get("tab"), false);
    Object.entries(this.events).forEach(([name, act]) => { if (name !== "beat") act(); });
  }

  close() {
    clearInterval(this.timer);
    this.observer.disconnect();
    this.sized.disconnect();
    this.handlers.forEach(([name, act]) => this.model.off(name, act));
    this.timelineView?.remove?.();
  }

  setTheme() {
    const name = detectTheme(this.root);
    if (name === this.root.dataset.theme) return;
    const theme = this.spec.themes[name];
    this.root.dataset.theme = name;
    for (const key of ["background", "text", "muted", "grid", "accent"]) this.root.style.setProperty(`--lab-${key}`, theme[key]);
  }

  // No sign of life: the kernel was restarted, is gone, or is busy with a cell.
  setStale(stale) {
    if (stale === this.stale) return;
    this.stale = stale;
    this.root.classList.toggle("stale", stale);
    this.lost.hidden = !stale;
    this.main.toggleAttribute("inert", stale);
  }

  build() {
    const { spec } = this;
    this.state = make("span", { class: "state", role: "status" });
    this.counts = make("span", { class: "counts" });
    this.startButton = button("\u25b6 Start", "send requests", () => this.send({ kind: "start" }), { "data-act": "start" });
    this.pauseButton = button("\u275a\u275a Pause", "send no further requests", () => this.send({ kind: "pause" }), { "data-act": "pause" });
    this.stopButton = button("\u25a0 Stop", "end all requests now", () => this.send({ kind: "stop" }), { "data-act": "stop" });
    const header = make("header", {}, make("div", { class: "title" }, make("strong", {}, "MRV2 Workbench"),
      make("span", { class: "model", title: spec.hardware }, `${spec.model} \u00b7 ${spec.device} \u00b7 engine in a ${spec.place}`)),
    this.state, this.counts, make("div", { class: "row" }, this.startButton, this.pauseButton, this.stopButton));
    this.lost = make("p", { class: "banner lost", role: "alert", hidden: true }, "The kernel does not answer. It was restarted, or a cell keeps it busy; after a restart run the cells again.");
    this.error = make("div", { class: "banner error", role: "alert", hidden: true });
    this.captureText = make("span", {});
    this.captureBar = make("progress", { "aria-label": "graphs captured" });
    this.capture = make("div", { class: "capture", role: "status", hidden: true }, this.captureBar, this.captureText);
    // cause and effect on one screen: the knobs beside the timeline
    const right = make("div", { class: "right" }, this.buildTabs(), this.buildStreams());
    this.main = make("div", { class: "main" }, this.buildMetrics(), make("div", { class: "columns" }, this.buildControls(), right));
    this.root.replaceChildren(header, this.lost, this.error, this.capture, this.main);
  }

  // ---- metrics

  buildMetrics() {
    this.tiles = new Map();
    const tiles = this.spec.metrics.map((metric) => {
      const value = make("b", {}, "\u2013"), line = make("div", { class: "spark" }), range = make("small", {});
      this.tiles.set(metric.key, { metric, value, line, range });
      const better = { up: "more is better", down: "less is better" }[metric.better] || "";
      return make("div", { class: "tile", "data-metric": metric.key, title: [metric.help, better].filter(Boolean).join("; ") },
        make("span", { class: "name" }, metric.label), make("span", { class: "value" }, value, " ", make("span", { class: "unit" }, metric.unit)), line, range);
    });
    return make("section", { class: "tiles", "aria-label": "metrics of the last minute" }, ...tiles);
  }

  drawMetrics() {
    const { series, marks, seconds } = this.model.get("metrics");
    if (!series) return;
    for (const [key, { metric, value, line, range }] of this.tiles) {
      const { t, v, p50, p99 } = series[key];
      value.textContent = shownNumber(v.at(-1), metric.digits);
      range.textContent = v.length ? `p50 ${shownNumber(p50, metric.digits)} \u00b7 p99 ${shownNumber(p99, metric.digits)}` : "no data yet";
      sparkline(line, series[key], seconds, marks, `${metric.label}: ${v.length} values of the last ${seconds} s, ${t.length ? shownNumber(v.at(-1), metric.digits) : "none"} now`);
    }
    this.root.dataset.marks = marks.length;
  }

  // ---- knobs and load

  buildControls() {
    const { spec } = this;
    this.preset = make("select", { "data-control": "preset", onchange: () => { if (this.preset.value) this.send({ kind: "preset", name: this.preset.value }); } },
      make("option", { value: "" }, "(custom)"),
      ...spec.presets.map((p) => make("option", { value: p.name, disabled: Boolean(p.reason), title: p.reason || p.about }, p.name + (p.reason ? " \u2014 not available here" : ""))));
    this.knobRows = new Map();
    const rows = spec.knobs.map((knob) => {
      const select = make("select", { "data-knob": knob.name, onchange: () => this.ask(knob, select), onfocus: () => this.explain(knob) },
        ...knob.values.map((value, i) => make("option", { value: i }, shownValue(value))));
      const chip = make("span", { class: "chip", role: "status" });
      const row = make("div", { class: "knob", onmouseenter: () => this.explain(knob) },
        make("label", {}, make("span", {}, knob.label), select),
        make("span", { class: `effect ${knob.effect}`, title: `changing it: ${EFFECT_NAMES[knob.effect]}` }, EFFECT_NAMES[knob.effect]), chip);
      this.knobRows.set(knob.name, { knob, select, chip, row });
      return row;
    });
    this.help = make("div", { class: "help", "aria-live": "polite" });
    this.explain(spec.knobs[0]);
    return make("section", { class: "card controls", "aria-label": "knobs" },
      make("div", { class: "knob preset" }, make("label", {}, make("span", {}, "preset"), this.preset)), ...rows, this.help, this.buildLoad());
  }

  // While a cell runs the kernel may take no messages: say so rather than look dead.
  ask(knob, select) {
    const { chip } = this.knobRows.get(knob.name), sent = "\u2026 sent";
    this.send({ kind: "set", changes: { [knob.name]: Number(select.value) } });
    chip.className = "chip pending";
    chip.textContent = sent;
    setTimeout(() => { if (chip.textContent === sent) chip.textContent = "\u2026 waits for the cell that runs"; }, 2500);
  }

  explain(knob) {
    if (this.explained === knob) return;
    this.explained = knob;
    this.help.replaceChildren(make("strong", {}, knob.label), make("p", {}, knob.help), make("p", {}, make("em", {}, "Look for: "), knob.lookFor));
  }

  buildLoad() {
    const { spec } = this, send = (name, value) => this.send({ kind: "load", changes: { [name]: value } });
    const choice = (name, options) => {
      const select = make("select", { "data-load": name, onchange: () => send(name, select.value) }, ...options.map(([value, text, title]) => make("option", { value, title }, text)));
      return [name, select];
    };
    const number = (name, attributes, optional) => {
      const input = make("input", { type: "number", "data-load": name, ...attributes, onchange: () => {
        if (input.value === "" && !optional) return;
        send(name, input.value === "" ? null : Number(input.value));
      } });
      return [name, input];
    };
    const inputs = [
      choice("pack", spec.packs.map((p) => [p.name, p.title, p.about])),
      choice("mode", Object.entries(spec.modes).map(([name, about]) => [name, name, about])),
      number("users", { min: 1, max: 1024 }), number("rate", { min: 0.1, step: 0.1 }), number("max_tokens", { min: 1 }),
      number("temperature", { min: 0, step: 0.1 }), number("seed", { placeholder: "none" }, true),
      number("logprobs", { min: 0, max: 20, placeholder: "none" }, true),
    ];
    this.loadInputs = new Map(inputs);
    const labels = { max_tokens: "tokens at most", rate: "requests/s" };
    return make("details", { class: "load", open: true }, make("summary", {}, "Load"),
      make("div", { class: "fields" }, ...inputs.map(([name, input]) => make("label", {}, make("span", {}, labels[name] || name), input))));
  }

  drawKnobs() {
    const { values, why, effects, preset, intents } = this.model.get("knobs");
    if (!values) return;
    if (document.activeElement !== this.preset) this.preset.value = preset;
    for (const [name, { knob, select, chip, row }] of this.knobRows) {
      const at = knob.values.indexOf(values[name]), intent = intents[name];
      if (intent?.state !== "pending") select.value = at;
      [...select.options].forEach((option, i) => {
        option.disabled = Boolean(why[name][i]) && i !== at;
        option.title = why[name][i] || effects[name][i];
        const text = shownValue(knob.values[i]) + (effects[name][i] === EFFECT_NAMES.T ? "" : ` (${effects[name][i]})`);
        if (option.textContent !== text) option.textContent = text;
      });
      row.classList.toggle("changed", at !== knob.values.indexOf(knob.default));
      chip.className = `chip ${intent?.state || ""}`;
      chip.title = intent?.reason || (intent ? [`asked for by ${intent.source}`, costOf(intent)].filter(Boolean).join("; ") : "");
      chip.textContent = !intent ? "" : intent.state === "pending" ? "\u2026 pending" : intent.state === "applied" ? [`\u2713 applied at step ${intent.step}`, costOf(intent)].filter(Boolean).join(", ") : `\u2717 refused: ${intent.reason}`;
    }
  }

  drawStatus() {
    const status = this.model.get("status");
    if (!status.state) return;
    this.state.textContent = status.state;
    this.state.dataset.state = status.state.split(":")[0];
    const grammar = status.grammars ? ` (${status.grammars} follow a grammar: depth ${status.depth})` : "";
    this.counts.textContent = `step ${status.step} \u00b7 ${status.running} running${grammar} \u00b7 ${status.queue} waiting \u00b7 ${status.finished} finished \u00b7 ${status.tokens} tokens`;
    this.drawCapture(status.capture);
    this.startButton.disabled = !status.paused || status.state === "failed";
    this.pauseButton.disabled = status.paused;
    for (const [name, input] of this.loadInputs) {
      const value = status.load[name] ?? "";
      if (document.activeElement !== input && input.value !== String(value)) input.value = value;
    }
    this.loadInputs.get("rate").disabled = status.load.mode !== "poisson";
    if (status.error?.number !== this.errorNumber) this.drawError(status.error);
    this.hold.toggleAttribute("hidden", !status.hold);
    this.holdButton.toggleAttribute("hidden", status.hold);
    this.holding = false;
  }

  drawCapture(capture) {
    this.capture.hidden = !capture;
    if (!capture) return;
    const { num_captured: done, num_graphs: all, upcoming } = capture;
    Object.assign(this.captureBar, { max: all, value: done });
    this.captureText.textContent = `capturing graph ${Math.min(done + 1, all)} of ${all} (${upcoming}); what has none yet runs uncaptured meanwhile`;
  }

  drawError(error) {
    this.errorNumber = error?.number;
    this.error.hidden = !error;
    if (!error) return;
    const copy = () => navigator.clipboard?.writeText(`${error.summary}\n${error.detail}`);
    this.error.replaceChildren(make("strong", {}, error.summary),
      ...(error.detail ? [make("details", {}, make("summary", {}, "details"), make("pre", {}, error.detail))] : []),
      make("div", { class: "row" }, button("Copy", "copy the message", copy), button("Dismiss", "forget it", () => this.send({ kind: "dismiss" }))));
  }

  // ---- tokens

  buildStreams() {
    this.streamRoot = make("div", { class: "streams" });
    this.cards = new Map();
    return make("section", { class: "card tokens", "aria-label": "tokens of some requests" },
      make("h3", {}, "Tokens", make("small", {}, make("span", { class: "token accepted" }, "accepted draft"), " ", make("span", { class: "rejected" }, "\u2717n"), " n drafts rejected; hover for step and logprob")),
      this.streamRoot);
  }

  drawStreams() {
    const streams = this.model.get("streams") || [], alive = new Set(streams.map((stream) => stream.id));
    for (const [id, card] of this.cards) if (!alive.has(id)) { card.root.remove(); this.cards.delete(id); }
    streams.forEach((stream, i) => {
      let card = this.cards.get(stream.id);
      if (!card) {
        card = { head: make("span"), text: make("div", { class: "text" }), first: stream.first, count: 0 };
        card.root = make("article", { class: "stream" }, make("div", { class: "stream-head" }, card.head), make("p", { class: "prompt", title: stream.prompt }, stream.prompt), card.text);
        this.cards.set(stream.id, card);
      }
      this.updateCard(card, stream);
      if (this.streamRoot.children[i] !== card.root) this.streamRoot.insertBefore(card.root, this.streamRoot.children[i] || null);
    });
    if (!streams.length) this.streamRoot.replaceChildren(make("p", { class: "note" }, "No request yet: press Start."));
    else this.streamRoot.querySelector(":scope > .note")?.remove();
  }

  updateCard(card, stream) {
    const speed = stream.tpot ? ` + ${shownNumber(stream.tpot)} ms/tok` : "", first = stream.ttft ? ` \u00b7 ${shownNumber(stream.ttft, 0)} ms` : "";
    card.head.textContent = `${stream.id.replace("lab-", "#")} \u00b7 ${stream.state} \u00b7 ${stream.num} tok${first}${speed}`;
    card.head.title = `request ${stream.id}${stream.user == null ? "" : ` of user ${stream.user}`}: time to first token, then time per further token`;
    card.root.dataset.state = stream.state;
    const known = card.first + card.count;
    for (let i = Math.max(known, stream.first); i < stream.first + stream.tokens.length; i++) {
      const [piece, step, origin, logprob] = stream.tokens[i - stream.first], rejected = stream.rejected[i];
      if (rejected) card.text.append(make("span", { class: "rejected", title: `${rejected} drafts were rejected here` }, `\u2717${rejected}`));
      const title = `token ${i + 1}, step ${step}${origin ? ", an accepted draft" : ""}${logprob == null ? "" : `, logprob ${logprob.toFixed(3)}`}`;
      card.text.append(make("span", { class: origin ? "token accepted" : "token", title }, piece));
    }
    card.count = stream.first + stream.tokens.length - card.first;
    // old tokens leave at the front
    while (card.text.childNodes.length > 400) card.text.firstChild.remove();
    card.text.scrollTop = card.text.scrollHeight;
  }

  // ---- tabs

  buildTabs() {
    this.tabs = new Map();
    const id = Math.random().toString(36).slice(2);
    this.tabButtons = TABS.map(([name, text]) => button(text, "", () => this.openTab(name, true), { role: "tab", id: `lab-${id}-${name}`, "data-tab": name }));
    const list = make("div", { class: "tabs", role: "tablist", "aria-label": "views", onkeydown: (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const at = this.tabButtons.indexOf(event.target);
      const next = this.tabButtons[(at + move + this.tabButtons.length) % this.tabButtons.length];
      next.focus();
      next.click();
    } }, ...this.tabButtons);
    this.pages = new Map(TABS.map(([name]) => [name, make("div", { class: "page", role: "tabpanel", "aria-labelledby": `lab-${id}-${name}`, hidden: true })]));
    this.buildTimeline(this.pages.get("timeline"));
    return make("section", { class: "card" }, list, ...this.pages.values());
  }

  openTab(name, tell) {
    for (const tab of this.tabButtons) {
      const chosen = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      this.pages.get(tab.dataset.tab).hidden = !chosen;
    }
    if (name !== "timeline" && !this.tabs.has(name))
      this.tabs.set(name, new TAB_CLASSES[name](this.pages.get(name), (message) => this.send({ ...message, tab: name }), this.spec));
    if (tell) {
      this.model.set("tab", name);
      this.model.save_changes();
      this.send({ kind: "tab" });
    }
    this.drawDetail();
  }

  drawDetail() {
    const detail = this.model.get("detail");
    if (detail.tab) this.tabs.get(detail.tab)?.draw(detail);
  }

  buildTimeline(page) {
    this.windowNote = make("span", { class: "note" }, "The first recorded steps appear here when requests run.");
    this.hold = make("span", { class: "row", hidden: true }, make("span", { class: "held" }, "held"), button("Back to live", "show the newest steps again", () => this.send({ kind: "follow" }), { "data-act": "follow" }));
    this.timelinePlace = make("div", { class: "timeline" });
    this.syncPlace = make("div", { class: "syncs" });
    // who looks at a part of these steps does not want others in their place
    const touched = (event) => { if (!["Tab", "Shift"].includes(event.key) && !this.model.get("status").hold && !this.holding) { this.holding = true; this.send({ kind: "hold" }); } };
    for (const name of ["pointerdown", "wheel", "keydown"]) this.timelinePlace.addEventListener(name, touched, { capture: true, passive: true });
    this.holdButton = button("Hold", "keep these steps on the screen", () => this.send({ kind: "hold" }), { "data-act": "hold" });
    page.append(make("div", { class: "row" }, this.windowNote, this.holdButton, this.hold), this.timelinePlace, this.syncPlace);
  }

  async attachTimeline() {
    const id = this.model.get("timeline");
    if (!id || id === this.timelineId) return;
    this.timelineId = id;
    try {
      const child = await this.model.widget_manager.get_model(id);
      const view = await this.model.widget_manager.create_view(child);
      this.timelineView = view;
      this.timelinePlace.replaceChildren(view.el);
    } catch (error) {
      // a page that was reloaded may hear of the panel before it hears of the timeline: the next beat tries again
      if (this.timelineId === id) this.timelineId = null;
      this.timelinePlace.textContent = `the timeline cannot be shown here: ${error.message || error}`;
    }
  }

  drawWindow() {
    const window = this.model.get("window");
    if (!window.number) return;
    const percent = (share) => (share == null ? "n/a" : `${(100 * share).toFixed(0)} %`);
    this.windowNote.textContent = `Steps ${window.first} to ${window.first + window.steps - 1}: ${percent(window.overlap)} of the host's work overlapped with the device, device idle ${percent(window.idle)}.`;
    this.root.dataset.window = window.number;
    const { columns, rows, title } = window.syncs;
    const choose = (i) => (event) => {
      if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.syncPlace.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
      event.currentTarget.setAttribute("aria-selected", "true");
      this.send({ kind: "sync", row: i, window: window.number });
    };
    const shown = (column, value) => (value == null ? "n/a" : column.unit === "ns" ? formatNs(value) : String(value));
    this.syncPlace.replaceChildren(tableOf(columns.map((c) => c.label), rows.map((row, i) => make("tr", { tabindex: 0, "aria-selected": "false", "data-row": i, onclick: choose(i), onkeydown: choose(i) },
      ...columns.map((c) => make("td", { class: typeof row[c.key] === "number" ? "number" : false }, shown(c, row[c.key]))))), `${title}; choose a row to see it in the timeline`));
  }
}

function renderPanel({ model, el }) {
  const root = make("div");
  el.append(root);
  const view = new PanelView(root, model);
  return () => view.close();
}
