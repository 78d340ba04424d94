// The tabs under the tokens: each renders what the kernel put into `detail`.

const TABS = [
  ["timeline", "Timeline"], ["batch", "Batch & KV"], ["inspector", "Step inspector"], ["speculation", "Speculation"],
  ["sampler", "Sampler"], ["ab", "A/B"], ["session", "Session"],
];

function button(text, title, act, attributes = {}) {
  return make("button", { type: "button", title, onclick: act, ...attributes }, text);
}

function note(text) {
  return make("p", { class: "note" }, text);
}

function tableOf(head, rows, caption) {
  return make("div", { class: "scroll" }, make("table", {}, ...(caption ? [make("caption", {}, caption)] : []),
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows)));
}

function cellsOf(values, attributes = {}) {
  return make("tr", attributes, ...values.map((value) => {
    const [text, kind] = Array.isArray(value) ? value : [value, ""];
    return make("td", { class: [typeof text === "number" ? "number" : "", kind].join(" ").trim() || false }, String(text ?? "n/a"));
  }));
}

// A tab with controls that are built once and a place that is drawn anew.
class Tab {
  constructor(root, send, spec) {
    Object.assign(this, { root, send, spec, place: make("div") });
    root.replaceChildren(...this.controls(), this.place);
  }

  controls() { return []; }
}

class BatchTab extends Tab {
  controls() {
    return [make("div", { class: "row" }, button("Follow 32 steps", "look into the next 32 steps; each is waited for", () => this.send({ kind: "inspect", steps: 32 }))),
      note("V2 keeps a request in one row for life and gathers the batch by index: the number in a cell is the request's place in the batch (idx_mapping). V1 keeps rows dense: they move.")];
  }

  draw(d) {
    if (!d.blocks) return this.place.replaceChildren(note("waiting for the engine \u2026"));
    const hue = (i) => HUES[i % HUES.length];
    const cells = d.blocks.slice(1).map((owner, i) => (owner >= 0 ? { hue: hue(owner), title: `block ${i + 1}: ${d.requests[owner].id}` }
      : owner === -2 ? { pattern: "shared", title: `block ${i + 1}: shared prefix` } : { title: `block ${i + 1}: free` }));
    const shown = d.blocks.length - 1 < d.total ? `, the first ${d.blocks.length - 1} shown` : "";
    this.place.replaceChildren(
      d.steps.steps.length ? make("div", {}, make("h4", {}, `Rows by step${d.left ? `, ${d.left} steps to come` : ""}`), batchGrid(d.steps)) : note("No step was followed yet."),
      make("h4", {}, `KV blocks: ${d.used} of ${d.total} held, ${d.cached} cached and free, ${d.blockSize} tokens each${shown}`),
      blockGrid(cells, `${d.used} of ${d.total} KV blocks are held`),
      make("div", { class: "legend" }, ...d.requests.map((r, i) => make("span", {}, make("i", { style: `background:${hue(i)}` }), `${r.id}: ${r.known} tokens known, ${r.computed} launched`)),
        make("span", {}, make("i", { class: "shared" }), "shared prefix")));
  }
}

class InspectorTab extends Tab {
  controls() {
    this.select = make("select", { "aria-label": "step", onchange: () => this.send({ kind: "choose", step: Number(this.select.value) }) });
    return [make("div", { class: "row" }, button("Inspect 8 steps", "copy the inputs of the next 8 steps; each is waited for", () => this.send({ kind: "inspect", steps: 8 })),
      make("label", {}, "step ", this.select))];
  }

