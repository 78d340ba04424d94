"""The device reads a step's words out of host memory, and writes their runs: both twins, turn after turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.state.mailbox import fetch_step
from mrv2_kernels.state.staged_write import apply_staged_writes

USED_AT, GARBAGE = 9, -7


def mailbox_of(num_slots: int, slot_words: int, used: list[int]) -> torch.Tensor:
    """Return slots of distinct words, of which `used[i]` count in slot i."""
    mailbox = torch.arange(num_slots * slot_words, dtype=torch.int32).view(num_slots, slot_words).clone() + 1000
    mailbox[:, USED_AT] = torch.tensor(used, dtype=torch.int32)
    return mailbox


def check_turns(twin: str, words: torch.Tensor, mailbox: torch.Tensor, turn: torch.Tensor) -> None:
    num_slots = mailbox.shape[0]
    none = torch.zeros(1, dtype=torch.int32, device=words.device)
    dst = torch.full((8,), GARBAGE, dtype=torch.int32, device=words.device)
    for step in range(2 * num_slots + 1):
        words.fill_(GARBAGE)
        before = words.cpu().clone()
        getattr(fetch_step, twin)(words, mailbox, turn, dst, none, words[16:], used_at=USED_AT)
        slot = mailbox[step % num_slots]
        used = int(slot[USED_AT])
        assert torch.equal(words.cpu()[:used], slot[:used])
        assert torch.equal(words.cpu()[used:], before[used:])
        assert int(turn) == (step + 1) % num_slots
        assert dst.eq(GARBAGE).all()


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("slot_words", [16, 100, 5000])
def test_slots_are_read_in_turn(twin: str, slot_words: int) -> None:
    mailbox = mailbox_of(3, slot_words, [10, slot_words, 0])
    check_turns(twin, torch.empty(6000, dtype=torch.int32), mailbox, torch.zeros(1, dtype=torch.int32))


def packed_runs(num_runs: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return runs as a step packs them, the same as columns, and the entries that hold them all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, num_runs)
    if num_runs > 1:
        # far longer than the others
        lengths[1] = 300
    starts = np.concatenate(([0], np.cumsum(lengths + rng.integers(0, 3, num_runs))))[:num_runs]
    columns = (starts, np.concatenate(([0], np.cumsum(lengths))), rng.integers(0, 1000, int(lengths.sum())))
    size = int(starts[-1] + lengths[-1]) if num_runs else 4
    as_tensors = [torch.tensor(column, dtype=torch.int32) for column in columns]
    return torch.cat(as_tensors), as_tensors, size


def check_runs(twin: str, words: torch.Tensor, num_runs: int, *, fits: bool) -> None:
    """A slot with runs, behind another: they are written as staged writes are, whoever brought them here."""
    packed, columns, size = packed_runs(num_runs, num_runs)
    num_words = USED_AT + 1 + len(packed)
    # what lies behind the runs belongs to an earlier step
    mailbox = torch.full((2, num_words + 3), 5, dtype=torch.int32)
    mailbox[1, 0], mailbox[1, USED_AT] = num_runs, num_words if fits else 0
    mailbox[1, USED_AT + 1 : num_words] = packed if fits else GARBAGE
    words.fill_(GARBAGE)
    if not fits:
        words[0] = num_runs
        words[USED_AT + 1 : num_words] = packed
    turn = torch.ones(1, dtype=torch.int32, device=words.device)
    got, want = (torch.full((size + 3,), GARBAGE, dtype=torch.int32) for _ in range(2))
    lengths = columns[1].diff()
    apply_staged_writes.torch(
        want[:size].view(1, -1),
        torch.zeros(num_runs, dtype=torch.int32),
        *columns,
        max_len=int(lengths.max()) if num_runs else 0,
    )
    got = got.to(words.device)
    mail = mailbox.pin_memory() if words.is_cuda else mailbox
    getattr(fetch_step, twin)(words, mail, turn, got[:size], words[:1], words[USED_AT + 1 :], used_at=USED_AT)
    assert torch.equal(got.cpu(), want)
    assert int(turn) == 0


RUNS = (0, 1, 5, 200, 300)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("num_runs", RUNS)
def test_the_runs_of_a_step_are_staged_writes(twin: str, num_runs: int, fits: bool) -> None:
    check_runs(twin, torch.empty(6000, dtype=torch.int32), num_runs, fits=fits)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_a_run_ends_where_the_memory_ends(twin: str) -> None:
    memory = torch.full((8,), GARBAGE, dtype=torch.int32)
    mailbox = torch.tensor([[1, 3, 0, 4, 1, 2, 3, 4, 0, 10]], dtype=torch.int32)
    words, turn = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    getattr(fetch_step, twin)(words, mailbox, turn, memory[:5], words[:1], words[1:], used_at=USED_AT)
    assert memory.tolist() == [GARBAGE] * 3 + [1, 2] + [GARBAGE] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_pinned_memory_that_changes_under_it() -> None:
    mailbox = mailbox_of(3, 5000, [10, 5000, 0]).pin_memory()
    words = torch.empty(6000, dtype=torch.int32, device="cuda")
    turn = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        turn.zero_()
        check_turns("triton", words, mailbox, turn)
        mailbox[:, 10:] += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_runs", RUNS)
def test_a_gpu_writes_the_runs_that_it_has_just_read(num_runs: int) -> None:
    for fits in (True, False):
        check_runs("triton", torch.empty(6000, dtype=torch.int32, device="cuda"), num_runs, fits=fits)
