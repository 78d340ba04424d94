"""Where a workbench's engine runs, on what, and which requests it takes."""

from __future__ import annotations

from typing import Literal

from mrv2.errors import ConfigError, RequestError
from mrv2.sampling_params import SamplingParams


def place_of(engine: str, device: str) -> Literal["thread", "process"]:
    """Return where the engine runs; raises `ConfigError` for a place that does not exist."""
    if engine not in ("auto", "thread", "process"):
        raise ConfigError(f"engine={engine!r}; legal values are 'auto', 'thread', 'process'")
    if engine != "auto":
        return engine  # type: ignore[return-value]  # checked above
    return "process" if on_cuda(device) else "thread"


def on_cuda(device: str) -> bool:
    """Return whether an engine on `device` uses a GPU."""
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.is_available()


def check_params(params: SamplingParams) -> None:
    """Raise `RequestError` for what only `LLM` serves."""
    if params.n > 1:
        raise RequestError(f"n={params.n}: the workbench follows single sequences; send {params.n} requests")
    if params.stop_strings:
        raise RequestError(
            f"stop={list(params.stop_strings)!r}: the workbench takes stop_token_ids only; LLM takes both"
        )
    if any(isinstance(word, str) for word in params.bad_words or ()) or params.thinking_token_budget is not None:
        raise RequestError("bad words as text and thinking budgets are served by LLM, not by the workbench")


def hardware_name(with_gpu: bool) -> str:
    """Return the GPU's name, or the processor's."""
    from mrv2.bench.environment import cpu_name, gpu_info

    gpu = gpu_info() if with_gpu else None
    return gpu.name if gpu is not None else cpu_name()
