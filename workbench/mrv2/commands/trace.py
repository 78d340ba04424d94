"""``mrv2 trace``: read a recording of any origin, and say what it shows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.commands.printing import note
from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.trace.analysis import Analysis

_FILE = "a recording: Nsight Systems (.nsys-rep, .sqlite), torch profiler JSON, or a saved trace (.npz, folder)"
_REPORTS = (".html", ".png")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "trace",
        help="read recordings: figures, syncs, bubbles, comparison, export, assertions",
        description="Read recordings of this engine or of any other: overlap of host and device, gaps of the GPU with "
        "their causes, synchronisation with its price. A figure without evidence is n/a, never zero.",
        epilog="example: mrv2 trace assert run.sqlite.gz --no-sync --allow 'wait: output' --overlap 0.9",
    )
    verbs = parser.add_subparsers(title="what to do", metavar="VERB", required=True)
    show = _verb(verbs, "show", _show, "what a recording holds, and how it was made")
    _files(show, "FILE")
    stats = _verb(
        verbs, "stats", _stats, "overlap, idle time, bubbles by cause, syncs a step, stages; files side by side"
    )
    _files(stats, "FILES")
    stats.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N kernels with the most time")
    syncs = _verb(verbs, "syncs", _syncs, "host waits, dearest first")
    _files(syncs, "FILE")
    syncs.add_argument("--each", action="store_true", help="every wait by itself, also those outside of steps")
    syncs.add_argument("--stacks", action="store_true", help="with the best known stack of each")
    bubbles = _verb(verbs, "bubbles", _bubbles, "gaps of the GPU by cause, and the longest")
    _files(bubbles, "FILE")
    for each in (syncs, bubbles):
        each.add_argument("--limit", type=int, default=20, metavar="N", help="rows at most (default: 20)")
    _add_compare(verbs)
    export = _verb(verbs, "export", _export, "write it for other programs, or as a page or picture")
    _files(export, "FILE")
    export.add_argument(
        "output", metavar="OUTPUT", help=".html, .png, .json or .json.gz (Perfetto), .csv, .npz, a folder"
    )
    export.add_argument("--format", choices=("perfetto", "csv", "parquet", "npz"), help="default: from the name")
    export.add_argument("--table", action="append", metavar="NAME", help="for csv: this table; may be repeated")
    scrub = _verb(verbs, "scrub", _scrub, "copy it without paths, variables, names and other processes", analysed=False)
    scrub.add_argument("file", metavar="FILE", help=_FILE)
    scrub.add_argument("output", metavar="OUTPUT", help="the copy; .gz packs it")
    scrub.add_argument("--name", action="append", default=[], metavar="WORD", help="a further word to remove")
    _add_assert(verbs)
    return parser


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, *, analysed: bool = True
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    if analysed:
        parser.add_argument("--no-cache", action="store_true", help="leave no side-car file beside a large recording")
        group = parser.add_argument_group("what counts")
        group.add_argument("--step-name", metavar="NAME", help="the range that is a step (default: found by itself)")
        group.add_argument(
            "--step-span", choices=("range", "turn"), help="a step is that range, or lasts up to the next"
        )
        group.add_argument(
            "--warmup", type=int, default=1, metavar="N", help="first steps left out of quantiles (default: 1)"
        )
        group.add_argument(
            "--min-bubble-us", type=float, default=2.0, metavar="X", help="shorter gaps are no bubbles (default: 2)"
        )
        group.add_argument(
            "--policy", choices=("contained", "start"), default="contained", help="calls that a range owns"
        )
    parser.set_defaults(run=run)
    return parser


def _files(parser: argparse.ArgumentParser, what: str) -> None:
    if what == "FILES":
        parser.add_argument("files", nargs="+", metavar="FILE", help=_FILE)
    else:
        parser.add_argument("file", metavar="FILE", help=_FILE)


def _add_compare(verbs: Any) -> None:
    parser = _verb(verbs, "compare", _compare, "two recordings, step by step, with a verdict")
    parser.add_argument("file", metavar="BEFORE", help=_FILE)
    parser.add_argument("other", metavar="AFTER", help="what is compared with it")
    parser.add_argument(
        "--align", choices=("auto", "step_id", "position", "none"), default="auto", help="how steps pair"
    )
    parser.add_argument(
        "--fail-if-slower",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if a step is clearly slower by more than this",
    )


def _add_assert(verbs: Any) -> None:
    parser = _verb(
        verbs, "assert", _assert, "check statements about recordings; exit with 1 if one is false or unproven"
    )
    _files(parser, "FILES")
    parser.add_argument("--no-sync", action="store_true", help="the host waits for the device nowhere")
    parser.add_argument("--within", metavar="NAME", help="no-sync: only inside ranges of this name (default: step)")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PATTERN",
        help="no-sync: waits that are there by design, by reason, call, range or thread:NAME; may be repeated",
    )  # fmt: skip
    parser.add_argument("--min-stall-us", type=float, metavar="X", help="no-sync: shorter stalls do not count")
    parser.add_argument("--all-threads", action="store_true", help="no-sync: waits of every thread count")
    parser.add_argument(
        "--named-waits-suffice", action="store_true", help="no-sync: accept a recording without CUDA calls"
    )
    parser.add_argument(
        "--overlap", action="append", default=[], metavar="[STAGE=]SHARE",
        help="at least this share (0 to 1) of the CPU work, or of a stage, runs beside a busy GPU; may be repeated",
    )  # fmt: skip
    parser.add_argument("--max-bubble-us", type=float, metavar="X", help="longest gap of the GPU")
    parser.add_argument("--max-bubble-p95-us", type=float, metavar="X", help="95th percentile of the gaps")
    parser.add_argument(
        "--step-bubble-p95-us", type=float, metavar="X", help="95th percentile of the gaps' sum in a step"
    )
    parser.add_argument(
        "--stage-gap-p95-us", action="append", default=[], metavar="A..B=X",
        help="95th percentile of the GPU's idle time between two stages of a step; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max-graph-idle", type=float, metavar="SHARE", help="idle time (0 to 1) between executions of CUDA graphs"
    )


def analysis_of(args: argparse.Namespace, path: str) -> Analysis:
    """Load a recording and return its analysis under the given settings."""
    from mrv2.trace import load
    from mrv2.trace.analysis import Analysis

    if args.warmup < 0 or args.min_bubble_us < 0:
        raise ConfigError("--warmup and --min-bubble-us must be at least 0")
    if args.step_span is not None and args.step_name is None:
        raise ConfigError("--step-span needs --step-name")
    return Analysis(
        load(path, cache=False if args.no_cache else None),
        step_name=args.step_name,
        step_span=args.step_span,
        min_bubble_ns=round(args.min_bubble_us * 1e3),
        policy=args.policy,
        warmup=args.warmup,
    )


def _show(args: argparse.Namespace) -> int:
    from mrv2.commands import trace_report as report

    analysis = analysis_of(args, args.file)
    _print(args, lambda: report.contents(analysis), lambda: report.contents_text(analysis, args.file))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from mrv2.commands import trace_report as report

    analyses = {name: analysis_of(args, path) for name, path in _short_names(args.files).items()}

    def data() -> Any:
        found = [{"file": name, **report.figures(each, args.kernels)} for name, each in analyses.items()]
        return found if len(found) > 1 else found[0]

    _print(args, data, lambda: report.figures_text(analyses, args.kernels))
    return 0


def _syncs(args: argparse.Namespace) -> int:
    from mrv2.commands import trace_report as report

    limit = _limit(args)
    analysis = analysis_of(args, args.file)
    rows = report.sync_rows(analysis, each=args.each, stacks=args.stacks, limit=limit)
    _print(args, lambda: rows, lambda: report.syncs_text(analysis, rows))
    return 0


def _bubbles(args: argparse.Namespace) -> int:
    from mrv2.commands import trace_report as report

    limit = _limit(args)
    analysis = analysis_of(args, args.file)
    found = report.bubbles(analysis, limit)
    _print(args, lambda: found, lambda: report.bubbles_text(analysis, found))
    return 0


def _limit(args: argparse.Namespace) -> int:
    if args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: must be at least 1")
    return args.limit


def _compare(args: argparse.Namespace) -> int:
    from mrv2.trace.compare import compare

    (first, a), (second, b) = _short_names([args.file, args.other]).items()
    found = compare(analysis_of(args, a), analysis_of(args, b), names=(first, second), align=args.align)
    wall = found.get("step", "wall_ns")
    data = {
        "a": a,
        "b": b,
        "align": found.align,
        "verdict": found.verdict,
        "notes": found.notes,
        "config": found.config,
        "figures": found.rows(),
    }
    _print(args, lambda: data, lambda: str(found))
    if args.fail_if_slower is None:
        return 0
    if wall.relative is None:
        note("no steps with evidence on both sides: whether it is slower cannot be told")
        return 1
    return int(wall.is_clear and 100.0 * wall.relative > args.fail_if_slower)


def _export(args: argparse.Namespace) -> int:
    from mrv2.trace import export

    out = Path(args.output)
    analysis = analysis_of(args, args.file)
    if out.suffix in _REPORTS:
        if args.format or args.table:
            raise ConfigError(f"--format and --table do not go with {out.suffix}")
        if out.suffix == ".html":
            from mrv2.viz.report import save_report

            written = [save_report(analysis, out)]
        else:
            from mrv2.viz.timeline import Timeline

            written = [Timeline(analysis).save(out)]
    else:
        written = export(analysis.trace, out, args.format, args.table)
    _print(args, lambda: [str(path) for path in written], lambda: "\n".join(map(str, written)))
    return 0


def _scrub(args: argparse.Namespace) -> int:
    from mrv2.trace import scrub

    removed = scrub(args.file, args.output, args.name)
    size = Path(args.output).stat().st_size
    data = {"output": args.output, "bytes": size, "removed": removed}
    _print(
        args,
        lambda: data,
        lambda: "\n".join([*(f"removed: {line}" for line in removed), f"{args.output}: {size / 1e3:,.0f} kB"]),
    )
    return 0


def _assert(args: argparse.Namespace) -> int:
    from mrv2.commands.trace_checks import checks_of
    from mrv2.trace.assertions import TraceAssertionError

    checks = checks_of(args)
    results = []
    for name, path in _short_names(args.files).items():
        analysis = analysis_of(args, path)
        for statement, check in checks:
            try:
                check(analysis)
                failure = None
            except TraceAssertionError as error:
                failure = str(error)
            results.append({"file": name, "statement": statement, "ok": failure is None, "failure": failure})
    _print(args, lambda: results, lambda: "\n".join(map(_result_line, results)))
    return int(not all(result["ok"] for result in results))


def _result_line(result: dict[str, Any]) -> str:
    if result["ok"]:
        return f"ok      {result['file']}: {result['statement']}"
    return f"FAILED  {result['file']}: {result['failure']}"


def _short_names(paths: list[str]) -> dict[str, str]:
    """Return name -> path: file names where they tell the files apart, else whole paths."""
    names = [Path(path).name for path in paths]
    chosen = names if len(set(names)) == len(names) else paths
    if len(set(chosen)) < len(chosen):
        raise ConfigError("a file is given twice")
    return dict(zip(chosen, paths, strict=True))


def _print(args: argparse.Namespace, data: Callable[[], Any], text: Callable[[], str]) -> None:
    if not args.json:
        print(text())
        return
    from mrv2.commands.trace_report import plain

    print(json.dumps(plain(data()), indent=1))
