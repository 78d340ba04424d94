"""``mrv2 bench``: fixed workloads against the memory floor, knob by knob."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.commands import bench_parts
from mrv2.commands.arguments import add_engine_flags, add_knob_flags, add_model_flag, given_options, parse_knob_values
from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.device import Device

# what a machine can serve in minutes: (model, scale)
_DEFAULTS = {"cuda": ("qwen3-0.6b", 1), "host": ("tiny-qwen3", 16)}
_CONTEXT = 4096


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="measure fixed workloads, knob by knob",
        description="Serve named workloads without a tokenizer under every combination of the varied knobs. Prints "
        "the cost card (bytes and FLOPs of a step, and the floor they set on this device's measured bandwidth), the "
        "measurement, what each knob brought, and one JSON line last.",
        epilog="example: mrv2 bench --workload c,d --graphs model --record traces/bench/my-gpu.json",
    )
    parser.add_argument("--workload", default="c", metavar="NAMES", help="one or several, as in a,b (default: c)")
    parser.add_argument("--list", action="store_true", help="list the workloads and leave")
    bench_parts.add_flags(parser)
    add_model_flag(parser, None, "default: qwen3-0.6b with random weights on CUDA, tiny-qwen3 on the host")
    parser.add_argument(
        "--scale", type=int, metavar="N", help="divide counts and lengths by N (default: 1 on CUDA, 16 on the host)"
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="timed runs a setting (default: 3)")
    parser.add_argument("--record", metavar="FILE", help="write the whole record, with versions and stages, as JSON")
    parser.add_argument("--stages", action="store_true", help="print the time of every stage too")
    parser.add_argument("--no-recording", action="store_true", help="leave out the pass that records stages")
    varied = parser.add_argument_group("what is varied", "Every combination is measured.")
    varied.add_argument("--runners", default="v1,v2", metavar="LIST", help="v1, v2 or both (default: v1,v2)")
    varied.add_argument("--modes", default="sync,async", metavar="LIST", help="sync, async (default: both)")
    varied.add_argument("--graphs", metavar="LIST", help="off, model, step (default: off,model on CUDA)")
    varied.add_argument(
        "--vary", action="append", default=[], metavar="KNOB=V,V", help="vary another knob; may be repeated"
    )
    add_engine_flags(parser)
    add_knob_flags(parser, without=("runner", "async_scheduling", "cuda_graphs"))
    unset = {name: parser.get_default(name) for name in bench_parts.WORKLOAD_FLAGS}
    parser.set_defaults(run=run, unset=unset)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if the settings' tokens differ by more than ties."""
    from mrv2.bench.workloads import DRAWN_NAMES, NAMES, describe

    if args.list:
        print("\n".join(f"{name:6} {describe(name)}" for name in NAMES + DRAWN_NAMES))
        return 0
    names = args.workload.split(",")
    for name in names:
        describe(name)
    if args.repetitions < 1 or (args.scale is not None and args.scale < 1):
        raise ConfigError("--repetitions and --scale must be at least 1")
    record_path = Path(args.record) if args.record else None
    if record_path is not None and record_path.is_dir():
        raise ConfigError(f"--record {record_path}: is a folder; give a file name")
    if record_path is not None:
        # a folder that cannot be made should not cost a measurement
        record_path.parent.mkdir(parents=True, exist_ok=True)
    options = given_options(args)
    part = bench_parts.chosen(args, options)
    if part is not None:
        return part(args, options, record_path)

    from mrv2.bench.record import headline, write_record
    from mrv2.commands.bench_report import report
    from mrv2.device import make_device

    device = make_device(options.pop("device", "auto"))
    try:
        axes = varied_knobs(args, device.type)
        record: dict[str, Any] = {}
        for record in _measured(args, names, axes, options, device):
            # what is measured is kept, should the rest be cut short
            if record_path is not None:
                write_record(record, record_path)
    finally:
        device.close()
    print(report(record, with_stages=args.stages))
    if record_path is not None:
        print(f"\nrecord: {record_path}")
    print(json.dumps(headline(record)))
    found = [each["differences"] for each in record["workloads"] if each["differences"] is not None]
    return int(any(each["num_ties"] < each["num_requests"] for each in found))


