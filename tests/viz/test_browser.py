"""The page in a real browser: it draws what the index says, and moves as its reader wishes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2.trace.table import Trace
from mrv2.viz import Timeline, browser, drawing, page, payload, theme
from mrv2.viz.report import report
from mrv2.viz.timeline import save_png
from viz.pages import needs_browser, pixels, run_script
from viz.traces import big_trace, small_trace

pytest.importorskip("plotly")
pytestmark = needs_browser
# where the plot begins on a page without banners, pixels
TOP = 95


def _near(picture: np.ndarray, colour: str) -> np.ndarray:
    """Which pixels have a colour, give or take what a browser rounds; bool [height, width]."""
    return np.abs(picture.astype(int) - theme.rgb(colour)).max(axis=2) <= 3


def _picture(timeline: Timeline, folder: Path) -> np.ndarray:
    browser.screenshot(timeline.save(folder / "timeline.html"), folder / "timeline.png", 1300, 500)
    return pixels(folder / "timeline.png")


def test_the_rows_are_drawn_where_they_belong(tmp_path: Path) -> None:
    picture = _picture(Timeline(small_trace(), theme="light"), tmp_path)
    assert _near(picture, theme.THEMES["light"].background).mean() > 0.3
    # nested host stages, two kinds of kernels, copies, waits: each hue as a filled area, not a line
    for key in ("schedule", "forward", "attention", "copy", "wait", "other"):
        drawn = _near(picture, theme.HUES[theme.HUE_ID[key]].colour)
        columns = drawn[TOP:].sum(axis=0)
        assert (columns >= 5).sum() >= 20, key
    # attention stands on the GPU's row below the host's stages
    attention = np.nonzero(_near(picture, theme.HUES[theme.HUE_ID["attention"]].colour)[TOP:])[0].mean()
    schedule = np.nonzero(_near(picture, theme.HUES[theme.HUE_ID["schedule"]].colour)[TOP:])[0].mean()
    assert attention > schedule


WIDTH = 700
_TILES = """
  const tiles = %s.map(([a, b]) => {
    const { bars, cells, ticks, covered, bands } = page.view.source.tile(a, b, %d);
    const { row, index, start, hue } = bars;
    return { covered, bands, ticks, cells, bars: { row, index, start, hue } };
  });
"""
_OUTLINES = """
  const filled = page.view.plot.data.filter((trace) => trace.fill === "toself");
  const outlines = filled.map(({ name, x, y }) => ({ name, x, y }));
"""
_KEYS = """
  const keys = [];
  for (const key of ["+", "ArrowRight", "ArrowLeft", "-", "n", "n", "p", "0"]) {
    press(key);
    await sleep(30);
    keys.push(page.view.window);
  }
"""
# hovers over the first launch and clicks it
_CHOICE = """
  const { view } = page, box = view.plot.getBoundingClientRect();
  const x = box.left + view.left + (2250 - view.window[0]) / (view.window[1] - view.window[0]) * view.width;
  const row = view.spec.rows.findIndex((row) => row.key === "api:1:5:0");
  const y = box.top + 6 + (view.spec.boxes[row][0] + view.spec.boxes[row][1]) / 2;
  view.plot.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y, bubbles: true }));
  const tip = view.tip.innerText;
  point("pointerdown", view.plot, x, y);
  point("pointerup", view.plot, x, y);
  await sleep(50);
  const drawn = (name) => view.plot.data.find((trace) => trace.name === name).x;
  const choice = { tip, detail: view.detail.textContent, link: drawn("link"), chosen: drawn("selected") };
"""
# chooses the second row by keyboard, then sorts by a column
_TABLE = """
  const at = (path) => document.querySelector("#mrv2-table-0 " + path);
  at("tbody tr:nth-child(2)").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  await sleep(50);
  at("th:nth-child(8) button").click();
  const table = { window: view.window, marked: view.highlight, row: page.data.tables[0].rows[1],
                  sorted: at("th:nth-child(8)").getAttribute("aria-sort") };
  const places = [...document.querySelectorAll("[id^=mrv2-figure-]")];
  const figures = places.map((place) => place.querySelectorAll(".main-svg").length);
