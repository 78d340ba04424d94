"""What ``mrv2 bench`` measures instead of workloads: one part of the engine, or one way in which it grows."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mrv2.commands.arguments import flag
from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.device import Device

# the parsed command line, the engine options given on it, where the record goes -> exit code
PartRun = Callable[[argparse.Namespace, dict[str, Any], "Path | None"], int]
_GPU_MODEL = "qwen3-0.6b"
# a measurement neither compiles nor captures
_WARM: dict[str, Any] = {"warm_up": "all"}
# values of `prefill_chunk` beside which decodes are watched on a GPU
_CHUNKS = (0, 1024, 512, 256, 128, 64)


# flags of the command that say how workloads are measured
WORKLOAD_FLAGS = (
    "workload",
    "model",
    "scale",
    "repetitions",
    "stages",
    "no_recording",
    "runners",
    "modes",
    "graphs",
    "vary",
)
# those of them that a part with an engine of its own takes as one setting of its knobs
_KNOB_FLAGS = ("runners", "modes", "graphs")


class Part(NamedTuple):
    """One flag of the command."""

    flag: str
    help: str
    run: PartRun
    metavar: str | None = None
    # of `WORKLOAD_FLAGS`; any other of them is refused
    reads: tuple[str, ...] = ()
    # it loads an engine: options and knobs are for that
    has_engine: bool = False
    # engine options besides `device` that it reads without an engine
    options: tuple[str, ...] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each part; one at a time is legal."""
    group = parser.add_argument_group("instead of workloads")
    one = group.add_mutually_exclusive_group()
    for part in PARTS:
        if part.metavar is None:
            one.add_argument(part.flag, action="store_true", help=part.help)
        else:
            one.add_argument(part.flag, metavar=part.metavar, help=part.help)
    group.add_argument("--tune", action="store_true", help="with --samplers or --layers: time candidate launches")
    group.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="with --samplers --tune: leave out the candidates that are not checked and timed within S seconds",
    )
    group.add_argument(
        "--rates",
        metavar="LIST",
        help="with --speculation: time per output token of the runners while requests arrive at random, so many a "
        "second, as in 4,8,16; --spec-method (default: mtp), --num-spec-tokens (default: 1)",
    )
    group.add_argument(
        "--acceptance",
        metavar="LIST",
        help="with --speculation: accept draft 1, 2, ... by these shares, whatever the target says (default with "
        "random weights: 0.8,0.6,0.4)",
    )


def chosen(args: argparse.Namespace, options: dict[str, Any]) -> PartRun | None:
    """Return the part that the command line asks for, or None; its knobs join the engine `options`.

    Raises `ConfigError` for a flag that the part has no use for.
    """
    if args.tune and not (args.samplers or args.layers):
        raise ConfigError("--tune belongs to a part: mrv2 bench --samplers --tune, mrv2 bench --layers --tune")
    if args.seconds is not None and not (args.tune and args.samplers):
        raise ConfigError("--seconds belongs to --samplers --tune: mrv2 bench --samplers --tune --seconds S")
    if args.seconds is not None and not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds}: a number above 0")
    for name in ("rates", "acceptance"):
        if getattr(args, name) is not None and not args.speculation:
            raise ConfigError(f"--{name} belongs to --speculation: mrv2 bench --speculation --{name} LIST")
    part = next((part for part in PARTS if getattr(args, part.flag.removeprefix("--"))), None)
    if part is None:
        return None
    given = [name for name in WORKLOAD_FLAGS if getattr(args, name) != args.unset[name]]
    legal = (*part.reads, *(_KNOB_FLAGS if part.has_engine else ()))
    useless = [flag(name) for name in given if name not in legal]
    if not part.has_engine:
        useless += [flag(name) for name in options if name not in ("device", *part.options)]
    if useless:
        raise ConfigError(f"{part.flag} does not take {', '.join(useless)}")
    if "runners" in given and "runners" not in part.reads:
        options["runner"] = args.runners
    if "modes" in given and "modes" not in part.reads:
        if args.modes not in ("sync", "async"):
            raise ConfigError(f"{part.flag} --modes {args.modes}: sync or async")
        options["async_scheduling"] = args.modes == "async"
    if "graphs" in given:
        options["cuda_graphs"] = args.graphs
    return part.run


