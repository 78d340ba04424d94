"""Time of candidate launches of the drawing kernels: what `mrv2_kernels.sampling.launches` is filled from.

Each candidate is compiled, and its draws compared with the torch reference's, in a process of its own first; one
that fails is reported and left out.  Then all are timed as `mrv2.bench.samplers` times variants.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch

from mrv2.bench.bandwidth import measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.bench.samplers import ROWS, VOCAB, SamplerBatch
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2_kernels.sampling.launches import BlockedLaunch, FusedLaunch, TruncatedLaunch

KIND = "mrv2-sampler-launches"
# rows of a check: whatever is compiled for them serves every batch
_CHECK_ROWS = 6
_MAX_WORKERS = 12


class Candidate(NamedTuple):
    """One way to launch a kernel."""

    # plain or top-k/p, as `SamplerBatch` draws them; the variant that launches the kernel
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
    for block, num_warps, step in (
        (4096, 8, 512),
        (4096, 4, 512),
        (4096, 2, 512),
        (4096, 2, 256),
        (4096, 1, 256),
        (8192, 8, 512),
        (8192, 4, 512),
        (2048, 4, 512),
        (2048, 2, 256),
        (2048, 1, 256),
    ):
        launch = FusedLaunch(block, num_warps, step)
        found.append(_candidate("plain", "gumbel_fused", "gumbel_fused", FUSED=launch))
    for num_warps in (1, 2, 4, 8):
        for span, is_split in ((1, False), (1, True), (2, True), (4, True)):
            if num_warps * span != 4:
                launch = BlockedLaunch(span, is_split)
                found.append(
                    _candidate("plain", "gumbel_blocked", "gumbel_blocked", BLOCKED=launch, _NUM_WARPS=num_warps)
                )
    for launch in (
        TruncatedLaunch(8, 4, False, collect=1024),
        TruncatedLaunch(8, 4, False, collect=4096),
        TruncatedLaunch(4, 4, False, collect=2048),
        TruncatedLaunch(4, 4, True, draw_warps=8, collect=2048),
        TruncatedLaunch(4, 4, True, draw_warps=16, collect=4096),
        TruncatedLaunch(8, 4, True, draw_warps=4, collect=2048),
        TruncatedLaunch(8, 4, True, draw_warps=8, collect=2048),
        TruncatedLaunch(8, 4, True, draw_warps=8, collect=4096),
        TruncatedLaunch(8, 2, True, draw_warps=8, collect=4096),
        TruncatedLaunch(16, 4, True, draw_warps=8, collect=4096),
    ):
        found.append(_candidate("top-k/p", "gumbel_fused", "gumbel_truncated", TRUNCATED=launch))
    return found


def _candidate(
    case: str, variant: str, module: str, **values: FusedLaunch | BlockedLaunch | TruncatedLaunch | int
) -> Candidate:
    parts, names = [], []
    for name, value in values.items():
        if isinstance(value, int):
            parts.append(f"warps={value}")
            names.append((name, value))
        else:
            parts.append(" ".join(f"{key}={each}" for key, each in value._asdict().items()))
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
        return _reason(error)
    return "" if tokens[0] == tokens[1] else f"draws {tokens[0]}, the reference {tokens[1]}"


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _alone(candidate: Candidate) -> str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(check, candidate).result()
        except Exception as error:  # the process died, or could not start
            return _reason(error)


def tune_samplers(device: Device, *, progress: Callable[[str], object] = print) -> dict[str, Any]:
    """Check and time all candidates; return the record as plain values.  CUDA only."""
    if device.type != "cuda":
        raise ConfigError("--samplers --tune measures kernels: it needs a CUDA device")
    tried = candidates()
    workers = max(1, min(len(tried), os.cpu_count() or 1, _MAX_WORKERS))
    progress(f"samplers: {len(tried)} candidates are compiled and checked by {workers} processes")
    with ThreadPoolExecutor(workers) as pool:
        reasons = list(pool.map(_alone, tried))
    failures = {f"{each.group}: {each.name}": why for each, why in zip(tried, reasons, strict=True) if why}
    alive = [each for each, why in zip(tried, reasons, strict=True) if not why]
    limit = measure_read_bandwidth(device)
    times: list[dict[str, Any]] = []
    for num_rows in ROWS:
        progress(f"samplers: {num_rows} rows, {len(alive)} candidates")
        batch = SamplerBatch(device, num_rows, VOCAB)
        for each in alive:
            try:
                with each.used():
                    seconds, _ = batch.seconds(each.variant, each.case)
            except Exception as error:  # one candidate must not cost the others
                failures[f"{each.group}: {each.name}"] = _reason(error)
                continue
            times.append({"group": each.group, "name": each.name, "num_rows": num_rows, "us": 1e6 * seconds})
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
        "read_gigabytes_per_second": 1e-9 * bytes_per_second,
        "times": times,
        "failures": failures,
        "best": best,
    }


def report(record: dict[str, Any]) -> str:
    """Return the times as a table, then the fastest of each group and batch."""
    rows = sorted({each["num_rows"] for each in record["times"]})
    found = {(each["group"], each["name"], each["num_rows"]): each["us"] for each in record["times"]}
    lines = [f"{'microseconds':84}" + "".join(f"{f'N = {n}':>9}" for n in rows)]
    for group, name in dict.fromkeys((group, name) for group, name, _ in found):
        cells = (found.get((group, name, n)) for n in rows)
        lines.append(f"{group:22} {name:61}" + "".join(f"{'-' if us is None else f'{us:.1f}':>9}" for us in cells))
    lines += [f"failed {name}: {why}" for name, why in record["failures"].items()]
    lines.append(f"best (reads at {record['read_gigabytes_per_second']:,.0f} GB/s)")
    lines += [
        f"{key:28} {each['us']:6.1f} us {each['share']:5.0%} of read  {each['name']}"
        for key, each in record["best"].items()
    ]
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    best = {key: [round(each["us"], 1), each["name"]] for key, each in record["best"].items()}
    return {"kind": KIND, "best": best, "failed": len(record["failures"])}
