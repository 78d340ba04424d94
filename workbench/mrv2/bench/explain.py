"""The kernel budget of a decode step: for each part of the model, its kernels, microseconds, bytes and bandwidth.

A graph replay says how long its kernels took, but not for whom; a step without graphs says for whom, but its kernels
start far apart.  So one step without graphs, with a range around each part, gives the order of parts and kernels, and
the replays of the same batch give the times: both submit the same kernels in the same order, which is checked.

Bytes are counted once each: the tensors that a part is given and returns, its weights, and for attention the keys
and values of the context.  What the L2 cache serves counts as well, so the share of the bandwidth of parts without
weights can exceed one.  A kernel that starts ahead of its predecessor's end (`mrv2_kernels.gemm.pdl`) waits inside
itself, and its time counts that wait: the kernels of a step then add up to more than the step, and a part's share is an
upper bound of what it costs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from mrv2.bench.bandwidth import Limit
from mrv2.bench.environment import environment
from mrv2.bench.growth import decoding, run_steps
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError
from mrv2.instrument import stage
from mrv2.record import record
from mrv2.trace import OpKind, Trace
from mrv2.trace.analysis.join import join_launches
from mrv2_models.causal_lm import CausalLM, SelfAttention
from mrv2_models.layers import VocabEmbedding

KIND = "mrv2-explain"
# methods of modules that launch kernels
_METHODS = ("forward", "add", "of_sum", "attend", "project", "rotate", "normed")
_PART = "part: "
# keys and values are read by what is left of the attention module when its products are taken out
_ATTENTION = "attention"
_NUM_STEPS = 8


@dataclass(frozen=True)
class PartCost:
    """One part of a step, all layers together."""

    part: str
    # names of its kernels, the most frequent first
    kernels: tuple[str, ...]
    kernels_per_step: float
    microseconds: float
    share: float
    # None = not counted: stages outside the model
    bytes: int | None
    # of the measured read bandwidth
    bandwidth_share: float | None


@dataclass(frozen=True)
class Budget:
    """One batch."""

    num_requests: int
    context: int
    # sum of the kernels of a step, and from its first kernel's start to its last one's end
    kernel_us: float
    span_us: float
    parts: list[PartCost]


@dataclass(frozen=True)
class Kernels:
    """The kernels of recorded steps, in the order of their execution."""

    # n of them
    names: list[str]
    # [n] int64, ns
    durations: np.ndarray
    # innermost part or stage of each, "" = launched by a graph
    owners: list[str]
    first_start: int
    last_end: int


def measure_budget(
    core: EngineCore, batches: Sequence[int], context: int, limit: Limit, progress: Callable[[str], object] = print
) -> list[Budget]:
    """Return the budget of each batch under the engine's knobs.

    Raises `ConfigError` without CUDA, without graphs, or if a graph does not hold the kernels of the labelled step.
    """
    knobs, found = core.knobs, []
    if core.device.type != "cuda" or knobs.cuda_graphs == "off":
        raise ConfigError(
            "--explain reads the times of kernels in graphs: it needs CUDA and cuda_graphs other than off"
        )
    for num_requests in batches:
        progress(f"explain: {num_requests} requests")
        with decoding(core, num_requests, context, 4 * _NUM_STEPS):
            core.set_knobs(cuda_graphs="off")
            run_steps(core, 2)
            with labelled(core.executor.model) as sizes:
                with record(steps=1, level="kernels", core=core) as rec:
                    run_steps(core, 2)
                labels = kernels_of(rec.trace())
            core.set_knobs(cuda_graphs=knobs.cuda_graphs)
            run_steps(core, 4)
            with record(steps=_NUM_STEPS, level="kernels", core=core) as rec:
                run_steps(core, _NUM_STEPS)
            timed = kernels_of(rec.trace())
        kv_bytes = num_requests * context * core.model_config.num_hidden_layers * _kv_bytes(core)
        bytes_of = {part: size.per_step + (kv_bytes if part == _ATTENTION else 0) for part, size in sizes.items()}
        found.append(make_budget(num_requests, context, labels, timed, bytes_of, limit.value))
    return found


def _kv_bytes(core: EngineCore) -> int:
    """Keys and values of one token in one layer."""
    config = core.model_config
    return 2 * config.num_key_value_heads * config.head_dim * core.executor.groups[0].spec.dtype.itemsize


@dataclass
class PartSize:
    """Bytes that a part's calls have touched, and the ids of the modules that were called."""

    modules: set[int] = field(default_factory=set)
    num_calls: int = 0
    num_bytes: int = 0

    @property
    def per_step(self) -> int:
        """Bytes of one step, in which each of the modules is called once."""
        return self.num_bytes * len(self.modules) // max(self.num_calls, 1)


@contextmanager
def labelled(model: CausalLM) -> Iterator[dict[str, PartSize]]:
    """Inside the block a range stands around each part of the model; yield the sizes, filled as parts are called."""
    sizes: dict[str, PartSize] = {}
    wrapped: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        part = ".".join(word for word in path.split(".") if word != "layers" and not word.isdigit())
        own = list(module.parameters(recurse=False))
        if not part or not (own or isinstance(module, SelfAttention)):
            continue
        for name in _METHODS:
            method = getattr(module, name, None)
            if method is None:
                continue
            label = part if name in ("forward", "add", "of_sum", "attend", "normed") else f"{part}.{name}"
            # rows of an embedding are looked up, the matrix is not read through
            read = [] if isinstance(module, VocabEmbedding) and name != "project" else own
            size = sizes.setdefault(label, PartSize())
            module.__dict__[name] = _with_range(method, label, size, id(module), read)
            wrapped.append((module, name))
    try:
        yield sizes
    finally:
        for module, name in wrapped:
            del module.__dict__[name]


