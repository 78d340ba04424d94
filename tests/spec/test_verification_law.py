"""Verification by probabilities emits the target's own distribution: chi-square over many trials, and its power.

A trial is one request of a batch: drafts from a drafter that differs from the target, verified by the torch references,
until the text is long enough.  Every seed is fixed, so a test passes always or never.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import rejection_cases
from mrv2_kernels.spec.accept import accept_drafts_torch
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.recover import recover_tokens_torch

METHODS = ("standard", "block")
# the mutants pass on what they are given
accept: Any = accept_drafts_torch
recover: Any = recover_tokens_torch
MILLION = 10**6
# vocabulary -> tokens of a text (their joint distribution is judged), drafts a step
LENGTHS = {8: 2, 1000: 1}
NUM_DRAFTS = {8: 3, 1000: 2}
# a law that holds fails by chance once in ten thousand times, were the seeds drawn anew
LEAST_P = 1e-4


@cache
def run(method: str, drafts: str, vocab: int, trials: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return counts of the texts, their law, and drafts accepted a step."""
    return rejection_cases.chain(
        method, drafts, trials=trials, vocab=vocab, length=LENGTHS[vocab], num_drafts=NUM_DRAFTS[vocab]
    )


def over_the_bar(test: Callable[..., None]) -> Callable[..., None]:
    """Run over vocabularies; a million trials of a thousand tokens take a core a minute or two."""
    whole = pytest.param(1000, MILLION, marks=[pytest.mark.slow, pytest.mark.timeout(1200)], id="1000-million")
    sizes = [pytest.param(8, MILLION, id="8-million"), pytest.param(1000, 80_000, id="1000"), whole]
    return pytest.mark.parametrize(("vocab", "trials"), sizes)(test)


