"""Gaps of the GPU, each divided by cause to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.trace.analysis.causes import divide
from mrv2.trace.analysis.frame import Frame
from mrv2.trace.analysis.overlap import split_idle
from mrv2.trace.columns import Int64
from mrv2.trace.intervals import Intervals, overlap_join

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis
    from mrv2.trace.analysis.windows import StepWindows

_KERNEL_WAIT = ("kernel_wait",)
_OTHER = ("profiler", "unknown", "unknown_device", "dependency", "copy")


@dataclass(frozen=True, eq=False, repr=False)
class Bubbles(Frame):
    """The gaps of all devices in one window; the first and last idle time of the window are none.

    Causes: ``profiler`` its own overhead; ``unknown`` the next operation has no call; ``dependency``, ``copy`` the next
    operation was submitted in time and waited for an event or a copy; ``kernel_wait``, ``unknown_device`` it was
    submitted in time, and the gap is short or not; ``launch_api`` inside a launching call; ``sync`` the launching
    thread waited for the device; ``starved`` it waited for work; ``gil`` for Python's lock; ``alloc`` it managed memory
    or loaded code; ``host:X`` it was inside stage X; ``host:unattributed`` it did something else.
    """

    # [num_bubbles], by device, then by start
    start: Int64
    end: Int64
    device: Int64
    length_ns: Int64
    # the operation that ended the gap (row in ``ops``), and the thread that submitted it (-1 unknown)
    next_op: Int64
    process: Int64
    thread: Int64
    # step number of that operation, -1 unknown
    step: Int64
    # the largest share of each gap
    main_cause: list[str]
    # pieces: bubble (row of this table), start, end, cause (index into `_causes`); int64 [num_pieces] each
    _piece_bubble: Int64
    _piece_start: Int64
    _piece_end: Int64
    _piece_cause: Int64
    _causes: list[str]
    _min_ns: int

    @property
    def total_ns(self) -> int:
        """Length of all bubbles together."""
        return int(self.length_ns.sum())

    @property
    def pieces(self) -> dict[str, np.ndarray | list[str]]:
        """The parts of the bubbles: ``bubble`` (row), ``start``, ``end``, and ``cause`` as an index into ``causes``."""
        return {
            "bubble": self._piece_bubble,
            "start": self._piece_start,
            "end": self._piece_end,
            "cause": self._piece_cause,
            "causes": self._causes,
        }

    def by_cause(self) -> dict[str, int]:
        """Return nanoseconds by cause, largest first; they sum to `total_ns`."""
        sums = np.bincount(
            self._piece_cause, weights=self._piece_end - self._piece_start, minlength=len(self._causes)
        ).astype(np.int64)
        found = {name: int(ns) for name, ns in zip(self._causes, sums) if ns}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def rollup(self) -> dict[str, int]:
        """Return nanoseconds as HTA names them: "host wait", "kernel wait", "other"."""
        out = {"host wait": 0, "kernel wait": 0, "other": 0}
        for name, ns in self.by_cause().items():
            key = "kernel wait" if name in _KERNEL_WAIT else "other" if name in _OTHER else "host wait"
            out[key] += ns
        return out

    def by_step(self, windows: StepWindows) -> tuple[np.ndarray, list[str]]:
        """Return nanoseconds of bubbles inside each step's window by cause, int64 [num_steps, num_causes], and names.

        With several devices, their bubbles add up.
        """
        out = np.zeros((len(windows), len(self._causes)), np.int64)
        for device in np.unique(self.device).tolist():
            mine = np.flatnonzero(self.device[self._piece_bubble] == device)
            pieces = Intervals(self._piece_start[mine], self._piece_end[mine])
            step, piece = overlap_join(windows.start, windows.end, pieces)
            low = np.maximum(windows.start[step], pieces.start[piece])
            high = np.minimum(windows.end[step], pieces.end[piece])
            np.add.at(out, (step, self._piece_cause[mine][piece]), high - low)
        return out, list(self._causes)

    def within(self, start: np.ndarray, end: np.ndarray, device: int) -> np.ndarray:
        """Return how much bubble of a device lies in each window ``[start, end)``; int64 ns."""
        mine = self.device == device
        return Intervals(self.start[mine], self.end[mine]).within(start, end)

    def longest(self, count: int = 20) -> Bubbles:
        """Return the longest ones, with their pieces."""
        chosen = np.argsort(-self.length_ns, kind="stable")[:count]
        rank = np.full(len(self), -1, np.int64)
        rank[chosen] = np.arange(len(chosen))
        keep = np.flatnonzero(rank[self._piece_bubble] >= 0)
        keep = keep[np.argsort(rank[self._piece_bubble[keep]], kind="stable")]
        columns = {**Frame.columns(self), "main_cause": [self.main_cause[i] for i in chosen.tolist()]}
        columns |= {name: value[chosen] for name, value in columns.items() if isinstance(value, np.ndarray)}
        pieces = (rank[self._piece_bubble[keep]], self._piece_start[keep], self._piece_end[keep])
        return Bubbles(**columns, **_piece_fields(*pieces, self._piece_cause[keep], self._causes, self._min_ns))


def _piece_fields(
    bubble: np.ndarray, start: np.ndarray, end: np.ndarray, cause: np.ndarray, causes: list[str], min_ns: int
) -> dict[str, Any]:
    return {
        "_piece_bubble": bubble,
        "_piece_start": start,
        "_piece_end": end,
        "_piece_cause": cause,
        "_causes": causes,
        "_min_ns": min_ns,
    }


def find_bubbles(analysis: Analysis, min_ns: int) -> Bubbles | None:
    """Return all gaps of at least `min_ns` inside the window, or None without GPU rows."""
    ops = analysis.trace.ops
    if not len(ops):
        return None
    starts, ends, devices, following = [], [], [], []
    for device in analysis.devices:
        gaps, *_ = split_idle(analysis.busy(device), analysis.window, min_ns)
        rows = np.arange(len(ops)) if len(analysis.devices) == 1 else np.flatnonzero(ops.device == device)
        # the gap ends where the first later operation starts
        found = rows[np.searchsorted(ops.start[rows], gaps.end, "left")] if len(gaps) else np.empty(0, np.int64)
        starts.append(gaps.start)
        ends.append(gaps.end)
        devices.append(np.full(len(gaps), device, np.int64))
        following.append(found)
    start, end = np.concatenate(starts), np.concatenate(ends)
    device, next_op = np.concatenate(devices), np.concatenate(following)
    result = divide(analysis, start, end, device, next_op)
    return Bubbles(
        start=start,
        end=end,
        device=device,
        length_ns=end - start,
        next_op=next_op,
        process=ops.process[next_op],
        thread=result.thread,
        step=result.step,
        main_cause=_main_causes(result.bubble, result.end - result.start, result.cause, result.causes, len(start)),
        **_piece_fields(result.bubble, result.start, result.end, result.cause, result.causes, min_ns),
    )


def _main_causes(
    bubble: np.ndarray, length: np.ndarray, cause: np.ndarray, causes: list[str], num_bubbles: int
) -> list[str]:
    """Return the name of the cause with the most nanoseconds in each bubble."""
    best = np.full(num_bubbles, -1, np.int64)
    if len(bubble):
        key = bubble * np.int64(len(causes)) + cause
        order = np.argsort(key, kind="stable")
        key = key[order]
        opens = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        sums, owner, what = np.add.reduceat(length[order], opens), key[opens] // len(causes), key[opens] % len(causes)
        first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
        largest = np.maximum.reduceat(sums, first)[np.cumsum(np.concatenate([[0], owner[1:] != owner[:-1]]))]
        best[owner[sums == largest]] = what[sums == largest]
    return [causes[i] for i in best.tolist()]
