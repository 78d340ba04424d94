"""Tables of events: sortable, and a row that is chosen centres the timeline on what it is about."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.trace.analysis.frame import text_table
from mrv2.trace.analysis.model import Analysis
from mrv2.viz import widgets
from mrv2.viz.kernels import kernel_table
from mrv2.viz.names import format_ns

if TYPE_CHECKING:
    from mrv2.viz.timeline import Timeline

# a table of more rows is no reading; the dearest stay
MAX_ROWS = 500


@dataclass(frozen=True)
class Column:
    """A column: key in the rows, head, and "ns" for durations."""

    key: str
    label: str
    unit: str = ""


class EventTable:
    """Rows of events; show it as the last line of a notebook cell.

    Args:
        title: stands above it.
        columns: what is shown.
        rows: values by column key; None is shown as n/a.
        places: for each row ``(start, end)`` in nanoseconds of the trace's clock.
        note: stands below it.
        timeline: what a chosen row centres.
    """

    def __init__(
        self,
        title: str,
        columns: list[Column],
        rows: list[dict[str, Any]],
        places: list[tuple[int, int]],
        note: str = "",
        timeline: Timeline | None = None,
    ) -> None:
        assert len(rows) == len(places), f"{len(rows)} rows, but {len(places)} places"
        hidden = len(rows) - MAX_ROWS
        self.title, self.columns, self.timeline = title, columns, timeline
        self.rows, self.places = rows[:MAX_ROWS], places[:MAX_ROWS]
        self.note = f"{note} {hidden} more rows are not shown.".strip() if hidden > 0 else note
        self._widget: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        shown = [{c.key: row[c.key] for c in self.columns} for row in self.rows]
        return "\n".join(filter(None, [self.title, text_table(shown), self.note]))

    def __repr__(self) -> str:
        return f"EventTable({self.title!r}, {len(self)} rows)"

    def spec(self, origin: int) -> dict[str, Any]:
        """Return the table as the browser takes it, with places from `origin` on."""
        return {
            "title": self.title,
            "note": self.note,
            "columns": [vars(column) for column in self.columns],
            "rows": [
                {"cells": row, "start": float(start - origin), "end": float(end - origin)}
                for row, (start, end) in zip(self.rows, self.places)
            ],
        }

    def choose(self, row: int) -> None:
        """Centre the timeline on a row, as a click does."""
        if self.timeline is not None:
            self.timeline.center_on(*self.places[row])

    def widget(self) -> Any:
        """Return the widget; the same one each time.

        Raises:
            TraceError: ipywidgets or anywidget is not installed.
        """
        if self._widget is None:
            self._widget = widgets.table_class()(spec=self.spec(0))
            self._widget.on_msg(self._receive)
        return self._widget

    def _receive(self, widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("kind") == "row":
            widget.selected = int(content["row"])
            self.choose(widget.selected)

    def to_html(self) -> str:
        """Return the table as plain HTML, for readers without a kernel."""
        head = "".join(f"<th>{html.escape(column.label)}</th>" for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_text(c, row[c.key]))}</td>" for c in self.columns) + "</tr>"
            for row in self.rows
        )
        title, note = html.escape(self.title), html.escape(self.note)
        caption = f"<caption>{title}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{note}</p>"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        static = {"text/plain": str(self), "text/html": self.to_html()}
        return widgets.bundle(self.widget, static) if widgets.has_front_end() else static


def sync_table(analysis: Analysis, timeline: Timeline | None = None, *, counted_only: bool = False) -> EventTable:
    """Return every host wait, the one with the largest induced bubble first.

    Args:
        counted_only: leave out waits outside steps and on other threads than the engine's.
    """
    found = analysis.syncs()
    columns = [
        Column("step", "step"),
        Column("name", "call"),
        Column("where", "where"),
        Column("kind", "kind"),
        Column("induced_bubble_ns", "induced bubble", "ns"),
        Column("stall_ns", "stall", "ns"),
        Column("return_latency_ns", "return latency", "ns"),
        Column("duration_ns", "duration", "ns"),
        Column("queued_before", "queued"),
        Column("stack", "stack"),
    ]
    if found is None:
        return EventTable("Host syncs", columns, [], [], "not collected: CUDA calls", timeline)
    table = found.in_steps if counted_only else found
    rows = table.rows()
    for i, row in enumerate(rows):
        row["where"] = " \u00b7 ".join(filter(None, [row["path"], row["reason"]])) or "outside all ranges"
        row["step"] = row["step"] if row["step"] >= 0 else None
        frames, source = table.stack(i) if i < MAX_ROWS else ([], "unknown")
        row["stack"] = f"{frames[0]} ({source})" if frames and source not in ("ranges", "unknown") else None
    counted = int(found.counted.sum())
    title = f"Host syncs: {len(rows)}, of which {counted} in steps"
    note = (
        "Dearest first: the induced bubble is the time in which the GPU idled because its feeder waited here; "
        "a stall is waiting while the GPU still worked. Choose a row to see it in the timeline."
    )
    shown = [{column.key: row[column.key] for column in columns} for row in rows]
    return EventTable(title, columns, shown, list(zip(table.start.tolist(), table.end.tolist())), note, timeline)


def bubble_table(analysis: Analysis, timeline: Timeline | None = None) -> EventTable:
    """Return the gaps of the GPU, the longest first, each with its causes."""
    columns = [
        Column("step", "step"),
        Column("device", "GPU"),
        Column("length_ns", "length", "ns"),
        Column("main_cause", "main cause"),
        Column("causes", "all causes"),
        Column("next", "ended by"),
    ]
    found = analysis.bubbles()
    if found is None:
        return EventTable("Bubbles", columns, [], [], "not collected: GPU operations", timeline)
    table = found.longest(MAX_ROWS)
    trace, pieces = analysis.trace, table.pieces
    causes: list[list[str]] = [[] for _ in range(len(table))]
    length = np.asarray(pieces["end"]) - np.asarray(pieces["start"])
    for bubble, ns, cause in zip(pieces["bubble"], length.tolist(), np.asarray(pieces["cause"]).tolist()):
        causes[int(bubble)].append(f"{pieces['causes'][cause]} {format_ns(ns)}")
    rows = [
        {
            "step": row["step"] if row["step"] >= 0 else None,
            "device": row["device"],
            "length_ns": row["length_ns"],
            "main_cause": row["main_cause"],
            "causes": ", ".join(causes[i]),
            "next": trace.name_of(int(trace.ops.name[row["next_op"]])),
        }
        for i, row in enumerate(table.rows())
    ]
    share = len(found) - len(table)
    note = f"{share} shorter ones are not shown." if share > 0 else ""
    title = f"Bubbles: {len(found)}, {format_ns(found.total_ns)} together"
    return EventTable(title, columns, rows, list(zip(table.start.tolist(), table.end.tolist())), note, timeline)


def kernel_rows(
    analysis: Analysis, timeline: Timeline | None = None, bytes_per_call: Mapping[str, float] | None = None
) -> EventTable:
    """Return the operations by name with time share and, where bytes are known, bandwidth.

    Choosing a row leads to the longest call of that name.
    """
    columns = [
        Column("name", "kernel or copy"),
        Column("count", "count"),
        Column("total_ns", "total", "ns"),
        Column("percent", "% of GPU time"),
        Column("median_ns", "median", "ns"),
        Column("min_ns", "min", "ns"),
        Column("max_ns", "max", "ns"),
        Column("bytes", "bytes"),
        Column("rate", "GB/s"),
    ]
    kernels = kernel_table(analysis, bytes_per_call)
    if kernels is None:
        return EventTable("Kernels", columns, [], [], "not collected: GPU operations", timeline)
    rows = kernels.rows()
    for row in rows:
        row["percent"] = round(100 * row["share"], 2)
        row["rate"] = None if row["gb_per_s"] is None else float(f"{row['gb_per_s']:.3g}")
    shown = [{column.key: row[column.key] for column in columns} for row in rows]
    title = f"Kernels and copies: {len(kernels)} names"
    return EventTable(title, columns, shown, kernels.longest, kernels.note, timeline)


def _text(column: Column, value: Any) -> str:
    if value is None:
        return "n/a"
    return format_ns(value) if column.unit == "ns" else str(value)
