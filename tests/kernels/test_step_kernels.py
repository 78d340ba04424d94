"""What a step graph launches does what the kernels of the other path do; the batch's size is read on the device."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.inputs.commit import commit_decode
from mrv2_kernels.inputs.commit_verified import commit_verified
from mrv2_kernels.inputs.post_update import post_update
from mrv2_kernels.inputs.prepare import prepare_pos_seq_lens
from mrv2_kernels.inputs.verification import prepare_verification_inputs
from mrv2_kernels.spec.expand import expand_logit_rows
from mrv2_kernels.spec.ngram import propose_ngram
from mrv2_kernels.spec.suffix import propose_suffix
from mrv2_kernels.state.block_table import compute_slot_mapping, gather_block_tables

ROWS, LENGTH, SLOTS = 40, 9, 3
UNTOUCHED = -77


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def request_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # some histories are full: their token is dropped
    total = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator, dtype=torch.int32)
    return {
        "computed": total - 1,
        "total": total,
        "last": torch.randint(0, 500, (ROWS,), generator=generator),
        "tokens": torch.randint(0, 500, (ROWS, LENGTH), generator=generator, dtype=torch.int32),
    }


@pytest.mark.parametrize("twin", [commit_decode.torch, commit_decode.triton])
@pytest.mark.parametrize(("num_reqs", "padded"), [(0, 1), (1, 1), (3, 4), (33, 40), (40, 40)])
def test_a_commit_is_a_post_update_that_touches_no_padding(twin, num_reqs: int, padded: int) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    rows = torch.randperm(ROWS, generator=generator)[:num_reqs].to(torch.int32)
    # padding maps to a row that is in use: touching it would show
    mapping = torch.cat((rows, rows.new_full((padded - num_reqs,), int(rows[0]) if num_reqs else 0)))
    sampled = torch.randint(-1, 500, (padded,), generator=generator)
    got, want = request_state(num_reqs), request_state(num_reqs)
    post_update.torch(
        want["computed"],
        want["total"],
        want["last"],
        want["tokens"],
        rows,
        torch.arange(num_reqs + 1, dtype=torch.int32),
        sampled[:num_reqs].unsqueeze(1),
        torch.ones(num_reqs, dtype=torch.int32),
        torch.zeros(num_reqs, dtype=torch.int32),
    )
    outputs = torch.full((SLOTS, ROWS), UNTOUCHED)
    twin(
        outputs,
        word(1),
        got["computed"],
        got["total"],
        got["last"],
        got["tokens"],
        mapping,
        word(num_reqs),
        sampled,
    )
    for name, mine in got.items():
        assert torch.equal(mine, want[name]), name
    expected = torch.full((SLOTS, ROWS), UNTOUCHED)
    expected[1, :num_reqs] = sampled[:num_reqs]
    assert torch.equal(outputs, expected)


def ragged(num_reqs: int, padded: int, most: int, seed: int) -> torch.Tensor:
    """Starts of requests of 1 to `most` tokens, constant over padding. [padded + 1]"""
    lengths = torch.zeros(padded, dtype=torch.int32)
    lengths[:num_reqs] = torch.randint(1, most + 1, (num_reqs,), generator=torch.Generator().manual_seed(seed)).int()
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()


@pytest.mark.parametrize("twin", [commit_verified.torch, commit_verified.triton])
@pytest.mark.parametrize(("num_reqs", "padded"), [(0, 1), (1, 1), (3, 4), (33, 40)])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 8])
def test_a_verified_commit_is_a_post_update_that_touches_no_padding(
    twin, num_drafts: int, num_reqs: int, padded: int
) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    width = 1 + num_drafts
    rows = torch.randperm(ROWS, generator=generator)[:num_reqs].to(torch.int32)
    mapping = torch.cat((rows, rows.new_full((padded - num_reqs,), int(rows[0]) if num_reqs else 0)))
    starts = ragged(num_reqs, padded, width, seed=num_drafts)
    lengths = starts.diff().clamp(min=1)
    sampled = torch.randint(-1, 500, (padded, width), generator=generator)
    num_sampled = 1 + (torch.rand(padded, generator=generator) * lengths).int()
    num_rejected = lengths - num_sampled
    got, want = request_state(num_reqs), request_state(num_reqs)
    post_update.torch(
        want["computed"],
        want["total"],
        want["last"],
        want["tokens"],
        rows,
        starts,
        sampled[:num_reqs],
        num_sampled[:num_reqs],
        num_rejected[:num_reqs],
    )
    outputs, counts = torch.full((SLOTS, ROWS * width), UNTOUCHED), torch.full((SLOTS, ROWS), UNTOUCHED).int()
    twin(
        outputs,
        counts,
        word(1),
        got["computed"],
        got["total"],
        got["last"],
        got["tokens"],
        mapping,
        starts,
        sampled,
        num_sampled,
        num_rejected,
    )
    for name, mine in got.items():
        assert torch.equal(mine, want[name]), name
    expected, numbers = torch.full_like(outputs, UNTOUCHED), torch.full_like(counts, UNTOUCHED)
    expected[1, : num_reqs * width] = sampled[:num_reqs].reshape(-1)
    numbers[1, :num_reqs] = num_sampled[:num_reqs]
    assert torch.equal(outputs, expected) and torch.equal(counts, numbers)


@pytest.mark.parametrize("twin", [prepare_verification_inputs.torch, prepare_verification_inputs.triton])
@pytest.mark.parametrize(("num_reqs", "padded"), [(0, 2), (1, 1), (3, 4), (33, 40)])
@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_one_launch_prepares_what_five_kernels_do(twin, num_drafts: int, num_reqs: int, padded: int) -> None:
    generator = torch.Generator().manual_seed(100 * num_drafts + num_reqs)
    width, block_size, columns = 1 + num_drafts, 4, 6

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def empty(size: int) -> torch.Tensor:
        return torch.full((size,), UNTOUCHED, dtype=torch.int32)

    rows = torch.randperm(ROWS, generator=generator)[:num_reqs].to(torch.int32)
    mapping = torch.cat((rows, rows.new_zeros(padded - num_reqs)))
    # some drafts reach behind the table
    computed, tables = numbers(0, block_size * columns, ROWS), numbers(1, 99, ROWS, columns)
    num_blocks = numbers(0, columns + 1, ROWS)
    last, drafts = numbers(0, 500, ROWS).long(), numbers(-1, 500, ROWS, num_drafts).long()
    starts = ragged(num_reqs, padded, width, seed=num_drafts)
    names = ("input_ids", "positions", "seq_lens", "slots", "tables", "logit_slots", "local_positions", "live_rows")
    tokens, real = padded * width, int(starts[-1])
    sizes = (tokens, tokens, padded, tokens, padded * columns, tokens, tokens, padded)
    got = {name: empty(size) for name, size in zip(names, sizes, strict=True)}
    got["tables"] = got["tables"].view(padded, columns)
    twin(*got.values(), mapping, starts, computed, last, drafts, tables, num_blocks, block_size=block_size)

    want = {name: torch.zeros_like(got[name]) for name in names}
    want["slots"].fill_(-1)
    want["live_rows"].fill_(-1)
    want["live_rows"][:num_reqs] = rows
    if num_reqs:
        gather_block_tables.torch(want["tables"], tables, num_blocks, rows)
        prepare_pos_seq_lens.torch(want["positions"], want["seq_lens"], rows, starts, computed, max_query_len=width)
        combine_sampled_and_draft_tokens.torch(
            want["input_ids"],
            empty(real),
            rows,
            starts,
            want["seq_lens"],
            torch.zeros(ROWS, dtype=torch.int32),
            last,
            drafts,
            starts,
        )
        compute_slot_mapping.torch(want["slots"], tables, rows, starts, want["positions"], block_size=block_size)
        expand_logit_rows.torch(
            want["logit_slots"][:real], want["local_positions"][:real], rows, starts, max_rows=width
        )
    for name in names:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_drafting_leaves_rows_of_padding_alone(twin: str) -> None:
    """Padding stands for no request: neither its row nor the last one is written, whatever they hold."""
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 0, 0]] * 3, dtype=torch.int32)
    rows, total = torch.tensor([-1, 1, -1], dtype=torch.int32), torch.tensor([6, 6, 6], dtype=torch.int32)
    ones = torch.ones(3, dtype=torch.int32)
    drafts = torch.full((3, 2), UNTOUCHED)
    options = dict(num_draft_tokens=2, min_n=1, max_n=3, max_len=8)
    getattr(propose_ngram, twin)(drafts, rows, tokens, total, ones, **options)
    assert drafts.tolist() == [[UNTOUCHED] * 2, [1, 2], [UNTOUCHED] * 2]
    drafts.fill_(UNTOUCHED)
    kept = torch.zeros((1, 8), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), word(0)
    getattr(propose_suffix, twin)(drafts, rows, *kept, tokens, total, ones, **options)
    assert drafts.tolist() == [[UNTOUCHED] * 2, [1, 2], [UNTOUCHED] * 2]
