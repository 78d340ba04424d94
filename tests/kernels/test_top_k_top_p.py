"""Top-k and top-p: both twins keep exactly the tokens of a written-out definition."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import top_k_top_p
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p

INF = float("inf")
TWINS = ["torch", "triton"]


def kept_tokens(row: list[float], k: int, p: float) -> tuple[set[int], set[int]]:
    """Return the kept ids by definition, and those too near to p to tell in float32.

    Rank by (logit, -id), take the first k, of those the shortest prefix of mass p.
    """
    ranked = sorted((i for i in range(len(row)) if row[i] > -INF), key=lambda i: (-row[i], i))
    if 0 < k < len(row):
        ranked = ranked[:k]
    if p >= 1:
        return set(ranked), set()
    mass = (torch.tensor([row[i] for i in ranked], dtype=torch.float64) - row[ranked[0]]).exp()
    before = (mass.cumsum(0) - mass) / mass.sum()
    kept = {i for i, b in zip(ranked, before.tolist(), strict=True) if b < p or i == ranked[0]}
    return kept, {i for i, b in zip(ranked, before.tolist(), strict=True) if abs(b - p) < 1e-6} - {ranked[0]}


def check(twin: str, logits: torch.Tensor, k: int, p: float) -> None:
    """Run a twin on a copy of `logits` and compare with the definition; kept logits keep their value."""
    out = logits.clone()
    # the parameters live in slot 1; slot 0 is off
    args = (torch.tensor([0, k], dtype=torch.int32), torch.tensor([1.0, p]))
    getattr(apply_top_k_top_p, twin)(out, torch.ones(logits.shape[0], dtype=torch.int32), *args)
    kept = out > -INF
    assert torch.equal(out[kept], logits[kept])
    for row, kept_row in zip(logits.tolist(), kept, strict=True):
        expected, border = kept_tokens(row, k, p)
        assert ids_of(kept_row) - border == expected - border, f"{twin} k={k} p={p}"


def ids_of(kept: torch.Tensor) -> set[int]:
    return set(kept.nonzero().squeeze(1).tolist())


def make_logits(kind: str, num_rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab + num_rows)
    logits = 2 * torch.randn(num_rows, vocab, generator=generator)
    match kind:
        case "ties":
            return (logits * 2).round() / 2
        case "flat":
            return torch.zeros(num_rows, vocab)
        case "masked":
            return logits.masked_fill(torch.rand(num_rows, vocab, generator=generator) < 0.9, -INF).index_fill_(
                1, torch.tensor([vocab // 2]), 1.0
            )
        case "wide":
            return torch.where(torch.rand(num_rows, vocab, generator=generator) < 0.3, -1e9, 30 * logits)
        case _:
            return logits


PARAMS = [(1, 1.0), (5, 1.0), (40, 1.0), (0, 0.9), (0, 0.1), (0, 0.999), (10, 0.7), (200, 0.95), (3, 0.0), (700, 0.5)]


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked", "wide"])
@pytest.mark.parametrize(("vocab", "block"), [(49, 4096), (333, 32), (1000, 256)])
def test_both_twins_follow_the_definition(kind, vocab, block, monkeypatch):
    """Few lanes force many blocks, overflowing candidates and sweeps of whole rows."""
    monkeypatch.setattr(top_k_top_p, "_BLOCK", block)
    logits = make_logits(kind, 1, vocab)
    for k, p in PARAMS:
        for twin in TWINS:
            check(twin, logits, k, p)


def test_rows_whose_kept_tokens_are_few_need_no_sweeps_of_one_program(monkeypatch):
    """Chunks of a row are scanned and masked by programs of their own; ties of the border lie in several of them."""

    def sweep(*args):
        raise AssertionError("one program sweeps a row of few kept tokens")

    monkeypatch.setattr(top_k_top_p, "truncate_row", sweep)
    monkeypatch.setattr(top_k_top_p, "_BLOCK", 512)
    for kind in ("random", "ties", "masked", "wide"):
        logits = make_logits(kind, 1, 9000)
        logits[0, [100, 5300, 8999]] = logits.max()
        for k, p in ((1, 1.0), (5, 1.0), (40, 1.0), (10, 0.7), (3, 0.0)):
            check("triton", logits, k, p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    logits = make_logits("random", 1, 333).to(dtype)
    for k, p in PARAMS:
        for twin in TWINS:
            check(twin, logits, k, p)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("k", "p", "kept"),
    [
        (3, 1.0, {0, 1, 2}),
        # mass before ids 1, 0, 2, 4, 5, 3: 0, .38, .52, .66, .81, .95 of all
        (0, 0.6, {0, 1, 2}),
        # after top-k only ids 1, 0, 2 share the mass: 0, .58, .79 before them
        (3, 0.6, {0, 1}),
    ],
)
def test_ties_at_the_border_keep_the_lowest_ids(twin, k, p, kept):
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, 1.0]])
    args = (torch.tensor([k], dtype=torch.int32), torch.tensor([p]))
    getattr(apply_top_k_top_p, twin)(logits, torch.zeros(1, dtype=torch.int32), *args)
    assert ids_of(logits[0] > -INF) == kept


@pytest.mark.parametrize("twin", TWINS)
def test_rows_of_one_batch_are_independent(twin):
    logits = make_logits("random", 6, 500)
    top_k = torch.tensor([0, 7, 0, 600], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.8, 0.3])
    slots = torch.tensor([0, 1, 2, 3, 1, 0], dtype=torch.int32)
    out = torch.full((6, 640), float("nan"))[:, :500]
    out.copy_(logits)
    getattr(apply_top_k_top_p, twin)(out, slots, top_k, top_p)
    for row, slot in enumerate(slots.tolist()):
        expected, _ = kept_tokens(logits[row].tolist(), int(top_k[slot]), float(top_p[slot]))
        assert ids_of(out[row] > -INF) == expected


@pytest.mark.parametrize("twin", TWINS)
def test_rows_without_a_finite_maximum_are_not_touched(twin):
    nan = float("nan")
    logits = torch.tensor([[1.0, nan, 0.0, 2.0], [-INF] * 4, [INF, 0.0, 1.0, -INF]])
    out = logits.clone()
    getattr(apply_top_k_top_p, twin)(
        out, torch.zeros(3, dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.tensor([0.5])
    )
    torch.testing.assert_close(out, logits, equal_nan=True)


def test_no_rows():
    for twin in TWINS:
        check(twin, torch.empty(0, 7), 2, 0.5)
