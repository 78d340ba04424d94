"""One table from option names, vLLM's and our own, to `EngineConfig` and `Knobs`.

An option is either in `OPTIONS` (it has an effect), in `FIXED` (vLLM knows it, this engine has one
setting of it), or unknown; the last two raise `ConfigError`.  None always means "the default".
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mrv2.config import EngineConfig, Knobs
from mrv2.errors import ConfigError, nearest
from mrv2.speculators import LOADED_METHODS

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Option:
    """Where the value of an option goes: a field of `EngineConfig`, or of `Knobs` as ``knobs.<name>``."""

    field: str
    # turns the given value into the field's; returns None to leave the default
    convert: Callable[[Any], Any] | None = None


def _dtype(value: Any) -> str:
    """Accept vLLM's aliases and torch dtypes."""
    name = str(value).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def _load_format(value: Any) -> str:
    return "auto" if value == "safetensors" else value


def _enforce_eager(value: Any) -> str | None:
    if not isinstance(value, bool):
        raise ConfigError(f"enforce_eager={value!r} must be True or False")
    return "off" if value else None


def _compilation_config(value: Any) -> str | None:
    """Only the graph mode means something here: nothing is compiled by torch."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"compilation_config={value!r} must be a dict {{'cudagraph_mode': 'NONE' or 'FULL'}}; "
            "compilation levels do not exist in this engine"
        )
    for key in value:
        if key != "cudagraph_mode":
            raise ConfigError(
                f"compilation_config key {key!r} is not supported{nearest(str(key), ['cudagraph_mode'])}; "
                "the one legal key is 'cudagraph_mode'"
            )
    mode = value.get("cudagraph_mode")
    if mode is None:
        return None
    modes = {"NONE": "off", "FULL": "model"}
    name = str(getattr(mode, "name", mode)).upper()
    if name not in modes:
        raise ConfigError(
            f"cudagraph_mode={name!r} is not supported: a forward pass is captured whole or not at all; "
            "legal are 'NONE' and 'FULL'"
        )
    return modes[name]


# vLLM's keys of speculative_config -> our options
_SPECULATIVE_KEYS = {
    "method": ("spec_method",),
    "num_speculative_tokens": ("num_spec_tokens", "max_num_spec_tokens"),
    "prompt_lookup_min": ("ngram_min",),
    "prompt_lookup_max": ("ngram_max",),
    "model": (),
}
# vLLM's names of methods -> ours
_SPECULATIVE_METHODS = {"ngram": "ngram", "ngram_gpu": "ngram", **{name: name for name in LOADED_METHODS}}


def _speculative_options(value: Any) -> dict[str, Any]:
    """Return the options that a vLLM ``speculative_config`` stands for."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config={value!r} must be a dict with keys {', '.join(_SPECULATIVE_KEYS)}")
    options: dict[str, Any] = {}
    for key, given in value.items():
        if key not in _SPECULATIVE_KEYS:
            raise ConfigError(
                f"speculative_config key {key!r} is not supported{nearest(str(key), _SPECULATIVE_KEYS)}; "
                f"legal are {', '.join(_SPECULATIVE_KEYS)}"
            )
        options |= dict.fromkeys(_SPECULATIVE_KEYS[key], given)
    method = value.get("method")
    if method not in _SPECULATIVE_METHODS:
        raise ConfigError(
            f"speculative_config method={method!r} is not supported; legal are {', '.join(_SPECULATIVE_METHODS)}"
        )
    if "num_speculative_tokens" not in value:
        raise ConfigError("speculative_config needs num_speculative_tokens, the drafts of a request in a step")
    model, name = value.get("model"), _SPECULATIVE_METHODS[method]
    if name in LOADED_METHODS:
        options["speculators"] = [name if model is None else f"{name}={model}"]
    elif model is not None:
        raise ConfigError(f"speculative_config model={model!r}: method {method!r} has no model; leave it out")
    return options | {"spec_method": name}


def _structured_outputs_config(value: Any) -> str | None:
    """Only the library can be chosen."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"structured_outputs_config={value!r} must be a dict {{'backend': 'auto' or 'xgrammar'}}")
    for key in value:
        if key != "backend":
            raise ConfigError(
                f"structured_outputs_config key {key!r} is not supported{nearest(str(key), ['backend'])}; "
                "the one legal key is 'backend'"
            )
    return value.get("backend")


def _logits_processors(value: Any) -> tuple[Any, ...] | None:
    """A list of classes or of texts ``module:Class``; what they are is checked when the engine loads them."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"logits_processors={value!r} must be a list of classes or of texts 'module:Class'")
    return tuple(value) or None


