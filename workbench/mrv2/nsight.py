"""Comparing samplers kernel by kernel, through nsight-python (NVIDIA Nsight Compute).

nsight-python must be imported before CUDA and NVTX are used; importing this module first and calling
`load_nsight` at the top of a script does that.
"""

from __future__ import annotations

import functools
import operator
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from mrv2.config import legal_values
from mrv2.errors import ConfigError, MRV2Error, nearest
from mrv2.instrument.nsight_python import started_too_early
from mrv2.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from mrv2_kernels.sampling.truncation import Truncation
    from mrv2_kernels.sampling.workspace import DrawWorkspace

MIN_NCU = "2026.2.1"
_RANGE = "mrv2-sampler"
_TORCH = "torch"
_DTYPES = ("bfloat16", "float16", "float32")


class NsightError(MRV2Error, RuntimeError):
    """nsight-python or Nsight Compute is absent, too old, or came too late."""


@dataclass(frozen=True)
class SamplerInput:
    """One step's rows, as a sampler sees them; all have the same parameters."""

    # [B, V]
    logits: torch.Tensor
    # [B] int32, position of the input token; and row -> its parameters
    positions: torch.Tensor
    rows: torch.Tensor
    # [B] float32
    temperature: torch.Tensor
    # [B] int64
    seeds: torch.Tensor
    # None = no min-p, top-k and top-p
    truncation: Truncation | None
    workspace: DrawWorkspace
    # [B] int64, out
    sampled: torch.Tensor


Sampler = Callable[[SamplerInput], object]


def load_nsight() -> Any:
    """Import and return nsight-python.

    Raises:
        NsightError: it is not installed, or CUDA or NVTX was initialised before it could hook itself in.
    """
    if "nsight" not in sys.modules:
        too_early = started_too_early()
        if too_early is not None:
            raise NsightError(
                f"nsight-python must be imported before {too_early} is initialised, and it is by now: restart the "
                "process and put `from mrv2.nsight import load_nsight; load_nsight()` first"
            )
    try:
        return import_module("nsight")
    except ImportError as error:
        if getattr(error, "name", None) not in (None, "nsight"):
            raise NsightError(f"nsight-python cannot be imported: {error}") from error
        raise NsightError(
            f"nsight-python is not installed: pip install nsight-python; it also needs Nsight Compute {MIN_NCU} or "
            "newer (ncu) on PATH"
        ) from None


def compare_samplers(
    variants: Sequence[str] | Mapping[str, Sampler] = ("gumbel_fused", "gumbel_two_pass", "softmax_race"),
    batch: int = 32,
    vocab: int = 151_936,
    *,
    dtype: str = "bfloat16",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    metrics: Sequence[str] = ("gpu__time_duration.sum",),
    runs: int = 3,
    replay_mode: Literal["kernel", "range"] = "range",
    device: str = "cuda",
    seed: int = 0,
) -> Any:
    """Profile sampler variants on the same logits and return nsight-python's data frame, one row a variant and metric.

    All kernels of a variant are summed.  Profiling replays them, so this compares kernels, never steps.

    Args:
        variants: values of the knob ``sampler``, "torch" for plain softmax and multinomial, or own functions by name.
        batch, vocab: rows and columns of the logits.
        metrics: names that ``ncu --query-metrics`` lists.
        replay_mode: "range" replays a variant as a whole, "kernel" each of its kernels.

    Raises:
        ConfigError: an unknown variant or dtype, a size below 1, or a filter that a variant does not have.
        RequestError: an illegal sampling parameter.
        NsightError: nsight-python or ncu is absent or too old, or they were loaded too late.
    """
    chosen = _resolve(variants)
    if batch < 1 or vocab < 1 or runs < 1:
        raise ConfigError(f"batch={batch}, vocab={vocab} and runs={runs} must be at least 1")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}{nearest(dtype, _DTYPES)}; legal values are {', '.join(_DTYPES)}")
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if _TORCH in variants and (temperature == 0.0 or params.top_k > 0 or top_p < 1.0 or min_p > 0.0):
        raise ConfigError(
            "the sampler 'torch' only draws from the softmax: leave it out, or top_k, top_p, min_p and T=0"
        )
    nsight = load_nsight()
    if shutil.which("ncu") is None:
        raise NsightError(f"ncu is not on PATH: install Nsight Compute {MIN_NCU} or newer")
    make_input = functools.partial(_make_input, batch, vocab, dtype, params, device=device, seed=seed)

    def profile_variant(variant: str) -> None:
        sampler, rows = chosen[variant], make_input()
        # compiles; outside of the range, so it is not measured
        sampler(rows)
        with nsight.annotate(_RANGE):
            sampler(rows)

    decorate = nsight.analyze.kernel(
        configs=[(name,) for name in chosen],
        runs=runs,
        metrics=list(metrics),
        replay_mode=replay_mode,
        combine_kernel_metrics=operator.add,
    )
    try:
        results = decorate(profile_variant)()
    except Exception as error:
        # nsight-python's own errors, by name: its modules are not imported here
        if type(error).__name__ not in ("NCUNotAvailableError", "ProfilerException"):
            raise
        raise NsightError(f"Nsight Compute {MIN_NCU} or newer is needed: {' '.join(str(error).split())}") from error
    if results is None:
        raise NsightError(f"nsight-python returned nothing; is the ncu on PATH {MIN_NCU} or newer?")
    return results.to_dataframe()