def varied_knobs(args: argparse.Namespace, device_type: str) -> dict[str, list[Any]]:
    """Return knob -> values, the baseline first."""
    modes = {"sync": False, "async": True}
    unknown = [mode for mode in args.modes.split(",") if mode not in modes]
    if unknown:
        raise ConfigError(f"--modes {args.modes}: legal are sync, async, or both with a comma")
    axes: dict[str, list[Any]] = dict([parse_knob_values(f"runner={args.runners}")])
    axes["async_scheduling"] = [modes[mode] for mode in args.modes.split(",")]
    graphs = args.graphs or ("off,model" if device_type == "cuda" else None)
    if graphs is not None:
        axes.update([parse_knob_values(f"cuda_graphs={graphs}")])
    for text in args.vary:
        name, values = parse_knob_values(text)
        if name in axes:
            raise ConfigError(f"--vary {text}: {name} is varied already")
        axes[name] = values
    return axes


def _measured(
    args: argparse.Namespace, names: Sequence[str], axes: dict[str, list[Any]], options: dict[str, Any], device: Device
) -> Iterator[dict[str, Any]]:
    """Measure the device, load the engine, serve every workload; yield the record so far after each."""
    from mrv2.bench.bandwidth import measure_limits
    from mrv2.bench.harness import disagreements, make_variants, measure
    from mrv2.bench.record import WorkloadResult, cost_card, make_record
    from mrv2.bench.workloads import make_workload
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2_models.registry import resolve_model

    default_model, default_scale = _DEFAULTS[device.type]
    model, scale = args.model or default_model, args.scale or default_scale
    found = resolve_model(model)
    workloads = [make_workload(name, vocab_size=found.config.vocab_size, scale=scale) for name in names]
    num_requests = max(len(workload.requests) for workload in workloads)
    longest = max(workload.longest for workload in workloads)
    sizes = engine_sizes(num_requests, longest, found.config.max_model_len, device.type)
    config = build_config(model, device=device.type, **{**sizes, **options})
    variants, refused = make_variants(config.knobs, axes)
    for text in refused:
        note(f"left out: {text}")
    note("measuring the device's bandwidth")
    limits = measure_limits(device, found.config.resolve_dtype(config.dtype))
    note_loading(model)
    core = EngineCore(config, device)
    results = []
    for workload in workloads:
        measured = measure(
            core,
            workload,
            variants,
            repetitions=args.repetitions,
            record_stages=not args.no_recording,
            progress=note,
        )
        differences = disagreements(core, workload, measured)
        results.append(WorkloadResult(workload, cost_card(core, workload), measured, axes, differences))
        for each in measured:
            note(f"{workload.name}: {each.rate:,.1f} tok/s, {each.variant.label}")
        yield make_record(core, limits, results)


def engine_sizes(num_requests: int, longest: int, longest_of_model: int, device_type: str) -> dict[str, int | str]:
    """Return load-time options of measurements: all is warm, sizes are the same on every GPU; on the host just what
    the requests need.

    Args:
        longest: tokens of the longest request, prompt and output together.
    """
    if device_type == "cuda":
        return {"max_num_seqs": 256, "max_model_len": min(_CONTEXT, longest_of_model), "warm_up": "all"}
    max_num_seqs = min(256, num_requests)
    return {
        "max_num_seqs": max_num_seqs,
        "max_model_len": min(longest + 1, longest_of_model),
        "max_num_batched_tokens": max(512, max_num_seqs),
        "num_gpu_blocks": 1 + max_num_seqs * -(-(longest + 1) // 16),
    }