def _with_range(
    method: Callable[..., Any], label: str, size: PartSize, module: int, weights: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        num_calls = size.num_calls
        with stage(_PART + label):
            out = method(*args, **kwargs)
        if size.num_calls > num_calls:
            # a method of the same part did the work, and has counted it
            return out
        # caches come in tuples: only what is handed over as it is counts
        touched = [*weights, *(out if isinstance(out, tuple) else (out,)), *args]
        size.modules.add(module)
        size.num_calls += 1
        size.num_bytes += sum(t.numel() * t.element_size() for t in touched if isinstance(t, torch.Tensor))
        return out

    return call


def kernels_of(trace: Trace) -> Kernels:
    """Return the kernels of a trace, each with the innermost of our ranges that it was launched in."""
    ops, api = trace.ops, trace.api
    rows = np.flatnonzero(ops.kind == OpKind.KERNEL)
    ours = trace.ranges.take(trace.ranges.domain == trace.string_id("mrv2"))

    def owner(launch: int) -> str:
        if launch < 0 or "GraphLaunch" in trace.strings[int(api.name[launch])]:
            return ""
        at, thread = int(api.start[launch]), int(api.thread[launch])
        around = np.flatnonzero((ours.start <= at) & (ours.end >= at) & (ours.thread == thread))
        return trace.strings[int(ours.name[around[-1]])] if len(around) else ""

    return Kernels(
        names=[trace.strings[int(name)] for name in ops.name[rows]],
        durations=ops.end[rows] - ops.start[rows],
        owners=[owner(launch) for launch in join_launches(trace).call[rows].tolist()],
        first_start=int(ops.start[rows].min(initial=np.iinfo(np.int64).max)),
        last_end=int(ops.end[rows].max(initial=0)),
    )


def make_budget(
    num_requests: int,
    context: int,
    labels: Kernels,
    timed: Kernels,
    bytes_of: Mapping[str, int],
    bandwidth: float,
) -> Budget:
    """Give the kernels of a graph their owners, and add up.

    Args:
        labels: one step without graphs; `timed`: whole steps of the same batch with them.
        bytes_of: part -> bytes of a step.
        bandwidth: bytes a second.

    Raises `ConfigError` if the graphs do not hold the kernels of the labelled step.
    """
    pairs = zip(labels.names, labels.owners, strict=True)
    expected = [(name, owner) for name, owner in pairs if owner.startswith(_PART)]
    times: dict[str, int] = {}
    kernels: dict[str, Counter[str]] = {}
    at = 0
    for name, found, ns in zip(timed.names, timed.owners, timed.durations.tolist(), strict=True):
        owner = found
        if not owner:
            owner = "rest of the graph"
            if expected and name == expected[at % len(expected)][0]:
                owner = expected[at % len(expected)][1]
                at += 1
        times[owner] = times.get(owner, 0) + ns
        kernels.setdefault(owner, Counter())[name] += 1
    if not at or at % len(expected):
        raise ConfigError(
            f"the graphs do not repeat the {len(expected)} kernels of the forward pass without graphs: {at} were found"
        )
    num_steps, total = at // len(expected), sum(times.values())
    parts = []
    for owner, ns in sorted(times.items(), key=lambda item: -item[1]):
        part, us = owner.removeprefix(_PART), 1e-3 * ns / num_steps
        moved = bytes_of.get(part) if owner.startswith(_PART) else None
        parts.append(
            PartCost(
                part=part,
                kernels=tuple(name for name, _ in kernels[owner].most_common()),
                kernels_per_step=sum(kernels[owner].values()) / num_steps,
                microseconds=us,
                share=ns / total,
                bytes=moved,
                bandwidth_share=None if moved is None else moved / (us * 1e-6) / bandwidth,
            )
        )
    span = 1e-3 * (timed.last_end - timed.first_start) / num_steps
    return Budget(num_requests, context, 1e-3 * total / num_steps, span, parts)


def make_record(core: EngineCore, budgets: Sequence[Budget], limit: Limit) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "dtype": str(core.executor.model.dtype).removeprefix("torch."),
        "knobs": core.knobs.as_dict(),
        "read_bytes_per_s": limit.value,
        "read_method": limit.method,
        "budgets": [asdict(each) for each in budgets],
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as one table a batch."""
    lines = [f"{record['model']} {record['dtype']}; reads at {record['read_bytes_per_s'] / 1e9:,.0f} GB/s"]
    for each in record["budgets"]:
        lines += [
            "",
            f"{each['num_requests']} requests, context {each['context']}: kernels {each['kernel_us']:,.0f} us a step; "
            f"{each['span_us']:,.0f} us from step to step, which recording every kernel stretches",
            f"{'part':<24}{'kernels':>8}{'us':>9}{'share':>7}{'MB':>9}{'of read':>9}  kernel",
        ]
        for part in each["parts"]:
            moved = "-" if part["bytes"] is None else f"{part['bytes'] / 1e6:,.2f}"
            reached = "-" if part["bandwidth_share"] is None else f"{part['bandwidth_share']:.0%}"
            lines.append(
                f"{part['part']:<24}{part['kernels_per_step']:>8.0f}{part['microseconds']:>9.1f}{part['share']:>7.1%}"
                f"{moved:>9}{reached:>9}  {part['kernels'][0][:44]}"
            )
    return "\n".join(lines)
