"""Sampled drafts: with the target's noise under token_exact, with their own and kept probabilities otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2.engine.request import Request
from mrv2.errors import ConfigError
from mrv2.sampling_params import SamplingParams
from mrv2_kernels.sampling.noise import gumbel_noise_of_torch
from mrv2_kernels.spec.draft_draw import draw_drafts, keep_draft_probs
from mrv2_models.drafters.loading import random_head
from mrv2_models.registry import load_model
from rejection_cases import chi_square_z
from serving import Collector, alone, make_core, random_prompt, serve
from spec.drafter_cores import (
    METHODS,
    K,
    check_drafts,
    drafting_core,
    greedy,
    perturb,
    plain_drafter,
    use_small_vocabulary,
    write_head,
)

SAMPLED = {"draft_sampling": "sampled"}


def hot(seed: int, max_tokens: int = 24, **fields: Any) -> SamplingParams:
    """So hot that the noise decides, and drafts that share it are often right."""
    return SamplingParams(**{"temperature": 6.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def shared_noise(ids: torch.Tensor) -> Any:
    """Return how a request's draft is drawn: the target's noise at the target's ids."""

    def pick(request: Request, step: int, logits: torch.Tensor) -> int:
        if request.sampling.temperature == 0:
            return int(logits.argmax())
        scores = logits / request.sampling.temperature
        if request.sampling.top_k:
            scores[scores < scores.topk(request.sampling.top_k).values[-1]] = float("-inf")
        position = torch.tensor([len(request.token_ids) - 1 + step], dtype=torch.int32)
        words = ids.to(torch.int32).unsqueeze(0)
        noise = gumbel_noise_of_torch(torch.tensor([request.sampling.seed]), position, words, torch.float64)
        return int((scores + noise[0]).argmax())

    return pick


@pytest.mark.parametrize("method", METHODS)
def test_drafts_share_the_noise_of_the_target(method: str) -> None:
    """Greedy, hot and truncated requests side by side; the tokens stay, and hot drafts are often right."""
    core = drafting_core(method, knobs=SAMPLED, num_gpu_blocks=14, max_num_batched_tokens=24)
    if method == "draft_model":
        perturb(core, 0.05)
    else:
        use_small_vocabulary(core, 400)
    plain = plain_drafter(core)
    requests = {
        "greedy": (random_prompt(1, 20), greedy(20)),
        "hot": (random_prompt(2, 35), hot(5)),
        "truncated": (random_prompt(3, 9), hot(6, top_k=40)),
        "also hot": (random_prompt(4, 31), hot(7)),
    }
    collector, compared = Collector(core), 0
    for name, (prompt, params) in requests.items():
        collector.submit(name, prompt, params)
    while core.has_unfinished:
        collector.step()
        compared += check_drafts(core, plain, K, shared_noise(plain.ids))
    assert compared > 100
    want = serve(make_core(), requests)
    for name in requests:
        assert collector.served[name].token_ids == want[name].token_ids, name
    stats = core.scheduler.stats
    assert 0.1 < stats.num_accepted[0] / stats.num_drafted[0] < 1.0
    core.shutdown()


@pytest.mark.parametrize(("method", "verification"), [("eagle3", "standard"), ("mtp", "block")])
def test_verification_by_probabilities_keeps_the_distribution(method: Any, verification: str, tmp_path: Path) -> None:
    """Many seeds of one prompt, over the six tokens that the head can draft, against the engine without drafts."""
    head = random_head(method, load_model("tiny-llama", dtype="float64", load_format="dummy"), draft_vocab_size=6)
    write_head(head, tmp_path)
    assert head.to_target is not None
    allowed, prompt = head.to_target.tolist(), random_prompt(60, 12)

    def counts(core: Any) -> np.ndarray:
        params = [hot(i, 3, allowed_token_ids=allowed) for i in range(1000)]
        served = serve(core, {f"r{i}": (prompt, p) for i, p in enumerate(params)})
        table = np.zeros((6, 6), dtype=np.int64)
        for s in served.values():
            table[allowed.index(s.token_ids[1]), allowed.index(s.token_ids[2])] += 1
        return table

    options = dict(max_num_seqs=64, max_num_batched_tokens=1024, num_gpu_blocks=200, debug_checks=False)
    plain = counts(make_core(**options))
    core = drafting_core(
        method,
        num_drafts=2,
        knobs=SAMPLED | {"verification": verification},
        speculators=(f"{method}={tmp_path}",),
        **options,
    )
    fast = counts(core)
    accepted, drafted = core.scheduler.stats.num_accepted, core.scheduler.stats.num_drafted
    assert 0.2 < accepted[0] / drafted[0] < 0.95
    law = (plain + fast).flatten() / (plain + fast).sum()
    assert chi_square_z(fast.flatten(), law) < 4


