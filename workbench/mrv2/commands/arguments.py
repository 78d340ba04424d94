"""Flags that several commands share; knob flags and their help come from the metadata of `Knobs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from mrv2.config import EngineConfig, Knobs, legal_values
from mrv2.errors import ConfigError, nearest

EFFECTS = {"T": "same tokens", "D": "same distribution", "O": "changes the output"}
# engine options that have a flag -> (type, help)
_ENGINE_FLAGS: dict[str, tuple[type, str]] = {
    "dtype": (str, "auto (as published), float32, bfloat16, float16, or float64 (host only)"),
    "device": (str, "auto (CUDA where there is one), cuda or host"),
    "load_format": (str, "auto, or dummy for random weights"),
    "quantization": (str, "fp8 keeps the weights of the layers' products as 8-bit floats; default: as they are"),
    "kv_cache_dtype": (str, "fp8 keeps keys and values as 8-bit floats; auto: in the model's dtype"),
    "warm_up": (str, "first_use, or all to compile and capture everything before the first request"),
    "seed": (int, "seeds requests that bring no seed of their own, and dummy weights"),
    "max_model_len": (int, "longest prompt and output together, in tokens"),
    "max_num_seqs": (int, "requests in a step at most"),
    "max_num_spec_tokens": (int, "drafts a request may get in a step, for which memory is kept"),
    "speculators": (str, "drafters to load, as in eagle3,draft_model=NAME (ngram needs no loading)"),
    "ngram_min": (int, "shortest suffix that n-gram drafting looks for"),
    "ngram_max": (int, "longest suffix that n-gram drafting looks for"),
    "max_num_batched_tokens": (int, "tokens in a step at most"),
    "block_size": (int, "tokens in a KV block: a power of two from 16"),
    "num_gpu_blocks": (int, "KV blocks, instead of what fits the free memory"),
    "gpu_memory_utilization": (float, "share of the GPU's memory that the engine may take"),
    "long_prefill_token_threshold": (int, "largest prefill chunk of one request in a step; 0 = no limit"),
}


def flag(name: str) -> str:
    """Return the command-line form of an option's name."""
    return "--" + name.replace("_", "-")


def add_model_flag(parser: argparse.ArgumentParser, default: str | None, help: str = "") -> None:
    """Add ``--model``."""
    text = help or "a model folder, a fetchable model or a preset; `mrv2 models` lists the names"
    shown = f" (default: {default})" if default is not None else ""
    parser.add_argument("--model", default=default, metavar="MODEL", help=text + shown)


def add_engine_flags(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add a flag for each load-time setting; one that is not given leaves the default."""
    group = parser.add_argument_group("engine")
    defaults = {f.name: f.default for f in fields(EngineConfig) if f.default is not MISSING}
    for name, (kind, text) in _ENGINE_FLAGS.items():
        if name in without:
            continue
        default = f" (default: {defaults[name]})" if defaults[name] not in (None, ()) else ""
        metavar = {str: "NAME", int: "N", float: "X"}[kind]
        group.add_argument(flag(name), type=kind, default=None, metavar=metavar, help=_escape(text + default))


def add_knob_flags(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add a flag for each knob, with its help and what to look for in the timeline."""
    group = parser.add_argument_group(
        "knobs", "Each can also change while requests run. The text in brackets says what it does to the output."
    )
    for spec in fields(Knobs):
        if spec.name in without:
            continue
        legal = legal_values(spec.name)
        text = (
            f"{spec.metadata['help']} Look for: {spec.metadata['look_for']} "
            f"[{EFFECTS[spec.metadata['effect']]}] (default: {_shown(spec.default)})"
        )
        options: dict[str, Any] = {"default": None, "help": _escape(text)}
        if isinstance(spec.default, bool):
            group.add_argument(flag(spec.name), action=argparse.BooleanOptionalAction, **options)
        else:
            group.add_argument(flag(spec.name), type=type(spec.default), choices=legal, **options)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options and knobs that were given as flags, for `mrv2.options.build_config`."""
    names = [*_ENGINE_FLAGS, *(f.name for f in fields(Knobs))]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def parse_knob(text: str) -> tuple[str, Any]:
    """Read ``name=value``; raises `ConfigError` for an unknown knob or an illegal value."""
    name, values = parse_knob_values(text)
    if len(values) != 1:
        raise ConfigError(f"{text!r}: give one value, as in {name}={_shown(values[0])}")
    return name, values[0]


def parse_knob_values(text: str) -> tuple[str, list[Any]]:
    """Read ``name=value,value...``; `-` and `_` are the same in names, on/off and true/false in switches."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    names = [f.name for f in fields(Knobs)]
    if name not in names:
        raise ConfigError(f"unknown knob {name!r}{nearest(name, names)}; knobs are {', '.join(names)}")
    if not equals or not values.strip():
        raise ConfigError(f"{text!r}: expected {name}=value, with one of {_all_shown(name)}")
    return name, [_parse_value(name, value.strip()) for value in values.split(",")]


def _parse_value(name: str, text: str) -> Any:
    aliases = {"true": "on", "false": "off", "1": "on", "0": "off", "yes": "on", "no": "off"}
    legal = legal_values(name)
    wanted = aliases.get(text.lower(), text.lower()) if isinstance(legal[0], bool) else text
    for value in legal:
        if _shown(value) == wanted:
            return value
    raise ConfigError(f"knob {name}={text}: legal values are {_all_shown(name)}")


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _all_shown(name: str) -> str:
    return ", ".join(map(_shown, legal_values(name)))


def knob_lines(knobs: Knobs) -> list[str]:
    """Return one line a knob: its value, its legal values and what it does."""
    return [
        f"{spec.name}={_shown(getattr(knobs, spec.name))}  ({_all_shown(spec.name)}): {spec.metadata['help']}"
        for spec in fields(knobs)
    ]


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the sampling parameters that a command line can express."""
    group = parser.add_argument_group("sampling", "What is not given comes from the model's own defaults.")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"tokens to generate (default: {max_tokens})"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 = the most likely token each time")
    group.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this mass")
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 = all")
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the likeliest one")
    group.add_argument("--sampling-seed", dest="seed_of_request", type=int, metavar="N", help="seed of every request")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given as flags, by their `SamplingParams` names."""
    values = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "seed": args.seed_of_request,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _escape(text: str) -> str:
    """argparse formats help texts with %."""
    return text.replace("%", "%%")
