"""The statements that ``mrv2 trace assert`` checks, from its flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from mrv2.errors import ConfigError

if TYPE_CHECKING:
    from mrv2.trace.analysis import Analysis

# what it states, and a call that raises `TraceAssertionError` if that is false or unproven
Check = tuple[str, "Callable[[Analysis], None]"]


def checks_of(args: argparse.Namespace) -> list[Check]:
    """Return the checks asked for; raises `ConfigError` if there are none or one is ill-formed."""
    checks = _no_sync(args) + [_overlap(text) for text in args.overlap] + _bubbles(args)
    checks += [_stage_gap(text) for text in args.stage_gap_p95_us] + _graph_idle(args)
    if not checks:
        raise ConfigError("nothing to check: give --no-sync, --overlap, --max-bubble-us or another statement")
    return checks


def _no_sync(args: argparse.Namespace) -> list[Check]:
    options = {
        "--within": args.within is not None,
        "--allow": bool(args.allow),
        "--min-stall-us": args.min_stall_us is not None,
        "--all-threads": args.all_threads,
        "--named-waits-suffice": args.named_waits_suffice,
    }
    if not args.no_sync:
        given = [name for name, is_given in options.items() if is_given]
        if given:
            raise ConfigError(f"{', '.join(given)}: needs --no-sync")
        return []
    within = args.within or "step"

    def check(analysis: Analysis) -> None:
        from mrv2.trace.assertions import assert_no_sync

        assert_no_sync(
            analysis,
            within,
            allow=args.allow,
            min_stall_ns=round((args.min_stall_us or 0.0) * 1e3),
            all_threads=args.all_threads,
            named_waits_suffice=args.named_waits_suffice,
        )

    allowed = f" but {', '.join(args.allow)}" if args.allow else ""
    return [(f"no sync within {within!r}{allowed}", check)]


def _overlap(text: str) -> Check:
    stage, equals, share_text = text.rpartition("=")
    try:
        share = float(share_text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0 or (equals and not stage):
        raise ConfigError(f"--overlap {text}: expected a share from 0 to 1, as in 0.9 or schedule=0.95")

    def check(analysis: Analysis) -> None:
        from mrv2.trace.assertions import assert_overlap

        assert_overlap(analysis, stage or None, at_least=share)

    return f"overlap of {stage or 'the CPU work'} at least {100 * share:g} %", check


def _bubbles(args: argparse.Namespace) -> list[Check]:
    flags = {
        "max_ns": (args.max_bubble_us, "longest bubble"),
        "p95_ns": (args.max_bubble_p95_us, "95th percentile of the bubbles"),
        "step_p95_ns": (args.step_bubble_p95_us, "95th percentile of a step's bubbles"),
    }
    checks = []
    for limit, (value, words) in flags.items():
        if value is None:
            continue
        if value < 0:
            raise ConfigError(f"a limit of {value} us on the {words} must be at least 0")

        def check(analysis: Analysis, limit: str = limit, value: float = value) -> None:
            from mrv2.trace.assertions import assert_max_bubble

            assert_max_bubble(analysis, **{limit: round(value * 1e3)})

        checks.append((f"{words} at most {value:g} us", check))
    return checks


def _stage_gap(text: str) -> Check:
    stages, _, limit_text = text.rpartition("=")
    first, dots, second = stages.partition("..")
    try:
        limit = float(limit_text)
    except ValueError:
        limit = -1.0
    if not (first and dots and second) or not limit >= 0:
        raise ConfigError(f"--stage-gap-p95-us {text}: expected two stages and microseconds, as in verify..draft=10")

    def check(analysis: Analysis) -> None:
        from mrv2.trace.assertions import assert_stage_gap

        assert_stage_gap(analysis, first, second, p95_ns=round(limit * 1e3))

    return f"95th percentile of the idle time between {first!r} and {second!r} at most {limit:g} us", check


def _graph_idle(args: argparse.Namespace) -> list[Check]:
    share = args.max_graph_idle
    if share is None:
        return []
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"--max-graph-idle {share}: expected a share from 0 to 1, as in 0.02")

    def check(analysis: Analysis) -> None:
        from mrv2.trace.assertions import assert_graph_idle

        assert_graph_idle(analysis, at_most=share)

    return [(f"idle between CUDA graphs at most {100 * share:g} %", check)]
