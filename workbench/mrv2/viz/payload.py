"""The timeline as the browser takes it: a description of the rows, and tiles or whole traces as packed columns."""

from __future__ import annotations

import base64
import gzip
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.table import Trace, TraceError
from mrv2.viz import drawing, theme
from mrv2.viz.index import BARS_PER_PIXEL, MARGIN, MAX_BARS, TICK_PIXELS, TICK_TABLE, Bands, Row, Tile, TimelineIndex
from mrv2.viz.names import short_name

_ASSETS = Path(__file__).parent / "assets"


def assets(*parts: str) -> str:
    """Return files of ``viz/assets`` joined to one text; programs share one scope and import nothing."""
    return "\n".join((_ASSETS / part).read_text(encoding="utf-8") for part in parts)


def plotly_version() -> str:
    """Return the version of the package that holds plotly.js.

    Raises:
        TraceError: plotly is not installed.
    """
    _plotly_file()
    return version("plotly")


@cache
def plotly_source(level: int = 9) -> bytes:
    """Return plotly.js, gzip of that level: 9 for a page that is kept, 1 where somebody waits for it.

    The file is read without importing plotly, which takes longer than all else that a first picture needs.

    Raises:
        TraceError: plotly is not installed.
    """
    return gzip.compress(_plotly_file().read_bytes(), level, mtime=0)


def _plotly_file() -> Path:
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise TraceError("the timeline needs plotly: pip install 'mrv2-workbench[notebook]'")
    file = Path(found.origin).parent / "package_data" / "plotly.min.js"
    if not file.is_file():
        raise TraceError(f"plotly {version('plotly')} has no {file.name}: pip install 'mrv2-workbench[notebook]'")
    return file


def describe(index: TimelineIndex) -> dict[str, Any]:
    """Return rows, places, hues and themes: what stays the same for every tile."""
    where = drawing.geometry(index.rows)
    return {
        **theme.spec(),
        "rows": [{"key": r.key, "label": r.label, "table": r.table, "process": r.process} for r in index.rows],
        "boxes": where.boxes,
        "labels": where.labels,
        "height": where.height,
        "span": float(index.end - index.origin),
        "usedHues": sorted({hue for row in index.rows for hue in np.unique(row.hue).tolist()}),
    }


def tile_message(trace: Trace, index: TimelineIndex, tile: Tile) -> dict[str, Any]:
    """Return a tile for the page; times are nanoseconds from the start of the trace, columns are bytes."""
    names = _Names(trace)
    parts = [index.rows[i].take(part) for i, part in zip(tile.bar_rows, tile.bars)]
    bars = {key: values.tobytes() for key, values in _columns(trace, index, parts, names).items()}
    first = [np.arange(part.start, part.stop, dtype=np.int32) for part in tile.bars]
    sizes = [part.stop - part.start for part in tile.bars]
    cells = tile.cells
    ticks_only = [index.rows[i].table == TICK_TABLE for i in tile.cell_rows]
    return {
        "window": _relative(index, tile.window),
        "covered": _relative(index, tile.covered),
        "width": tile.width_px,
        "bars": {
            **bars,
            "row": np.repeat(np.array(tile.bar_rows, np.uint16), sizes).tobytes(),
            "index": np.concatenate(first).tobytes() if first else b"",
            "names": names.texts,
            "short": names.short,
        },
        "cells": {
            "rows": tile.cell_rows,
            "bins": len(cells[0].share) if cells else 0,
            "share": b"".join(cell.levels(is_tick).tobytes() for cell, is_tick in zip(cells, ticks_only)),
            "hue": b"".join(cell.hue.tobytes() for cell in cells),
            "events": b"".join(cell.events.astype(np.int32).tobytes() for cell in cells),
        },
        "ticks": {
            "time": (tile.ticks.time - index.origin).astype(np.float64).tobytes(),
            "count": tile.ticks.count.tolist(),
            "name": [trace.name_of(int(i)) for i in tile.ticks.name],
            "lines": tile.has_tick_lines,
        },
        "bands": _bands(index, tile.bands),
    }


