"""A tour of the settings without a notebook: serve a load, turn the knobs, compare, and write a session and its report.

    python scripts/lab_tour.py --model qwen3-0.6b --load-format dummy --users 32 --out tour

writes ``tour/`` (opens with `mrv2.lab.open_session`) and ``tour.html`` (needs nothing else).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mrv2.errors import MRV2Error
from mrv2.lab import Load, Workbench

# what a setting shows, one after the other
TOUR: tuple[dict[str, Any], ...] = (
    {"runner": "v1", "sampler": "softmax_race", "async_scheduling": False},
    {"async_scheduling": True},
    {"runner": "v2", "async_scheduling": False},
    {"async_scheduling": True},
    {"queue_depth": 4},
    {"cuda_graphs": "step"},
    {"cuda_graphs": "model", "queue_depth": 2},
)


def main() -> int:
    """Serve, switch, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--pack", default="chat")
    parser.add_argument("--seconds", type=float, default=5.0, help="at each setting")
    parser.add_argument("--requests", type=int, default=32, help="of the A/B")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("tour"))
    args = parser.parse_args()
    load = Load(pack=args.pack, users=args.users, max_tokens=args.max_tokens, ignore_eos=True)
    options = {"load_format": args.load_format, "max_model_len": 2048, "max_num_seqs": max(args.users, 16)}
    with Workbench(args.model, load=load, max_num_spec_tokens=3, **options) as bench:
        bench.wait(tokens=8 * args.users)
        for changes in TOUR:
            try:
                intent = bench.set(**changes)
            except MRV2Error as error:  # a setting that is not for this machine is no reason to leave out the others
                print(f"{changes}: {error}", file=sys.stderr)
                continue
            bench.wait(seconds=args.seconds)
            found = bench.metrics(since=args.seconds - 0.5)
            rate, idle = found["tok_s"]["p50"], found["idle_pct"]["p50"]
            shown = "n/a" if idle is None else f"{idle:.0f} %"
            took = f"{1000 * (intent.seconds or 0.0):.0f} ms to switch"
            if intent.change is not None and intent.change.num_graphs:
                took += f", {intent.change.num_graphs} graphs captured in {intent.capture_seconds or 0.0:.1f} s"
            print(f"step {intent.step}, {took}, {rate or 0:,.0f} tok/s, device idle {shown}: {changes}")
        print(bench.ab("V1 as it was", "V2 async", requests=args.requests, repetitions=4, recorded=False))
        bench.wait(seconds=3.0)
        bench.check()
        print(bench.save(args.out), bench.report(args.out.with_suffix(".html")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
