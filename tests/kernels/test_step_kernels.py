"""What a step graph launches does what the kernels of the other path do; the batch's size is read on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.inputs.commit import commit_decode
from mrv2_kernels.inputs.post_update import post_update
from mrv2_kernels.state.staged_write import apply_packed_writes, apply_staged_writes

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


@pytest.mark.parametrize("twin", [apply_packed_writes.torch, apply_packed_writes.triton])
@pytest.mark.parametrize("num_runs", [0, 1, 5, 200])
def test_packed_runs_are_staged_writes(twin, num_runs: int) -> None:
    rng = np.random.default_rng(num_runs)
    lengths = rng.integers(1, 6, num_runs)
    if num_runs > 1:
        # longer than one program's block
        lengths[1] = 300
    starts = np.concatenate(([0], np.cumsum(lengths + rng.integers(0, 3, num_runs))))[:num_runs]
    cu_lens = np.concatenate(([0], np.cumsum(lengths)))
    contents = rng.integers(0, 1000, int(cu_lens[-1]))
    size = int(starts[-1] + lengths[-1]) if num_runs else 4
    # what lies behind the runs belongs to an earlier step
    packed = torch.tensor(np.concatenate((starts, cu_lens, contents, [5, 5, 5])), dtype=torch.int32)
    got, want = (torch.full((size,), UNTOUCHED, dtype=torch.int32) for _ in range(2))
    columns = [torch.tensor(column, dtype=torch.int32) for column in (starts, cu_lens, contents)]
    apply_staged_writes.torch(
        want.view(1, -1), torch.zeros(num_runs, dtype=torch.int32), *columns, max_len=int(lengths.max(initial=0))
    )
    twin(got, word(num_runs), packed)
    assert torch.equal(got, want)


@pytest.mark.parametrize("twin", [apply_packed_writes.torch, apply_packed_writes.triton])
def test_a_packed_run_ends_where_the_memory_ends(twin) -> None:
    memory = torch.full((8,), UNTOUCHED, dtype=torch.int32)
    packed = torch.tensor([3, 0, 4, 1, 2, 3, 4], dtype=torch.int32)
    twin(memory[:5], word(1), packed)
    assert memory.tolist() == [UNTOUCHED] * 3 + [1, 2] + [UNTOUCHED] * 3
