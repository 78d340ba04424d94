"""Exports: Perfetto's rules of nesting, exact times, launch arrows; CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace import Api, OpKind, Ops, Ranges, Syncs, Trace, TraceError, Waits, export, load
from mrv2.trace.perfetto import perfetto_events
from nsight_files import worked_example

Event = dict[str, Any]


def _events(trace: Trace) -> list[Event]:
    return [json.loads(text, parse_float=lambda text: round(float(text) * 1000)) for text in perfetto_events(trace)]


def _complete(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return (start, end) in ns of complete events by track."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return tracks


def _assert_legal(events: list[Event]) -> None:
    """Check what Perfetto needs: slices of a track nest, async slices pair up, arrows begin and end in slices."""
    tracks = _complete(events)
    for slices in tracks.values():
        for i, (start, end) in enumerate(slices):
            for other_start, other_end in slices[:i]:
                apart = end <= other_start or other_end <= start
                nested = (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)
                assert apart or nested, (start, end, other_start, other_end)
    pairs: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            pairs[event["id"]].append(event)
    for begin, end in pairs.values():
        assert (begin["ph"], end["ph"]) == ("b", "e") and begin["ts"] <= end["ts"]
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"])
    flows: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
            assert any(start <= event["ts"] <= end for start, end in tracks[event["pid"], event["tid"]])
    for first, last in flows.values():
        assert (first["ph"], last["ph"]) == ("s", "f") and first["ts"] <= last["ts"]
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert set(tracks) <= named


def _example(folder: Path) -> Trace:
    return load(worked_example().write(folder / "t.sqlite"))


def test_the_worked_example_nests(tmp_path: Path) -> None:
    events = _events(_example(tmp_path))
    _assert_legal(events)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) == 43
    # three launches, one arrow each: not one for each of 40 nodes
    assert sum(event["ph"] == "s" for event in events) == 3
    across = next(event for event in events if event["ph"] == "b")
    assert across["name"] == "request" and across["args"] == {"domain": "mrv2", "step": 7}
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"thread 4001: ranges", "thread 4001: CUDA calls", "stream 7", "stream 13"} <= names


def _intervals(draw: st.DrawFn, most: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = draw(st.lists(st.tuples(st.integers(-5000, 5000), st.integers(0, 4000)), max_size=most))
    start, length = np.array(pairs, np.int64).reshape(-1, 2).T
    return start, start + length


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Draw traces in which anything may overlap anything."""
    start, end = _intervals(draw, 14)
    thread = np.array(draw(st.lists(st.integers(1, 2), min_size=len(start), max_size=len(start))), np.int64)
    end_thread = np.where(start % 5 == 0, 3, thread)
    ranges = Ranges.make(
        start=start, end=end, thread=thread, end_thread=end_thread, name=0, domain=1, kind=start % 3 // 2
    )
    start, end = _intervals(draw, 10)
    api = Api.make(start=start, end=end, thread=1, corr=np.arange(len(start)), name=2)
    start, end = _intervals(draw, 14)
    ops = Ops.make(start=start, end=end, corr=np.arange(len(start)) // 2, kind=OpKind.KERNEL, name=3, stream=start % 2)
    return Trace(ranges=ranges, api=api, ops=ops, strings=['say "hi"', "default", "cudaLaunchKernel", "käse\n"])


@settings(max_examples=60, deadline=None)
@given(_traces())
def test_any_overlap_is_exported_legally_and_completely(trace: Trace) -> None:
    events = _events(trace)
    _assert_legal(events)
    shown = sum(event["ph"] in "Xbi" for event in events)
    assert shown == len(trace.ranges) + len(trace.api) + len(trace.ops)


def test_children_are_clamped_and_concurrent_operations_get_tracks_of_their_own() -> None:
    trace = Trace(
        ranges=Ranges.make(start=[0, 500], end=[1000, 1400], name=[0, 1], domain=2),
        ops=Ops.make(start=[0, 50, 200], end=[100, 150, 300], kind=OpKind.KERNEL, name=3),
        strings=["parent", "child", "default", "k"],
    )
    events = _events(trace)
    _assert_legal(events)
    ranges = {event["name"]: event["ts"] + event["dur"] for event in events if event.get("cat") == "range"}
    assert ranges == {"parent": 1000, "child": 1000}
    assert len({event["tid"] for event in events if event.get("cat") == "kernel"}) == 2
    assert any(event["args"].get("name") == "stream 0 (2)" for event in events if event["ph"] == "M")


def test_an_operation_before_its_launch_gets_no_arrow_backwards() -> None:
    trace = Trace(
        api=Api.make(start=[100], end=[110], corr=[1], name=[0]),
        ops=Ops.make(start=[90], end=[95], corr=[1], kind=OpKind.KERNEL, name=[1]),
        strings=["cudaLaunchKernel", "k"],
    )
    assert not any(event["ph"] in "sf" for event in _events(trace))


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    trace = Trace(
        waits=Waits.make(start=[base, base + 1], end=[base + 123_456_789, base + 2], name=0, kind=0),
        syncs=Syncs.make(start=[base + 7], end=[base + 1_000_007], name=1, sync_type=1),
        strings=["wait", "cudaEventSynchronize"],
    )
    (path,) = export(trace, tmp_path / "t.json")
    text = path.read_text()
    assert '"ts":0.000,"dur":123456.789' in text and '"ts":0.001,"dur":0.001' in text
    assert '"ts":0.007,"dur":1000.000' in text
    assert {event["ph"] for event in json.loads(text)["traceEvents"]} == {"X", "M"}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file_is_whole_json(tmp_path: Path, name: str) -> None:
    (path,) = export(_example(tmp_path), tmp_path / name)
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    assert document["displayTimeUnit"] == "ns" and len(document["traceEvents"]) > 43


def test_an_empty_trace_is_a_legal_file(tmp_path: Path) -> None:
    (path,) = export(Trace(), tmp_path / "t.json")
    assert json.loads(path.read_text())["traceEvents"] == []


def test_csv_spells_text_out(tmp_path: Path) -> None:
    trace = _example(tmp_path)
    files = export(trace, tmp_path / "tables", "csv")
    assert [file.name for file in files] == ["ops.csv", "api.csv", "ranges.csv"]
    with files[2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["step", "request", "forward"]
    assert rows[0] | {"start": "0", "end": "1000000", "step": "7", "domain": "mrv2", "is_open": "0"} == rows[0]
    (one,) = export(trace, tmp_path / "one.csv", tables=["api"])
    assert len(one.read_text().splitlines()) == 4
    with pytest.raises(TraceError, match="holds one table; name one of ops, api, ranges"):
        export(trace, tmp_path / "all.csv")


def test_parquet_and_npz_load_back(tmp_path: Path) -> None:
    trace = _example(tmp_path)
    (path,) = export(trace, tmp_path / "t.npz")
    assert len(load(path).ops) == 43
    pytest.importorskip("pyarrow")
    (path,) = export(trace, tmp_path / "t.parquet")
    assert path.is_dir() and len(load(path).ops) == 43


def test_unknown_formats_and_paths(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot tell the format; formats: perfetto, csv"):
        export(Trace(), tmp_path / "t.xyz")
    with pytest.raises(TraceError, match="did you mean 'perfetto'"):
        export(Trace(), tmp_path / "t", "perfeto")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TraceError, match="do not fit together"):
        export(Trace(), tmp_path / "t", "npz")
    with pytest.raises(TraceError, match="cannot be written"):
        export(Trace(), tmp_path / "absent" / "t.json")
