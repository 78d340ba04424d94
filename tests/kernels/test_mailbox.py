"""The device reads a step's words out of host memory, and writes their runs: both twins, turn after turn."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
import pytest
import torch

from mrv2_kernels.state.mailbox import Mailbox, fetch_step, next_number, peek_step
from mrv2_kernels.state.staged_write import apply_staged_writes

USED_AT, GARBAGE = 9, -7


def slots_of(num_slots: int, slot_words: int, used: list[int]) -> torch.Tensor:
    """Return slots of distinct words, of which `used[i]` count in slot i."""
    slots = torch.arange(num_slots * slot_words, dtype=torch.int32).view(num_slots, slot_words).clone() + 1000
    slots[:, USED_AT] = torch.tensor(used, dtype=torch.int32)
    return slots


def mailbox_of(slots: torch.Tensor, device: torch.device | str = "cpu", *, turn: int = 0, number: int = 0) -> Mailbox:
    """Return a mailbox in which nothing is announced; step `number` is next, in slot `turn`."""
    numbers = torch.full((slots.shape[0],), -1, dtype=torch.int32)
    if torch.device(device).type == "cuda":
        slots, numbers = slots.pin_memory(), numbers.pin_memory()
    return Mailbox(slots, numbers, torch.tensor([turn, number], dtype=torch.int32, device=device), USED_AT)


def nothing_peeked(mailbox: Mailbox) -> torch.Tensor:
    return torch.full((mailbox.slots.shape[1] + 1,), -1, dtype=torch.int32, device=mailbox.turn.device)


def check_turns(twin: str, words: torch.Tensor, mailbox: Mailbox, *, announced: Callable[[int], bool]) -> None:
    """Steps of which `announced` tells the peek in front of their turn: all of them are read, and once."""
    num_slots, device = mailbox.slots.shape[0], words.device
    none = torch.zeros(1, dtype=torch.int32, device=device)
    dst = torch.full((8,), GARBAGE, dtype=torch.int32, device=device)
    peeked, number = nothing_peeked(mailbox), int(mailbox.turn[1])
    for step in range(2 * num_slots + 1):
        turn = step % num_slots
        slot = mailbox.slots[turn].clone()
        used = int(slot[USED_AT])
        if announced(step):
            mailbox.numbers[turn] = number
        getattr(peek_step, twin)(peeked, mailbox)
        assert (int(peeked[-1]) == number) == announced(step)
        if announced(step):
            # what was brought is not read again
            if words.is_cuda:
                torch.cuda.synchronize()
            mailbox.slots[turn] = GARBAGE
        words.fill_(GARBAGE)
        before = words.cpu().clone()
        getattr(fetch_step, twin)(words, mailbox, peeked, dst, none, words[16:])
        assert torch.equal(words.cpu()[:used], slot[:used])
        assert torch.equal(words.cpu()[used:], before[used:])
        number = next_number(number)
        assert mailbox.turn.tolist() == [(step + 1) % num_slots, number]
        assert dst.eq(GARBAGE).all()
        mailbox.slots[turn] = slot


ANNOUNCED: dict[str, Callable[[int], bool]] = {
    "none": lambda step: False,
    "all": lambda step: True,
    "some": lambda step: step in (1, 2, 5),
}


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("announced", ANNOUNCED)
@pytest.mark.parametrize("slot_words", [16, 100, 5000])
def test_slots_are_read_in_turn(twin: str, slot_words: int, announced: str) -> None:
    mailbox = mailbox_of(slots_of(3, slot_words, [10, slot_words, 0]))
    check_turns(twin, torch.empty(6000, dtype=torch.int32), mailbox, announced=ANNOUNCED[announced])


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_numbers_begin_anew_while_slots_go_on(twin: str) -> None:
    mailbox = mailbox_of(slots_of(3, 16, [10, 16, 0]), number=2**30 - 3)
    check_turns(twin, torch.empty(16, dtype=torch.int32), mailbox, announced=lambda step: step != 4)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("number", [-1, 4, 6, 8])
def test_a_slot_is_not_peeked_at_before_its_number(twin: str, number: int) -> None:
    """Neither an empty slot, nor one that an earlier or a later step was announced in."""
    mailbox = mailbox_of(slots_of(2, 16, [10, 10]), turn=1, number=5 if number != -1 else 0)
    mailbox.numbers.fill_(number)
    peeked = nothing_peeked(mailbox)
    getattr(peek_step, twin)(peeked, mailbox)
    assert peeked.eq(-1).all()


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


def check_runs(twin: str, words: torch.Tensor, num_runs: int, *, fits: bool, is_peeked: bool) -> None:
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
    got, want = (torch.full((size + 3,), GARBAGE, dtype=torch.int32) for _ in range(2))
    lengths = columns[1].diff()
    apply_staged_writes.torch(
        want[:size].view(1, -1),
        torch.zeros(num_runs, dtype=torch.int32),
        *columns,
        max_len=int(lengths.max()) if num_runs else 0,
    )
    got = got.to(words.device)
    mail = mailbox_of(mailbox, words.device, turn=1, number=7)
    peeked = nothing_peeked(mail)
    if is_peeked:
        mail.numbers[1] = 7
        getattr(peek_step, twin)(peeked, mail)
    getattr(fetch_step, twin)(words, mail, peeked, got[:size], words[:1], words[USED_AT + 1 :])
    assert torch.equal(got.cpu(), want)
    assert mail.turn.tolist() == [0, 8]


RUNS = (0, 1, 5, 200, 300)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("is_peeked", [True, False])
@pytest.mark.parametrize("num_runs", RUNS)
def test_the_runs_of_a_step_are_staged_writes(twin: str, num_runs: int, fits: bool, is_peeked: bool) -> None:
    check_runs(twin, torch.empty(6000, dtype=torch.int32), num_runs, fits=fits, is_peeked=is_peeked)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_a_run_ends_where_the_memory_ends(twin: str) -> None:
    memory = torch.full((8,), GARBAGE, dtype=torch.int32)
    mailbox = mailbox_of(torch.tensor([[1, 3, 0, 4, 1, 2, 3, 4, 0, 10]], dtype=torch.int32))
    words = torch.zeros(16, dtype=torch.int32)
    getattr(fetch_step, twin)(words, mailbox, nothing_peeked(mailbox), memory[:5], words[:1], words[1:])
    assert memory.tolist() == [GARBAGE] * 3 + [1, 2] + [GARBAGE] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("announced", ANNOUNCED)
def test_a_gpu_reads_pinned_memory_that_changes_under_it(announced: str) -> None:
    mailbox = mailbox_of(slots_of(3, 5000, [10, 5000, 0]), "cuda")
    words = torch.empty(6000, dtype=torch.int32, device="cuda")
    for _ in range(3):
        mailbox.turn.zero_()
        mailbox.numbers.fill_(-1)
        check_turns("triton", words, mailbox, announced=ANNOUNCED[announced])
        mailbox.slots[:, 10:] += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_runs", RUNS)
def test_a_gpu_writes_the_runs_that_it_has_just_read(num_runs: int) -> None:
    for fits in (True, False):
        for is_peeked in (True, False):
            words = torch.empty(6000, dtype=torch.int32, device="cuda")
            check_runs("triton", words, num_runs, fits=fits, is_peeked=is_peeked)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_announced_meanwhile_is_brought_whole_or_not_at_all() -> None:
    """The host announces while the launch reads the number: no thread may go on without the others."""
    mailbox = mailbox_of(slots_of(2, 2048, [2048, 2048]), "cuda")
    peeked, launched = nothing_peeked(mailbox), torch.cuda.Event()
    rng, outcomes = np.random.default_rng(0), [0, 0]
    numbers = mailbox.numbers.numpy()
    for step in range(4000):
        mailbox.slots[0] = step
        mailbox.slots[0, USED_AT] = 2048
        mailbox.turn.copy_(torch.tensor([0, step]))
        peeked.fill_(-1)
        torch.cuda.synchronize()
        # some 20 us, within which all that follows is launched
        torch.cuda._sleep(40_000)
        peek_step.triton(peeked, mailbox)  # type: ignore[attr-defined]
        launched.record()
        until = perf_counter_ns() + int(rng.integers(60_000))
        while perf_counter_ns() < until:
            pass
        numbers[0] = step
        launched.synchronize()
        got = peeked.cpu()
        came = int(got[-1]) == step
        outcomes[came] += 1
        got[USED_AT] = step if came else -1
        assert got.eq(step if came else -1).all(), f"step {step}: {int(got.eq(step).sum())} words of 2048"
    # else nothing was tested
    assert min(outcomes) > 20, outcomes
