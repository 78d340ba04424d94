"""Staged writes: one ragged scatter, equal in both twins, never past a row's end."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.state.staged_write import apply_staged_writes

TWINS = [apply_staged_writes.torch, apply_staged_writes.triton]


def stage(writes: list[tuple[int, int, list[int]]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return rows, starts, cu_lens and contents of (row, start, values) writes."""
    rows = torch.tensor([row for row, _, _ in writes], dtype=torch.int32)
    starts = torch.tensor([start for _, start, _ in writes], dtype=torch.int32)
    lens = [0, *(len(values) for _, _, values in writes)]
    contents = torch.tensor([v for _, _, values in writes for v in values], dtype=dtype)
    return rows, starts, torch.tensor(lens).cumsum(0).to(torch.int32), contents


@pytest.mark.parametrize("apply", TWINS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_ragged_writes_land_where_they_were_staged(apply, dtype):
    dst = torch.full((4, 7), -1, dtype=dtype)
    writes = [(2, 1, [5, 6, 7]), (0, 0, [1]), (3, 4, []), (1, 6, [9])]
    apply(dst, *stage(writes, dtype), max_len=3)
    expected = torch.full((4, 7), -1, dtype=dtype)
    expected[2, 1:4] = torch.tensor([5, 6, 7], dtype=dtype)
    expected[0, 0] = 1
    expected[1, 6] = 9
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("apply", TWINS)
def test_entries_past_the_end_of_a_row_are_dropped(apply):
    dst = torch.zeros(3, 4, dtype=torch.int32)
    apply(dst, *stage([(1, 2, [1, 2, 3, 4]), (2, 4, [8])], torch.int32), max_len=4)
    assert dst.tolist() == [[0] * 4, [0, 0, 1, 2], [0] * 4]


@pytest.mark.parametrize("apply", TWINS)
def test_vector_of_rows(apply):
    dst = torch.zeros(5, dtype=torch.int64)
    apply(dst, *stage([(4, 0, [2**40]), (0, 0, [-3])], torch.int64), max_len=1)
    assert dst.tolist() == [-3, 0, 0, 0, 2**40]


@pytest.mark.parametrize("apply", TWINS)
def test_nothing_staged_does_nothing(apply):
    dst = torch.arange(3, dtype=torch.int32)
    apply(dst, *stage([], torch.int32), max_len=0)
    assert dst.tolist() == [0, 1, 2]


@pytest.mark.parametrize("max_len", [1, 5000])
def test_max_len_only_sizes_the_grid(max_len):
    values = list(range(2500))
    dst = torch.zeros(2, 3000, dtype=torch.int32)
    apply_staged_writes.triton(dst, *stage([(1, 3, values)], torch.int32), max_len=max_len)
    assert dst[1, 3:2503].tolist() == values
    assert dst.sum() == sum(values)


def test_strided_rows():
    buffer = torch.zeros(3, 10, dtype=torch.int32)
    twin = buffer.clone()
    staged = stage([(0, 2, [1, 2, 3, 4]), (2, 0, [5])], torch.int32)
    apply_staged_writes.triton(buffer[:, :4], *staged, max_len=4)
    apply_staged_writes.torch(twin[:, :4], *staged, max_len=4)
    assert torch.equal(buffer, twin)
    assert buffer[:, 4:].eq(0).all()


def test_wrong_dtype_is_refused():
    with pytest.raises(AssertionError, match="one dtype"):
        apply_staged_writes.torch(torch.zeros(2, dtype=torch.int64), *stage([(0, 0, [1])], torch.int32), max_len=1)
