"""Traces for the tests of mrv2.viz: one small one whose picture is known by heart, and random ones."""

from __future__ import annotations

import numpy as np

from mrv2.trace.strings import StringPool
from mrv2.trace.table import Api, OpKind, Ops, Ranges, Syncs, SyncType, Trace, Waits

STEP_NS = 10_000
NUM_STEPS = 4


def small_trace() -> Trace:
    """Return four steps of 10 us.

    Each: schedule, execute_model with a nested forward, one launch of two kernels on stream 7, an output copy on stream
    17 and a wait for it.  In the last step the two kernels overlap.
    """
    pool = StringPool()
    mrv2 = pool.id("mrv2")
    ranges: list[tuple[int, int, str, int]] = []
    api: list[tuple[int, int, str, int]] = []
    ops: list[tuple[int, int, str, int, int, int, int]] = []
    syncs: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        t = 1_000_000 + step * STEP_NS
        ranges += [
            (t, t + 1000, "schedule", step),
            (t + 1000, t + 5000, "execute_model", step),
            (t + 1500, t + 4000, "forward", step),
            (t + 8000, t + 9800, "wait_output", step),
        ]
        api += [
            (t + 2000, t + 2500, "cudaGraphLaunch", 2 * step + 1),
            (t + 5000, t + 5200, "cudaMemcpyAsync", 2 * step + 2),
            (t + 8000, t + 9500, "cudaEventSynchronize", 100 + step),
        ]
        second = t + 4500 if step == NUM_STEPS - 1 else t + 5500
        ops += [
            (t + 3000, t + 5000, "_decode_kernel", OpKind.KERNEL, 7, 2 * step + 1, -1),
            (second, t + 7500, "nvjet_gemm", OpKind.KERNEL, 7, 2 * step + 1, -1),
            (t + 7600, t + 9000, "Memcpy DtoH", OpKind.MEMCPY, 17, 2 * step + 2, 1400),
        ]
        syncs.append((t + 8000, t + 9500))
    column = lambda rows, i: np.array([row[i] for row in rows])  # noqa: E731  # shorter than four loops
    names = lambda rows: pool.ids(row[2] for row in rows)  # noqa: E731  # as above
    trace = Trace(
        ops=Ops.make(
            start=column(ops, 0), end=column(ops, 1), name=names(ops), kind=column(ops, 3), stream=column(ops, 4),
            corr=column(ops, 5), bytes=column(ops, 6), process=1,
        ),
        api=Api.make(
            start=column(api, 0), end=column(api, 1), name=names(api), corr=column(api, 3), process=1, thread=5
        ),
        ranges=Ranges.make(
            start=column(ranges, 0), end=column(ranges, 1), name=names(ranges), step=column(ranges, 3), domain=mrv2,
            process=1, thread=5, end_thread=5,
        ),
        syncs=Syncs.make(
            start=column(syncs, 0), end=column(syncs, 1), name=pool.id("cudaEventSynchronize"), process=1, thread=5,
            sync_type=SyncType.EVENT, corr=np.arange(100, 100 + NUM_STEPS),
        ),
        waits=Waits.make(),
        strings=pool.values,
        thread_names={(1, 5): "engine"},
        meta={"source": "nsight", "granularity": "none", "gpu_name": "Test GPU", "path": "/recordings/small.sqlite"},
    )  # fmt: skip
    for key in ("ops", "ops.kernel", "ops.memcpy", "api", "ranges", "syncs"):
        trace.coverage.set(key, 1)
    return trace


def host_only_trace() -> Trace:
    """Return a trace with ranges and nothing else, as a profiler of the host alone leaves it."""
    full = small_trace()
    return Trace(ranges=full.ranges, strings=full.strings, meta={"source": "nsight", "granularity": "none"})


def big_trace(num_kernels: int, seed: int = 0) -> Trace:
    """Return steps of 200 launches and kernels each, 2 % of them copies on a second stream, one sync a step."""
    rng = np.random.default_rng(seed)
    pool = StringPool()
    kernels = pool.ids(["_decode_kernel", "nvjet_gemm", "_rms_norm_kernel", "_gumbel_sample_kernel", "_slot_mapping"])
    num_steps = num_kernels // 200
    length = rng.lognormal(8, 0.6, num_kernels).astype(np.int64) + 200
    end = np.cumsum(length + rng.exponential(300, num_kernels).astype(np.int64))
    start = end - length
    # one after the other: kernels begin at least 200 ns apart
    called = start - 12_000 + rng.integers(0, 150, num_kernels)
    returned = np.minimum(called + rng.integers(800, 2_500, num_kernels), np.append(called[1:], 2**62))
    is_copy = rng.random(num_kernels) < 0.02
    opens = called[::200][:num_steps]
    spans = np.append(opens[1:], returned[-1]) - opens
    stages = (
        ("schedule", 0.0, 0.1),
        ("execute_model", 0.1, 0.6),
        ("sample_tokens", 0.6, 0.8),
        ("wait_output", 0.8, 1.0),
    )
    waits = opens + (0.85 * spans).astype(np.int64)
    trace = Trace(
        ops=Ops.make(
            start=start, end=end, stream=np.where(is_copy, 17, 7), corr=np.arange(num_kernels), process=1,
            kind=np.where(is_copy, OpKind.MEMCPY, OpKind.KERNEL), bytes=np.where(is_copy, 256, -1),
            name=np.where(is_copy, pool.id("Memcpy DtoH"), rng.choice(kernels, num_kernels)),
        ),
        api=Api.make(
            start=called, end=returned, process=1, thread=5, corr=np.arange(num_kernels),
            name=np.where(is_copy, pool.id("cudaMemcpyAsync"), pool.id("cudaLaunchKernel")),
        ),
        ranges=Ranges.make(
            start=np.concatenate([opens + (a * spans).astype(np.int64) for _, a, _ in stages]),
            end=np.concatenate([opens + (b * spans).astype(np.int64) for _, _, b in stages]),
            name=np.repeat(pool.ids(name for name, _, _ in stages), num_steps), domain=pool.id("mrv2"),
            process=1, thread=5, end_thread=5, step=np.tile(np.arange(num_steps), len(stages)),
        ),
        syncs=Syncs.make(
            start=waits, end=waits + 3_000, process=1, thread=5, sync_type=SyncType.EVENT,
            name=pool.id("cudaEventSynchronize"),
        ),
        strings=pool.values,
        meta={"source": "synthetic", "granularity": "none"},
    )  # fmt: skip
    for key in ("ops", "ops.kernel", "ops.memcpy", "api", "ranges", "syncs"):
        trace.coverage.set(key, 1)
    return trace
