"""``mrv2 bench --speculation`` over runners: V1 and V2, sync and async, at fixed batches or under random arrivals."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.device import Device
    from mrv2.engine.core import EngineCore

# how often draft 1, 2, 3 is accepted where random weights agree on nothing
_ACCEPTANCE = "0.8,0.6,0.4"
_PROMPT_LEN = 128
Result = tuple[dict[str, Any], str, dict[str, Any]]


def is_comparison(args: argparse.Namespace, options: dict[str, Any]) -> bool:
    """Say whether several runners or modes are asked for, or random arrivals, or a model that can answer nothing."""
    from mrv2_models.registry import resolve_model

    given = args.runners != args.unset["runners"] or args.modes != args.unset["modes"]
    if given or args.rates is not None or args.acceptance is not None or options.get("load_format") == "dummy":
        return True
    return args.model is not None and resolve_model(args.model).folder is None


def compare(args: argparse.Namespace, options: dict[str, Any], device: Device) -> Result:
    """Measure; return record, table and headline."""
    from mrv2.bench.spec_runners import settings_of
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2_models.registry import resolve_model

    is_gpu, scale = device.type == "cuda", args.scale or 1
    model = args.model or ("qwen3-0.6b" if is_gpu else "tiny-qwen3")
    found = resolve_model(model)
    has_weights = found.folder is not None and options.get("load_format") != "dummy"
    rates = None if args.rates is None else _numbers("--rates", args.rates)
    modes = "async" if rates is not None and args.modes == args.unset["modes"] else args.modes
    settings = settings_of(args.runners.split(","), modes.split(","))
    # what has random weights agrees by chance only: acceptance is made up, and the same for all
    if args.acceptance is not None or (not has_weights and "verification" not in options):
        options["verification"] = "synthetic"
    if options.get("verification") == "synthetic":
        options |= {"benchmark": True, "synthetic_acceptance": args.acceptance or _ACCEPTANCE}
    options.setdefault("speculators", "eagle3,mtp")
    method = options.pop("spec_method", "mtp")
    options.setdefault("num_spec_tokens", 3 if rates is None else 1)
    longest = (_PROMPT_LEN + 256) // scale
    num_seqs = 128 if rates is not None and is_gpu else 8
    max_model_len = max(64, longest + 8)
    # a measurement neither compiles nor captures
    sizes: dict[str, Any] = {"warm_up": "all", "max_num_seqs": num_seqs, "max_model_len": max_model_len}
    sizes |= {"max_num_batched_tokens": 2048, "max_num_spec_tokens": options["num_spec_tokens"]}
    if not is_gpu:
        sizes["num_gpu_blocks"] = 1 + num_seqs * -(-max_model_len // 16)
    note_loading(model)
    # the knobs of the first setting that may be loaded: v2 has them all
    core = EngineCore(build_config(model, device=device.type, **{**sizes, **options}), device)
    prompts = _prompts(core, max(4, _PROMPT_LEN // scale), 64)
    num_tokens = max(8, 256 // scale)
    if rates is None:
        return _at_batches(args, core, prompts, settings, num_tokens)
    return _at_rates(args, core, prompts, settings, rates, method, num_tokens, is_gpu)


def _at_batches(
    args: argparse.Namespace,
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, dict[str, Any]],
    num_tokens: int,
) -> Result:
    from mrv2.bench.spec_runners import headline, measure_runners, report
    from mrv2.bench.speculation import loaded_methods

    record = measure_runners(
        core,
        prompts[:8],
        loaded_methods(core),
        settings,
        (1, 8),
        num_tokens=num_tokens,
        repetitions=args.repetitions,
        progress=note,
    )
    return record, report(record), headline(record)


def _at_rates(
    args: argparse.Namespace,
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, dict[str, Any]],
    rates: list[float],
    method: str,
    num_tokens: int,
    is_gpu: bool,
) -> Result:
    from mrv2.bench.spec_rates import headline, make_record, measure_rates, report
    from mrv2.bench.spec_runners import legal_methods

    drafting: dict[str, dict[str, Any]] = {}
    for label, changes in settings.items():
        core.set_knobs(spec_method="off", **changes)
        if legal_methods(core.knobs, [method], note):
            drafting[f"{label} {method}"] = {**changes, "spec_method": method}
    if not drafting:
        raise ConfigError(f"--rates: none of the settings {', '.join(settings)} drafts with spec_method={method!r}")
    sizes = {
        "num_requests": max(4, (128 if is_gpu else 16) // (args.scale or 1)),
        "num_tokens": num_tokens,
        "repetitions": args.repetitions,
    }
    outcomes, comparisons = measure_rates(core, prompts, drafting, rates, **sizes, progress=note)
    record = make_record(core, outcomes, comparisons, **sizes)
    return record, report(record), headline(record)


def _prompts(core: EngineCore, length: int, count: int) -> list[list[int]]:
    """Return random prompts: what is measured depends on no text."""
    import numpy as np

    vocab = core.executor.vocab_size
    return [np.random.default_rng(i).integers(0, vocab, size=length).tolist() for i in range(count)]


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} {text}: numbers with commas, as in 2,4,8") from error
    if not all(number > 0 for number in numbers):
        raise ConfigError(f"{name} {text}: every number must be more than 0")
    return numbers
