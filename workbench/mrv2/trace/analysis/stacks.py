"""Where in the program a wait happened: the best stack that the recording holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


class StackFinder:
    """Finds the stack of one row of the unsorted table of waits."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    def find(self, row: int) -> tuple[list[str], str]:
        """Return frames, innermost first, and their source.

        Sources, best first: frames that the recorder captured ("recorder"), enclosing Python functions of a profile
        ("python frames"), native call chains ("call chain"), names of the enclosing ranges ("ranges"), "unknown".
        """
        analysis = self._analysis
        rows, trace = analysis.sync_rows, analysis.trace
        stack = int(rows["stack"][row])
        recorded = trace.name_of(stack).split("\n") if stack >= 0 else []
        if recorded and trace.meta.get("source") == "recorder":
            return recorded, "recorder"
        key = int(rows["process"][row]), int(rows["thread"][row])
        start = int(rows["start"][row])
        frames = self._python_frames(key, start)
        if frames:
            return frames, "python frames"
        if recorded:
            return recorded, "call chain"
        node = analysis.nests[key].at(np.array([start]))
        path = analysis.nests.path(key, int(node[0]))
        return (path.split(" > ")[::-1], "ranges") if path else ([], "unknown")

    def _python_frames(self, key: tuple[int, int], time: int) -> list[str]:
        frames = self._analysis.trace.python
        if not len(frames):
            return []
        last = int(np.searchsorted(frames.start, time, "right"))
        inside = frames.end[:last] > time
        inside &= (frames.process[:last] == key[0]) & (frames.thread[:last] == key[1])
        # sorted by start: the last one that still runs is the innermost
        return self._analysis.trace.name_of(frames.name[:last][inside])[::-1].tolist()
