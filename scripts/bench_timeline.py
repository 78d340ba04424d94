"""How long the timeline takes on a large trace: building the index, the first tile, and moving about.

    python scripts/bench_timeline.py --kernels 1000000 --lab

Everything on the kernel's side is timed; a browser adds its drawing.  With ``--lab`` it is all in JupyterLab, in a
headless Chromium: from running the cell to the first picture, and the time between frames while the mouse drags the
timeline or turns its wheel.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.viz import Timeline, payload

# the trace is the one that the tests draw
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from viz.traces import big_trace

if TYPE_CHECKING:
    from lab.jupyter import LabPage

TESTS = Path(sys.path[-1])
# runs the last cell; milliseconds until its timeline is drawn
_FIRST_PAINT = """async () => {
  const notebook = window.jupyterapp.shell.currentWidget.content, began = performance.now();
  notebook.activeCellIndex = 1;
  const ran = window.jupyterapp.commands.execute("notebook:run-cell");
  while (!document.querySelector("[data-draw-ms]")) await new Promise(requestAnimationFrame);
  const took = performance.now() - began;
  await ran;
  return took;
}"""
# milliseconds between the frames of the page, until `_STOP`
_WATCH = """() => {
  const watch = window.frameTimes = [];
  let last = performance.now();
  const next = (now) => {
    watch.push(now - last);
    last = now;
    if (window.frameTimes === watch) requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""
_MOVED = "(before) => document.querySelector('[data-draw-ms]').dataset.window !== before"
_STOP = "() => { const found = window.frameTimes; window.frameTimes = null; return found; }"


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and what `act` returned."""
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def moves(timeline: Timeline, count: int, width_px: int) -> list[float]:
    """Return the seconds that each of `count` random pans and zooms takes, from the question to the packed answer."""
    rng, index = np.random.default_rng(0), timeline.index
    span = index.end - index.origin
    out = []
    for _ in range(count):
        width = span * 10 ** rng.uniform(-5.5, 0)
        start = rng.uniform(index.origin, index.end - width)
        seconds, _ = timed(
            lambda: payload.tile_message(timeline.trace, index, index.tile(start, start + width, width_px))  # noqa: B023  # called at once
        )
        out.append(seconds)
    return out


def in_lab(num_kernels: int, num_moves: int) -> dict[str, float]:
    """Return what a reader of a notebook waits for; needs JupyterLab, playwright and a Chromium."""
    from lab.jupyter import lab_page, lab_server

    setup = f"""import sys
sys.path.append({str(TESTS)!r})
from mrv2.viz import Timeline
from viz.traces import big_trace
trace = big_trace({num_kernels})"""
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{**cell, "id": f"c{at}", "source": text} for at, text in enumerate((setup, "Timeline(trace)"))]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as home:
        (Path(root) / "large.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        with lab_server(Path(root), Path(home)) as base, lab_page(base) as lab:
            lab.open("large.ipynb")
            lab.run_cells(1)
            paint_ms = lab.page.evaluate(_FIRST_PAINT)
            frames = {what: moving(lab, what, num_moves) for what in ("pan", "zoom")}
    found = {f"lab_{what}_p95_ms": round(float(np.percentile(times, 95)), 1) for what, times in frames.items()}
    return {"lab_paint_s": round(paint_ms / 1e3, 2), **found}


def moving(lab: LabPage, what: str, count: int) -> list[float]:
    """Drag the timeline or turn the wheel over it, `count` events in all; return milliseconds between frames."""
    box = lab.page.locator("[data-draw-ms] .nsewdrag").first.bounding_box()
    assert box is not None, "no timeline is drawn"
    shown = lab.page.locator("[data-draw-ms]").first.get_attribute("data-window")
    mouse, (x, y) = lab.page.mouse, (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.move(x, y)
    if what == "zoom":
        lab.page.evaluate(_WATCH)
        for at in range(count):
            # in to single events, and out again
            mouse.wheel(0, -120 if at % 40 < 20 else 110)
        times = lab.page.evaluate(_STOP)
        lab.wait(_MOVED, shown)
        return times
    mouse.wheel(0, -600)
    lab.frame()
    mouse.down()
    lab.page.evaluate(_WATCH)
    for at in range(count):
        mouse.move(x + box["width"] * 0.3 * np.sin(at / 15), y)
    times = lab.page.evaluate(_STOP)
    mouse.up()
    lab.wait(_MOVED, shown)
    return times


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000, help="kernels, and as many API calls")
    parser.add_argument("--moves", type=int, default=400, help="random pans and zooms")
    parser.add_argument("--width", type=int, default=1100, help="pixels")
    parser.add_argument("--lab", action="store_true", help="also in JupyterLab, in a browser without a window")
    parser.add_argument("--page", action="store_true", help="also write the self-contained page")
    args = parser.parse_args()
    trace = big_trace(args.kernels)
    open_s, timeline = timed(lambda: Timeline(trace))
    paint_s, _ = timed(
        lambda: (payload.describe(timeline.index), payload.tile_message(trace, timeline.index, timeline.tile()))
    )
    steps = np.array(moves(timeline, args.moves, args.width)) * 1e3
    result: dict[str, Any] = {
        "events": timeline.index.num_events,
        "rows": len(timeline.index.rows),
        "index_s": round(open_s, 3),
        "first_tile_s": round(paint_s, 3),
        **{f"move_p{q}_ms": round(float(np.percentile(steps, q)), 2) for q in (50, 95, 100)},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if args.page:
        with tempfile.TemporaryDirectory() as folder:
            page_s, path = timed(lambda: timeline.save(Path(folder) / "timeline.html"))
            result |= {"page_s": round(page_s, 2), "page_mb": round(path.stat().st_size / 1e6, 1)}
    if args.lab:
        result |= in_lab(args.kernels, min(args.moves, 100))
    for key, value in result.items():
        print(f"{key:16} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