def _speculators(value: Any) -> tuple[str, ...] | None:
    """A text with commas, or a list of texts ``method`` or ``method=model``."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"speculators={value!r} must be a list of texts 'method' or 'method=model'")
    return tuple(value) or None


def _rates(value: Any) -> tuple[float, ...]:
    """A list of numbers, or a text ``0.9,0.8``."""
    try:
        return tuple(float(rate) for rate in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"synthetic_acceptance={value!r} must be a list of rates, as 0.9,0.8,0.6") from error


_RENAMED = {
    "speculators": Option("speculators", _speculators),
    "synthetic_acceptance": Option("synthetic_acceptance", _rates),
    "logits_processors": Option("logits_processors", _logits_processors),
    "num_gpu_blocks_override": Option("num_gpu_blocks"),
    "enforce_eager": Option("knobs.cuda_graphs", _enforce_eager),
    "compilation_config": Option("knobs.cuda_graphs", _compilation_config),
    "dtype": Option("dtype", _dtype),
    "load_format": Option("load_format", _load_format),
    "structured_outputs_config": Option("grammar_backend", _structured_outputs_config),
}

OPTIONS: dict[str, Option] = {
    **{f.name: Option(f.name) for f in fields(EngineConfig) if f.name not in ("model", "knobs")},
    **{f.name: Option(f"knobs.{f.name}") for f in fields(Knobs)},
    **_RENAMED,
}

# options of `LLM` itself, for suggestions
LLM_OPTIONS = ("model", "engine", "tokenizer", "knobs", "speculative_config")

# vLLM's options with one setting here -> that setting and why there is no other
FIXED: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "the engine runs on one device"),
    "pipeline_parallel_size": (1, "the engine runs on one device"),
    "data_parallel_size": (1, "the engine runs on one device"),
    "enable_expert_parallel": (False, "the engine runs on one device"),
    "distributed_executor_backend": (None, "the engine runs on one device"),
    "trust_remote_code": (False, "code from a model folder is never run"),
    "tokenizer_mode": ("auto", "there is one tokenizer implementation"),
    "revision": (None, "models are local folders"),
    "tokenizer_revision": (None, "models are local folders"),
    "download_dir": (None, "models are local folders"),
    "hf_overrides": (None, "config.json is used as it is"),
    "cpu_offload_gb": (0, "weights stay on the device"),
    "swap_space": (0, "preempted requests are computed again"),
    "enable_lora": (False, "adapters are not supported yet"),
    "limit_mm_per_prompt": (None, "models take text only"),
    "mm_processor_kwargs": (None, "models take text only"),
    "disable_log_stats": (True, "statistics are read with snapshot()"),
    "kv_transfer_config": (None, "the KV cache stays on its device"),
    "cudagraph_capture_sizes": (None, "the engine chooses its own buckets"),
}


def build_config(model: str, **options: Any) -> EngineConfig:
    """Return the configuration for `model`, a folder or preset name.

    Raises `ConfigError` for an unknown option (naming the nearest legal one), for a value that the
    engine does not support, and for two options that say different things about one setting.
    """
    knobs = options.pop("knobs", None)
    if knobs is not None and not isinstance(knobs, Knobs):
        raise ConfigError(f"knobs={knobs!r} must be a Knobs object; single knobs are options of their own")
    speculative = options.pop("speculative_config", None)
    if speculative is not None:
        options = _speculative_options(speculative) | options
    values: dict[str, tuple[str, Any]] = {}
    for name, given in options.items():
        if name in FIXED:
            _check_fixed(name, given)
            continue
        if name not in OPTIONS:
            legal = [*OPTIONS, *FIXED, *LLM_OPTIONS]
            raise ConfigError(
                f"unknown option {name!r}{nearest(name, legal)}; options are {', '.join(sorted(OPTIONS))}"
            )
        option = OPTIONS[name]
        value = given if given is None or option.convert is None else option.convert(given)
        if value is None:
            continue
        _check_type(name, given, option.field, value)
        other, earlier = values.setdefault(option.field, (name, value))
        if earlier != value:
            raise ConfigError(f"{other} and {name} contradict each other: both set {option.field}; give one of them")
    changes = {key.removeprefix("knobs."): value for key, (_, value) in values.items() if key.startswith("knobs.")}
    load_time = {key: value for key, (_, value) in values.items() if not key.startswith("knobs.")}
    knobs = (knobs or Knobs()).with_changes(**changes)
    if knobs.spec_method != "off":
        # who asks for drafts at load has said how many
        load_time.setdefault("max_num_spec_tokens", knobs.num_spec_tokens)
    if knobs.spec_method in LOADED_METHODS:
        # ... and who drafts
        load_time.setdefault("speculators", (knobs.spec_method,))
    return EngineConfig(model=model, knobs=knobs, **load_time)


def _check_fixed(name: str, given: Any) -> None:
    setting, reason = FIXED[name]
    if given is not None and given != setting:
        raise ConfigError(f"{name}={given!r} is not supported: {reason}; leave it out, or at {setting!r}")


def _check_type(name: str, given: Any, target: str, value: Any) -> None:
    """Refuse a value whose type the field does not take; ranges are the config's own matter."""
    owner = Knobs if target.startswith("knobs.") else EngineConfig
    hint = get_type_hints(owner)[target.removeprefix("knobs.")]
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(_fits(value, each) for each in hints):
        return
    legal = [text for each in hints if each is not types.NoneType for text in _legal_text(each)]
    raise ConfigError(f"{name}={given!r} is not supported; legal values: {', '.join(legal)}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value == legal and type(value) is type(legal) for legal in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _legal_text(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [repr(legal) for legal in get_args(hint)]
    return {bool: ["True", "False"], int: ["an integer"], float: ["a number"], str: ["a string"]}[hint]
