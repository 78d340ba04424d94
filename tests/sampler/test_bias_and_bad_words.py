"""Allowed tokens, logit bias, minimum length and bad words: equal twins, against their definitions."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import logit_bias
from mrv2_kernels.sampling.bad_words import apply_bad_words, bad_words_row
from mrv2_kernels.sampling.logit_bias import apply_logit_bias, bias_words
from sampler.history_cases import INF, make_history, make_logits

TWINS = ["torch", "triton"]
VOCAB = 97


def packed(rows: list, width: int) -> torch.Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.int32)
    for slot, words in enumerate(rows):
        out[slot, : len(words)] = torch.from_numpy(words)
    return out


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bias_follows_its_definition(twin, dtype, monkeypatch):
    monkeypatch.setattr(logit_bias, "_BLOCK", 64)
    monkeypatch.setattr(logit_bias, "MAX_IDS", 64)
    lists = [
        ([], [], [], [], 0),
        ([3, 96, 0], [], [], [], 0),
        ([], [5, 1], [2.5, -100.0], [], 0),
        (list(range(40)), [7, 90], [1.0, 3.0], [2, 7], 30),
        ([], [], [], [4, 96], 10),
        ([2], [2], [-1.0], [2], 11),
    ]
    history = make_history(3)
    logits = make_logits(history, VOCAB, dtype)
    logits[4, 50] = float("nan")
    # the token that is sampled stands at position 10: below 30 and 11, not below 10
    positions = torch.full((6,), 9, dtype=torch.int32)
    expected = logits.double().clone()
    for row, slot in enumerate(history.logit_slots.tolist()):
        allowed, biased, biases, stop, min_len = lists[slot]
        if allowed:
            dropped = [i for i in range(VOCAB) if i not in allowed]
            expected[row, dropped] += torch.tensor(-INF, dtype=torch.float64)
        expected[row, biased] += torch.tensor(biases, dtype=torch.float64)
        if min_len > 10:
            expected[row, stop] += torch.tensor(-INF, dtype=torch.float64)
    table = packed([bias_words(*row) for row in lists], 256)
    getattr(apply_logit_bias, twin)(logits, history.logit_slots, positions, table)
    # the interpreter truncates to bfloat16 where the device rounds
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(logits, expected.to(dtype), rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("twin", TWINS)
def test_minimum_length_is_tested_by_the_position_of_each_row(twin):
    """Three rows of one request, drafts in flight: prompt 7, min_tokens 2, so position 9 is free."""
    table = packed([bias_words([], [], [], [1], 9)], 8)
    logits = torch.zeros(3, 5)
    positions = torch.tensor([6, 7, 8], dtype=torch.int32)
    getattr(apply_logit_bias, twin)(logits, torch.zeros(3, dtype=torch.int32), positions, table)
    assert logits[:, 1].tolist() == [-INF, -INF, 0.0]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_bad_words_match_outputs_and_drafts_only(twin, num_drafts):
    history = make_history(11, num_drafts=num_drafts)
    num_rows = len(history.logit_slots)
    words: list[list[list[int]]] = [[] for _ in range(6)]
    for row in range(num_rows):
        slot, outputs = int(history.logit_slots[row]), history.outputs(row)
        for size in (1, 2, 5):
            words[slot].append([*outputs[len(outputs) - size :], (7 * row + size) % VOCAB])
        words[slot].append([90 + slot])
        # begins with the last token of the prompt: no match
        words[slot].append([history.prompt(row)[-1], *outputs, 89])
    words[3] = []
    expected = make_logits(history, VOCAB, torch.float32)
    logits = expected.clone()
    for row in range(num_rows):
        outputs = history.outputs(row)
        for word in words[int(history.logit_slots[row])]:
            prefix = word[:-1]
            if len(prefix) <= len(outputs) and outputs[len(outputs) - len(prefix) :] == prefix:
                expected[row, word[-1]] = -INF
    getattr(apply_bad_words, twin)(
        logits,
        history.logit_slots,
        packed([bad_words_row(w) for w in words], 2048),
        history.token_ids,
        history.prompt_len,
        history.total_len,
        *history.drafts,
        max_words=max(map(len, words)),
    )
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("twin", TWINS)
def test_a_row_that_is_masked_whole_is_all_minus_infinity(twin):
    history = make_history(2)
    logits = torch.zeros(6, 3)
    table = packed([bad_words_row([[0], [1], [2]])] * 6, 8)
    getattr(apply_bad_words, twin)(
        logits,
        history.logit_slots,
        table,
        history.token_ids,
        history.prompt_len,
        history.total_len,
        *history.drafts,
        max_words=3,
    )
    assert (logits == -INF).all()
