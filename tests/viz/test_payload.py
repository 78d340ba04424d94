"""What the browser gets is what the index says."""

from __future__ import annotations

import json

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.table import Trace
from mrv2.viz import payload
from mrv2.viz.lanes import build_index
from viz.traces import big_trace, small_trace

TYPES = {"start": "f8", "end": "f8", "step": "f8", "corr": "f8", "bytes": "f8", "name": "i4", "hue": "u1"}


def _index(trace: Trace):
    return build_index(Analysis(trace))


def test_a_tile_carries_its_bars_column_by_column() -> None:
    trace = small_trace()
    index = _index(trace)
    tile = index.tile(index.origin, index.end, 800)
    bars = payload.tile_message(trace, index, tile)["bars"]
    columns = {name: np.frombuffer(bars[name], dtype) for name, dtype in TYPES.items()}
    row, number = np.frombuffer(bars["row"], "u2"), np.frombuffer(bars["index"], "i4")
    assert len(row) == index.num_events
    for at, (r, i) in enumerate(zip(row.tolist(), number.tolist())):
        lane = index.rows[r]
        assert columns["start"][at] + index.origin == lane.start[i]
        assert columns["end"][at] + index.origin == lane.end[i]
        assert (columns["step"][at], columns["corr"][at], columns["hue"][at]) == (
            lane.step[i],
            lane.corr[i],
            lane.hue[i],
        )
        name = columns["name"][at]
        assert (bars["names"][name] if name >= 0 else "") == trace.name_of(int(lane.name[i]))
    copies = [at for at, r in enumerate(row.tolist()) if index.rows[r].key == "copies:0:17:0"]
    assert columns["bytes"][copies].tolist() == [1400] * 4


def test_a_tile_carries_its_cells_and_ticks() -> None:
    trace = big_trace(20_000)
    index = _index(trace)
    tile = index.tile(index.origin, index.end, 300)
    message = payload.tile_message(trace, index, tile)
    cells = message["cells"]
    share = np.frombuffer(cells["share"], "u1").reshape(len(cells["rows"]), cells["bins"])
    for line, density in zip(share, tile.cells):
        assert (line == density.levels()).all()
    ticks = message["ticks"]
    assert sum(ticks["count"]) == len(trace.syncs)
    assert np.frombuffer(ticks["time"], "f8")[0] + index.origin == trace.syncs.start[0]
    assert set(ticks["name"]) == {"cudaEventSynchronize"}


def test_a_tile_is_small_however_large_the_trace() -> None:
    trace = big_trace(100_000)
    index = _index(trace)
    rng = np.random.default_rng(0)
    for _ in range(20):
        width = (index.end - index.origin) * 10 ** rng.uniform(-4, 0)
        at = rng.uniform(index.origin, index.end)
        bars = payload.tile_message(trace, index, index.tile(at, at + width, 1000))["bars"]
        assert len(bars["row"]) // 2 <= 4 * 1500 + 64 * len(index.rows)


def test_a_whole_trace_survives_packing() -> None:
    trace = small_trace()
    index = _index(trace)
    spec, blob = payload.whole(trace, index)
    unpacked = payload.unpacked(payload.packed(blob))
    columns = {name: np.frombuffer(unpacked, dtype, size, at) for name, dtype, at, size in spec["columns"]}
    for name, _, at, _ in spec["columns"]:
        assert at % columns[name].dtype.itemsize == 0
    for r, row in enumerate(index.rows):
        part = slice(spec["offsets"][r], spec["offsets"][r + 1])
        assert (columns["start"][part] + index.origin).tolist() == row.start.tolist()
        assert [spec["names"][i] if i >= 0 else "" for i in columns["name"][part]] == trace.name_of(row.name).tolist()
    assert (columns["tickTime"] + index.origin).tolist() == trace.syncs.start.tolist()
    json.dumps(spec, allow_nan=False)


def test_the_description_names_hues_that_occur() -> None:
    index = _index(small_trace())
    spec = payload.describe(index)
    assert spec["usedHues"] == sorted({int(h) for row in index.rows for h in row.hue})
    assert len(spec["boxes"]) == len(spec["rows"]) == len(index.rows)
    assert spec["span"] == index.end - index.origin
