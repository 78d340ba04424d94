"""How long the timeline takes on a large trace: building the index, the first tile, and moving about.

    python scripts/bench_timeline.py --kernels 1000000

Everything on the kernel's side is timed; a browser adds its drawing (some 30 to 60 ms a tile).  The last line is JSON.
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
from typing import Any

import numpy as np

from mrv2.viz import Timeline, payload

# the trace is the one that the tests draw
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from viz.traces import big_trace


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


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000, help="kernels, and as many API calls")
    parser.add_argument("--moves", type=int, default=400, help="random pans and zooms")
    parser.add_argument("--width", type=int, default=1100, help="pixels")
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
    for key, value in result.items():
        print(f"{key:14} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
