"""Named, fixed workloads: the same requests on every machine, for every engine setting.

Every request ends by its length alone (``ignore_eos``), so a workload is the same amount of work
whatever the model answers.  A scaled workload has a name of its own ("c/8") and never the plain one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError, nearest
from mrv2.sampling_params import SamplingParams


@dataclass(frozen=True)
class BenchRequest:
    """One request; `output_len` in tokens."""

    prompt_token_ids: tuple[int, ...]
    output_len: int

    @property
    def input_len(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together, in this order."""

    # "c", or "c/8" when scaled by 8
    name: str
    description: str
    requests: tuple[BenchRequest, ...]
    # 0 = greedy
    temperature: float
    scale: int = 1
    # 0 = off
    top_k: int = 0
    # 1 = off
    top_p: float = 1.0

    @property
    def num_input_tokens(self) -> int:
        return sum(request.input_len for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(request.input_len + request.output_len for request in self.requests)

    def shortened(self, max_output_len: int) -> Workload:
        """Return the same prompts with at most that many output tokens each, for a warm-up."""
        requests = tuple(BenchRequest(r.prompt_token_ids, min(r.output_len, max_output_len)) for r in self.requests)
        return replace(self, name=f"{self.name} (short)", requests=requests)

    def engine_requests(self) -> list[EngineRequest]:
        """Return fresh requests for `EngineCore.add_request`; request i has the id ``str(i)`` and the seed i."""
        return [
            EngineRequest(
                req_id=str(index),
                prompt_token_ids=list(request.prompt_token_ids),
                params=SamplingParams(
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    max_tokens=request.output_len,
                    ignore_eos=True,
                    seed=index,
                    detokenize=False,
                ),
            )
            for index, request in enumerate(self.requests)
        ]


@dataclass(frozen=True)
class _Recipe:
    description: str
    make: Callable[[int], list[BenchRequest]]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def workload(self, name: str, requests: list[BenchRequest]) -> Workload:
        return Workload(name, self.description, tuple(requests), self.temperature, top_k=self.top_k, top_p=self.top_p)


def _uniform(count: int, input_len: int, output_len: int) -> _Recipe:
    def make(vocab_size: int) -> list[BenchRequest]:
        rng = random.Random(0)
        return [
            BenchRequest(tuple(rng.randrange(vocab_size) for _ in range(input_len)), output_len) for _ in range(count)
        ]

    plural = "s" if count > 1 else ""
    return _Recipe(f"{count} request{plural} of {input_len} random ids in, {output_len} out, greedy", make)


def _mixed_lengths(vocab_size: int) -> list[BenchRequest]:
    """The offline benchmark of nano-vllm's ``bench.py``: the draws and their order are part of it."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    output_lens = [rng.randint(100, 1024) for _ in prompts]
    # ids stay as drawn for every vocabulary of more than 10,000
    return [
        BenchRequest(tuple(token % vocab_size for token in prompt), output_len)
        for prompt, output_len in zip(prompts, output_lens, strict=True)
    ]


_RECIPES: dict[str, _Recipe] = {
    "a": _uniform(1, 128, 512),
    "b": _uniform(8, 128, 512),
    "c": _uniform(32, 128, 512),
    "d": _uniform(64, 128, 512),
    "e": _Recipe(
        "256 requests of 100 to 1024 tokens in and out, temperature 0.6 (the bench of nano-vllm)", _mixed_lengths, 0.6
    ),
    "f": _uniform(512, 32, 256),
}
NAMES = tuple(_RECIPES)


def _drawn(name: str) -> dict[str, _Recipe]:
    """Return a greedy workload's twins whose tokens are drawn."""
    base = _RECIPES[name]
    what = base.description.removesuffix(", greedy")
    return {
        f"{name}-t1": replace(base, description=f"{what}, temperature 1", temperature=1.0),
        f"{name}-k50": replace(
            base, description=f"{what}, temperature 1, top-k 50, top-p 0.9", temperature=1.0, top_k=50, top_p=0.9
        ),
    }


_RECIPES |= {**_drawn("d"), **_drawn("f")}
DRAWN_NAMES = tuple(name for name in _RECIPES if name not in NAMES)


def describe(name: str) -> str:
    """Return one line about a workload."""
    return _recipe(name).description


def make_workload(name: str, *, vocab_size: int, scale: int = 1) -> Workload:
    """Build a workload by its name.

    Args:
        name: one of `NAMES` or `DRAWN_NAMES`.
        vocab_size: ids are drawn below it.
        scale: keep the first 1/scale of the requests, and 1/scale of every prompt and output (at least
            one of each): for machines that cannot serve the whole.

    Raises `ConfigError` for an unknown name or a scale below 1.
    """
    recipe = _recipe(name)
    if scale < 1:
        raise ConfigError(f"scale={scale} must be at least 1 (1 = the workload itself)")
    requests = recipe.make(vocab_size)
    if scale == 1:
        return recipe.workload(name, requests)
    kept = [
        BenchRequest(r.prompt_token_ids[: max(1, r.input_len // scale)], max(1, r.output_len // scale))
        for r in requests[: max(1, len(requests) // scale)]
    ]
    description = f"{recipe.description}; counts and lengths divided by {scale}"
    return replace(recipe.workload(f"{name}/{scale}", kept), description=description, scale=scale)


def _recipe(name: str) -> _Recipe:
    if name not in _RECIPES:
        raise ConfigError(f"unknown workload {name!r}{nearest(name, _RECIPES)}; workloads are {', '.join(_RECIPES)}")
    return _RECIPES[name]
