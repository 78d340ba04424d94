"""What ``mrv2 trace`` prints: the same figures as text and as plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.commands.printing import number, percent, text_table

if TYPE_CHECKING:
    from mrv2.trace.analysis import Analysis

_HIDDEN_META = ("path", "config", "knobs", "versions", "streams", "null_streams")
_WIDEST_PATH = 60


def plain(value: Any) -> Any:
    """Return a value that JSON knows; undefined figures become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def contents(analysis: Analysis) -> dict[str, Any]:
    """Return what a recording holds."""
    trace, span = analysis.trace, analysis.trace.span()
    return {
        "meta": trace.meta,
        "length_ns": None if span is None else span[1] - span[0],
        "coverage": {
            key: {"status": found.status, "rows": found.rows, "reason": found.reason}
            for key, found in sorted(trace.coverage.entries.items())
        },
        "processes": trace.processes(),
        "domains": _domains(analysis),
        "steps": {"count": len(analysis.windows), "source": analysis.windows.source},
        "banners": analysis.banners(),
    }


def contents_text(analysis: Analysis, path: str) -> str:
    """Return `contents` for people."""
    found = contents(analysis)
    meta = found["meta"]
    rows = [[key.replace("_", " "), str(value)] for key, value in meta.items() if key not in _HIDDEN_META and value]
    for group in ("versions", "knobs", "config"):
        if isinstance(meta.get(group), dict):
            rows.append([group, " ".join(f"{key}={value}" for key, value in meta[group].items())])
    if found["length_ns"] is not None:
        rows.append(["length", f"{number(found['length_ns'] / 1e6)} ms"])
    rows.append(["steps", f"{found['steps']['count']}, {found['steps']['source']}"])
    for domain, count in found["domains"].items():
        rows.append([f"ranges of {domain}", f"{count:,}"])
    recorded = f"recorded:\n{analysis.trace.coverage.report()}"
    return "\n\n".join([path, text_table(("about", ""), rows, left=2), recorded, *_banner_block(analysis)])


def _domains(analysis: Analysis) -> dict[str, int]:
    ids, counts = np.unique(analysis.trace.ranges.domain, return_counts=True)
    return dict(zip(analysis.trace.name_of(ids).tolist(), counts.tolist(), strict=True))


def _banner_block(analysis: Analysis) -> list[str]:
    """Return what a reader must know first as one part of a text, or nothing."""
    lines = [f"! {line}" for line in analysis.banners()]
    return ["\n".join(lines)] if lines else []


def headline(analysis: Analysis) -> dict[str, Any]:
    """Return the figures that a reader looks for first; times in nanoseconds, shares of one, None without evidence."""
    overview, steps = analysis.overview(), analysis.steps()
    num = len(steps)
    window = overview.window[1] - overview.window[0]

    def a_step(total: float | None) -> float | None:
        return None if total is None or not num else total / num

    def mean(column: np.ndarray | None) -> float | None:
        known = None if column is None else column[~np.isnan(column.astype(np.float64))]
        return float(known.mean()) if known is not None and len(known) else None

    idle, graphs = [each.idle_share for each in overview.devices], analysis.graph_idle()
    return {
        "steps": num,
        "window_ns": window,
        "step_median_ns": float(np.median(steps.wall_ns)) if num else None,
        "cpu_work_a_step_ns": a_step(overview.cpu_work_ns),
        "gpu_busy_a_step_ns": a_step(overview.mean("busy_ns")),
        "overlap_cpu": overview.overlap_cpu,
        "overlap_gpu": overview.overlap_gpu,
        "gpu_utilization": overview.utilization,
        "gpu_idle": None if not idle or any(each is None for each in idle) else sum(idle) / len(idle),  # type: ignore[arg-type]  # no None is left
        "graph_executions": None if graphs is None else graphs.num_executions,
        "idle_between_graphs": None if graphs is None else graphs.between_share,
        "idle_inside_graphs": None if graphs is None else graphs.inside_share,
        "gpu_busy_is_upper_bound": overview.busy_is_upper_bound,
        "exposed_cpu_a_step_ns": a_step(overview.mean("exposed_ns")),
        "bubbles_a_step": a_step(overview.mean("num_bubbles")),
        "bubble_a_step_ns": a_step(overview.mean("bubble_ns")),
        "syncs_a_step": mean(steps.syncs),
        "sync_stall_a_step_ns": mean(steps.sync_stall_ns),
        "run_ahead_steps": mean(steps.run_ahead),
        "launches_a_step": mean(steps.launches),
        "launch_bound": overview.launch_bound,
    }


_WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", str),
    "window_ns": ("window, ms", lambda ns: number(ns / 1e6)),
    "step_median_ns": ("median step, us", lambda ns: number(ns / 1e3, 0)),
    "cpu_work_a_step_ns": ("CPU work a step, us", lambda ns: number(ns / 1e3, 0)),
    "gpu_busy_a_step_ns": ("GPU busy a step, us", lambda ns: number(ns / 1e3, 0)),
    "overlap_cpu": ("overlap: CPU work beside a busy GPU", lambda share: percent(share, 1)),
    "overlap_gpu": ("GPU busy time beside CPU work", lambda share: percent(share, 1)),
    "gpu_utilization": ("GPU busy", lambda share: percent(share, 1)),
    "gpu_idle": ("GPU idle", lambda share: percent(share, 1)),
    "graph_executions": ("CUDA graph executions, warm-up left out", str),
    "idle_between_graphs": ("GPU idle between graphs", lambda share: percent(share, 2)),
    "idle_inside_graphs": ("GPU idle inside graphs", lambda share: percent(share, 2)),
    "exposed_cpu_a_step_ns": ("exposed CPU time a step, us", lambda ns: number(ns / 1e3, 0)),
    "bubbles_a_step": ("bubbles a step", lambda count: number(count, 1)),
    "bubble_a_step_ns": ("bubble time a step, us", lambda ns: number(ns / 1e3, 0)),
    "syncs_a_step": ("host syncs a step", lambda count: number(count, 2)),
    "sync_stall_a_step_ns": ("stalled in syncs a step, us", lambda ns: number(ns / 1e3, 0)),
    "run_ahead_steps": ("run-ahead, steps", lambda count: number(count, 2)),
    "launches_a_step": ("launches a step", lambda count: number(count, 1)),
    "launch_bound": ("launch-bound", lambda flag: "yes" if flag else "no"),
}


def figures(analysis: Analysis, num_kernels: int = 0) -> dict[str, Any]:
    """Return the headline, bubbles by cause, stages, copies and banners."""
    copies, captures = analysis.copies(), analysis.captures()
    found: dict[str, Any] = {
        **headline(analysis),
        "bubble_causes_ns": analysis.overview().causes,
        "stages": analysis.stages().quantiles(),
        "captured_under": None if captures is None else captures.rows(),
        "copies": None if copies is None else copies.rows(),
        "banners": analysis.banners(),
    }
    if num_kernels:
        from mrv2.viz.kernels import kernel_table

        kernels = kernel_table(analysis)
        found["kernels"] = None if kernels is None else kernels.rows()[:num_kernels]
    return found


def figures_text(analyses: Mapping[str, Analysis], num_kernels: int = 0) -> str:
    """Return `figures` for people: several recordings side by side, one with its stages too."""
    heads = {name: headline(each) for name, each in analyses.items()}
    rows = [[words, *(_cell(head[key], text) for head in heads.values())] for key, (words, text) in _WORDS.items()]
    parts = [text_table(("figure", *heads), rows), _causes_table(analyses, heads)]
    bounded = [name for name, head in heads.items() if head["gpu_busy_is_upper_bound"]]
    if bounded:
        which = "" if len(bounded) == len(heads) else f" of {', '.join(bounded)}"
        parts.append(f"GPU busy{which}: an upper bound, whole graphs or stages count as one operation")
    if len(analyses) == 1:
        (analysis,) = analyses.values()
        stages = analysis.stages()
        parts.append(f"time per {stages.per} ({stages.warmup} warm-up left out):\n{stages}")
        captures = analysis.captures()
        if captures is not None:
            parts.append(f"operations of CUDA graphs, by the ranges that were open at their capture:\n{captures}")
        copies = analysis.copies()
        if copies is not None and len(copies):
            parts.append(f"copies, and how much of them ran beside kernels:\n{copies}")
    for name, analysis in analyses.items():
        if num_kernels:
            parts.append(f"{name}\n{_kernels_text(analysis, num_kernels)}")
    lines: dict[str, list[str]] = {}
    for name, analysis in analyses.items():
        for line in analysis.banners():
            lines.setdefault(line, []).append(name)
    banners = [
        f"! {line}" if len(names) == len(heads) else f"! {', '.join(names)}: {line}" for line, names in lines.items()
    ]
    return "\n\n".join([*parts, *(["\n".join(banners)] if banners else [])])


def _cell(value: Any, text: Callable[[Any], str]) -> str:
    return "n/a" if value is None else text(value)


def _causes_table(analyses: Mapping[str, Analysis], heads: Mapping[str, dict[str, Any]]) -> str:
    """Return bubbles by cause: microseconds a step, and the share of the bubbles."""
    found = {name: each.overview().causes for name, each in analyses.items()}
    names = list(dict.fromkeys(cause for causes in found.values() for cause in (causes or {})))
    if not names:
        return "bubbles by cause: " + ("n/a" if all(causes is None for causes in found.values()) else "none")
    rows = []
    for cause in names:
        cells = [cause]
        for name, causes in found.items():
            steps, total = heads[name]["steps"] or 1, sum((causes or {}).values())
            ns = (causes or {}).get(cause, 0)
            cells.append(
                "n/a" if causes is None else f"{ns / steps / 1e3:,.1f} ({percent(ns / total if total else 0)})"
            )
        rows.append(cells)
    per = "a step" if all(head["steps"] for head in heads.values()) else "in all"
    return text_table((f"bubbles by cause, us {per}", *found), rows)


