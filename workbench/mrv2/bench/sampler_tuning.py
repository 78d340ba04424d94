"""Time of candidate launches of the drawing kernels: what `mrv2_kernels.sampling.launches` is filled from.

Each candidate is compiled, and its draws compared with the torch reference's, in another process first; one that
fails is reported and left out.  Then all are timed as `mrv2.bench.samplers` times variants.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch

from mrv2.bench.bandwidth import measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.bench.failures import reason_of
from mrv2.bench.samplers import ROWS, VOCAB, SamplerBatch
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2_kernels.sampling.launches import BlockedLaunch, FusedLaunch, TruncatedLaunch

KIND = "mrv2-sampler-launches"
# rows of a check: whatever is compiled for them serves every batch
_CHECK_ROWS = 6
_MAX_WORKERS = 12
_NO_TIME = "no time was left"


class Candidate(NamedTuple):
    """One way to launch a kernel."""

    # plain, greedy or top-k/p, as `SamplerBatch` draws them; the variant that launches the kernel
    case: str
    variant: str
    # module of mrv2_kernels.sampling, and what its names stand for meanwhile
    module: str
    values: tuple[tuple[str, Any], ...]
    name: str

    @property
    def group(self) -> str:
        """Candidates of one group stand for each other."""
        return f"{self.case} {self.variant}"

    @property
    def key(self) -> str:
        """What a failure is reported under."""
        return f"{self.group}: {self.name}"

    @contextmanager
    def used(self) -> Iterator[None]:
        """Launch by this candidate meanwhile, whatever the batch."""
        module = import_module(f"mrv2_kernels.sampling.{self.module}")
        before = {name: getattr(module, name) for name, _ in self.values}
        try:
            for name, value in self.values:
                setattr(module, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)


def candidates() -> list[Candidate]:
    """Return what is tried."""
    found = []
    for block, num_warps, step, span, is_split in (
        (4096, 4, 512, 1, False),
        (2048, 4, 512, 1, False),
        (2048, 2, 256, 1, False),
        (1024, 1, 64, 1, True),
        (1024, 1, 64, 3, False),
        (1024, 1, 64, 3, True),
        (1024, 1, 64, 5, True),
        (1024, 1, 64, 10, True),
        (1024, 1, 64, 19, False),
        (1024, 1, 64, 19, True),
        (1024, 2, 128, 5, True),
        (1024, 2, 128, 15, True),
        (512, 1, 64, 15, True),
    ):
        launch = FusedLaunch(block, num_warps, step, span, is_split)
        for case in ("plain", "greedy"):
            found.append(_candidate(case, "gumbel_fused", "gumbel_fused", FUSED=launch))
    for num_warps, span, pick_warps in (
        (4, 1, 4),
        (4, 1, 8),
        (4, 1, 16),
        (4, 2, 4),
        (4, 2, 8),
        (4, 3, 8),
        (4, 5, 8),
        (2, 1, 8),
        (2, 3, 8),
        (1, 1, 8),
        (1, 3, 8),
        (8, 1, 8),
        (8, 2, 8),
    ):
        launch = BlockedLaunch(span, pick_warps)
        for case in ("plain", "greedy"):
            candidate = _candidate(case, "gumbel_blocked", "gumbel_blocked", _NUM_WARPS=num_warps, BLOCKED=launch)
            found.append(candidate)
    for repeats, num_warps, draw_warps, collect, *draws_wide in (
        (8, 4, 8, 2048),
        (8, 4, 8, 4096),
        (10, 4, 8, 4096),
        (5, 2, 8, 2048),
        (5, 4, 4, 2048),
        (5, 4, 8, 1024),
        (5, 4, 8, 2048),
        (5, 4, 8, 4096),
        (5, 4, 16, 2048),
        (5, 4, 16, 4096),
        (4, 4, 8, 2048),
        (4, 4, 16, 2048),
        (3, 4, 16, 2048),
        (5, 4, 8, 4096, True),
        (5, 4, 16, 2048, True),
        (5, 4, 16, 4096, True),
        (4, 4, 16, 4096, True),
        (3, 4, 16, 2048, True),
        (3, 4, 16, 4096, True),
    ):
        launch = TruncatedLaunch(repeats, num_warps, True, draw_warps, collect, *draws_wide)
        found.append(_candidate("top-k/p", "gumbel_fused", "gumbel_truncated", TRUNCATED=launch))
    return found


def _candidate(
    case: str, variant: str, module: str, **values: FusedLaunch | BlockedLaunch | TruncatedLaunch | int
) -> Candidate:
    parts, names = [], []
    for name, value in values.items():
        if isinstance(value, int):
            parts.append(f"{name.strip('_').lower()}={value}")
            names.append((name, value))
        else:
            parts.append(" ".join(f"{key}={int(each)}" for key, each in value._asdict().items()))
            names.append((name, ((1, value),)))
    return Candidate(case, variant, module, tuple(names), " ".join(parts))


def check(candidate: Candidate) -> str:
    """Draw by a candidate and by its reference; return what is wrong, or nothing.  Run in a process of its own."""
    try:
        device = make_device("cuda")
        batch = SamplerBatch(device, _CHECK_ROWS, VOCAB, num_buffers=1)
        tokens: list[list[int]] = []

        def draw_both() -> None:
            for is_reference in (False, True):
                batch.sampled.fill_(-9)
                batch.draw(candidate.variant, batch.buffers[0], candidate.case, is_reference=is_reference)
                tokens.append(batch.sampled.tolist())

        with candidate.used():
            device.main.run("measure", draw_both)
        device.close()
    except Exception as error:  # whatever a compiler raises is a finding
        return reason_of(error)
    return "" if tokens[0] == tokens[1] else f"draws {tokens[0]}, the reference {tokens[1]}"


def _check_in_turn(turn: Sequence[Candidate], until: float) -> list[str]:
    """Return what is wrong with each; they are checked in one process, and in a new one after a failure."""
    reasons: list[str] = []
    with ExitStack() as stack:
        process = None
        for each in turn:
            if time.monotonic() > until:
                reasons.append(_NO_TIME)
                continue
            if process is None:
                process = stack.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
            try:
                reason = process.submit(check, each).result()
            except Exception as error:  # the process died, or could not start
                reason = reason_of(error)
            reasons.append(reason)
            if reason:
                process = None
    return reasons


def tune_samplers(
    device: Device, *, seconds: float = math.inf, progress: Callable[[str], object] = print
) -> dict[str, Any]:
    """Check and time the candidates that `seconds` suffice for; return the record as plain values.  CUDA only."""
    if device.type != "cuda":
        raise ConfigError("--samplers --tune measures kernels: it needs a CUDA device")
    until = time.monotonic() + seconds
    tried = candidates()
    workers = max(1, min(len(tried), os.cpu_count() or 1, _MAX_WORKERS))
    progress(f"samplers: {len(tried)} candidates are compiled and checked by {workers} processes")
    limit = measure_read_bandwidth(device)
    turns = [tried[index::workers] for index in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        reasons = list(pool.map(_check_in_turn, turns, [until] * workers))
    failures: dict[str, str] = {}
    alive = []
    for turn, whys in zip(turns, reasons, strict=True):
        for each, why in zip(turn, whys, strict=True):
            if why:
                failures[each.key] = why
            else:
                alive.append(each)
    alive.sort(key=tried.index)
    times: list[dict[str, Any]] = []
    # the largest batch first: it is what a bound in time should leave out last
    for num_rows in sorted(ROWS, reverse=True):
        progress(f"samplers: {num_rows} rows, {len(alive)} candidates")
        batch = SamplerBatch(device, num_rows, VOCAB)
        for each in alive:
            if time.monotonic() > until:
                failures[each.key] = _NO_TIME
                continue
            try:
                with each.used():
                    duration, _ = batch.seconds(each.variant, each.case)
            except Exception as error:  # one candidate must not cost the others
                failures[each.key] = reason_of(error)
                continue
            times.append({"group": each.group, "name": each.name, "num_rows": num_rows, "us": 1e6 * duration})
        del batch
        torch.cuda.empty_cache()
    return make_record(times, failures, limit.value, VOCAB)


def make_record(
    times: list[dict[str, Any]], failures: dict[str, str], bytes_per_second: float, vocab: int
) -> dict[str, Any]:
    """Return the record: every time, and of each group and batch the fastest with its share of the reads' rate."""
    best = {}
    for group in dict.fromkeys(each["group"] for each in times):
        for num_rows in sorted({each["num_rows"] for each in times if each["group"] == group}):
            fastest = min(
                (each for each in times if (each["group"], each["num_rows"]) == (group, num_rows)),
                key=lambda each: each["us"],
            )
            share = num_rows * vocab * 2 / (fastest["us"] * 1e-6) / bytes_per_second
            best[f"{group} {num_rows}"] = {"name": fastest["name"], "us": fastest["us"], "share": share}
    return {
        "kind": KIND,
        "environment": environment(),
        "vocab": vocab,
        "read_gigabytes_per_second": 1e-9 * bytes_per_second,
        "times": times,
        "failures": failures,
        "best": best,
    }


