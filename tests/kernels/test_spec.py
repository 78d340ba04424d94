"""Kernels of speculative decoding against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.spec.chain import draft_from_chains
from mrv2_kernels.spec.expand import expand_logit_rows
from mrv2_kernels.spec.ngram import propose_ngram
from mrv2_kernels.spec.verify import verify_token_exact


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("twin", [expand_logit_rows.torch, expand_logit_rows.triton])
def test_rows_know_their_request_and_their_place_in_it(twin) -> None:
    slots, places = int32([0] * 6), int32([0] * 6)
    twin(slots, places, int32([7, 2, 5]), int32([0, 3, 4, 6]), max_rows=4)
    assert slots.tolist() == [7, 7, 7, 2, 5, 5]
    assert places.tolist() == [0, 1, 2, 0, 0, 1]


def verify_plain(targets: list[int], drafts: list[int], yields: bool, width: int) -> tuple[list[int], int, int]:
    if not yields:
        return [-1] * width, 0, 0
    accepted = 0
    while accepted < len(targets) - 1 and drafts[accepted] == targets[accepted] >= 0:
        accepted += 1
    emitted = targets[: accepted + 1]
    return emitted + [-1] * (width - len(emitted)), len(emitted), len(targets) - len(emitted)


@pytest.mark.parametrize("twin", [verify_token_exact.torch, verify_token_exact.triton])
@pytest.mark.parametrize("seed", range(6))
def test_the_leading_drafts_that_equal_the_targets_draws_are_accepted(twin, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_reqs, num_rows, k = 5, 9, 3
    rows = rng.permutation(num_rows)[:num_reqs]
    counts = rng.integers(1, k + 2, size=num_reqs)
    yields = rng.integers(0, 4, size=num_reqs) > 0
    bounds = np.concatenate(([0], np.cumsum(counts)))
    targets = rng.integers(0, 2, size=bounds[-1])
    drafts = rng.integers(-1, 2, size=(num_rows, k))
    sampled = torch.full((num_reqs, k + 1), 77)
    num_sampled, num_rejected = int32([77] * num_reqs), int32([77] * num_reqs)
    twin(
        sampled,
        num_sampled,
        num_rejected,
        torch.from_numpy(targets),
        torch.from_numpy(drafts),
        torch.from_numpy(rows.astype(np.int32)),
        torch.from_numpy(bounds.astype(np.int32)),
        torch.from_numpy(yields.astype(np.int32)),
    )
    for b in range(num_reqs):
        mine = targets[bounds[b] : bounds[b + 1]].tolist()
        want = verify_plain(mine, drafts[rows[b]].tolist(), bool(yields[b]), k + 1)
        assert (sampled[b].tolist(), int(num_sampled[b]), int(num_rejected[b])) == want


def ngram_plain(history: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[len(history) - n :]:
                drafts = history[end : end + k]
                return drafts + [-1] * (k - len(drafts))
    return [-1] * k


@pytest.mark.parametrize("twin", [propose_ngram.torch, propose_ngram.triton])
@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_what_followed_the_longest_rightmost_match(twin, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, width, k_max = 6, 40, 5
    k, min_n = int(rng.integers(1, k_max + 1)), int(rng.integers(1, 3))
    max_n = min_n + int(rng.integers(0, 3))
    token_ids = torch.from_numpy(rng.integers(0, 3, size=(num_rows, width)).astype(np.int32))
    totals = rng.integers(1, width + 1, size=num_rows)
    rows = rng.permutation(num_rows)[:4]
    num_sampled = rng.integers(0, 3, size=4)
    drafts = torch.full((num_rows, k_max), 77)
    twin(
        drafts,
        torch.from_numpy(rows.astype(np.int32)),
        token_ids,
        torch.from_numpy(totals.astype(np.int32)),
        torch.from_numpy(num_sampled.astype(np.int32)),
        num_draft_tokens=k,
        min_n=min_n,
        max_n=max_n,
        max_len=int(totals[rows].max()),
    )
    for b, row in enumerate(rows):
        history = token_ids[row, : totals[row]].tolist()
        want = ngram_plain(history, k, min_n, max_n) if num_sampled[b] else [-1] * k
        assert drafts[row].tolist() == want + [-1] * (k_max - k), f"row {row}"
    untouched = [row for row in range(num_rows) if row not in rows]
    assert (drafts[untouched] == 77).all()


def test_ngram_twins_agree_on_long_histories() -> None:
    rng = np.random.default_rng(0)
    token_ids = torch.from_numpy(rng.integers(0, 6, size=(3, 1500)).astype(np.int32))
    outs = [torch.zeros((3, 4), dtype=torch.int64) for _ in range(2)]
    for twin, out in zip((propose_ngram.torch, propose_ngram.triton), outs, strict=True):
        twin(
            out,
            int32([2, 0, 1]),
            token_ids,
            int32([1500, 700, 3]),
            int32([1, 2, 1]),
            num_draft_tokens=4,
            min_n=2,
            max_n=4,
            max_len=1500,
        )
    assert torch.equal(*outs) and (outs[0][0] >= 0).all()


@pytest.mark.parametrize("twin", [combine_sampled_and_draft_tokens.torch, combine_sampled_and_draft_tokens.triton])
def test_a_missing_draft_is_a_legal_token_for_the_model(twin) -> None:
    ids, indices = int32([5] * 3), int32([0] * 3)
    drafts = torch.tensor([[-1, -1]])
    twin(ids, indices, int32([0]), int32([0, 3]), int32([9]), int32([4]), torch.tensor([8]), drafts, int32([0, 3]))
    assert ids.tolist() == [8, 0, 0] and indices.tolist() == [0, 1, 2]


def chain_plain(others: list[int], history: list[int], start: int, chain: list[int], k: int, keep: bool) -> list[int]:
    done = len(history) - start
    holds = 0 <= done < len(chain) and history[start:] == chain[:done]
    ours = chain[done : done + k] if holds else []
    agrees = others[: len(ours)] == ours
    rest = others if keep and agrees else [-1] * len(others)
    return ours + rest[len(ours) :]


@pytest.mark.parametrize("twin", [draft_from_chains.torch, draft_from_chains.triton])
@pytest.mark.parametrize("keep", [False, True])
def test_drafts_come_from_a_chain_that_the_history_has_kept_to(twin, keep: bool) -> None:
    """Histories ahead of, inside, behind and off their chain; other requests' rows are not touched."""
    num_held = num_kept = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_rows, k_max, width = 7, int(rng.integers(1, 6)), int(rng.integers(1, 12))
        k = int(rng.integers(0, k_max + 1))
        slots = rng.permutation(num_rows)[:5]
        batch_rows = rng.permutation(5)[:3]
        # rows behind the history, and behind a chain, hold what nobody may take for tokens
        token_ids = torch.full((num_rows, 40), 999, dtype=torch.int32)
        chains = torch.full((3, width), 998, dtype=torch.int32)
        drafts = torch.from_numpy(rng.integers(-1, 4, (num_rows, k_max)))
        before, total_len, starts, lengths = drafts.clone(), int32([0] * num_rows), int32([0] * 3), int32([0] * 3)
        wanted = {}
        for c, batch_row in enumerate(batch_rows):
            slot, length = int(slots[batch_row]), int(rng.integers(0, width + 1))
            chain = rng.integers(0, 4, length).tolist()
            history = rng.integers(0, 4, int(rng.integers(1, 20))).tolist()
            start = len(history) + int(rng.integers(-1, 2))
            history += [*chain[: int(rng.integers(width + 1))], *([1] if rng.random() < 0.3 else [])]
            if length and rng.random() < 0.5:
                done = len(history) - start
                drafts[slot, : len(chain[done:])] = torch.tensor(chain[done:][:k_max]) if 0 <= done < length else 3
                before[slot] = drafts[slot]
            token_ids[slot, : len(history)] = int32(history)
            total_len[slot], starts[c], lengths[c] = len(history), start, length
            chains[c, :length] = int32(chain)
            wanted[slot] = chain_plain(before[slot].tolist(), history, start, chain, k, keep)
            num_held += wanted[slot] != chain_plain(before[slot].tolist(), history, start, [], k, keep)
            num_kept += keep and wanted[slot] == before[slot].tolist()
        batch = int32(batch_rows.tolist()), starts, lengths, chains, int32(slots.tolist()), token_ids, total_len
        twin(drafts, *batch, num_draft_tokens=k, keep_others=keep)
        for slot in range(num_rows):
            assert drafts[slot].tolist() == wanted.get(slot, before[slot].tolist()), (seed, slot)
    assert num_held > 10 and (num_kept > 10 or not keep)


def test_no_chain_is_no_launch() -> None:
    drafts, none = torch.full((2, 3), 5), int32([])
    chains = torch.zeros((0, 4), dtype=torch.int32)
    draft_from_chains.triton(
        drafts, none, none, none, chains, int32([0]), int32([[1]]), int32([1, 1]), num_draft_tokens=3, keep_others=False
    )
    assert (drafts == 5).all()