def _resolve(variants: Sequence[str] | Mapping[str, Sampler]) -> dict[str, Sampler]:
    chosen: dict[str, Sampler]
    if isinstance(variants, Mapping):
        chosen = dict(variants)
    else:
        legal = (*legal_values("sampler"), _TORCH)
        for name in variants:
            if name not in legal:
                raise ConfigError(f"unknown sampler {name!r}{nearest(name, legal)}; samplers are {', '.join(legal)}")
        chosen = {name: _sample_torch if name == _TORCH else functools.partial(_draw, name) for name in variants}
    if not chosen:
        raise ConfigError("variants is empty: name at least one sampler")
    return chosen


def _make_input(batch: int, vocab: int, dtype: str, params: SamplingParams, *, device: str, seed: int) -> SamplerInput:
    import torch

    from mrv2_kernels.sampling.truncation import Truncation
    from mrv2_kernels.sampling.workspace import DrawWorkspace

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab, generator=generator) * 4.0

    def column(value: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=kind, device=device)

    index = torch.arange(batch, device=device)
    truncation = None
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        truncation = Truncation(
            column(params.min_p, torch.float32),
            column(params.top_k, torch.int32),
            column(params.top_p, torch.float32),
            all_rows=params.temperature != 0.0,
        )
    return SamplerInput(
        logits=logits.to(device=device, dtype=getattr(torch, dtype)),
        positions=index.to(torch.int32),
        rows=index.to(torch.int32),
        temperature=column(params.temperature, torch.float32),
        seeds=index.to(torch.int64) + seed,
        truncation=truncation,
        workspace=DrawWorkspace.make(batch, device),
        sampled=column(-1, torch.int64),
    )


def _draw(variant: str, given: SamplerInput) -> None:
    """Draw as the V2 runner does."""
    from mrv2.runner.v2.variants import DrawPlan, draw

    draw(
        DrawPlan(variant, is_truncated=given.truncation is not None),
        given.logits,
        given.sampled,
        given.rows,
        given.positions,
        given.temperature,
        given.seeds,
        truncation=given.truncation,
        workspace=given.workspace,
    )


def _sample_torch(given: SamplerInput) -> None:
    """What plain torch offers: softmax and multinomial."""
    import torch

    probs = (given.logits.float() / given.temperature.unsqueeze(1)).softmax(dim=-1)
    given.sampled.copy_(torch.multinomial(probs, 1).squeeze(1))
