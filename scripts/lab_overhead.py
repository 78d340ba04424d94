"""What watching costs: output tokens a second without the panel, with recorded windows, and with the panel.

The panel is driven headless: its painter runs at its usual rate, and everything that it would send to a page is turned
into JSON. Passes alternate, so that drift of the machine falls on all of them alike.

    python scripts/lab_overhead.py --model qwen3-0.6b --load-format dummy --users 64 --seconds 8 --passes 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from mrv2.lab import Load, Workbench
from mrv2.lab.panel import Panel

VARIANTS = ("quiet", "windows", "panel")


def measure(bench: Workbench, variant: str, seconds: float) -> dict[str, Any]:
    """Return the rate of one pass, and what the panel took of it."""
    bench.driver.windows.enabled = variant != "quiet"
    panel: Panel | None = None
    sent = [0]
    if variant == "panel":
        panel = Panel(bench)

        def count(change: Any) -> None:
            sent[0] += len(json.dumps(change["new"], default=str))

        panel.widget.observe(count)
    bench.wait(seconds=1.0)
    start = bench.view
    end = bench.wait(seconds=seconds)
    rate = (end.num_tokens - start.num_tokens) / (end.at - start.at)
    found: dict[str, Any] = {"variant": variant, "tok_s": rate}
    if panel is not None:
        found |= {"panel": panel.cost, "kB_s": sent[0] / 1e3 / (end.at - start.at)}
        panel.close()
    return found


def main() -> int:
    """Run the passes and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engine", default="auto", choices=["auto", "thread", "process"])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    load = Load(users=args.users, max_tokens=args.max_tokens, ignore_eos=True)
    options = {"load_format": args.load_format, "max_model_len": 1024, "max_num_seqs": max(args.users, 1)}
    passes: list[dict[str, Any]] = []
    with Workbench(args.model, engine=args.engine, load=load, **options) as bench:
        bench.wait(tokens=4 * args.users)
        for number in range(args.passes):
            order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
            for variant in order:
                passes.append(measure(bench, variant, args.seconds))
                print(passes[-1], file=sys.stderr)
        bench.check()
    rates = {v: statistics.median(p["tok_s"] for p in passes if p["variant"] == v) for v in VARIANTS}
    cost = {v: round(1 - rates[v] / rates["quiet"], 4) for v in VARIANTS[1:]}
    panels = [p for p in passes if p["variant"] == "panel"]
    print(json.dumps({"model": args.model, "tok_s": rates, "cost": cost, "panel": panels[-1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
