"""The device reads a step's words out of host memory: both twins, turn after turn."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.state.mailbox import fetch_words

USED_AT, GARBAGE = 9, -7


def mailbox_of(num_slots: int, slot_words: int, used: list[int]) -> torch.Tensor:
    """Return slots of distinct words, of which `used[i]` count in slot i."""
    mailbox = torch.arange(num_slots * slot_words, dtype=torch.int32).view(num_slots, slot_words).clone() + 1000
    mailbox[:, USED_AT] = torch.tensor(used, dtype=torch.int32)
    return mailbox


def check_turns(twin: str, words: torch.Tensor, mailbox: torch.Tensor, turn: torch.Tensor) -> None:
    num_slots = mailbox.shape[0]
    for step in range(2 * num_slots + 1):
        words.fill_(GARBAGE)
        before = words.cpu().clone()
        getattr(fetch_words, twin)(words, mailbox, turn, used_at=USED_AT)
        slot = mailbox[step % num_slots]
        used = int(slot[USED_AT])
        assert torch.equal(words.cpu()[:used], slot[:used])
        assert torch.equal(words.cpu()[used:], before[used:])
        assert int(turn) == (step + 1) % num_slots


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("slot_words", [16, 100, 5000])
def test_slots_are_read_in_turn(twin: str, slot_words: int) -> None:
    mailbox = mailbox_of(3, slot_words, [10, slot_words, 0])
    check_turns(twin, torch.empty(6000, dtype=torch.int32), mailbox, torch.zeros(1, dtype=torch.int32))


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