"""


def test_a_view_that_was_built_before_it_stands_on_the_page_fits_the_page(tmp_path: Path) -> None:
    script = """
      const box = document.createElement("div"), { timeline } = page.data;
      document.body.style.background = "rgb(20, 20, 20)";
      const view = new page.view.constructor(box, page.Plotly, timeline, page.view.source, { window: timeline.window });
      const before = view.theme.name;
      document.body.append(box);
      // what is observed is told with a frame: a busy machine draws none while the browser's clock runs on, so it works
      const work = () => { let sum = 0; for (let i = 0; i < 1e7; i++) sum += i % 7; return sum; };
      for (let turn = 0; turn < 200 && work() && view.theme.name === before; turn++) await sleep(50);
      return [before, view.theme.name];
    """
    assert run_script(Timeline(small_trace()).html(), script, tmp_path) == ["light", "dark"]


def test_rows_too_dense_for_bars_are_drawn_as_cells_on_a_dark_page(tmp_path: Path) -> None:
    timeline = Timeline(big_trace(20_000), theme="dark")
    picture = _picture(timeline, tmp_path)
    background = theme.THEMES["dark"].background
    assert _near(picture, background).mean() > 0.3
    number = [row.key for row in timeline.index.rows].index("stream:0:7:0")
    top, bottom = drawing.geometry(timeline.index.rows).boxes[number]
    middle = round(TOP + 6 + (top + bottom) / 2)
    line = picture[middle, 300:1200]
    # kernels follow each other closely: hardly a pixel is empty, and but for the ticks its hue is one of the kernels'
    assert (~_near(line[None], background)).mean() > 0.95
    hues = [theme.HUE_ID[key] for key in ("forward", "attention", "prepare", "sample")]
    steps = [colour for _, colour in theme.density_colours(theme.THEMES["dark"])[::2]]
    scale = [colour for hue in hues for colour in steps[hue * theme.LEVELS : (hue + 1) * theme.LEVELS]]
    assert np.any([_near(line[None], colour) for colour in scale], axis=0).mean() > 0.8


def _windows(timeline: Timeline) -> list[tuple[int, int]]:
    """Windows of all sizes, in whole nanoseconds from the start."""
    rng = np.random.default_rng(0)
    span = timeline.index.end - timeline.index.origin
    out = [(0, span)]
    for exponent in np.linspace(0, -4, 12):
        width = max(int(span * 10**exponent), 20)
        start = int(rng.integers(-width // 2, span - width // 2))
        out.append((start, start + width))
    return out


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one page with everything answers to all that these tests ask: a browser takes seconds to start."""
    tiles = _TILES % (json.dumps(_windows(Timeline(small_trace()))), WIDTH)
    script = tiles + _OUTLINES + _KEYS + _CHOICE + _TABLE + "return { tiles, outlines, keys, choice, table, figures };"
    return run_script(report(small_trace()), script, tmp_path_factory.mktemp("page"))


def _compare_tiles(trace: Trace, tiles: list[dict[str, Any]]) -> None:
    timeline = Timeline(trace)
    index = timeline.index
    for (a, b), drawn in zip(_windows(timeline), tiles):
        said = payload.tile_message(trace, index, index.tile(a + index.origin, b + index.origin, WIDTH))
        assert drawn["covered"] == pytest.approx(said["covered"])
        for column, dtype in (("row", "u2"), ("index", "i4"), ("start", "f8"), ("hue", "u1")):
            assert drawn["bars"][column] == np.frombuffer(said["bars"][column], dtype).tolist()
        assert drawn["cells"]["rows"] == said["cells"]["rows"]
        share = np.frombuffer(said["cells"]["share"], "u1").astype(int)
        # an edge that rounds to the other side of an event may cost one 255th
        assert np.abs(np.array(drawn["cells"]["share"], int) - share).max(initial=0) <= 1
        assert drawn["ticks"]["count"] == said["ticks"]["count"]
        assert drawn["ticks"]["time"] == np.frombuffer(said["ticks"]["time"], "f8").tolist()
        assert [tuple(band) for band in drawn["bands"]] == said["bands"]


def test_the_page_computes_the_same_tiles_as_the_kernel(seen: dict[str, Any]) -> None:
    _compare_tiles(small_trace(), seen["tiles"])


