// A sortable table of events; choosing a row (click, Enter, Space) tells where in the trace it lies.

class EventTable {
  // spec: {title, note, columns: [{key, label, unit}], rows: [{cells: {key: value}, start, end}]}
  constructor(root, spec, onSelect) {
    Object.assign(this, { root, spec, onSelect });
    this.order = spec.rows.map((_, i) => i);
    this.sorted = null;
    root.classList.add("mrv2-table");
    this.body = make("tbody");
    const head = spec.columns.map((column) => make("th", { scope: "col" },
      make("button", { type: "button", title: "sort", onclick: () => this.sort(column.key) }, column.label)));
    this.head = make("tr", {}, ...head);
    this.table = make("table", {}, make("caption", {}, spec.title), make("thead", {}, this.head), this.body);
    root.replaceChildren(this.table, make("p", { class: "mrv2-note" }, spec.note || ""));
    this.draw();
  }

  sort(key) {
    const direction = this.sorted?.[0] === key ? -this.sorted[1] : -1;
    this.sorted = [key, direction];
    // missing values stand last in either direction
    const value = (i) => this.spec.rows[i].cells[key];
    this.order.sort((x, y) => {
      const a = value(x), b = value(y);
      if (a == null || b == null) return (a == null) - (b == null);
      return direction * (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
    });
    this.draw();
  }

  text(column, value) {
    if (value == null) return "n/a";
    return column.unit === "ns" ? formatNs(value) : String(value);
  }

  draw() {
    [...this.head.children].forEach((cell, i) => {
      const mine = this.sorted?.[0] === this.spec.columns[i].key;
      cell.setAttribute("aria-sort", mine ? (this.sorted[1] > 0 ? "ascending" : "descending") : "none");
    });
    this.body.replaceChildren(...this.order.map((i) => {
      const { cells, start, end } = this.spec.rows[i];
      const choose = (event) => {
        if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        this.body.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
        event.currentTarget.setAttribute("aria-selected", "true");
        this.onSelect(i, start, end);
      };
      return make("tr", { tabindex: 0, "aria-selected": "false", "data-row": i, onclick: choose, onkeydown: choose },
        ...this.spec.columns.map((column) => make("td", { class: typeof cells[column.key] === "number" ? "mrv2-number" : false,
          title: String(cells[column.key] ?? "") }, this.text(column, cells[column.key]))));
    }));
  }
}
