"""``mrv2 record``: a named workload, or any command under Nsight Systems, as a recording."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.commands.arguments import add_engine_flags, add_knob_flags, add_model_flag, given_options
from mrv2.commands.loading import note_loading
from mrv2.commands.printing import note, text_table
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.record import Level
    from mrv2.trace import Trace

# what a machine can serve in seconds: (model, scale, turns skipped)
_DEFAULTS = {"cuda": ("qwen3-0.6b", 1, 30), "host": ("tiny-qwen3", 8, 8)}
_TRACED = "cuda,nvtx"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "record",
        help="record a workload, or any command under Nsight Systems",
        description="Record some steps of a named workload in its steady state, or a whole command under Nsight "
        "Systems. The recording is scrubbed of paths, variables and names, and checked: a capture without ranges is "
        "an error that says why.",
        epilog="examples: mrv2 record --workload c --steps 30 --level kernels -o c.json.gz; "
        "mrv2 record --nsys -o run.sqlite.gz -- python script.py",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=_OUTPUT_HELP)
    parser.add_argument(
        "--level",
        choices=("stages", "kernels", "nsight"),
        help="stages = own recorder; kernels = torch profiler; nsight = Nsight Systems (default: stages; for a command "
        "nsight)",
    )
    parser.add_argument("--nsys", action="store_true", help="the same as --level nsight")
    parser.add_argument(
        "--granularity",
        choices=("graph", "node"),
        help="nsight: record CUDA graphs whole, which disturbs timing least, or node by node (default: graph)",
    )
    parser.add_argument("--trace", metavar="LIST", help=f"nsight: what nsys traces (default: {_TRACED})")
    parser.add_argument("--with-stack", action="store_true", help="kernels: record Python stacks too")
    _add_workload_flags(parser)
    wrapped = parser.add_argument_group("a command")
    wrapped.add_argument("command", nargs="*", metavar="-- COMMAND", help="after --, the command to record under nsys")
    wrapped.add_argument("--allow-no-ranges", action="store_true", help="accept a capture without NVTX ranges")
    wrapped.add_argument(
        "--nsys-option", action="append", default=[], metavar="OPTION", help="another option for nsys profile"
    )
    add_engine_flags(parser)
    add_knob_flags(parser, without=("async_scheduling",))
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--async", dest="async_scheduling", action="store_true", default=None, help="async scheduling")
    mode.add_argument("--sync", dest="async_scheduling", action="store_false", default=None, help="no async scheduling")
    parser.set_defaults(run=run)
    return parser


_OUTPUT_HELP = (
    ".npz or a folder for any level, .json or .json.gz for level kernels, .sqlite or .sqlite.gz for level nsight"
)


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a workload")
    group.add_argument("--workload", metavar="NAME", help="one of `mrv2 bench --list`")
    group.add_argument("--steps", type=int, metavar="N", help="turns of the engine's loop to record (default: 30)")
    group.add_argument(
        "--skip", type=int, metavar="N", help="turns before the recording (default: 30 on CUDA, 8 on the host)"
    )
    group.add_argument(
        "--arrive-every", type=int, metavar="N", help="let a new prompt arrive every N recorded turns (default: none)"
    )
    group.add_argument("--arrival-len", type=int, metavar="N", help="its length in tokens (default: 200)")
    group.add_argument(
        "--scale", type=int, metavar="N", help="divide counts and lengths by N (default: 1 on CUDA, 8 on the host)"
    )
    add_model_flag(parser, None, "default: qwen3-0.6b with random weights on CUDA, tiny-qwen3 on the host")


def run(args: argparse.Namespace) -> int:
    """Record; return the exit code."""
    if args.nsys and args.level not in (None, "nsight"):
        raise ConfigError(f"--nsys and --level {args.level} exclude each other")
    level = "nsight" if args.nsys else args.level
    if bool(args.command) == bool(args.workload):
        raise ConfigError("give either --workload NAME or, after --, a command to record")
    if args.command:
        return _run_command(args, level)
    return _run_workload(args, level or "stages")


def _run_command(args: argparse.Namespace, level: str | None) -> int:
    if level not in (None, "nsight"):
        raise ConfigError(f"--level {level} records an engine of this program; a command is recorded with --nsys")
    names = ("steps", "skip", "arrive_every", "arrival_len", "scale", "model")
    unused = [name for name in names if getattr(args, name) is not None] + [*given_options(args)]
    if unused or args.with_stack:
        listed = ", ".join("--" + name.replace("_", "-") for name in [*unused, *["with_stack"] * args.with_stack])
        raise ConfigError(f"{listed}: of no effect on a command; give it to the command itself")

    from mrv2.record.wrap import record_command

    out = Path(args.output)
    recording = record_command(
        args.command,
        out,
        granularity=args.granularity or "graph",
        trace=args.trace or _TRACED,
        extra=args.nsys_option,
    )
    _report(recording.trace, out)
    if recording.status:
        note(f"the command ended with status {recording.status}; the recording holds what it did until then")
    if recording.no_ranges is not None and not args.allow_no_ranges:
        note(f"the capture holds no NVTX range: {recording.no_ranges}; --allow-no-ranges accepts that")
        return 1
    return int(bool(recording.status))


def _run_workload(args: argparse.Namespace, level: Level) -> int:
    if args.allow_no_ranges or args.nsys_option:
        raise ConfigError("--allow-no-ranges and --nsys-option are for a command after --")
    if level != "nsight" and (args.granularity or args.trace):
        raise ConfigError("--granularity and --trace need --level nsight")
    if level != "kernels" and args.with_stack:
        raise ConfigError("--with-stack needs --level kernels")

    from mrv2.bench.workloads import describe

    describe(args.workload)
    out = Path(args.output)
    _check_output(out, level)
    if level == "nsight":
        from mrv2.record.nsys import SESSION_ENV, current_session, launch_command, run_through

        if current_session() is None:
            if SESSION_ENV in os.environ:
                raise ConfigError(f"{SESSION_ENV} is set, yet no nsys traces this process; unset it")
            session = f"mrv2-{os.getpid()}"
            again = [sys.executable, "-m", "mrv2.cli", *args.argv]
            line = launch_command(session, again, granularity=args.granularity or "graph", trace=args.trace or _TRACED)
            return run_through(line, env={**os.environ, SESSION_ENV: session})
        if SESSION_ENV not in os.environ and (args.granularity or args.trace):
            raise ConfigError("--granularity and --trace were settled by the `nsys launch` that started this process")
        from mrv2.record.nsight import require_session

        # better now than after the model was loaded
        require_session()
    return _record(args, level, out)


def _check_output(out: Path, level: str) -> None:
    """Refuse a name that the level cannot write, before it costs a recording."""
    plain = out.with_suffix("") if out.suffix == ".gz" else out
    native = {"kernels": ".json", "nsight": ".sqlite"}.get(level)
    if plain.suffix in (".json", ".sqlite", ".nsys-rep", ".html", ".gz", ".csv") and plain.suffix != native:
        legal = f"{native}, {native}.gz, .npz or a folder" if native else ".npz or a folder"
        raise ConfigError(f"--output {out}: level {level} writes {legal}; `mrv2 trace export` makes other formats")


def _record(args: argparse.Namespace, level: Level, out: Path) -> int:
    from mrv2.bench.workloads import make_workload
    from mrv2.commands.bench import engine_sizes
    from mrv2.device import make_device
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2.record.workload import Window, record_workload
    from mrv2_models.registry import resolve_model

    options = given_options(args)
    device = make_device(options.pop("device", "auto"))
    try:
        default_model, default_scale, default_skip = _DEFAULTS[device.type]
        model = args.model or default_model
        found = resolve_model(model)
        workload = make_workload(
            args.workload, vocab_size=found.config.vocab_size, scale=_or(args.scale, default_scale)
        )
        window = Window(
            steps=_or(args.steps, Window.steps),
            skip=_or(args.skip, default_skip),
            arrive_every=_or(args.arrive_every, Window.arrive_every),
            arrival_len=_or(args.arrival_len, Window.arrival_len),
        )
        sizes = engine_sizes(
            len(workload.requests) + (window.steps if window.arrive_every else 0),
            window.longest(workload),
            found.config.max_model_len,
            device.type,
        )
        config = build_config(model, device=device.type, **{**sizes, **options})
        note_loading(model)
        core = EngineCore(config, device)
        note(f"recording {window.steps} steps of {workload.name}: {workload.description}")
        recording, num_steps = record_workload(core, workload, window, level=level, with_stack=args.with_stack)
        recording.save(out)
        trace = recording.trace()
    finally:
        device.close()
    _report(trace, out)
    if num_steps < window.steps:
        note(
            f"the workload ended after {num_steps} of {window.steps} steps; a smaller --scale or --skip makes it longer"
        )
    return 0


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _report(trace: Trace, out: Path) -> None:
    """Print what the recording holds."""
    from mrv2.trace.table import TABLES

    rows = [(name, str(trace.coverage[name])) for name in TABLES]
    print(text_table(("table", "recorded"), rows, left=2))
    for line in trace.diagnostics:
        note(line)
    size = sum(f.stat().st_size for f in out.rglob("*")) if out.is_dir() else out.stat().st_size
    print(f"\n{out}: {size / 1e3:,.0f} kB")
