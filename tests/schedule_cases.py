"""A request's tokens do not depend on the schedule: neighbours, chunks, preemption, depth, runner, delays.

Each seed draws one random point of the product of everything that may change the schedule, on a
float64 model with poisoned memory, and compares every request with what it yields alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.engine.core import EngineCore
from mrv2.sampling_params import SamplingParams
from serving import BLOCK_SIZE, MAX_MODEL_LEN, Collector, alone, make_core, random_prompt
from spec.knowing_head import make_knowing

MODES = ("sync", "depth 1", "depth 2", "depth 3", "depth 4")
# V1's pinned buffers are shared between steps: its depth is at most 2
RUNNER_MODES = [("v2", mode) for mode in MODES] + [("v1", mode) for mode in MODES[:3]]
# an exact number of blocks, one less, one more, and lengths around the chunk sizes
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 90)
MAX_TOKENS = 18
MAX_DRAFTS = 8
NUM_DRAFTS = (0, 1, 2, 4, 8)
# over few tokens, so that drafts do meet what is penalised, forbidden or budgeted
FEW = tuple(range(40, 48))
FEATURES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.2, "presence_penalty": 0.4, "allowed_token_ids": FEW},
    {"repetition_penalty": 1.7},
    {"bad_words": [[a, b] for a in FEW[:5] for b in FEW[::2]], "allowed_token_ids": FEW},
    {"logit_bias": {FEW[0]: 5.0, FEW[1]: 5.5}, "top_k": 7, "min_p": 0.02},
    {"thinking_token_budget": 2, "thinking_start": [40], "thinking_end": [44, 45], "allowed_token_ids": FEW},
    {"logprobs": 2, "top_p": 0.8, "frequency_penalty": 0.5},
)
# drafters that are loaded, and how; a draft model that is the target is accepted in long runs
SPECULATORS = {"draft_model": "draft_model=tiny-llama", "eagle3": "eagle3", "mtp": "mtp", "suffix": "suffix"}
# "knowing": right now and then, where n-grams and heads of random weights hardly ever are
DRAFTERS = ("none", "ngram", "knowing", "knowing mtp", *SPECULATORS)
# drafters of V1, without and with async scheduling
HEADS = ("eagle3", "mtp", "knowing mtp")
V1_DRAFTERS = {"sync": ("none", "ngram", *HEADS), "async": ("none", *HEADS)}


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    # index of the output token that is made a stop token, or None
    stop_at: int | None
    priority: int
    arrives: int
    aborted_at: int | None
    # index into `FEATURES`, or None
    features: int | None = None

    @property
    def sampling(self) -> tuple[tuple[str, Any], ...]:
        return () if self.features is None else tuple(FEATURES[self.features].items())


@dataclass(frozen=True)
class Case:
    """One point of the product."""

    seed: int
    axes: dict[str, Any]
    requests: tuple[Request, ...]

    @property
    def drafts_on_v1(self) -> bool:
        return self.axes["runner"] == "v1" and self.axes["drafter"] != "none"

    @property
    def verification(self) -> str:
        """Return the axis' value, or the nearest that V1 has."""
        wanted = self.axes["verification"]
        return "standard" if self.drafts_on_v1 and wanted == "block" else wanted

    def knobs(self) -> Knobs:
        mode = self.axes["mode"]
        return Knobs(
            runner=self.axes["runner"],
            async_scheduling=mode != "sync",
            queue_depth=1 if mode == "sync" else int(mode[-1]),
            input_prep=self.axes["input_prep"],
            fetch_ahead=self.axes["fetch_ahead"],
            output_copy=self.axes["output_copy"],
            spec_method=method_of(self.axes["drafter"]),
            draft_sampling=("greedy", "sampled")[self.seed // 3 % 2],
            num_spec_tokens=self.axes["num_drafts"],
            verification=self.verification,
            cuda_graphs=self.axes["cuda_graphs"],
            prefill_chunk=0 if self.axes["chunks"] == "whole prompts" else 16 * (self.seed // 5 % 2),
        )


def method_of(drafter: str) -> str:
    return {"none": "off", "knowing": "ngram", "knowing mtp": "mtp"}.get(drafter, drafter)


def on_device(drafter: str) -> str:
    """Return the drafter for a GPU: one that knows the text looks at the device's values, which no graph can hold."""
    return {"knowing": "ngram", "knowing mtp": "mtp"}.get(drafter, drafter)


def draw_drafter(seed: int, runner: str, mode: str) -> str:
    drafters = DRAFTERS if runner == "v2" else V1_DRAFTERS["sync" if mode == "sync" else "async"]
    return drafters[(seed + seed // 7) % len(drafters)]


def draw_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)

    def pick(values: tuple[Any, ...]) -> Any:
        return values[int(rng.integers(len(values)))]

    runner, mode = RUNNER_MODES[seed // 9 % len(RUNNER_MODES)]
    axes = {
        "runner": runner,
        "mode": mode,
        # in turn, so that every value meets every other axis
        "max_num_seqs": 1 + seed % 9,
        "delays": pick((False, True)),
        "prefix_caching": pick((False, True)),
        "chunks": pick(("budget only", "small", "whole prompts")),
        "pool": pick(("ample", "tight")),
        "policy": pick(("fcfs", "priority")),
        "aborts": pick((False, True)),
        "switches": pick((False, True)),
        "shared_prefixes": pick((False, True)),
        "output_copy": pick(("side_stream", "main_stream")),
        "drafter": draw_drafter(seed, runner, mode),
        "num_drafts": NUM_DRAFTS[(seed + seed // 11) % len(NUM_DRAFTS)],
        # verification by probabilities keeps the tokens of greedy requests
        "verification": pick(("token_exact", "standard", "block")),
        "cuda_graphs": ("model", "step")[seed // 5 % 2],
        "input_prep": ("device", "host")[seed // 4 % 2],
        "fetch_ahead": (seed + seed // 13) % 3 != 0,
    }
    requests = []
    for _ in range(int(rng.integers(2, 9))):
        family = int(rng.integers(3)) if axes["shared_prefixes"] else int(rng.integers(1000, 1040))
        requests.append(
            Request(
                prompt=tuple(random_prompt(family, 90)[: pick(LENGTHS)]),
                temperature=0.0 if axes["verification"] != "token_exact" else pick((0.0, 0.7, 1.0)),
                seed=int(rng.integers(4)),
                max_tokens=int(rng.integers(1, MAX_TOKENS + 1)),
                stop_at=int(rng.integers(MAX_TOKENS)) if rng.random() < 0.3 else None,
                priority=int(rng.integers(3)) if axes["policy"] == "priority" else 0,
                arrives=int(rng.integers(12)),
                aborted_at=int(rng.integers(30)) if axes["aborts"] and rng.random() < 0.4 else None,
                features=int(rng.integers(len(FEATURES))) if rng.random() < 0.3 else None,
            )
        )
    return Case(seed, axes, tuple(requests))


def expected_tokens(request: Request, options: tuple[tuple[str, Any], ...]) -> tuple[list[int], int | None]:
    """Return what the request yields alone, and its stop token."""
    full = whole_text(request, options)
    if request.stop_at is None:
        return full[: request.max_tokens], None
    stop = full[request.stop_at]
    return full[: full.index(stop) + 1][: request.max_tokens], stop


def whole_text(request: Request, options: tuple[tuple[str, Any], ...]) -> list[int]:
    return alone(
        request.prompt,
        request.temperature,
        request.seed,
        MAX_TOKENS,
        options=options,
        sampling=repr(sorted(dict(request.sampling).items())),
    )


class KnowingSpeculator:
    """Proposes what the request will say, spoilt here and there: accepted runs of every length."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sequences: list[list[int]] = []

    def propose(
        self, state: Any, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_draft_tokens: int, max_len: int
    ) -> None:
        """Device code: look the history up among the sequences."""
        for row in idx_mapping.tolist():
            if row < 0:
                continue
            total = int(state.arena["total_len"][row])
            history = state.arena["token_ids"][row, :total].tolist()
            known = next((s for s in self.sequences if s[:total] == history), [])
            width = state.draft_tokens.shape[1]
            drafts = [7 if self.rng.random() < 0.2 else d for d in known[total : total + num_draft_tokens]]
            state.draft_tokens[row] = torch.tensor(drafts + [-1] * (width - len(drafts)))


def pick_verification(rng: np.random.Generator, axes: dict[str, Any], runner: str = "v2") -> str:
    kinds = ("token_exact",) if axes["verification"] == "token_exact" else ("token_exact", "standard", "block")
    if runner == "v1":
        kinds = tuple(kind for kind in kinds if kind != "block")
    return kinds[int(rng.integers(len(kinds)))]


def random_switch(rng: np.random.Generator, axes: dict[str, Any]) -> dict[str, Any]:
    prep = ("device", "host")[int(rng.integers(2))]
    if axes["drafter"] in HEADS or (axes["drafter"] == "ngram" and axes["runner"] == "v1"):
        # of both runners, each with what it has
        runner = ("v1", "v2")[int(rng.integers(2))]
        methods = ("off", "ngram", *((method_of(axes["drafter"]),) * 3 if axes["drafter"] in HEADS else ("ngram",)))
        method = methods[int(rng.integers(len(methods)))]
        return {
            "runner": runner,
            "spec_method": method,
            "num_spec_tokens": int(rng.integers(0, MAX_DRAFTS + 1)),
            "verification": pick_verification(rng, axes, runner),
            "async_scheduling": bool(rng.integers(2)) and (runner, method) != ("v1", "ngram"),
            "queue_depth": int(rng.integers(1, 5 if runner == "v2" else 3)),
            "input_prep": prep,
        }
    if axes["drafter"] != "none":
        methods = ("off", "ngram", *(m for m in SPECULATORS if m == axes["drafter"]))
        return {
            "spec_method": methods[int(rng.integers(len(methods)))],
            "num_spec_tokens": int(rng.integers(0, MAX_DRAFTS + 1)),
            "verification": pick_verification(rng, axes),
            "async_scheduling": bool(rng.integers(2)),
            "queue_depth": int(rng.integers(1, 5)),
            "cuda_graphs": ("off", "model", "step")[int(rng.integers(3))],
            "adaptive_drafts": not rng.integers(4),
            "input_prep": prep,
            "fetch_ahead": bool(rng.integers(4)),
        }
    runner = ("v1", "v2")[int(rng.integers(2))]
    depth = int(rng.integers(1, 5 if runner == "v2" else 3))
    graphs = ("model", "step")[int(rng.integers(2))]
    return {
        "runner": runner,
        "async_scheduling": bool(rng.integers(2)),
        "queue_depth": depth,
        "cuda_graphs": graphs,
        "input_prep": prep,
        "fetch_ahead": bool(rng.integers(4)),
    }


def use_speculator(core: EngineCore, method: str, speculator: Any) -> None:
    """Let another speculator draft; what a CUDA graph holds of the old one stays, for a new one may not be captured."""
    runner: Any = core.executor.runner
    runner.drafting.speculators[method] = speculator
    if core.device.type == "host":
        runner.step_graphs.graphs.clear()
        core.executor.capture_graphs()


def run_case(case: Case, options: dict[str, Any] | None = None) -> int:
    """Serve the case's requests and compare each with itself alone; `options` change the engine (device, dtype).

    Returns how many steps were replayed whole.
    """
    options = options or {}
    rng = np.random.default_rng(case.seed + 10**6)
    axes = case.axes
    budget = {"budget only": 48, "small": 48, "whole prompts": MAX_MODEL_LEN}[axes["chunks"]]
    blocks_of_one = -(-(90 + MAX_TOKENS) // BLOCK_SIZE)
    delay = 0.001 if axes["delays"] else 0.0
    device = make_device(options.get("device", "host"), poison=True, random_delay_s=delay, seed=case.seed)
    core = make_core(
        device,
        max_num_seqs=axes["max_num_seqs"],
        max_num_batched_tokens=max(budget, axes["max_num_seqs"]),
        enable_chunked_prefill=axes["chunks"] != "whole prompts",
        long_prefill_token_threshold=int(rng.integers(5, 40)) if axes["chunks"] == "small" else 0,
        enable_prefix_caching=axes["prefix_caching"],
        scheduling_policy=axes["policy"],
        num_gpu_blocks=1 + (blocks_of_one + int(rng.integers(4)) if axes["pool"] == "tight" else 100),
        knobs=case.knobs(),
        max_num_spec_tokens=MAX_DRAFTS,
        ngram_min=1,
        speculators=tuple(entry for method, entry in SPECULATORS.items() if method == method_of(axes["drafter"])),
        **options,
    )
    head = make_knowing(core) if axes["drafter"] == "knowing mtp" else None
    knowing = KnowingSpeculator(case.seed)
    if axes["drafter"] == "knowing":
        use_speculator(core, "ngram", knowing)
    collector = Collector(core)
    expected = {}
    try:
        turn = 0
        while turn < 30 or core.has_unfinished:
            for index, request in enumerate(case.requests):
                name = f"r{index}"
                if request.arrives == turn:
                    expected[name], stop = expected_tokens(request, tuple(options.items()))
                    whole = whole_text(request, tuple(options.items()))
                    knowing.sequences.append([*request.prompt, *whole])
                    if head is not None:
                        head.learn([*request.prompt, *whole])
                    params = SamplingParams(
                        temperature=request.temperature,
                        seed=request.seed,
                        max_tokens=request.max_tokens,
                        stop_token_ids=[] if stop is None else [stop],
                        ignore_eos=True,
                        **dict(request.sampling),
                    )
                    collector.submit(name, list(request.prompt), params, priority=request.priority)
                if request.aborted_at == turn:
                    core.abort([name])
            if axes["switches"] and rng.random() < 0.15:
                core.set_knobs(capture="between_steps" if rng.random() < 0.5 else "now", **random_switch(rng, axes))
            collector.step()
            turn += 1
            assert turn < 3000, f"not done after {turn} turns: {core.snapshot()}"
        check_outputs(case, collector, expected)
        core.scheduler.check()
        assert core.snapshot().kv_blocks_used == 0, "blocks are held after the last request"
        # v1 waits for whatever its features need; v2 for nothing but its output, unless the host counts drafts
        v2_waits = {reason for reason in device.waits if not reason.startswith("v1: ")}
        counts_drafts = axes["drafter"] != "none" and (axes["switches"] or axes["input_prep"] == "host")
        assert v2_waits <= {"output", "graph capture", *(["accepted tokens"] * counts_drafts)}, device.waits
        assert v2_waits == set(device.waits) or axes["runner"] == "v1" or axes["switches"], device.waits
        check_wasted_steps(case, core.scheduler.stats.num_wasted_steps)
        return core.executor.runner.stats.num_step_replays
    finally:
        core.shutdown()


def check_outputs(case: Case, collector: Collector, expected: dict[str, list[int]]) -> None:
    for index, request in enumerate(case.requests):
        served, want = collector.served[f"r{index}"], expected[f"r{index}"]
        where = f"seed {case.seed}, request {index} ({request}), axes {case.axes}"
        if served.finish_reason == "abort":
            assert request.aborted_at is not None, where
            assert served.token_ids == want[: len(served.token_ids)], where
        else:
            assert served.token_ids == want, where
            assert served.finish_reason in ("stop", "length"), where


def check_wasted_steps(case: Case, wasted: dict[str, int]) -> None:
    """None for requests that end by length; at most depth - 1 for each that ends otherwise."""
    mode = case.axes["mode"]
    most = 4 if case.axes["switches"] else (1 if mode == "sync" else int(mode[-1]))
    # accepted drafts may end a request earlier than the steps in flight promised
    early = len(case.requests) * (most - 1) if case.axes["drafter"] != "none" else 0
    assert wasted.get("length", 0) <= early, wasted
    stops = sum(r.stop_at is not None for r in case.requests)
    assert wasted.get("stop", 0) <= stops * (most - 1), wasted
