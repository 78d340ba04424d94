"""How long a knob takes: seconds from asking until it is applied, and until the graphs that it needs are there.

Each value is set `rounds` + 1 times while a load runs.  The first time may have graphs to capture, and steps go on
without them meanwhile; from the second time on everything is there, and the bar is one second.

    python scripts/lab_switching.py --model qwen3-0.6b --load-format dummy --users 64 --rounds 5

The last line is JSON; the exit status is 1 if a value whose graphs were there took longer than the bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from mrv2.errors import MRV2Error
from mrv2.lab import Load, Workbench
from mrv2.lab.driver import describe_changes

BAR_S = 1.0
# back and forth between two settings each; a knob that needs others brings them along
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"async_scheduling": False}, {"async_scheduling": True}),
    ({"queue_depth": 4}, {"queue_depth": 2}),
    ({"runner": "v1"}, {"runner": "v2"}),
    ({"input_prep": "host"}, {"input_prep": "device"}),
    ({"cuda_graphs": "off"}, {"cuda_graphs": "model"}),
    ({"cuda_graphs": "step"}, {"cuda_graphs": "model"}),
    ({"fetch_ahead": False}, {"fetch_ahead": True}),
    ({"sampler": "softmax_race"}, {"sampler": "gumbel_fused"}),
    ({"output_copy": "main_stream"}, {"output_copy": "side_stream"}),
    ({"output_wait": "sleep"}, {"output_wait": "spin"}),
    ({"prefill_chunk": 64}, {"prefill_chunk": 0}),
    ({"spec_method": "ngram"}, {"spec_method": "off"}),
    ({"spec_method": "ngram", "num_spec_tokens": 1}, {"spec_method": "off", "num_spec_tokens": 3}),
)


def switch(bench: Workbench, changes: dict[str, Any]) -> dict[str, Any]:
    """Change knobs while requests run; seconds from asking on, and what it took."""
    before, began = bench.view, time.monotonic()
    intent = bench.set(**changes)
    done = time.monotonic() - began
    change = intent.change
    assert change is not None and intent.capture_seconds is not None, f"{changes}: applied without a report"
    return {
        "changes": describe_changes(changes),
        # what the engine needed plus the wait for its turn
        "applied_s": done - intent.capture_seconds,
        "engine_s": intent.seconds,
        "capture_s": intent.capture_seconds,
        "graphs": change.num_graphs,
        "drained": change.num_drained,
        "recomputed": change.num_recomputed,
        "tokens_meanwhile": bench.view.num_tokens - before.num_tokens,
    }


def main() -> int:
    """Switch, report, compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engine", default="auto", choices=["auto", "thread", "process"])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    load = Load(users=args.users, max_tokens=args.max_tokens, ignore_eos=True)
    options = {"load_format": args.load_format, "max_model_len": 1024, "max_num_seqs": max(args.users, 1)}
    first: list[dict[str, Any]] = []
    later: dict[str, list[float]] = {}
    with Workbench(args.model, engine=args.engine, load=load, max_num_spec_tokens=3, **options) as bench:
        bench.wait(tokens=4 * args.users)
        for pair in PAIRS:
            for number in range(args.rounds + 1):
                for changes in pair:
                    try:
                        found = switch(bench, changes)
                    except MRV2Error as error:  # not for this machine: the others still are
                        print(f"{describe_changes(changes)}: {error}", file=sys.stderr)
                        continue
                    if found["graphs"] or number == 0:
                        first.append(found)
                        print(found, file=sys.stderr)
                    if not found["graphs"] and not found["recomputed"]:
                        later.setdefault(found["changes"], []).append(found["applied_s"])
                    bench.wait(tokens=2 * args.users)
        hardware = bench.hardware
        bench.check()
    spread = {name: {"median": statistics.median(s), "max": max(s), "n": len(s)} for name, s in later.items()}
    slow = {name: each["max"] for name, each in spread.items() if each["max"] > BAR_S}
    result = {"model": args.model, "hardware": hardware, "users": args.users, "bar_s": BAR_S}
    captures = [found for found in first if found["graphs"]]
    print(json.dumps({**result, "applied_s": spread, "over_the_bar": slow, "captures": captures}))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