def test_the_page_computes_the_same_cells_as_the_kernel(tmp_path: Path) -> None:
    trace = big_trace(20_000)
    timeline = Timeline(trace)
    script = _TILES % (json.dumps(_windows(timeline)), WIDTH) + "return tiles;"
    _compare_tiles(trace, run_script(timeline.html(), script, tmp_path))


def test_the_page_draws_the_outlines_of_the_figure(seen: dict[str, Any]) -> None:
    drawn = {trace["name"]: trace for trace in seen["outlines"]}
    figure = Timeline(small_trace()).figure(width_px=5000)
    assert set(drawn) == {hue.label for hue in theme.HUES} | {"steps"}
    shaded = np.array(drawn["steps"]["x"], np.float64).reshape(-1, 6)[:, :2]
    assert shaded == pytest.approx(np.array([[shape.x0, shape.x1] for shape in figure.layout.shapes]))
    for trace in figure.data:
        if trace.name in drawn:
            for axis in ("x", "y"):
                page = np.array(drawn[trace.name][axis], np.float64)
                # a pixel of the narrower page is 40 ns
                assert page == pytest.approx(np.array(getattr(trace, axis), np.float64), nan_ok=True, abs=5e-8)


def test_keys_move_and_zoom(seen: dict[str, Any]) -> None:
    plus, right, left, minus, first, second, back, every = seen["keys"]
    span = 39_800
    assert plus[1] - plus[0] == pytest.approx(span / 1.6)
    assert right[0] - plus[0] == pytest.approx((plus[1] - plus[0]) / 4)
    assert left == pytest.approx(plus)
    assert minus == pytest.approx([0, span])
    # from sync to sync
    assert [sum(window) / 2 for window in (first, second, back)] == pytest.approx([8000, 18_000, 8000])
    assert every == pytest.approx([0, span])


def test_hovering_over_a_launch_and_choosing_it_shows_what_it_started(seen: dict[str, Any]) -> None:
    choice = seen["choice"]
    assert choice["tip"].startswith("cudaGraphLaunch\n500 ns at 0.002000 ms")
    assert "correlation 1" in choice["tip"]
    assert choice["detail"].endswith("2 operations on the device, the first 1 us after the call began")
    assert np.array(choice["link"]) * 1e9 == pytest.approx([2000, 3000])
    assert np.array(choice["chosen"][::6]) * 1e9 == pytest.approx([2000, 3000, 5500])


def test_a_row_of_the_sync_table_centres_the_timeline(seen: dict[str, Any]) -> None:
    table = seen["table"]
    assert table["marked"] == [table["row"]["start"], table["row"]["end"]]
    assert sum(table["window"]) == pytest.approx(table["row"]["start"] + table["row"]["end"])
    assert table["sorted"] == "descending"


def test_every_figure_of_the_report_is_drawn(seen: dict[str, Any]) -> None:
    assert len(seen["figures"]) == 4 and all(seen["figures"])


def test_a_figure_becomes_a_png_without_kaleido(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Timeline(small_trace(), theme="dark").figure()
    monkeypatch.setattr(type(figure), "write_image", lambda *_, **__: (_ for _ in ()).throw(ValueError("no kaleido")))
    save_png(figure, tmp_path / "figure.png")
    picture = pixels(tmp_path / "figure.png")
    assert picture.shape[:2] == (figure.layout.height, figure.layout.width)
    assert _near(picture, theme.HUES[theme.HUE_ID["forward"]].colour).sum() > 1000


def test_a_page_reads_packed_columns_of_any_length(tmp_path: Path) -> None:
    spec, blob = Timeline(small_trace()).page_data()
    seen: set[int] = set()
    # four bytes make five characters: whatever is left over counts as well
    for extra in range(64):
        longer = blob + bytes(range(extra))
        left = len(gzip.compress(longer, 9, mtime=0)) % 4
        if left in seen:
            continue
        seen.add(left)
        text = page.render(page.Page("packed", timeline=(spec, longer)))
        drawn = run_script(text, "return [...page.view.source.start];", tmp_path)
        at = next(offset for name, _, offset, _ in spec["columns"] if name == "start")
        assert drawn == np.frombuffer(blob, np.float64, len(drawn), at).tolist()
    assert seen == {0, 1, 2, 3}
