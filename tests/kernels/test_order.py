"""The order of requests: longest context first, ties by row, padding last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.attention.order import longest_first

TWINS = [longest_first.torch, longest_first.triton]  # type: ignore[attr-defined]  # they ride on the function object


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(batch: int, padding: int, longest: int) -> list[int]:
    return [*np.random.default_rng(batch).integers(1, longest + 1, batch).tolist(), *[0] * padding]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [7],
        [0],
        [0, 0, 3],
        [5, 5, 5, 5, 5, 5, 5],
        [1, 2, 3, 4, 5],
        [2048, 100, 2048, 101, 100, 0, 0],
        # few lengths, so many ties; rows beyond one block of comparisons, no power of two
        drawn(255, 0, 3),
        drawn(256, 0, 2048),
        drawn(251, 6, 9),
        drawn(700, 13, 40),
    ],
)
def test_rows_from_the_longest_to_the_shortest_in_turn_where_as_long(twin, lengths: list[int]) -> None:
    expected = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    order = twin(int32(lengths))
    assert order.dtype == torch.int32 and order.tolist() == expected.tolist()


@pytest.mark.parametrize("twin", TWINS)
def test_the_lengths_stay_as_they_are(twin) -> None:
    lengths = int32(drawn(37, 2, 5))
    before = lengths.clone()
    twin(lengths)
    assert torch.equal(lengths, before)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("lengths", [torch.ones(4), torch.ones(4).long(), int32([1, 2, 3, 4])[::2], int32([[1, 2]])])
def test_lengths_that_the_kernel_cannot_read_are_refused(twin, lengths: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"contiguous int32 \[B_pad\]"):
        twin(lengths)
