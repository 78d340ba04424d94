"""Batches and chains for verification by probabilities, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2_kernels.sampling.noise import (
    ACCEPT_DOMAIN,
    DRAFT_DOMAIN,
    RECOVER_DOMAIN,
    gumbel_noise_of_torch,
    uniform_torch,
)
from mrv2_kernels.spec.accept import accept_drafts
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.recover import recover_tokens


@dataclass
class Batch:
    """Arguments of both operations."""

    logits: torch.Tensor
    logit_slots: torch.Tensor
    local_positions: torch.Tensor
    positions: torch.Tensor
    draft_tokens: torch.Tensor
    idx_mapping: torch.Tensor
    cu_num_logits: torch.Tensor
    yields: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_probs: DraftProbs | None
    rates: torch.Tensor
    scaled: bool

    def q(self, slot: int, i: int, draft: int) -> np.ndarray:
        """Return what draft i was drawn from. [V]"""
        vocab = self.logits.shape[1]
        if self.draft_probs is None:
            return np.eye(vocab)[draft]
        probs = self.draft_probs.probs[slot, i].double().numpy()
        if self.draft_probs.from_target is None:
            return probs
        index = self.draft_probs.from_target.numpy()
        return np.where(index >= 0, probs[index], 0.0)

    def u(self, slot: int, row: int, i: int) -> float:
        key = torch.tensor([[ACCEPT_DOMAIN + i]], dtype=torch.int32)
        return float(uniform_torch(self.seeds[slot : slot + 1], self.positions[row : row + 1], key))


def random_batch(
    seed: int,
    *,
    dtype: torch.dtype,
    drafts: str,
    scaled: bool,
    num_reqs: int = 7,
    vocab: int = 37,
    missing: float = 0.1,
) -> Batch:
    """Return a batch with greedy rows, missing drafts, requests without drafts, and ones that yield nothing."""
    g = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_slots, k = num_reqs + 3, 4
    slots = torch.randperm(num_slots, generator=g)[:num_reqs].int()
    yields = torch.from_numpy((rng.random(num_reqs) > 0.1).astype(np.int32))
    counts = torch.from_numpy(rng.integers(1, k + 2, size=num_reqs)) * yields + (1 - yields)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_rows = int(bounds[-1])
    logit_slots = torch.repeat_interleave(slots, counts)
    places = torch.arange(num_rows) - torch.repeat_interleave(bounds[:-1], counts)
    starts = torch.randint(1, 500, (num_slots,), generator=g)
    # a strided view, as logits of a padded vocabulary are
    logits = (2 * torch.randn(num_rows, vocab + 3, generator=g)).to(dtype)[:, :vocab]
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.6])[torch.from_numpy(rng.integers(0, 4, size=num_slots))]
    draft_probs, known = None, vocab
    if drafts != "certain":
        from_target = None
        if drafts == "mapped":
            known = vocab // 2
            to_target = torch.randperm(vocab, generator=g)[:known]
            from_target = torch.full((vocab,), -1, dtype=torch.int32)
            from_target[to_target] = torch.arange(known, dtype=torch.int32)
        probs = torch.randn(num_slots, k, known, generator=g).mul(1.5).softmax(dim=2)
        draft_probs = DraftProbs(probs, from_target)
        tokens = torch.multinomial(probs.view(-1, known), 1, generator=g).view(num_slots, k)
        draft_tokens = tokens if drafts == "dense" else to_target[tokens]
    else:
        draft_tokens = torch.randint(0, vocab, (num_slots, k), generator=g)
        # likely ones, so that some are accepted
        best = torch.zeros(num_slots, k, dtype=torch.int64)
        for row in range(num_rows):
            if places[row] < k:
                best[logit_slots[row], places[row]] = int(logits[row].argmax())
        draft_tokens = torch.where(torch.rand(num_slots, k, generator=g) < 0.6, best, draft_tokens)
    draft_tokens = torch.where(torch.rand(num_slots, k, generator=g) < missing, -1, draft_tokens)
    return Batch(
        logits,
        logit_slots,
        places.int(),
        (starts[logit_slots.long()] + places).int(),
        draft_tokens,
        slots,
        bounds.int(),
        yields,
        temperature,
        torch.randint(-(2**62), 2**62, (num_slots,), generator=g),
        draft_probs,
        torch.tensor([0.9, 0.75, 0.6, 0.4]),
        scaled,
    )


def verify(batch: Batch, method: str, twin: str = "") -> tuple[torch.Tensor, ...]:
    """Return sampled, num_sampled, num_rejected, row_tokens, num_accepted."""
    accept: Any = getattr(accept_drafts, twin, accept_drafts)
    recover: Any = getattr(recover_tokens, twin, recover_tokens)
    num_reqs, num_rows, device = len(batch.idx_mapping), batch.logits.shape[0], batch.logits.device
    acc = torch.float64 if batch.logits.dtype == torch.float64 else torch.float32
    sampled = torch.full((num_reqs, batch.draft_tokens.shape[1] + 1), 77, device=device)
    counts = [torch.full((num_reqs,), 77, dtype=torch.int32, device=device) for _ in range(3)]
    row_tokens = torch.full((num_rows,), 77, device=device)
    log_mass, joint = (torch.full((num_rows,), float("nan"), dtype=acc, device=device) for _ in range(2))
    accept(
        counts[0],
        log_mass,
        joint,
        batch.logits,
        batch.logit_slots,
        batch.local_positions,
        batch.positions,
        batch.draft_tokens,
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.temperature,
        batch.seeds,
        method=method,
        scaled=batch.scaled,
        draft_probs=batch.draft_probs,
        rates=batch.rates,
    )
    synthetic = method == "synthetic"
    recover(
        sampled,
        counts[1],
        counts[2],
        row_tokens,
        counts[0],
        log_mass,
        joint,
        batch.logits,
        batch.positions,
        batch.draft_tokens,
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.yields,
        batch.temperature,
        batch.seeds,
        scaled=batch.scaled,
        residual=not synthetic,
        draft_probs=None if synthetic else batch.draft_probs,
    )
    return sampled, counts[1], counts[2], row_tokens, counts[0]


def chain(
    method: str,
    drafts: str,
    *,
    trials: int,
    vocab: int,
    length: int,
    num_drafts: int,
    temperature: float = 1.0,
    wrongness: float = 1.0,
    shared_noise: bool = False,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray, float]:
    """Decode `length` tokens of a Markov chain `trials` times by drafts; return counts, their law, accepted a step.

    `drafts`: "certain" = the likeliest of a wrong chain, "sampled" = drawn from it, "mapped" = from every other token.
    `wrongness` says how far the drafter's chain is from the target's.  Drafts are drawn with the draft
    domain's noise; `shared_noise` takes that of `recover` instead.
    """
    g = torch.Generator().manual_seed(vocab)
    target = 1.2 * torch.randn(vocab, vocab, generator=g)
    wrong = (target + wrongness * torch.randn(vocab, vocab, generator=g)).log_softmax(1)
    to_target = torch.arange(0, vocab, 2) if drafts == "mapped" else torch.arange(vocab)
    wrong = wrong[:, to_target].log_softmax(1).to(device)
    target, to_target = target.to(device), to_target.to(device)
    from_target = torch.full((vocab,), -1, dtype=torch.int32, device=device)
    from_target[to_target] = torch.arange(len(to_target), dtype=torch.int32, device=device)
    counts = torch.zeros(vocab**length, dtype=torch.int64, device=device)
    # trials of one batch: on the host its logits fit a core's cache
    elements = 40_000_000 if torch.device(device).type == "cuda" else 1_000_000
    size = max(1, min(trials, elements // (vocab * (num_drafts + 1))))
    num_accepted = num_steps = 0
    for begin in range(0, trials, size):
        n = min(size, trials - begin)
        seeds = torch.arange(begin, begin + n, device=device) * 7919
        # column 0 is where every chain begins
        text = torch.zeros(n, 1 + length + num_drafts, dtype=torch.int64, device=device)
        done = torch.zeros(n, dtype=torch.int64, device=device)
        while bool((done < length).any()):
            alive = (done < length).nonzero().squeeze(1)
            m, tokens = len(alive), []
            previous = text[alive, done[alive]]
            last, probs = previous, []
            for k in range(num_drafts):
                log_q = wrong[last]
                if drafts == "certain":
                    drawn = to_target[log_q.argmax(1)]
                else:
                    domain = RECOVER_DOMAIN if shared_noise else (1 + k) * DRAFT_DOMAIN
                    ids = (to_target + domain).int().unsqueeze(0)
                    noise = gumbel_noise_of_torch(seeds[alive], (done[alive] + k).int(), ids)
                    drawn = to_target[(log_q + noise).argmax(1)]
                    probs.append(log_q.exp())
                tokens.append(drawn)
                last = drawn
            rows = torch.stack([previous, *tokens], dim=1).flatten()
            width = num_drafts + 1
            slots = torch.arange(m, dtype=torch.int32, device=device)
            batch = Batch(
                target[rows],
                torch.repeat_interleave(slots, width),
                torch.arange(width, dtype=torch.int32, device=device).repeat(m),
                (done[alive].unsqueeze(1) + torch.arange(width, device=device)).flatten().int(),
                torch.stack(tokens, dim=1),
                slots,
                torch.arange(0, m * width + 1, width, dtype=torch.int32, device=device),
                torch.ones(m, dtype=torch.int32, device=device),
                torch.full((m,), temperature, device=device),
                seeds[alive],
                None if drafts == "certain" else DraftProbs(torch.stack(probs, dim=1), from_target),
                torch.ones(num_drafts, device=device),
                False,
            )
            sampled, num_sampled, *_ = verify(batch, method)
            place = torch.arange(width, device=device)
            kept = place < num_sampled.unsqueeze(1)
            at = (done[alive].unsqueeze(1) + 1 + place).clamp(max=text.shape[1] - 1)
            owner = alive.unsqueeze(1).expand_as(at)
            text[owner[kept], at[kept]] = sampled[kept]
            done[alive] += num_sampled
            num_accepted += int(num_sampled.sum()) - m
            num_steps += m
        code = torch.zeros(n, dtype=torch.int64, device=device)
        for i in range(1, length + 1):
            code = code * vocab + text[:, i]
        counts += torch.bincount(code, minlength=vocab**length)
    logits = (
        target.double() / temperature
        if temperature
        else torch.where(target == target.amax(1, keepdim=True), 0.0, float("-inf"))
    )
    step = logits.softmax(1)
    law = step[0]
    for _ in range(length - 1):
        law = (law.view(-1, vocab, 1) * step.unsqueeze(0)).flatten()
    return counts.cpu().numpy(), law.cpu().numpy(), num_accepted / num_steps


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Return chi-square and its degrees of freedom; cells that expect five or fewer are taken together."""
    expected = law * counts.sum()
    seen = expected > 5
    observed = np.append(counts[seen], counts[~seen].sum())
    expected = np.append(expected[seen], expected[~seen].sum())
    used = expected > 0
    chi2 = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    return float(chi2), int(used.sum()) - 1


def chi_square_z(counts: np.ndarray, law: np.ndarray) -> float:
    """Return how many standard deviations chi-square lies above its mean."""
    chi2, freedom = chi_square(counts, law)
    return (chi2 - freedom) / (2 * freedom) ** 0.5


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """Return how likely so large a chi-square is where `counts` follow `law`."""
    chi2, freedom = chi_square(counts, law)
    half = torch.tensor([freedom, chi2], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
