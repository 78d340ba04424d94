"""Tables of syncs, bubbles and kernels: rows, places, and what they say without evidence."""

from __future__ import annotations

import json

import pytest

from mrv2.trace.analysis.model import Analysis
from mrv2.viz import Timeline, tables
from mrv2.viz.tables import Column, EventTable
from viz.traces import NUM_STEPS, STEP_NS, host_only_trace, small_trace

ORIGIN = 1_000_000


def test_the_sync_table_has_every_wait_with_its_place() -> None:
    trace = small_trace()
    table = tables.sync_table(Analysis(trace))
    assert len(table) == NUM_STEPS
    assert sorted(table.places) == list(zip(trace.syncs.start.tolist(), trace.syncs.end.tolist()))
    row = table.rows[0]
    assert row["name"] == "cudaEventSynchronize"
    assert "wait_output" in row["where"]
    assert {r["step"] for r in table.rows} == set(range(NUM_STEPS))
    prices = [r["induced_bubble_ns"] or 0 for r in table.rows]
    assert prices == sorted(prices, reverse=True)


def test_the_bubble_table_divides_each_gap_among_its_causes() -> None:
    analysis = Analysis(small_trace())
    bubbles = analysis.bubbles()
    assert bubbles is not None
    table = tables.bubble_table(analysis)
    assert len(table) == len(bubbles)
    lengths = [row["length_ns"] for row in table.rows]
    assert lengths == sorted(lengths, reverse=True)
    assert all(row["main_cause"] in row["causes"] for row in table.rows)
    assert all(end - start == row["length_ns"] for (start, end), row in zip(table.places, table.rows))


def test_a_chosen_row_centres_the_timeline() -> None:
    analysis = Analysis(small_trace())
    timeline = Timeline(analysis)
    table = tables.kernel_rows(analysis, timeline)
    table.choose(0)
    assert sum(timeline.window) / 2 == sum(table.places[0]) / 2 == ORIGIN + 3 * STEP_NS + 6000


@pytest.mark.parametrize("make", [tables.sync_table, tables.bubble_table, tables.kernel_rows])
def test_without_evidence_a_table_says_so(make) -> None:
    table = make(Analysis(host_only_trace()))
    assert not len(table)
    assert table.note.startswith("not collected")


def test_missing_values_are_na_and_markup_is_text() -> None:
    columns = [Column("name", "name"), Column("length", "length", "ns")]
    table = EventTable(
        "<t>", columns, [{"name": "<b>", "length": None}, {"name": "x", "length": 1500}], [(0, 1), (1, 2)]
    )
    assert "<td>&lt;b&gt;</td><td>n/a</td>" in table.to_html()
    assert "<td>1.5 us</td>" in table.to_html()
    json.dumps(table.spec(0), allow_nan=False)


def test_long_tables_keep_the_dearest_and_tell() -> None:
    rows = [{"n": i} for i in range(tables.MAX_ROWS + 7)]
    table = EventTable("many", [Column("n", "n")], rows, [(0, 1)] * len(rows))
    assert len(table) == tables.MAX_ROWS
    assert table.note == "7 more rows are not shown."


def test_where_there_is_no_notebook_a_table_is_static() -> None:
    shown = tables.sync_table(Analysis(small_trace()))._repr_mimebundle_()
    assert shown["text/html"].count("<tr>") == NUM_STEPS + 1
    assert "cudaEventSynchronize" in shown["text/plain"]
