// Pages without a kernel: everything lies in the page itself.

// Base85 as Python writes it (five characters make four bytes, the last group may be shorter), "," in place of "<".
const BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

function bytesOf(text) {
  const digits = new Uint8Array(128), missing = (5 - (text.length % 5)) % 5, size = ((text.length + missing) / 5) * 4;
  [...BASE85].forEach((char, i) => { digits[char.charCodeAt(0)] = i; });
  const view = new DataView(new ArrayBuffer(size));
  for (let at = 0; at < text.length; at += 5) {
    let value = 0;
    for (let i = at; i < at + 5; i++) value = value * 85 + (i < text.length ? digits[text.charCodeAt(i)] : 84);
    view.setUint32((at / 5) * 4, value);
  }
  return new Uint8Array(view.buffer, 0, size - missing);
}

async function unpack(id) {
  const stream = new Blob([bytesOf(document.getElementById(id).textContent.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function columnsOf(buffer, directory) {
  const types = { f8: Float64Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array };
  return Object.fromEntries(directory.map(([name, type, offset, length]) => [name, new types[type](buffer, offset, length)]));
}

// A figure's layout in the colours of a theme.
function themed(layout, theme) {
  const out = { ...layout, paper_bgcolor: theme.background, plot_bgcolor: theme.background, font: { ...layout.font, color: theme.text } };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) out[key] = { ...layout[key], gridcolor: theme.grid, linecolor: theme.grid, zerolinecolor: theme.grid };
  }
  return out;
}

class Page {
  constructor(data, Plotly) {
    Object.assign(this, { data, Plotly });
    document.getElementById("mrv2-theme")?.addEventListener("click", () => this.setTheme(this.theme === "dark" ? "light" : "dark"));
  }

  setTheme(name) {
    this.theme = name;
    const theme = this.data.themes[name];
    document.documentElement.style.colorScheme = name;
    for (const [key, value] of Object.entries(theme)) {
      if (typeof value === "string") document.documentElement.style.setProperty(`--mrv2-${key}`, value);
    }
    this.view?.setTheme(name);
    this.data.figures.forEach(({ data, layout }, i) => {
      this.Plotly.react(`mrv2-figure-${i}`, data, themed(layout, theme), { displayModeBar: false, responsive: true });
    });
  }

  async open() {
    const { timeline, tables, theme } = this.data;
    const wanted = theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    if (timeline) {
      timeline.themes = this.data.themes;
      const source = new LocalSource(timeline, columnsOf(await unpack("mrv2-columns"), timeline.columns));
      const root = document.getElementById("mrv2-timeline");
      this.view = new TimelineView(root, this.Plotly, timeline, source, { theme: wanted, window: timeline.window });
      this.view.ask();
    }
    tables.forEach((spec, i) => new EventTable(document.getElementById(`mrv2-table-${i}`), spec, (row, start, end) => {
      this.view?.centreOn(start, end);
      this.view?.root.scrollIntoView({ block: "nearest" });
    }));
    this.setTheme(wanted);
  }
}

async function openPage() {
  const data = JSON.parse(new TextDecoder().decode(await unpack("mrv2-data")));
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await unpack("mrv2-plotly"));
  document.head.append(script);
  const page = (globalThis.mrv2 = new Page(data, globalThis.Plotly));
  await page.open();
  document.documentElement.dataset.ready = "true";
}

openPage().catch((error) => {
  document.body.prepend(make("p", { class: "mrv2-error", role: "alert" }, `This page could not be drawn: ${error.message}`));
  document.documentElement.dataset.ready = "failed";
});