  draw(d) {
    if (!d.steps?.length) return this.place.replaceChildren(note(d.left ? `${d.left} steps to come \u2026` : "Press the button: the inputs of the next steps are copied as the device had them."));
    const key = d.steps.join();
    if (key !== this.key) {
      this.key = key;
      this.select.replaceChildren(...d.steps.map((step) => make("option", { value: step }, String(step))));
    }
    if (document.activeElement !== this.select || !this.select.value) this.select.value = d.chosen;
    const what = (flag) => (flag ? "changed" : "");
    this.place.replaceChildren(
      make("p", {}, `Step ${d.chosen}, runner ${d.runner}: ${d.requests.length} requests, ${d.numTokens} tokens.`,
        d.gone.length ? ` Left since the step before: ${d.gone.join(", ")}.` : "", " Marked cells (\u2217) differ from the step before."),
      tableOf(["request", "row", "tokens", "drafts", "query_start_loc", "seq_len", "grew by"], d.requests.map((r) => cellsOf([
        [r.id + (r.new ? " \u2217 new" : ""), what(r.new)], [`${r.row}${r.rowChanged ? " \u2217" : ""}`, what(r.rowChanged)], r.scheduled, r.drafts, r.start, r.seqLen, r.grew]))),
      tableOf(["request", "input_id", "text", "position", "KV slot"], d.tokens.map((t) => cellsOf([
        [d.requests[t.owner].id], t.id, [JSON.stringify(t.text)], t.position, t.slot])), d.tokens.length < d.numTokens ? `the first ${d.tokens.length} of ${d.numTokens} tokens` : ""));
  }
}

class SpeculationTab extends Tab {
  draw(d) {
    if (!d.drafted?.length) return this.place.replaceChildren(note(d.method === "off"
      ? "Nobody drafts: choose a spec_method above (the engine must have been loaded with max_num_spec_tokens)." : "Nothing was drafted yet."));
    const total = Object.values(d.lengths).reduce((a, b) => a + b, 0);
    this.place.replaceChildren(
      make("h4", {}, `Tokens per verification: ${shownNumber(d.mean, 2)} on average (1 = every draft was rejected)`),
      barRows(Object.entries(d.lengths).map(([length, n]) => ({ label: `${length} token${length > 1 ? "s" : ""}`, parts: [{ share: n / total, kind: "accent" }], text: `${n} (${(100 * n / total).toFixed(0)} %)` }))),
      make("h4", {}, "Accepted, by draft position (the outline is what was drafted)"),
      barRows(d.drafted.map((n, i) => ({ label: `position ${i + 1}`, parts: [{ share: d.accepted[i] / Math.max(d.drafted[0], 1), kind: "good" }, { share: (n - d.accepted[i]) / Math.max(d.drafted[0], 1), kind: "outline" }],
        text: `${d.accepted[i]} of ${n} (${(100 * d.accepted[i] / Math.max(n, 1)).toFixed(0)} %)` }))));
  }
}

class SamplerTab extends Tab {
  controls() {
    this.prompt = make("input", { type: "text", value: "The weather today is", "aria-label": "prompt", size: 36 });
    this.draws = make("input", { type: "number", value: 200, min: 1, max: 2000, "aria-label": "draws" });
    this.go = button("Draw", "draw the next token many times with different seeds, at temperature 1",
      () => this.send({ kind: "draw", prompt: this.prompt.value, draws: Number(this.draws.value) }));
    return [make("div", { class: "row" }, make("label", {}, "prompt ", this.prompt), make("label", {}, "draws ", this.draws), this.go)];
  }

  draw(d) {
    this.go.disabled = Boolean(d.busy);
    if (!d.labels) return this.place.replaceChildren(note(d.busy ? "drawing \u2026" : "Compares what the model gives with what the sampler draws, token by token."));
    const top = Math.max(...d.target, ...d.counts.map((n) => n / d.draws));
    this.place.replaceChildren(
      make("p", {}, `After \u201c${d.prompt}\u201d: ${d.draws} draws; \u03c7\u00b2 = ${d.chi2} with ${d.freedom} degrees of freedom, p = ${d.p.toFixed(3)}. ${d.p < 0.001 ? "That is unlikely for a sampler that is right." : "The draws fit the model's distribution."}`),
      barRows(d.labels.flatMap((label, i) => [
        { label, parts: [{ share: d.target[i] / top, kind: "outline" }], text: `model ${(100 * d.target[i]).toFixed(1)} %` },
        { label: "", parts: [{ share: d.counts[i] / d.draws / top, kind: "accent" }], text: `drawn ${(100 * d.counts[i] / d.draws).toFixed(1)} %` }])));
  }
}

