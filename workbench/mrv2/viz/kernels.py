"""Where the device's time goes: one row for each kernel and kind of copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mrv2.trace.analysis.frame import Frame
from mrv2.trace.analysis.model import Analysis
from mrv2.trace.table import OpKind
from mrv2.viz.names import op_hue, short_name


@dataclass(frozen=True, eq=False, repr=False)
class Kernels(Frame):
    """Operations of one window by name, the most time first; NaN: without evidence."""

    # short name, for people; and the name in the trace
    name: list[str]
    full_name: list[str]
    # OpKind in lower case
    kind: list[str]
    # all [num_rows]: calls, sum of durations (where streams overlap, more than busy time), and its share of all
    count: np.ndarray
    total_ns: np.ndarray
    share: np.ndarray
    median_ns: np.ndarray
    min_ns: np.ndarray
    max_ns: np.ndarray
    # both [num_rows]: bytes of all calls together (what a copy moved, or what the caller says that a kernel must move),
    # and bytes / total
    bytes: np.ndarray
    gb_per_s: np.ndarray
    # [num_rows] number of the hue
    _hue: np.ndarray
    # start and end of the longest call of each name
    _longest: list[tuple[int, int]]
    # what a reader must know: whole graphs hide their kernels
    _note: str

    @property
    def note(self) -> str:
        """What a reader must know, or an empty string."""
        return self._note

    @property
    def longest(self) -> list[tuple[int, int]]:
        """Start and end of the longest call of each name, in nanoseconds of the trace's clock."""
        return self._longest

    @property
    def hue(self) -> np.ndarray:
        """Number of each row's hue (`theme.HUES`); uint8 [num_rows]."""
        return self._hue


def kernel_table(analysis: Analysis, bytes_per_call: Mapping[str, float] | None = None) -> Kernels | None:
    """Return the operations of the analysis' window by name, or None if no operations were collected.

    Args:
        analysis: the trace and its window; operations that begin inside it count.
        bytes_per_call: what one call of a kernel must move, by short or full name; with it a kernel gets a bandwidth.
    """
    trace, ops = analysis.trace, analysis.trace.ops
    if not len(ops):
        return None
    low, high = analysis.window
    rows = np.flatnonzero((ops.start >= low) & (ops.start < high) & (ops.kind != OpKind.STAGE))
    length = (ops.end - ops.start)[rows]
    key = ops.name[rows].astype(np.int64) * 8 + ops.kind[rows]
    distinct, which, count = np.unique(key, return_inverse=True, return_counts=True)
    total = np.bincount(which, weights=length, minlength=len(distinct))
    order = np.argsort(-total, kind="stable")
    grouped = np.split(np.argsort(which, kind="stable"), np.cumsum(count)[:-1]) if len(distinct) else []
    by_key = [length[group] for group in grouped]
    peak = [rows[grouped[i][np.argmax(by_key[i])]] for i in order.tolist()]
    names = [trace.name_of(int(k // 8)) for k in distinct[order].tolist()]
    kinds = (distinct[order] % 8).tolist()
    moved = _bytes(ops.bytes[rows], which, len(distinct))[order]
    for i, name in enumerate(names):
        per_call = (bytes_per_call or {}).get(name, (bytes_per_call or {}).get(short_name(name)))
        if per_call is not None:
            moved[i] = per_call * count[order][i]
    whole = int((ops.kind[rows] == OpKind.GRAPH).sum())
    return Kernels(
        name=[short_name(name) for name in names],
        full_name=names,
        kind=[OpKind(kind).name.lower() for kind in kinds],
        count=count[order],
        total_ns=total[order].astype(np.int64),
        share=total[order] / max(total.sum(), 1),
        median_ns=np.array([float(np.median(by_key[i])) for i in order.tolist()]),
        min_ns=np.array([int(by_key[i].min()) for i in order.tolist()], np.int64),
        max_ns=np.array([int(by_key[i].max()) for i in order.tolist()], np.int64),
        bytes=moved,
        gb_per_s=np.divide(moved, total[order], out=np.full(len(order), np.nan), where=total[order] > 0),
        _hue=np.array([op_hue(name, kind) for name, kind in zip(names, kinds)], np.uint8),
        _longest=[(int(ops.start[row]), int(ops.end[row])) for row in peak],
        _note=f"{whole} CUDA graphs were recorded as a whole: their kernels are not collected" if whole else "",
    )


def _bytes(size: np.ndarray, which: np.ndarray, num: int) -> np.ndarray:
    """Return the bytes of each group, NaN where any call lacks them; float64 [num]."""
    known = np.bincount(which, weights=size >= 0, minlength=num) == np.bincount(which, minlength=num)
    return np.where(known, np.bincount(which, weights=np.maximum(size, 0), minlength=num), np.nan)
