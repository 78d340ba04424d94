"""MRV2 Workbench: an LLM inference engine whose every step can be seen, switched and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2.config import EngineConfig, Knobs
from mrv2.errors import ConfigError, EngineDeadError, MRV2Error, RequestError, SyncError
from mrv2.outputs import CompletionOutput, Logprob, RequestOutput
from mrv2.sampling_params import RequestOutputKind, SamplingParams
from mrv2.structured_outputs import StructuredOutputsParams
from mrv2_models.errors import ModelFileError

if TYPE_CHECKING:
    from mrv2.llm import LLM
    from mrv2.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "Knobs",
    "Logprob",
    "MRV2Error",
    "ModelFileError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "SyncError",
    "Tokenizer",
]

# names whose modules bring torch or a tokenizer; imported when first asked for
_LAZY = {"LLM": "mrv2.llm", "Tokenizer": "mrv2.tokenizer"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mrv2' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext mrv2``: register ``%wb`` and ``%%wb_record`` (see `mrv2.lab.magics`)."""
    from mrv2.lab import magics

    magics.load_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
