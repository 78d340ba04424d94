"""Random sampling parameters over every feature, and engines to serve them with."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.sampling_params import SamplingParams
from serving import Served, make_core, random_prompt, serve

VOCAB = 512
Requests = dict[str, tuple[list[int], SamplingParams]]

MODES = {
    "v2 sync": Knobs(async_scheduling=False),
    "v2 depth 2": Knobs(queue_depth=2),
    "v2 depth 4": Knobs(queue_depth=4),
    "v1 sync": Knobs(runner="v1", async_scheduling=False),
    "v1 async": Knobs(runner="v1"),
}


def random_params(seed: int, temperature: float, num_tokens: int = 12) -> SamplingParams:
    """Return a random combination of features; about a third of them is on."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return rng.permutation(VOCAB)[: int(rng.integers(1, most + 1))].tolist()

    few = rng.permutation(VOCAB)[:40].tolist()
    choices: dict[str, Any] = {
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": {token: float(rng.uniform(-20, 20)) for token in ids(20)},
        "allowed_token_ids": few,
        # bad words over few tokens, so that prefixes do occur
        "bad_words": [rng.choice(few, size=int(rng.integers(1, 4))).tolist() for _ in range(30)],
        "min_tokens": int(rng.integers(1, num_tokens)),
        "stop_token_ids": ids(60),
        "thinking_token_budget": int(rng.integers(0, 5)),
    }
    on = {name: value for name, value in choices.items() if rng.random() < 0.4}
    if temperature > 0.0 and rng.random() < 0.5:
        on.update(top_k=int(rng.integers(2, 60)), top_p=float(rng.uniform(0.5, 1)), min_p=float(rng.uniform(0, 0.05)))
    start, end = (int(token) for token in few[:2])
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=num_tokens,
        ignore_eos=True,
        thinking_start=[start],
        thinking_end=[end, few[2]],
        **on,
    )


def random_requests(seed: int, num: int, num_tokens: int = 12) -> Requests:
    """Return requests of every length and temperature, each with its own features; prompts hold start markers."""
    requests: Requests = {}
    for index in range(num):
        params = random_params(1000 * seed + index, (0.0, 1.0, 0.7)[index % 3], num_tokens)
        prompt = random_prompt(1000 * seed + index, 3 + (11 * index) % 50)
        if params.thinking_token_budget is not None:
            prompt += params.thinking_start
        requests[f"r{index}"] = (prompt, params)
    return requests


def serve_in(mode: str, requests: Requests, **options: Any) -> dict[str, Served]:
    """Serve on a float64 engine with poisoned memory and late streams."""
    device = make_device("host", poison=True, random_delay_s=0.0005)
    return serve(make_core(device, knobs=MODES[mode], **options), requests)


def alone(name: str, requests: Requests) -> Served:
    """Serve one of the requests with the engine to itself."""
    core = make_core(max_num_seqs=1, enable_prefix_caching=False, knobs=MODES["v2 sync"])
    return serve(core, {name: requests[name]})[name]