def test_a_drafter_that_is_the_target_is_accepted_with_certainty() -> None:
    """Its probabilities are the target's own, so that no ratio is below one."""
    core = drafting_core("draft_model", knobs=SAMPLED | {"verification": "standard"}, dtype="float32")
    requests = {f"r{i}": (random_prompt(i, 10 + i), hot(i, temperature=0.8, top_k=30, top_p=0.9)) for i in range(6)}
    serve(core, requests)
    stats = core.scheduler.stats
    assert sum(stats.num_accepted) >= 0.99 * sum(stats.num_drafted) > 60


def test_how_drafts_are_chosen_changes_while_requests_run() -> None:
    core = drafting_core("draft_model")
    collector, prompts = Collector(core), [random_prompt(30 + i, 10) for i in range(3)]
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(40))
    for changes in (SAMPLED, {"verification": "block"}, {"draft_sampling": "greedy"}, {"verification": "token_exact"}):
        for _ in range(2):
            collector.step()
        core.set_knobs(**changes)
    served = collector.run()
    assert [served[f"r{i}"].token_ids for i in range(3)] == [alone(tuple(p), 0.0, 0, 40) for p in prompts]
    assert core.scheduler.stats.num_accepted == core.scheduler.stats.num_drafted
    core.shutdown()


def test_without_memory_for_probabilities_such_draws_are_refused() -> None:
    core = drafting_core("mtp", draft_probabilities=False, knobs=SAMPLED)
    with pytest.raises(ConfigError, match="draft_probabilities=False"):
        core.set_knobs(verification="standard")
    core.set_knobs(verification="standard", draft_sampling="greedy")
    core.shutdown()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_both_twins_draw_and_keep_the_same(mapped: bool, seed: int) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_reqs, vocab, rows = 5, 1500, 8
    logits = torch.randn(num_reqs, vocab, generator=generator)
    logits[:, ::3] = float("-inf")
    logits[0], logits[1, 7] = float("-inf"), float("nan")
    idx_mapping = torch.from_numpy(rng.permutation(rows)[:num_reqs].astype(np.int32))
    total_len = torch.from_numpy(rng.integers(1, 90, rows).astype(np.int32))
    temperature = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], rows).astype(np.float32))
    seeds = torch.from_numpy(rng.integers(0, 2**62, rows))
    to_target = torch.from_numpy(np.sort(rng.permutation(4000)[:vocab])) if mapped else None
    starts = torch.tensor([0, 1, 2, 2, 5, 6], dtype=torch.int32)
    drawn, kept = [], []
    for twin in (0, 1):
        drawn.append(torch.full((num_reqs,), 77))
        kept.append(torch.full((rows, K, vocab), 7.0))
        name = ("torch", "triton")[twin]
        draw, keep = getattr(draw_drafts, name), getattr(keep_draft_probs, name)
        draw(logits, drawn[twin], idx_mapping, total_len, to_target, temperature, seeds, step=2, purpose=3 << 27)
        keep(kept[twin], logits[2:].softmax(-1)[[0, 1, 2, 2, 1]], drawn[twin], starts, idx_mapping, temperature, step=1)
    assert torch.equal(*drawn) and drawn[0][:2].tolist() == [-1, -1] and (drawn[0][2:] >= 0).all()
    assert torch.equal(*kept)
    padding = int(idx_mapping[2])
    assert (kept[0][padding] == 7).all() and (kept[0][:, [0, 2]] == 7).all()