def _kernels_text(analysis: Analysis, limit: int) -> str:
    from mrv2.viz.kernels import kernel_table

    kernels = kernel_table(analysis)
    if kernels is None:
        return "kernels: not collected"
    rows = [
        [
            row["name"],
            row["kind"],
            f"{row['count']:,}",
            number(row["total_ns"] / 1e3, 1),
            percent(row["share"], 1),
            number(row["median_ns"] / 1e3, 1),
        ]
        for row in kernels.rows()[:limit]
    ]
    table = text_table(("kernel", "kind", "count", "total us", "share", "median us"), rows, left=2)
    return f"{table}\n{kernels.note}".rstrip()


def sync_rows(analysis: Analysis, *, each: bool, stacks: bool, limit: int) -> list[dict[str, Any]] | None:
    """Return host waits, dearest first, summed by call and place unless `each`; None if none could be recorded."""
    table = analysis.syncs()
    if table is None:
        return None
    if not each and not stacks:
        return table.per_call()[:limit]
    chosen = table if each else table.in_steps
    rows = chosen.rows()[:limit]
    if stacks:
        for i, row in enumerate(rows):
            frames, source = chosen.stack(i)
            row |= {"stack": frames, "stack_source": source}
    return rows


def syncs_text(analysis: Analysis, rows: list[dict[str, Any]] | None) -> str:
    """Return `sync_rows` for people."""
    if rows is None:
        return f"host waits: n/a ({analysis.trace.coverage['syncs']})"
    if not rows:
        return "no host wait inside the steps"
    steps = len(analysis.windows)
    header = ["wait", "where", "bubble us", "stall us", "held us"]
    is_summed = "count" in rows[0]
    header.insert(2, "count" if is_summed else "step")
    cells = []
    for row in rows:
        label = f"{row['name']}: {row['reason']}" if row["reason"] and row["reason"] not in row["name"] else row["name"]
        path = row["path"] or "no range"
        shown = path if len(path) <= _WIDEST_PATH else f"...{path[-_WIDEST_PATH:]}"
        times = [_us(row[key]) for key in ("induced_bubble_ns", "stall_ns", "duration_ns")]
        cells.append([label, shown, f"{row['count' if is_summed else 'step']:,}", *times])
    parts = [text_table(header, cells, left=2)]
    if is_summed:
        parts.append(
            f"inside {steps} steps; bubble: the GPU idled because of it, stall: the GPU still worked, held: in the call"
        )
    for row in rows:
        if "stack" in row:
            frames = "\n".join(f"    {frame}" for frame in row["stack"]) or "    unknown"
            parts.append(f"{row['name']} at {row['start']} ({row['stack_source']}):\n{frames}")
    return "\n\n".join([*parts, *_banner_block(analysis)])


def _us(ns: float | None) -> str:
    return "n/a" if ns is None or ns != ns else number(ns / 1e3, 1)


def bubbles(analysis: Analysis, limit: int) -> dict[str, Any] | None:
    """Return gaps by cause and the longest ones; None without GPU rows."""
    found = analysis.bubbles()
    if found is None:
        return None
    hidden = ("next_op", "process", "thread")
    longest = [{k: v for k, v in row.items() if k not in hidden} for row in found.longest(limit).rows()]
    return {
        "count": len(found),
        "total_ns": found.total_ns,
        "causes_ns": found.by_cause(),
        "rollup_ns": found.rollup(),
        "longest": longest,
    }


def bubbles_text(analysis: Analysis, found: dict[str, Any] | None) -> str:
    """Return `bubbles` for people."""
    if found is None:
        return f"bubbles: n/a ({analysis.trace.coverage['ops']})"
    total = found["total_ns"]
    window = analysis.window[1] - analysis.window[0]
    share = percent(total / window if window else None, 1)
    parts = [f"{found['count']:,} bubbles, {number(total / 1e3, 0)} us, {share} of {number(window / 1e6)} ms"]
    if total:
        rows = [[cause, number(ns / 1e3, 1), percent(ns / total, 1)] for cause, ns in found["causes_ns"].items()]
        parts.append(text_table(("cause", "us", "share"), rows))
        rollup = ", ".join(f"{name} {percent(ns / total, 1)}" for name, ns in found["rollup_ns"].items())
        parts.append(f"in HTA's terms: {rollup}")
        rows = [
            [row["main_cause"], str(row["step"]), number(row["length_ns"] / 1e3, 1), str(row["start"])]
            for row in found["longest"]
        ]
        parts.append(text_table(("longest, mostly", "step", "us", "start ns"), rows))
    return "\n\n".join([*parts, *_banner_block(analysis)])
