"""Verification by probabilities on the GPU: the kernels against their references, and the law of the text."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import rejection_cases
from mrv2_kernels.spec.draft_probs import DraftProbs
from rejection_cases import Batch, random_batch, verify

pytestmark = pytest.mark.gpu

METHODS = ("standard", "block")


def on_gpu(batch: Batch) -> Batch:
    moved = {f.name: v.cuda() for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)}
    given = batch.draft_probs
    if given is not None:
        index = None if given.from_target is None else given.from_target.cuda()
        moved["draft_probs"] = DraftProbs(given.probs.cuda(), index)  # type: ignore[assignment]
    return replace(batch, **moved)


@pytest.mark.parametrize("drafts", ["certain", "dense", "mapped"])
@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
@pytest.mark.parametrize("vocab", [37, 1000, 49_152, 151_936])
def test_kernels_equal_their_references(method: str, drafts: str, vocab: int) -> None:
    """But for a draft whose acceptance hangs on the last bit of a sum: at most one request of a batch."""
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        batch = random_batch(seed, dtype=dtype, drafts=drafts, scaled=seed == 1, num_reqs=12, vocab=vocab)
        # the reference on the CPU, where the first of equal logits is the arg-max
        mine, theirs = verify(on_gpu(batch), method, "triton")[0].cpu(), verify(batch, method, "torch")[0]
        differing = int((mine != theirs).any(dim=1).sum())
        assert differing <= (0 if dtype == torch.float64 else 1), (dtype, differing)


@pytest.mark.parametrize("drafts", ["certain", "sampled", "mapped"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [8, 1000])
def test_a_million_texts_follow_the_target(method: str, drafts: str, vocab: int) -> None:
    counts, law, _ = rejection_cases.chain(
        method, drafts, trials=10**6, vocab=vocab, length=2 if vocab == 8 else 1, num_drafts=3, device="cuda"
    )
    assert rejection_cases.chi_square_z(counts, law) < 4.5


def test_block_verification_accepts_no_less_than_standard() -> None:
    mean = {
        method: rejection_cases.chain(
            method, "sampled", trials=10**6, vocab=8, length=1, num_drafts=4, wrongness=1.5, device="cuda"
        )[2]
        for method in METHODS
    }
    assert mean["block"] > mean["standard"] * 1.005, mean
