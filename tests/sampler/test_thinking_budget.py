"""The thinking budget: when the end marker is forced, and that both twins see it, drafts included."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import thinking_budget
from mrv2_kernels.sampling.thinking_budget import FORCED_LOGIT, apply_thinking_budget, forced_token, thinking_row
from sampler.history_cases import make_history

START, END = [1, 2], [3, 4, 5]


@pytest.mark.parametrize(
    "tokens, prompt_len, budget, want",
    [
        # no thought, one within its budget, one at it
        ([9, 9, 9], 1, 0, None),
        ([1, 2, 9, 9], 2, 3, None),
        ([1, 2, 9, 9], 2, 2, 3),
        # the marker goes on where it is
        ([1, 2, 9, 9, 3], 2, 2, 4),
        ([1, 2, 9, 9, 3, 4], 2, 2, 5),
        ([1, 2, 9, 9, 3, 4, 5], 2, 2, None),
        # a tail that only looks like it
        ([1, 2, 9, 3, 9], 2, 2, 3),
        # tokens of the prompt are not counted
        ([1, 2, 9, 9, 9, 9], 5, 2, None),
        ([1, 2, 9, 9, 9, 9], 4, 2, 3),
        # a second thought; half a start marker; nothing may be thought at all
        ([1, 2, 3, 4, 5, 1, 2, 9], 1, 1, 3),
        ([9, 1], 1, 0, None),
        ([1, 2], 2, 0, 3),
    ],
)
def test_what_must_follow(tokens: list[int], prompt_len: int, budget: int, want: int | None) -> None:
    assert forced_token(tokens, prompt_len, budget, START, END) == want


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_kernels_force_what_the_rule_says(twin: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_budget, "_BLOCK", 64)
    num_forced = 0
    # the interpreter takes its time
    for seed in range(6 if twin == "torch" else 1):
        # of six tokens, so that markers do arise
        history = make_history(seed, num_drafts=num_drafts, vocab=18)
        history.input_ids %= 6
        markers = torch.zeros(6, 12, dtype=torch.int32)
        rules = [(slot % 4, START if slot % 2 else [1], END if slot % 3 else [3]) for slot in range(5)]
        for slot, rule in enumerate(rules):
            words = torch.from_numpy(thinking_row(*rule))
            markers[slot, : len(words)] = words
        expected = torch.randn(len(history.logit_slots), 20, generator=torch.Generator().manual_seed(seed))
        expected[2] = float("nan")
        logits = expected.clone()
        for row, slot in enumerate(history.logit_slots.tolist()):
            if slot < 5 and row != 2:
                prompt = history.prompt(row)
                token = forced_token(prompt + history.outputs(row), len(prompt), *rules[slot])
                if token is not None:
                    expected[row, token] = FORCED_LOGIT
                    num_forced += 1
        getattr(apply_thinking_budget, twin)(
            logits,
            history.logit_slots,
            markers,
            history.token_ids,
            history.prompt_len,
            history.total_len,
            *history.drafts,
        )
        torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    assert num_forced > 0
