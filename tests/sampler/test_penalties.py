"""Penalties from counts beside the history equal the dense definition, twin by twin."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import penalties, token_counts
from mrv2_kernels.sampling.penalties import apply_penalties
from sampler.history_cases import dense_penalties, make_history, make_logits

TWINS = ["torch", "triton"]
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}


def penalised(twin: str, history, logits: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    getattr(apply_penalties, twin)(
        out,
        history.logit_slots,
        history.penalties,
        history.token_ids,
        history.token_counts,
        history.total_len,
        *history.drafts,
    )
    return out


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_the_dense_definition(twin, num_drafts, dtype, monkeypatch):
    for module, name, value in (
        (penalties, "_BLOCK", 64),
        (token_counts, "_BLOCK", 32),
        (token_counts, "_BLOCK_I", 16),
    ):
        monkeypatch.setattr(module, name, value)
    history = make_history(num_drafts, num_drafts=num_drafts)
    logits = make_logits(history, 97, dtype)
    history.count(twin)
    expected = dense_penalties(history, logits)
    torch.testing.assert_close(penalised(twin, history, logits).double(), expected, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("twin", TWINS)
def test_counting_token_by_token_equals_counting_at_once(twin):
    history = make_history(5)
    history.count(twin)
    gen = torch.Generator().manual_seed(1)
    for _ in range(12):
        history.append(torch.randint(0, 30, (6,), generator=gen).tolist())
        history.count(twin, has_new=False)
    again = make_history(5)
    again.token_ids, again.total_len = history.token_ids, history.total_len
    again.count(twin)
    used = torch.arange(200) < history.total_len.unsqueeze(1)
    assert torch.equal(history.token_counts * used, again.token_counts * used)
    assert torch.equal(history.counted_len, again.counted_len)


@pytest.mark.parametrize("twin", TWINS)
def test_rows_without_a_penalty_keep_their_bits_and_their_counts(twin):
    history = make_history(7)
    neutral = [slot for slot, row in enumerate(history.penalties.tolist()) if row in ([0, 0, 0], [1, 0, 0])]
    assert len(neutral) == 2
    logits = make_logits(history, 97, torch.float32)
    history.count(twin)
    out = penalised(twin, history, logits)
    for row, slot in enumerate(history.logit_slots.tolist()):
        assert torch.equal(out[row], logits[row]) == (slot in neutral)
    assert not history.token_counts[neutral].any() and not history.counted_len[neutral].any()


@pytest.mark.parametrize("twin", TWINS)
def test_nan_rows_stay_nan(twin):
    history = make_history(9)
    history.count(twin)
    logits = make_logits(history, 97, torch.float32)
    logits[2] = float("nan")
    assert penalised(twin, history, logits)[2].isnan().all()


def test_state_of_a_thousand_requests_fits_its_budget():
    """2 bytes a token of the history; a dense count table of 151,936 tokens would take 622 MB."""
    rows, row_len = 1024, 8192
    words = torch.empty(rows, row_len, dtype=torch.int16, device="meta")
    assert words.numel() * words.element_size() + rows * (3 * 4 + 4) <= 60e6
