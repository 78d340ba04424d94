"""Request state on the device: what is staged in any way stands in its section when its runs have been applied."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from mrv2.device import make_device
from mrv2.runner.v2.arena import DeviceArena

SECTIONS = {
    "tokens": ((4, 6), torch.int32),
    "length": ((4,), torch.int32),
    "temperature": ((4,), torch.float32),
    "seed": ((4,), torch.int64),
}


def apply_runs(arena: DeviceArena) -> int:
    """Do what the launch that edits the buffer does; return the longest run."""
    starts, cu_lens, contents, longest = arena.take_runs()
    words = arena.words[0].numpy()
    for start, begin, end in zip(starts, cu_lens[:-1], cu_lens[1:], strict=True):
        words[start : start + end - begin] = contents[begin:end]
    assert longest == max(np.diff(cu_lens), default=0)
    return longest


def test_what_is_staged_arrives_whatever_its_type_and_length() -> None:
    with closing(make_device("host")) as device:
        arena = DeviceArena(device, SECTIONS)
        arena.stage("tokens", 1, [7, 8, 9], start=2)
        arena.stage_words("tokens", np.array([0, 3]), np.array([5, 0]), np.array([-1, 4], dtype=np.int32))
        for row, (length, temperature, seed) in enumerate(
            [(3, 0.0, 0), (2**31 - 1, 0.6, -1), (-1, 3e38, 2**63 - 1), (np.int32(5), 1, 2**40)]
        ):
            arena.stage_scalar("length", row, length)
            arena.stage_scalar("temperature", row, temperature)
            arena.stage_scalar("seed", row, seed)
        assert arena.has_runs and apply_runs(arena) == 3 and not arena.has_runs
        expected = [[0, 0, 0, 0, 0, -1], [0, 0, 7, 8, 9, 0], [0] * 6, [4, 0, 0, 0, 0, 0]]
        assert arena["tokens"].tolist() == expected
        assert arena["length"].tolist() == [3, 2**31 - 1, -1, 5]
        # a float32 keeps what it can
        assert arena["temperature"].tolist() == [0.0, float(np.float32(0.6)), float(np.float32(3e38)), 1.0]
        assert arena["seed"].tolist() == [0, -1, 2**63 - 1, 2**40]


@pytest.mark.parametrize("name, value", [("length", 5), ("temperature", 0.5), ("seed", 9)])
def test_a_scalar_alone_is_one_run(name: str, value: float) -> None:
    with closing(make_device("host")) as device:
        arena = DeviceArena(device, SECTIONS)
        assert not arena.has_runs and apply_runs(arena) == 0
        arena.stage_scalar(name, 2, value)
        assert apply_runs(arena) == (2 if name == "seed" else 1)
        assert arena[name].tolist() == [0, 0, value, 0]
        assert not arena.has_runs and apply_runs(arena) == 0