def _samplers(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench import sampler_tuning
    from mrv2.bench.samplers import headline, measure_samplers, report

    if args.tune:
        with _device(options) as device:
            seconds = math.inf if args.seconds is None else args.seconds
            record = sampler_tuning.tune_samplers(device, seconds=seconds, progress=note)
        return _finish(record, sampler_tuning.report(record), sampler_tuning.headline(record), record_path)
    with _device(options) as device:
        record = measure_samplers(device, progress=note)
    return _finish(record, report(record), headline(record), record_path)


def _gemms(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    """Return 1 if a picked chain is wrong."""
    from mrv2.bench.gemms import headline, is_right, measure_gemms, report

    quantization = options.get("quantization")
    if quantization not in (None, "fp8"):
        raise ConfigError(f"--gemms --quantization {quantization}: fp8, or none for weights of 16 bits")
    with _device(options) as device:
        record = measure_gemms(device, quantization=quantization, progress=note)
    _finish(record, report(record), headline(record), record_path)
    return int(not is_right(record))


def _layers(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench import forward_tuning
    from mrv2.bench.layers import headline, measure_layers, report

    kept = options.get("kv_cache_dtype", "auto")
    if kept not in ("auto", "fp8"):
        raise ConfigError(f"--layers --kv-cache-dtype {kept}: auto or fp8")
    if args.tune:
        with _device(options) as device:
            record = forward_tuning.tune_forward(device, kv_cache_dtype=kept, progress=note)
        return _finish(record, forward_tuning.report(record), forward_tuning.headline(record), record_path)
    if kept != "auto":
        raise ConfigError(f"--kv-cache-dtype {kept} belongs to mrv2 bench --layers --tune")
    with _device(options) as device:
        record = measure_layers(device, progress=note)
    return _finish(record, report(record), headline(record), record_path)


def _structured(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    """Return 1 if an output has the wrong form."""
    from mrv2.bench.structured import make_record, measure_structured, report
    from mrv2.commands.generate import DEFAULT_MODEL
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2.tokenizer import Tokenizer
    from mrv2_models.registry import resolve_model

    model = args.model or DEFAULT_MODEL
    note_loading(model)
    with _device(options) as device:
        found = resolve_model(model)
        if found.folder is None:
            raise ConfigError(f"--structured needs the tokenizer of a model with weights; {model} has none")
        is_gpu = device.type == "cuda"
        num_slots = max(2, (64 if is_gpu else 6) // (args.scale or 1))
        sizes = {"max_num_seqs": num_slots, "max_model_len": 512, "max_num_batched_tokens": 2048}
        core = EngineCore(build_config(model, device=device.type, **{**_WARM, **sizes, **options}), device)
        outcomes = measure_structured(
            core,
            Tokenizer.from_folder(found.folder),
            num_slots=num_slots,
            num_tokens=num_slots * (256 if is_gpu else 32),
            progress=note,
        )
        record = make_record(core, outcomes, num_slots)
    shown = {key: record[key] for key in ("kind", "model", "num_slots", "throughput_against_free")}
    _finish(record, report(record), shown, record_path)
    return int(any(each.num_valid < each.num_ended for each in outcomes))


def _growth(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench.bandwidth import measure_read_bandwidth
    from mrv2.bench.growth import host_growth, make_record, measure_growth, points_for, report
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config

    with _device(options) as device:
        is_gpu = device.type == "cuda"
        model = args.model or (_GPU_MODEL if is_gpu else "tiny-qwen3")
        rows, num_steps = (512, 64) if is_gpu else (8, 16)
        sizes = {"max_num_seqs": rows, "max_num_batched_tokens": 8192 if is_gpu else 512}
        if is_gpu:
            sizes["max_model_len"] = 33_024
        else:
            sizes |= {"max_model_len": 512, "num_gpu_blocks": 1 + rows * 32}
        limit = measure_read_bandwidth(device)
        note_loading(model)
        core = EngineCore(build_config(model, device=device.type, **{**_WARM, **sizes, **options}), device)
        points = points_for(core, num_steps=num_steps)
        found = measure_growth(core, points, limit.value, num_steps=num_steps, progress=note)
        record = make_record(core, found, limit)
    shown = {"kind": record["kind"], "model": record["model"], "points": len(record["points"])}
    shown["host_growth"] = host_growth(record["points"])
    return _finish(record, report(record), shown, record_path)


def _prefill(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench.prefill import make_record, measure_arrivals, measure_beside, measure_rates, report
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config

    with _device(options) as device:
        is_gpu = device.type == "cuda"
        model = args.model or (_GPU_MODEL if is_gpu else "tiny-qwen3")
        num_prompts, length, num_decodes = (32, 2048, 32) if is_gpu else (4, 128, 4)
        sizes: dict[str, Any] = {"max_num_seqs": num_prompts + num_decodes, "max_model_len": 8192 if is_gpu else 512}
        if not is_gpu:
            sizes |= {"max_num_batched_tokens": 256, "num_gpu_blocks": 1 + 8 * 32}
        note_loading(model)
        core = EngineCore(build_config(model, device=device.type, **{**_WARM, **sizes, **options}), device)
        note("prefill: prompts at once")
        arrivals = measure_arrivals(core, num_prompts, length)
        note("prefill: rates of its kernels")
        rates = measure_rates(core, length)
        note("prefill: beside decodes")
        chunks = _CHUNKS if is_gpu else (0, 64)
        record = make_record(core, arrivals, rates, measure_beside(core, num_decodes, 4, length, chunks))
    shown = {key: record[key] for key in ("kind", "model", "arrivals", "rates", "beside")}
    return _finish(record, report(record), shown, record_path)


def _explain(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench.bandwidth import measure_read_bandwidth
    from mrv2.bench.explain import make_record, measure_budget, report
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config

    with _device(options) as device:
        model = args.model or _GPU_MODEL
        sizes = {"max_num_seqs": 256, "max_model_len": 1024}
        note_loading(model)
        core = EngineCore(build_config(model, device=device.type, **{**_WARM, **sizes, **options}), device)
        limit = measure_read_bandwidth(device)
        batches = [n for n in (1, 32, 256) if n <= core.config.max_num_seqs]
        record = make_record(core, measure_budget(core, batches, 256, limit, progress=note), limit)
    shown = {"kind": record["kind"], "model": record["model"]}
    shown["kernel_us"] = {str(each["num_requests"]): each["kernel_us"] for each in record["budgets"]}
    return _finish(record, report(record), shown, record_path)


def _startup(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench.environment import environment
    from mrv2.bench.startup import KIND, measure_startup, report

    with _device({"device": options.get("device", "auto")}) as device:
        model = args.model or (_GPU_MODEL if device.type == "cuda" else "tiny-qwen3")
    starts = measure_startup(model, options, progress=note)
    rows = [asdict(start) for start in starts]
    record = {"kind": KIND, "environment": environment(), "model": model, "options": options, "starts": rows}
    return _finish(record, report(starts, model), {"kind": KIND, "model": model, "starts": rows}, record_path)


def _project(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.bench.projection import project, report
    from mrv2.bench.workloads import NAMES
    from mrv2_models.registry import resolve_model

    config = resolve_model(args.model or _GPU_MODEL).config
    projected = project(args.project.split(","), NAMES, config, config.resolve_dtype("auto"))
    record = {"kind": "mrv2-projection", "model": config.name, "tok_s": projected}
    return _finish(record, report(projected, config.name), record, record_path)


def _speculation(args: argparse.Namespace, options: dict[str, Any], record_path: Path | None) -> int:
    from mrv2.commands.bench_speculation import compare, is_comparison

    if is_comparison(args, options):
        with _device(options) as device:
            record, text, shown = compare(args, options, device)
        return _finish(record, text, shown, record_path)

    from mrv2.bench.speculation import QUESTIONS, headline, loaded_methods, make_record, measure_speculation, report
    from mrv2.commands.generate import DEFAULT_MODEL
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2.tokenizer import Tokenizer
    from mrv2_models.drafters.loading import shipped_head_of
    from mrv2_models.registry import resolve_model

    model = args.model or DEFAULT_MODEL
    note_loading(model)
    with _device(options) as device:
        found = resolve_model(model)
        assert found.folder is not None, "a preset is compared on random prompts"
        if "speculators" not in options:
            heads = [method for method in ("eagle3", "mtp") if shipped_head_of(method, model) is not None]
            options["speculators"] = ["suffix", f"draft_model={model}", *heads]
        is_gpu = device.type == "cuda"
        scale = args.scale or 1
        sizes = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 2048}
        sizes["max_num_spec_tokens"] = options.get("num_spec_tokens", 3)
        core = EngineCore(build_config(model, device=device.type, **{**_WARM, **sizes, **options}), device)
        tokenizer = Tokenizer.from_folder(found.folder)
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        num_tokens = max(8, (256 if is_gpu else 32) // scale)
        outcomes = measure_speculation(
            core,
            prompts,
            loaded_methods(core),
            (1, 8) if is_gpu or scale == 1 else (1,),
            num_tokens=num_tokens,
            repetitions=args.repetitions,
            progress=note,
        )
        record = make_record(core, outcomes, num_tokens)
    return _finish(record, report(record), headline(record), record_path)


PARTS = (
    Part("--samplers", "the values of the knob sampler on random logits (CUDA)", _samplers),
    Part(
        "--gemms",
        "plans for the matrix products of few rows, with --quantization fp8 of 8-bit weights (CUDA)",
        _gemms,
        options=("quantization",),
    ),
    Part("--layers", "attention kernels and their launch plans (CUDA)", _layers, options=("kv_cache_dtype",)),
    Part(
        "--structured",
        "what it costs that none, half and all of the requests follow a grammar",
        _structured,
        reads=("model", "scale"),
        has_engine=True,
    ),
    Part(
        "--speculation",
        "acceptance, speed and step times of every way of drafting, at batch 1 and 8; with --runners or --modes the "
        "same under each of them, with --rates under random arrivals",
        _speculation,
        reads=("model", "scale", "repetitions", "runners", "modes"),
        has_engine=True,
    ),
    Part(
        "--growth",
        "a decode step over the batch and over the context, and the host's part of it",
        _growth,
        reads=("model",),
        has_engine=True,
    ),
    Part(
        "--prefill",
        "time to the first token, rates of prefill kernels, and decodes beside a prefill",
        _prefill,
        reads=("model",),
        has_engine=True,
    ),
    Part(
        "--explain",
        "the kernel budget of decode steps: time, bytes and bandwidth of each part (CUDA)",
        _explain,
        reads=("model",),
        has_engine=True,
    ),
    Part(
        "--startup",
        "from the start of a process to its first token, with a cold and a warm cache",
        _startup,
        reads=("model",),
        has_engine=True,
    ),
    Part("--project", "compute the memory floor on other GPUs, as in gb200,b200", _project, "GPUS", reads=("model",)),
)


@contextmanager
def _device(options: dict[str, Any]) -> Iterator[Device]:
    """Yield the device that the options name; they lose its name."""
    from mrv2.device import make_device

    device = make_device(options.pop("device", "auto"))
    try:
        yield device
    finally:
        device.close()


def _finish(record: dict[str, Any], text: str, headline: dict[str, Any], record_path: Path | None) -> int:
    """Print the table and one JSON line, write the record, and return 0."""
    from mrv2.bench.record import write_record

    print(text)
    if record_path is not None:
        write_record(record, record_path)
        print(f"\nrecord: {record_path}")
    print(json.dumps(headline))
    return 0
