"""A step's words, read by the device itself out of pinned host memory, and the writes that are among them.

A graph that begins with `fetch_step` needs no copy in front of it: a copy between two graphs makes the second start
anew when it has ended.  The slots are used in turn, and the device keeps count: whoever launches this has filled the
next slot before, once for every launch.

One program does it all, so that no second launch stands between a step's words and its inputs: of a step of decodes
there are few writes, a block or two for some of the requests.  It is an ordinary launch, which lets the one behind it
start at once (`mrv2_kernels.gemm.pdl`).

The way to the host and back is long, and nothing else runs meanwhile: on an H200 `fetch_step` took 17 us of a step,
and takes 1.5 where `peek_step` has gone that way in the step before, beside a launch that is long itself:

    host    | fill slot n+1 | launch n+1 | announce n+1 |
    device  | fetch n | ... layers of step n ... | logits          | draw | fetch n+1 |
                                                 | peek: n+1 is there |

The host writes a step's number into `numbers` behind the launch of the step's graph, whose doorbell orders it behind
the words of the slot, on every processor.  Whoever reads the number may therefore read the slot; what was not announced
in time is fetched when its turn has come.

Legend: S = slots, W = words of the memory that is written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import constant, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.state.staged_write import apply_runs_torch

# words that are on their way at once; runs that are written together, and their words
_BLOCK = 2048
_RUNS, _WIDTH = 256, 8
_NUM_WARPS = 16
# steps are counted anew behind this one, long before an int32 is full
_LAST_NUMBER = (1 << 30) - 1
_NUMBER_BITS = constant(_LAST_NUMBER)


@triton.jit
def _copy_words(dst_ptr, src_ptr, first, end, BLOCK: tl.constexpr):
    for base in range(first, end, BLOCK):
        index = base + tl.arange(0, BLOCK)
        words = tl.load(src_ptr + index, mask=index < end, volatile=True)
        tl.store(dst_ptr + index, words, mask=index < end)


@triton.jit
def _copy_slot(dst_ptr, slot_ptr, slot_words, used_at, HEADER: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a slot out of host memory, and the number of its words in any case; return that number."""
    # the host writes these: never from a cache
    used = tl.load(slot_ptr + used_at, volatile=True)
    for base in tl.static_range(0, HEADER, BLOCK):
        # on their way together with their number
        index = base + tl.arange(0, BLOCK)
        words = tl.load(slot_ptr + index, mask=index < slot_words, volatile=True)
        tl.store(dst_ptr + index, words, mask=index < used)
    _copy_words(dst_ptr, slot_ptr, (HEADER + BLOCK - 1) // BLOCK * BLOCK, used, BLOCK)
    return used


@triton.jit
def _fetch_step_kernel(
    words_ptr,
    mailbox_ptr,
    turn_ptr,
    peeked_ptr,
    dst_ptr,
    num_runs_ptr,
    runs_ptr,
    num_slots,
    slot_words,
    used_at,
    dst_len,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(turn_ptr)
    number = tl.load(turn_ptr + 1)
    # all of it on its way at once
    is_peeked = tl.load(peeked_ptr + slot_words) == number
    used = tl.load(peeked_ptr + used_at)
    for base in tl.static_range(0, HEADER, BLOCK):
        index = base + tl.arange(0, BLOCK)
        words = tl.load(peeked_ptr + index, mask=index < slot_words)
        tl.store(words_ptr + index, words, mask=(index < used) & is_peeked)
    if is_peeked:
        _copy_words(words_ptr, peeked_ptr, (HEADER + BLOCK - 1) // BLOCK * BLOCK, used, BLOCK)
    else:
        slot_ptr = mailbox_ptr + slot.to(tl.int64) * slot_words
        _copy_slot(words_ptr, slot_ptr, slot_words, used_at, HEADER, BLOCK)
    # every thread has read the turn, and stored its words
    tl.debug_barrier()
    tl.store(turn_ptr, (slot + 1) % num_slots)
    tl.store(turn_ptr + 1, (number + 1) & _NUMBER_BITS)
    num_runs = tl.load(num_runs_ptr)
    for base in range(0, num_runs, RUNS):
        run = base + tl.arange(0, RUNS)
        is_run = run < num_runs
        start = tl.load(runs_ptr + run, mask=is_run, other=0)
        first = tl.load(runs_ptr + num_runs + run, mask=is_run, other=0)
        length = tl.load(runs_ptr + num_runs + run + 1, mask=is_run, other=0) - first
        contents_ptr = runs_ptr + 2 * num_runs + 1
        for begin in range(0, tl.max(length, axis=0), WIDTH):
            offset = begin + tl.arange(0, WIDTH)[None, :]
            at = start[:, None] + offset
            mask = (offset < length[:, None]) & (at < dst_len)
            tl.store(dst_ptr + at, tl.load(contents_ptr + first[:, None] + offset, mask=mask), mask=mask)


@triton.jit
def _peek_step_kernel(
    peeked_ptr,
    mailbox_ptr,
    numbers_ptr,
    turn_ptr,
    slot_words,
    used_at,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # `fetch_step` of this step wrote the turn in front of the last gate, and has read what is overwritten here
    slot = tl.load(turn_ptr, volatile=True)
    number = tl.load(turn_ptr + 1, volatile=True)
    # the host may write it at this very moment: all threads must have seen it, or none goes on
    lane = tl.arange(0, THREADS)
    announced = tl.load(numbers_ptr + slot + tl.zeros_like(lane), volatile=True)
    if tl.min((announced == number).to(tl.int32), axis=0) == 1:
        if ON_GPU:
            # what is read from here on is no older than the number
            number = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
            )
        slot_ptr = mailbox_ptr + slot.to(tl.int64) * slot_words
        used = _copy_slot(peeked_ptr, slot_ptr, slot_words, used_at, HEADER, BLOCK)
        tl.store(peeked_ptr + used_at, used)
        tl.store(peeked_ptr + slot_words, number)
    if PDL:
        gdc_wait()


class Mailbox(NamedTuple):
    """Where the words of steps come from; all of it stays where it is."""

    # [S, slot_words] int32, pinned host memory; as many words of a slot count as its word `used_at` says, 0 = none
    slots: torch.Tensor
    # [S] int32, pinned host memory: the number of the step that was announced in each slot; negative = none
    numbers: torch.Tensor
    # [2] int32, device: the slot of the next step, and that step's number
    turn: torch.Tensor
    # whatever stands behind it in a slot is expected to be little
    used_at: int

    def constants(self) -> dict[str, int]:
        """Return the constants of a launch."""
        return {"HEADER": self.used_at + 1, "BLOCK": min(_BLOCK, next_power_of_2(self.slots.shape[1]))}


def fetch_step_triton(
    # [>= slot_words] int32
    words: torch.Tensor,
    mailbox: Mailbox,
    # [slot_words + 1] int32: the words of a step that were brought, then its number; negative = none were
    peeked: torch.Tensor,
    # [W], any dtype of 32 bits: what the runs write to
    dst: torch.Tensor,
    # [1] int32, on the device, maybe one of `words`
    num_runs: torch.Tensor,
    # int32, maybe a part of `words`: starts [n] | cu_lens [n + 1] | contents [cu_lens[n]]
    runs: torch.Tensor,
) -> None:
    """Copy the slot whose turn it is into `words`, take the next turn, and write the runs that then are there.

    Where `peek_step` has brought the slot's words, those are copied, and the slot is not read.  For each of the n runs
    ``dst[starts[i] + j] = contents[cu_lens[i] + j]``; they must not overlap, and entries past the end of `dst` are
    dropped.
    """
    num_slots, slot_words = mailbox.slots.shape
    assert mailbox.slots.is_contiguous() and words.shape[0] >= slot_words, "words must have room for a whole slot"
    _fetch_step_kernel[(1,)](
        words,
        mailbox.slots,
        mailbox.turn,
        peeked,
        dst,
        num_runs,
        runs,
        num_slots,
        slot_words,
        mailbox.used_at,
        dst.shape[0],
        **mailbox.constants(),
        RUNS=_RUNS,
        WIDTH=_WIDTH,
        PDL=has_pdl(words),
        num_warps=_NUM_WARPS,
    )


def fetch_step_torch(
    # [>= slot_words] int32
    words: torch.Tensor,
    mailbox: Mailbox,
    # [slot_words + 1] int32: the words of a step that were brought, then its number; negative = none were
    peeked: torch.Tensor,
    # [W], any dtype of 32 bits: what the runs write to
    dst: torch.Tensor,
    # [1] int32, on the device, maybe one of `words`
    num_runs: torch.Tensor,
    # int32, maybe a part of `words`: starts [n] | cu_lens [n + 1] | contents [cu_lens[n]]
    runs: torch.Tensor,
) -> None:
    """Torch reference of `fetch_step`, the implementation of the host backend."""
    turn, number = mailbox.turn.tolist()
    source = peeked if int(peeked[-1]) == number else mailbox.slots[turn]
    used = int(source[mailbox.used_at])
    words[:used] = source[:used]
    mailbox.turn.copy_(torch.tensor([(turn + 1) % mailbox.slots.shape[0], next_number(number)]))
    apply_runs_torch(dst, int(num_runs), runs)


def peek_step_triton(
    # [slot_words + 1] int32, out: see `fetch_step`
    peeked: torch.Tensor,
    mailbox: Mailbox,
) -> None:
    """Bring the words of the step whose turn is next, if it was announced by now.

    One launch at most between two of `fetch_step`, and behind the first gate of its step (`mrv2_kernels.gemm.pdl`).
    """
    pdl = has_pdl(peeked)
    _peek_step_kernel[(1,)](
        peeked,
        mailbox.slots,
        mailbox.numbers,
        mailbox.turn,
        mailbox.slots.shape[1],
        mailbox.used_at,
        **mailbox.constants(),
        THREADS=32 * _NUM_WARPS,
        ON_GPU=peeked.is_cuda,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )


def peek_step_torch(
    # [slot_words + 1] int32, out: see `fetch_step`
    peeked: torch.Tensor,
    mailbox: Mailbox,
) -> None:
    """Torch reference of `peek_step`, the implementation of the host backend."""
    turn, number = mailbox.turn.tolist()
    if int(mailbox.numbers[turn]) == number:
        slot = mailbox.slots[turn]
        used = int(slot[mailbox.used_at])
        peeked[:used] = slot[:used]
        peeked[mailbox.used_at], peeked[-1] = used, number


def next_number(number: int) -> int:
    """Return the number of the step behind step `number`."""
    return (number + 1) & _LAST_NUMBER


fetch_step = dispatch(fetch_step_triton, fetch_step_torch)
peek_step = dispatch(peek_step_triton, peek_step_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations of 256 rows."""
    names = ("words_ptr", "mailbox_ptr", "turn_ptr", "peeked_ptr")
    fetch: dict[str, str] = dict.fromkeys((*names, "dst_ptr", "num_runs_ptr", "runs_ptr"), "*i32")
    fetch |= dict.fromkeys(("num_slots", "slot_words", "used_at", "dst_len"), "i32")
    peek: dict[str, str] = dict.fromkeys((*names[1:], "numbers_ptr"), "*i32")
    peek |= dict.fromkeys(("slot_words", "used_at"), "i32")
    constants: dict[str, object] = {"HEADER": 1030, "BLOCK": _BLOCK, "PDL": True}
    aligned = frozenset({"mailbox_ptr", "peeked_ptr", "slot_words"})
    fetched = constants | {"RUNS": _RUNS, "WIDTH": _WIDTH}
    peeked = constants | {"THREADS": 32 * _NUM_WARPS, "ON_GPU": True}
    return [
        AotCase(_fetch_step_kernel, fetch, fetched, _NUM_WARPS, aligned=aligned | {"words_ptr"}),
        AotCase(_peek_step_kernel, peek, peeked, _NUM_WARPS, aligned=aligned),
    ]
