"""What live stage recording costs: paired runs of one workload, without and with it.

python scripts/recording_overhead.py --workload d --pairs 6
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from mrv2.bench.serving import serve
from mrv2.bench.workloads import make_workload
from mrv2.config import EngineConfig, Knobs
from mrv2.engine.core import EngineCore
from mrv2.instrument import recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="d")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--graphs", default="step", choices=("off", "model", "step"))
    args = parser.parse_args()
    core = EngineCore(
        EngineConfig(model=args.model, max_model_len=4096, warm_up="all", knobs=Knobs(cuda_graphs=args.graphs))
    )
    workload = make_workload(args.workload, vocab_size=core.model_config.vocab_size)
    serve(core, workload.engine_requests())

    def tok_s(recorded: bool) -> float:
        if not recorded:
            run = serve(core, workload.engine_requests())
        else:
            with recording(core.device):
                run = serve(core, workload.engine_requests())
        return run.tokens_per_second

    ratios = []
    for pair in range(args.pairs):
        # the order alternates, so that a drift of the machine hits both sides alike
        first, second = (tok_s(False), tok_s(True)) if pair % 2 == 0 else (tok_s(True), tok_s(False))
        off, on = (first, second) if pair % 2 == 0 else (second, first)
        ratios.append(on / off)
        print(f"pair {pair}: off {off:,.0f} tok/s, recorded {on:,.0f} tok/s, ratio {on / off:.4f}")
    print(
        json.dumps(
            {
                "workload": args.workload,
                "graphs": args.graphs,
                "pairs": args.pairs,
                "ratios": ratios,
                "median": median(ratios),
            }
        )
    )
    core.shutdown()


if __name__ == "__main__":
    main()