class ABTab extends Tab {
  controls() {
    const options = () => this.spec.presets.map((p) => make("option", { value: p.name, disabled: Boolean(p.reason), title: p.reason || p.about }, p.name + (p.reason ? " (not here)" : "")));
    this.a = make("select", { "aria-label": "setting A" }, ...options());
    this.b = make("select", { "aria-label": "setting B" }, ...options());
    this.a.value = "V2 sync";
    this.b.value = "V2 async";
    this.requests = make("input", { type: "number", value: 8, min: 1, max: 256, "aria-label": "requests" });
    this.passes = make("input", { type: "number", value: 4, min: 1, max: 20, "aria-label": "passes" });
    this.go = button("Run A/B", "serve the same requests under both settings, in alternation", () => this.send({ kind: "run", a: this.a.value,
      b: this.b.value, requests: Number(this.requests.value), repetitions: Number(this.passes.value) }), { class: "primary" });
    return [make("div", { class: "row" }, make("label", {}, "A ", this.a), make("label", {}, "B ", this.b), make("label", {}, "requests ", this.requests),
      make("label", {}, "passes ", this.passes), this.go)];
  }

  draw(d) {
    this.go.disabled = Boolean(d.busy);
    if (!d.result) return this.place.replaceChildren(note(d.busy ? `${d.busy} \u2026` : "The same requests with the same seeds run under A and B in alternation, after a pass of each that is not counted."));
    const r = d.result, number = (value) => (value == null ? "n/a" : shownNumber(value, 2));
    const change = (row) => (row.ratio == null ? "n/a" : `${(100 * (row.ratio - 1)).toFixed(1)} %`);
    const range = (row) => (row.low == null ? "n/a" : `${(100 * (row.low - 1)).toFixed(1)} to ${(100 * (row.high - 1)).toFixed(1)} %`);
    this.place.replaceChildren(
      make("p", { class: "verdict" }, (d.busy ? `${d.busy} \u2026 before it: ` : "") + r.verdict),
      tableOf(["", `A: ${r.names[0]}`, `B: ${r.names[1]}`, "B against A", "95 % interval", "pairs"], r.rows.map((row) => cellsOf([
        `${row.label}${row.unit ? `, ${row.unit}` : ""}`, [number(row.a), "number"], [number(row.b), "number"], [change(row), row.clear ? "number strong" : "number"], [range(row), "number"], row.n]))),
      note(`Token identity: ${r.same} of ${r.total} requests are the same on both sides${r.promises ? "" : "; these settings do not promise it"}. Settings that differ: ${r.differing.join(", ") || "none"}.`));
  }
}

class SessionTab extends Tab {
  controls() {
    this.code = make("pre", { class: "code", tabindex: 0, "aria-label": "this workbench as code" });
    const copy = (text) => navigator.clipboard?.writeText(text).then(() => { this.said.textContent = "copied"; }, () => { this.said.textContent = "the browser does not let a page copy: select the text"; });
    this.said = make("output", { "aria-live": "polite" });
    return [make("div", { class: "row" }, button("Copy as code", "Python that makes this workbench again", () => copy(this.code.textContent)),
      button("Copy as JSON", "the knobs as JSON", () => copy(JSON.stringify(this.knobs, null, 1))),
      button("Save session", "a directory beside the notebook: settings, metrics, tokens, trace, versions", () => this.send({ kind: "save" })),
      button("HTML report", "one page that needs nothing else", () => this.send({ kind: "report" })), this.said), this.code];
  }

  draw(d) {
    if (!d.code) return;
    this.knobs = d.knobs;
    if (this.code.textContent !== d.code) this.code.textContent = d.code;
    if (d.saved && d.saved !== this.saved) this.said.textContent = this.saved = d.saved;
    this.place.replaceChildren(
      make("p", { class: "cost" }, `This panel paints ${d.cost.hz} times a second at most, ${d.cost.paint_ms} ms each; it has taken ${(100 * d.cost.share).toFixed(1)} % of one core.`),
      d.log.length ? tableOf(["what", "who", "state", "step", "took"], d.log.map((i) => cellsOf([
        Object.entries(i.changes).map(([k, v]) => `${k}=${v}`).join(", "), i.source, [i.state + (i.reason ? `: ${i.reason}` : ""), costOf(i)].filter(Boolean).join(", "), i.step ?? "", i.ms == null ? "" : `${i.ms} ms`])), "Changes") : note("Nothing was changed yet."));
  }
}

const TAB_CLASSES = { batch: BatchTab, inspector: InspectorTab, speculation: SpeculationTab, sampler: SamplerTab, ab: ABTab, session: SessionTab };
