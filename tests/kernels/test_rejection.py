"""Verification by probabilities: twins, greedy runs, odd rows, and the law that the text follows the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rejection_cases
from mrv2_kernels.spec.accept import accept_drafts
from mrv2_kernels.spec.recover import recover_tokens
from rejection_cases import Batch, random_batch, verify

METHODS = ("standard", "block")


@pytest.mark.parametrize("drafts", ["certain", "dense", "mapped"])
@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
@pytest.mark.parametrize("seed", range(6))
def test_twins_agree(method: str, drafts: str, seed: int) -> None:
    dtype = (torch.float64, torch.float32, torch.bfloat16)[seed % 3]
    batch = random_batch(seed, dtype=dtype, drafts=drafts, scaled=seed % 2 == 1)
    mine = [verify(batch, method, twin) for twin in ("torch", "triton")]
    for a, b in zip(*mine, strict=True):
        assert torch.equal(a, b), (a, b)


def plain_accept(batch: Batch, method: str) -> list[int]:
    """Read the definition off, request by request, in float64."""
    bounds, counts = batch.cu_num_logits.tolist(), []
    for b, slot in enumerate(batch.idx_mapping.tolist()):
        rows = range(bounds[b], bounds[b + 1])
        drafts = batch.draft_tokens[slot, : len(rows) - 1].tolist()
        m = next((i for i, d in enumerate(drafts) if d < 0), len(drafts))
        t = float(batch.temperature[slot])
        p = [(batch.logits[r].double() / (t if t and not batch.scaled else 1.0)).softmax(0).numpy() for r in rows]
        if t == 0:
            best = [int(batch.logits[r].argmax()) for r in rows]
            counts.append(next((i for i in range(m) if drafts[i] != best[i]), m))
            continue
        q = [batch.q(slot, i, drafts[i]) for i in range(m)]
        u = [batch.u(slot, rows[i], i) for i in range(m)]
        if method == "standard":
            counts.append(next((i for i in range(m) if not u[i] * q[i][drafts[i]] < p[i][drafts[i]]), m))
            continue
        c, tau = 1.0, 0
        for i in range(1, m + 1):
            c = min(1.0, c * p[i - 1][drafts[i - 1]] / q[i - 1][drafts[i - 1]])
            h = c
            if i < m:
                s = np.maximum(c * p[i] - q[i], 0).sum()
                h = s / (s + 1 - c) if s + 1 - c > 0 else 1.0
            tau = i if u[i - 1] <= h else tau
        counts.append(tau)
    return counts


@pytest.mark.parametrize("drafts", ["certain", "dense", "mapped"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_accepted_is_what_the_papers_say(method: str, drafts: str, seed: int) -> None:
    batch = random_batch(100 + seed, dtype=torch.float64, drafts=drafts, scaled=False, num_reqs=40)
    sampled, num_sampled, num_rejected, row_tokens, accepted = verify(batch, method, "torch")
    assert accepted.tolist() == plain_accept(batch, method)
    bounds = batch.cu_num_logits.tolist()
    for b, slot in enumerate(batch.idx_mapping.tolist()):
        a, m = int(accepted[b]), bounds[b + 1] - bounds[b]
        if not batch.yields[b]:
            assert (int(num_sampled[b]), int(num_rejected[b])) == (0, 0)
            continue
        assert (int(num_sampled[b]), int(num_rejected[b])) == (a + 1, m - a - 1)
        assert sampled[b, :a].tolist() == batch.draft_tokens[slot, :a].tolist()
        assert (sampled[b, a + 1 :] == -1).all()
        assert row_tokens[bounds[b] : bounds[b + 1]].tolist() == sampled[b, :m].tolist()
        if a < m - 1 and drafts == "certain" and batch.temperature[slot] != 0:
            assert int(sampled[b, a]) != int(batch.draft_tokens[slot, a]), "a refused certain draft came back"


@pytest.mark.parametrize("method", METHODS)
def test_certain_drafts_or_none_leave_the_targets_own_draw_behind_them(method: str) -> None:
    """A request without drafts draws what sampling draws, so that only drafts change tokens."""
    from mrv2_kernels.sampling.gumbel import gumbel_sample

    batch = random_batch(7, dtype=torch.float64, drafts="certain", scaled=False, num_reqs=50)
    batch.draft_tokens.fill_(-1)
    sampled = verify(batch, method, "torch")[0]
    drawn = torch.zeros(batch.logits.shape[0], dtype=torch.int64)
    gumbel_sample(batch.logits, drawn, batch.logit_slots, batch.positions, batch.temperature, batch.seeds)
    first = drawn[batch.cu_num_logits[:-1].long()]
    assert sampled[batch.yields > 0, 0].tolist() == first[batch.yields > 0].tolist()


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafts", ["certain", "dense"])
def test_a_row_of_nan_ends_its_request_and_no_other(method: str, drafts: str, twin: str) -> None:
    batch = random_batch(11, dtype=torch.float32, drafts=drafts, scaled=False, num_reqs=12)
    batch.yields.fill_(1)
    clean = verify(batch, method, twin)[0]
    victim = int(batch.cu_num_logits.diff().argmax())
    begin, end = batch.cu_num_logits[victim : victim + 2].tolist()
    for bad in (float("nan"), float("-inf")):
        batch.logits[begin:end] = bad
        sampled, num_sampled, *_ = verify(batch, method, twin)
        assert int(num_sampled[victim]) == 1 and int(sampled[victim, 0]) == -1
        others = [b for b in range(12) if b != victim]
        assert torch.equal(sampled[others], clean[others])


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_a_masked_draft_is_never_emitted(method: str, twin: str) -> None:
    batch = random_batch(13, dtype=torch.float32, drafts="certain", scaled=False, num_reqs=20)
    bounds = batch.cu_num_logits.tolist()
    for b, slot in enumerate(batch.idx_mapping.tolist()):
        for i, row in enumerate(range(bounds[b], bounds[b + 1] - 1)):
            if batch.draft_tokens[slot, i] >= 0:
                batch.logits[row, batch.draft_tokens[slot, i]] = float("-inf")
    accepted = verify(batch, method, twin)[4]
    assert (accepted == 0).all()


@pytest.mark.parametrize("drafts", ["certain", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_follows_the_target(method: str, drafts: str) -> None:
    """The joint distribution of three tokens of a chain, over steps that begin wherever the last one ended.

    The seed of a trial never changes, so noise that a discarded draft has used and that is used again shows.
    """
    counts, law, _ = rejection_cases.chain(method, drafts, trials=150_000, vocab=4, length=3, num_drafts=3)
    assert rejection_cases.chi_square_z(counts, law) < 4.5


def test_greedy_requests_say_what_greedy_decoding_says() -> None:
    for method in METHODS:
        counts, law, _ = rejection_cases.chain(
            method, "sampled", trials=500, vocab=8, length=3, num_drafts=3, temperature=0.0
        )
        assert counts.max() == 500 and counts.argmax() == law.argmax()


def test_the_check_of_distributions_sees_a_shared_noise() -> None:
    """Drafts drawn with the noise that replaces them (or accepts them) would bend the text; the test must see it."""
    counts, law, _ = rejection_cases.chain(
        "standard", "sampled", trials=10**5, vocab=4, length=1, num_drafts=1, wrongness=3.0, shared_noise=True
    )
    assert rejection_cases.chi_square_z(counts, law) > 20


def test_synthetic_acceptance_hits_its_rates() -> None:
    batch = random_batch(3, dtype=torch.float32, drafts="certain", scaled=False, num_reqs=8_000, missing=0.0)
    accepted = verify(batch, "synthetic", "torch")[4]
    num_drafts = batch.cu_num_logits.diff() - 1
    for i, rate in enumerate(batch.rates.tolist()):
        tried = (num_drafts > i) & (accepted >= i)
        n = int(tried.sum())
        got = int((accepted[tried] > i).sum())
        assert abs(got - rate * n) < 5 * (n * rate * (1 - rate)) ** 0.5, (i, rate, got / n)


def test_a_synthetic_acceptance_needs_rates() -> None:
    batch: Any = random_batch(3, dtype=torch.float32, drafts="certain", scaled=False)
    batch.rates = None
    for twin in ("torch", "triton"):
        with pytest.raises(AssertionError, match="rates"):
            verify(batch, "synthetic", twin)


def test_the_twins_are_reachable() -> None:
    for op in (accept_drafts, recover_tokens):
        assert op.torch is not op.triton  # type: ignore[attr-defined]  # the twins ride on the function object
