// The index of viz/index.py for pages without a kernel: the same questions, answered from arrays in the page.
// Times are nanoseconds from the start of the trace.

class LocalSource {
  // `columns`: typed arrays over all rows; `spec.offsets` tells which part belongs to which row
  constructor(spec, columns) {
    Object.assign(this, columns);
    this.spec = spec;
    this.isImmediate = true;
    this.numRows = spec.rows.length;
    this.sums = new Array(this.numRows);
  }

  request(window, width, deliver) {
    deliver(this.tile(window[0], window[1], width));
  }

  touching(row, a, b) {
    const from = this.spec.offsets[row], to = this.spec.offsets[row + 1];
    let first = lowerBound(this.start, a, from, to);
    if (first > from && this.end[first - 1] > a) first--;
    return [first, Math.max(first, lowerBound(this.start, b, from, to))];
  }

  // Starts, ends and running sums of the lengths of each hue of a row, made when first needed.
  byHue(row) {
    if (this.sums[row]) return this.sums[row];
    const from = this.spec.offsets[row], to = this.spec.offsets[row + 1];
    const members = new Map();
    for (let i = from; i < to; i++) {
      if (!members.has(this.hue[i])) members.set(this.hue[i], []);
      members.get(this.hue[i]).push(i);
    }
    const parts = [...members.keys()].sort((x, y) => x - y).map((hue) => {
      const ids = members.get(hue);
      const start = Float64Array.from(ids, (i) => this.start[i]);
      const length = Float64Array.from(ids, (i) => this.end[i] - this.start[i]);
      const running = new Float64Array(ids.length + 1);
      length.forEach((value, i) => { running[i + 1] = running[i] + value; });
      return { hue, start, length, running };
    });
    return (this.sums[row] = parts);
  }

  // Busy share (1 to 255, 0 only where nothing is), hue and number of beginnings of each of `bins` equal parts.
  density(row, a, b, bins, share, hueOf, events) {
    const width = (b - a) / bins;
    const isTick = this.spec.rows[row].table === this.spec.tickTable;
    const total = new Float64Array(bins), best = new Float64Array(bins);
    for (const { hue, start, length, running } of this.byHue(row)) {
      let begun = lowerBound(start, a), busy = LocalSource.busyUntil(a, begun, start, length, running);
      for (let bin = 0; bin < bins; bin++) {
        const edge = bin + 1 === bins ? b : a + (bin + 1) * width;
        const next = lowerBound(start, edge, begun), until = LocalSource.busyUntil(edge, next, start, length, running);
        const here = until - busy, begins = next - begun;
        total[bin] += here;
        events[bin] += begins;
        const weight = here <= 0 && begins ? 1e-9 : here;
        if (weight > best[bin]) { best[bin] = weight; hueOf[bin] = hue; }
        begun = next;
        busy = until;
      }
    }
    for (let bin = 0; bin < bins; bin++) {
      if (best[bin] > 0) share[bin] = isTick ? 255 : Math.min(Math.max(Math.ceil((total[bin] / width) * 255), 1), 255);
    }
  }

  static busyUntil(edge, begun, start, length, running) {
    if (!begun) return 0;
    return running[begun - 1] + Math.min(Math.max(edge - start[begun - 1], 0), length[begun - 1]);
  }

  tile(a, b, width) {
    const pixel = (b - a) / width, side = this.spec.margin * (b - a);
    const left = Math.trunc(Math.min(side, Math.max(a, 0)) / pixel);
    const right = Math.trunc(Math.min(side, Math.max(this.spec.span - b, 0)) / pixel);
    const bins = width + left + right, low = a - left * pixel, high = b + right * pixel;
    const { barRows, cellRows } = this.split(a, b, width);
    const size = cellRows.length * bins;
    const cells = { rows: cellRows, bins, share: new Uint8Array(size), hue: new Uint8Array(size), events: new Int32Array(size) };
    cellRows.forEach((row, i) => {
      const part = (array) => array.subarray(i * bins, (i + 1) * bins);
      this.density(row, low, high, bins, part(cells.share), part(cells.hue), part(cells.events));
    });
    return {
      window: [a, b], covered: [low, high], width, cells,
      bars: this.bars(barRows, a, b, low, high),
      ticks: this.binnedTicks(low, high, bins),
      bands: this.bands(low, high, pixel),
    };
  }