def whole(trace: Trace, index: TimelineIndex) -> tuple[dict[str, Any], bytes]:
    """Return a whole timeline for a page without a kernel: `describe` with a directory, and the packed columns."""
    names = _Names(trace)
    columns = _columns(trace, index, index.rows, names)
    columns["tickTime"] = (index.ticks.time - index.origin).astype(np.float64)
    columns["tickName"] = names.ids(index.ticks.name)
    directory: list[tuple[str, str, int, int]] = []
    blob = bytearray()
    # widest first: every column starts at a multiple of its item size
    for key, array in sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize):
        directory.append((key, array.dtype.str[1:], len(blob), len(array)))
        blob += array.tobytes()
    spec = {
        **describe(index),
        "columns": directory,
        "offsets": np.concatenate([[0], np.cumsum([len(row) for row in index.rows])]).tolist(),
        "names": names.texts,
        "short": names.short,
        "bands": _bands(index, np.arange(len(index.bands.start))),
        "maxBars": MAX_BARS,
        "barsPerPixel": BARS_PER_PIXEL,
        "margin": MARGIN,
        "tickPixels": TICK_PIXELS,
        "tickTable": TICK_TABLE,
    }
    return spec, bytes(blob)


def packed(data: bytes) -> str:
    """Return `data` as gzip in `as_base85`, to stand inside a page."""
    return as_base85(gzip.compress(data, 9, mtime=0))


def unpacked(text: str) -> bytes:
    """Undo `packed`."""
    return gzip.decompress(base64.b85decode(text.strip().replace(",", "<")))


# every page of a process holds the same plotly.js
@lru_cache(maxsize=2)
def as_base85(data: bytes) -> str:
    """Return `data` as base85 text, a sixteenth shorter than base64; "," stands for "<", so that it ends no element."""
    return base64.b85encode(data).decode().replace("<", ",")


class _Names:
    """Strings of a trace renumbered to those that are used."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.texts: list[str] = []
        self.short: list[str] = []
        self._number: dict[int, int] = {-1: -1}

    def ids(self, ids: np.ndarray) -> np.ndarray:
        """Return the new numbers of string ids [n]; int32 [n], -1 stays."""
        distinct, where = np.unique(ids, return_inverse=True)
        for old in distinct.tolist():
            if old not in self._number:
                self._number[old] = len(self.texts)
                text = self._trace.name_of(old)
                self.texts.append(text)
                self.short.append(short_name(text))
        return np.array([self._number[old] for old in distinct.tolist()], np.int32)[where]


def _columns(trace: Trace, index: TimelineIndex, rows: list[Row], names: _Names) -> dict[str, np.ndarray]:
    """Return the columns of all events of `rows`, one row after the other; each [num_events]."""

    def joined(values: list[np.ndarray], dtype: Any) -> np.ndarray:
        return np.concatenate(values).astype(dtype, copy=False) if values else np.zeros(0, dtype)

    sizes = [trace.ops.bytes[row.event] if row.table == "ops" else np.full(len(row), -1, np.int64) for row in rows]
    return {
        "start": joined([row.start - index.origin for row in rows], np.float64),
        "end": joined([row.end - index.origin for row in rows], np.float64),
        "step": joined([row.step for row in rows], np.float64),
        "corr": joined([row.corr for row in rows], np.float64),
        "bytes": joined(sizes, np.float64),
        "name": names.ids(joined([row.name for row in rows], np.int64)),
        "hue": joined([row.hue for row in rows], np.uint8),
    }


def _relative(index: TimelineIndex, window: tuple[float, float]) -> list[float]:
    return [float(edge - index.origin) for edge in window]


def _bands(index: TimelineIndex, numbers: np.ndarray) -> list[tuple[float, float, int, bool]]:
    """Return start, end of the shade, step, and whether to shade for each band."""
    bands: Bands = index.bands
    return [
        (float(bands.start[i] - index.origin), float(bands.shade_end[i] - index.origin), int(bands.step[i]), i % 2 == 0)
        for i in numbers.tolist()
    ]