# "certain" = greedy drafts, the drafter's likeliest; "sampled" = drawn from it; "mapped" = it knows half of the tokens
@over_the_bar
@pytest.mark.parametrize("drafts", ["certain", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_emitted_tokens_follow_the_target(method: str, drafts: str, vocab: int, trials: int) -> None:
    counts, law, accepted = run(method, drafts, vocab, trials)
    assert counts.sum() == trials and accepted > 0
    assert rejection_cases.chi_square_p(counts, law) > LEAST_P


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_knows_half_of_the_tokens_leaves_the_target_too(method: str) -> None:
    counts, law, accepted = run(method, "mapped", 8, MILLION)
    assert accepted > 0
    assert rejection_cases.chi_square_p(counts, law) > LEAST_P


@over_the_bar
@pytest.mark.parametrize("drafts", ["certain", "sampled"])
def test_block_accepts_no_less_than_standard(drafts: str, vocab: int, trials: int) -> None:
    """With certain drafts both accept the same in the mean; with sampled ones block accepts more."""
    standard, block = (run(method, drafts, vocab, trials)[2] for method in METHODS)
    # accepted drafts of a step lie in 0 .. K, so their mean strays by at most K / 2 / sqrt(trials)
    noise = NUM_DRAFTS[vocab] / 2 * (2 / trials) ** 0.5
    assert block > standard - 4 * noise
    if drafts == "sampled":
        assert block > standard + 4 * noise, (standard, block)


def swapped(num_accepted: torch.Tensor, log_mass: torch.Tensor, joint: torch.Tensor, *args: Any, **options: Any):
    """Accept by q / p: the target's rows in the drafter's place, and the other way round."""
    logits, draft_probs = args[0], options["draft_probs"]
    vocab, width = logits.shape[1], draft_probs.probs.shape[1] + 1
    accept(num_accepted, log_mass, joint, *args, **options)
    rows = logits.view(-1, width, vocab)
    turned = DraftProbs(rows[:, :-1].softmax(2))
    drafter = torch.cat([draft_probs.probs.log(), torch.zeros_like(rows[:, :1])], dim=1).view(-1, vocab)
    spare = [torch.empty_like(log_mass) for _ in range(2)]
    accept(num_accepted, *spare, drafter, *args[1:], **{**options, "draft_probs": turned})


def all_too_easily(num_accepted: torch.Tensor, *args: Any, **options: Any) -> None:
    """Accept with q a tenth too small."""
    probs = options["draft_probs"]
    accept(num_accepted, *args, **{**options, "draft_probs": DraftProbs(0.9 * probs.probs)})


def weightless(num_accepted: torch.Tensor, log_mass: torch.Tensor, joint: torch.Tensor, *args: Any, **options: Any):
    """Forget c_i, by which block verification weighs the target in the residual."""
    accept(num_accepted, log_mass, joint, *args, **options)
    joint.fill_(1)


def one_by_one(num_accepted: torch.Tensor, *args: Any, **options: Any) -> None:
    """Take the length that standard verification finds, but the residual of block's."""
    accept(num_accepted, *args, **options)
    spare = [torch.empty_like(a) for a in args[:2]]
    accept(num_accepted, *spare, *args[2:], **{**options, "method": "standard"})


def from_the_target(*args: Any, **options: Any) -> None:
    """Draw the replacement from p, not from what the drafts left of it."""
    recover(*args, **{**options, "residual": False})


def not_normalised(*args: Any, **options: Any) -> None:
    """Form the residual from a p that sums to 0.8."""
    weights = args[6]
    recover(*args[:6], 0.8 * weights, *args[7:], **options)


def draft_again(*args: Any, **options: Any) -> None:
    """Draw the replacement from q."""
    probs = options["draft_probs"]
    assert probs is not None, "certain drafts have no distribution"
    drafts = probs.probs
    logits = args[7].view(drafts.shape[0], -1, drafts.shape[2]).clone()
    logits[:, :-1] = drafts.log()
    recover(*args[:7], logits.flatten(0, 1), *args[8:], **{**options, "residual": False})


MUTANTS: list[tuple[str, str, Any]] = [
    ("standard", "accept_drafts", swapped),
    ("block", "accept_drafts", swapped),
    ("standard", "accept_drafts", all_too_easily),
    ("block", "accept_drafts", all_too_easily),
    ("block", "accept_drafts", weightless),
    ("block", "accept_drafts", one_by_one),
    ("standard", "recover_tokens", from_the_target),
    ("block", "recover_tokens", from_the_target),
    ("standard", "recover_tokens", not_normalised),
    ("block", "recover_tokens", not_normalised),
    ("standard", "recover_tokens", draft_again),
]


@pytest.mark.parametrize(("method", "part", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_rule_is_seen(method: str, part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check, at a tenth of its trials, refuses each of these."""
    monkeypatch.setattr(rejection_cases, part, mutant)
    counts, law, _ = rejection_cases.chain(method, "sampled", trials=MILLION // 10, vocab=8, length=2, num_drafts=3)
    assert rejection_cases.chi_square_p(counts, law) < LEAST_P / 1e6


def test_a_certain_draft_that_may_come_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy drafts: the token that was refused must not be drawn in its own place."""
    monkeypatch.setattr(rejection_cases, "recover_tokens", from_the_target)
    counts, law, _ = rejection_cases.chain(
        "standard", "certain", trials=20_000, vocab=1000, length=1, num_drafts=1, wrongness=0.0
    )
    assert rejection_cases.chi_square_p(counts, law) < LEAST_P / 1e6


def test_the_measure_itself() -> None:
    """Known values: chi-square 3.841 of one degree of freedom has p = 0.05; counts on their means have p = 1."""
    offset = (3.841459 * 1000 / 4) ** 0.5
    assert rejection_cases.chi_square_p(np.array([500 + offset, 500 - offset]), np.array([0.5, 0.5])) == pytest.approx(
        0.05, abs=1e-6
    )
    assert rejection_cases.chi_square_p(np.full(8, 125), np.full(8, 0.125)) == 1.0
