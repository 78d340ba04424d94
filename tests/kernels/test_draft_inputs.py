"""Inputs of a drafter against plain Python, with padding and rows that must stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.spec.draft_inputs import advance_draft, prepare_draft_inputs

ROWS, WIDTH, BLOCK, TABLE, K = 7, 40, 16, 3, 4


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """A random batch after it was committed: chunks, decodes, verifications, then padding."""

    def __init__(self, seed: int, padding: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_real = int(rng.integers(1, 5))
        self.rows = rng.permutation(ROWS)[: self.num_real].tolist()
        self.lengths = rng.integers(1, 6, self.num_real).tolist()
        self.first = [int(rng.integers(0, WIDTH - n)) for n in self.lengths]
        # tokens known after the step: more than computed, one more than accepted, or past the row's end
        self.total = [
            f + int(rng.integers(1, n + 2)) + 5 * int(rng.integers(2)) for f, n in zip(self.first, self.lengths)
        ]
        self.history = rng.integers(0, 500, (ROWS, WIDTH))
        self.blocks = rng.integers(1, 90, (ROWS, TABLE))
        self.num_blocks = rng.integers(1, TABLE + 1, ROWS)
        self.num_reqs = self.num_real + padding
        bounds = np.cumsum([0, *self.lengths, *[0] * padding])
        self.starts = bounds.tolist()
        self.num_tokens = self.starts[-1] + 3 * padding
        positions = [f + i for f, n in zip(self.first, self.lengths) for i in range(n)]
        self.positions = int32(positions + [0] * (self.num_tokens - len(positions)))
        # what stands behind the batch in the uploaded words is another step's
        self.idx_mapping = int32(self.rows + [ROWS - 1] * padding)
        self.total_len = int32([0] * ROWS)
        self.total_len[self.rows] = int32(self.total)

    def slot(self, row: int, position: int) -> int:
        if position >= WIDTH or position // BLOCK >= self.num_blocks[row]:
            return -1
        return int(self.blocks[row, position // BLOCK]) * BLOCK + position % BLOCK


@pytest.mark.parametrize("twin", [prepare_draft_inputs.torch, prepare_draft_inputs.triton])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_first_pass(twin, extra: int, padding: int, seed: int) -> None:
    s = Step(seed, padding)
    size = s.num_tokens + extra * s.num_reqs
    ids, positions, slots = (torch.full((size,), 77, dtype=torch.int32) for _ in range(3))
    starts, seq_lens = torch.full((s.num_reqs + 1,), 77, dtype=torch.int32), torch.full((s.num_reqs,), 77).int()
    sample_index, drafts = torch.full((s.num_reqs,), 77, dtype=torch.int32), torch.full((ROWS, K), 77)
    twin(
        ids,
        positions,
        slots,
        starts,
        seq_lens,
        sample_index,
        drafts,
        s.positions,
        int32(s.starts),
        s.idx_mapping,
        torch.from_numpy(s.history.astype(np.int32)),
        s.total_len,
        torch.from_numpy(s.blocks.astype(np.int32)),
        torch.from_numpy(s.num_blocks.astype(np.int32)),
        extra=extra,
        block_size=BLOCK,
        max_query_len=5,
    )
    want_ids, want_positions, want_slots, want_starts = [], [], [], [0]
    for b, row in enumerate(s.rows):
        for i in range(s.lengths[b] + extra):
            position = s.first[b] + i
            source = position + 1 - extra
            want_ids.append(int(s.history[row, source]) if source < min(s.total[b], WIDTH) else 0)
            want_positions.append(min(position, WIDTH - 1))
            want_slots.append(s.slot(row, position))
        last = min(max(s.total[b] - 2 + extra - s.first[b], 0), s.lengths[b] + extra - 1)
        assert int(sample_index[b]) == want_starts[-1] + last
        want_starts.append(len(want_ids))
    tail = size - len(want_ids)
    assert ids.tolist() == want_ids + [0] * tail
    untouched = [i for i in range(ROWS) if i not in s.rows]
    assert (drafts[s.rows] == -1).all() and (drafts[untouched] == 77).all()
    if extra:
        assert positions.tolist() == want_positions + [0] * tail
        assert slots.tolist() == want_slots + [-1] * tail
        assert starts.tolist() == want_starts + [want_starts[-1] + i + 1 for i in range(padding)]
        assert seq_lens.tolist() == [f + n + 1 for f, n in zip(s.first, s.lengths)] + [0] * padding
    else:
        assert (positions == 77).all() and (slots == 77).all() and (starts == 77).all()


@pytest.mark.parametrize("twin", [advance_draft.torch, advance_draft.triton])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_advance(twin, extra: int, mapped: bool, seed: int) -> None:
    s, rng = Step(seed, 2), np.random.default_rng(seed)
    step = int(rng.integers(K))
    drawn = torch.from_numpy(rng.integers(-1, 20, s.num_reqs))
    to_target = torch.from_numpy(rng.permutation(500)[:20])
    computed = s.total_len - 1
    lagging = s.rows[: int(rng.integers(2))]
    computed[lagging] -= 1
    outs = [torch.full((s.num_reqs,), 77, dtype=torch.int32) for _ in range(4)]
    drafts = torch.full((ROWS, K), 77)
    twin(
        *outs,
        drafts,
        drawn,
        to_target if mapped else None,
        int32(s.starts),
        s.idx_mapping,
        s.total_len,
        computed,
        torch.from_numpy(s.blocks.astype(np.int32)),
        torch.from_numpy(s.num_blocks.astype(np.int32)),
        step=step,
        extra=extra,
        block_size=BLOCK,
        row_len=WIDTH,
    )
    want_drafts = torch.full((ROWS, K), 77)
    for b in range(s.num_reqs):
        token, position, slot = 0, 0, -1
        if b < s.num_real:
            row = s.rows[b]
            is_drafting, token = row not in lagging, int(drawn[b])
            if mapped and token >= 0:
                token = int(to_target[token])
            want_drafts[row, step] = token if is_drafting else -1
            token = token if is_drafting and token >= 0 else 0
            position = s.total[b] - 1 + extra + step if is_drafting else 0
            slot = s.slot(row, position) if is_drafting else -1
        found = [int(out[b]) for out in outs]
        assert found == [token, min(position, WIDTH - 1), position + 1 if slot >= 0 else 0, slot], b
    assert drafts.tolist() == want_drafts.tolist()