  split(a, b, width) {
    const count = Array.from({ length: this.numRows }, (_, row) => { const [x, y] = this.touching(row, a, b); return y - x; });
    const order = count.map((_, row) => row).sort((x, y) => count[x] - count[y] || x - y);
    let room = this.spec.maxBars;
    const chosen = new Set();
    for (const row of order) {
      if (count[row] > room || count[row] > Math.max(this.spec.barsPerPixel * width, 1)) break;
      chosen.add(row);
      room -= count[row];
    }
    const rows = count.map((_, row) => row);
    return { barRows: rows.filter((row) => chosen.has(row)), cellRows: rows.filter((row) => !chosen.has(row)) };
  }

  bars(rows, a, b, low, high) {
    const parts = rows.map((row) => {
      const view = this.touching(row, a, b), wide = this.touching(row, low, high);
      return wide[1] - wide[0] <= 4 * (view[1] - view[0]) + 64 ? wide : view;
    });
    const size = parts.reduce((sum, [from, to]) => sum + to - from, 0);
    const out = { row: new Uint16Array(size), index: new Int32Array(size) };
    const columns = ["start", "end", "hue", "name", "step", "corr", "bytes"];
    for (const column of columns) out[column] = new this[column].constructor(size);
    let at = 0;
    parts.forEach(([from, to], i) => {
      out.row.fill(rows[i], at, at + to - from);
      for (const column of columns) out[column].set(this[column].subarray(from, to), at);
      for (let event = from; event < to; event++) out.index[at++] = event - this.spec.offsets[rows[i]];
    });
    out.names = this.spec.names;
    out.short = this.spec.short;
    return out;
  }

  binnedTicks(low, high, bins) {
    const width = (high - low) / bins, time = [], count = [], name = [];
    let first = lowerBound(this.tickTime, low);
    while (first < this.tickTime.length && this.tickTime[first] < high) {
      const bin = Math.min(Math.floor((this.tickTime[first] - low) / width), bins - 1);
      const edge = bin + 1 === bins ? high : low + (bin + 1) * width;
      const next = Math.max(lowerBound(this.tickTime, edge, first), first + 1);
      time.push(this.tickTime[first]);
      count.push(next - first);
      name.push(this.spec.names[this.tickName[first]]);
      first = next;
    }
    return { time, count, name, lines: time.length * this.spec.tickPixels <= bins };
  }

  bands(low, high, pixel) {
    const found = this.spec.bands.filter(([start, end]) => start < high && end > low);
    return found.length * 12 * pixel <= high - low ? found : [];
  }

  // The next or previous synchronisation after `at`.
  nextTick(at, direction) {
    const i = direction > 0 ? lowerBound(this.tickTime, at + 1) : lowerBound(this.tickTime, at) - 1;
    return this.tickTime[i];
  }

  // What was launched by, or launched, the event at `index` of `row`.
  select(row, index, deliver) {
    const event = this.spec.offsets[row] + index, table = this.spec.rows[row].table;
    const other = { api: "ops", ops: "api" }[table];
    const ends = [];
    if (other && this.corr[event] >= 0) {
      this.spec.rows.forEach((candidate, r) => {
        if (candidate.table !== other || candidate.process !== this.spec.rows[row].process) return;
        for (let i = this.spec.offsets[r]; i < this.spec.offsets[r + 1]; i++) {
          if (this.corr[i] === this.corr[event]) ends.push([r, this.start[i], this.end[i]]);
        }
      });
    }
    ends.sort((x, y) => x[1] - y[1]);
    deliver({ from: [row, this.start[event], this.end[event]], to: ends });
  }
}