def report(record: dict[str, Any]) -> str:
    """Return the times as a table, then the fastest of each group and batch."""
    rows = sorted({each["num_rows"] for each in record["times"]})
    found = {(each["group"], each["name"], each["num_rows"]): each["us"] for each in record["times"]}
    head = f"microseconds, and share of reads at {record['read_gigabytes_per_second']:,.0f} GB/s"
    lines = [f"{head:84}" + "".join(f"{f'N = {n}':>16}" for n in rows)]
    for group, name in dict.fromkeys((group, name) for group, name, _ in found):
        cells = ""
        for n in rows:
            us = found.get((group, name, n))
            share = 0.0 if us is None else n * record["vocab"] * 2e-3 / us / record["read_gigabytes_per_second"]
            cells += f"{'-':>16}" if us is None else f"{us:>10.1f}{share:>6.0%}"
        lines.append(f"{group:22} {name:61}{cells}")
    lines += [f"failed {name}: {why}" for name, why in record["failures"].items()]
    lines.append("best")
    lines += [
        f"{key:28} {each['us']:6.1f} us {each['share']:5.0%} of read  {each['name']}"
        for key, each in record["best"].items()
    ]
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    best = {key: [round(each["us"], 1), each["name"]] for key, each in record["best"].items()}
    return {"kind": KIND, "best": best, "failed": len(record["failures"])}
