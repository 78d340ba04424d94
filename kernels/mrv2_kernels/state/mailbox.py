"""A step's words, read by the device itself out of pinned host memory, and the writes that are among them.

A graph that begins with this launch needs no copy in front of it: a copy between two graphs makes the second start
anew when it has ended.  The slots are used in turn, and the device keeps count: whoever launches this has filled the
next slot before, once for every launch.

One program does it all, so that no second launch stands between a step's words and its inputs: of a step of decodes
there are few writes, a block or two for some of the requests.  It is an ordinary launch, which lets the one behind it
start at once (`mrv2_kernels.gemm.pdl`).

Legend: S = slots, W = words of the memory that is written.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, has_pdl
from mrv2_kernels.state.staged_write import apply_runs_torch

# words that are on their way at once; runs that are written together, and their words
_BLOCK = 2048
_RUNS, _WIDTH = 256, 8
_NUM_WARPS = 16


@triton.jit
def _fetch_step_kernel(
    words_ptr,
    mailbox_ptr,
    turn_ptr,
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
    turn = tl.load(turn_ptr)
    slot_ptr = mailbox_ptr + turn.to(tl.int64) * slot_words
    # the host writes these: never from a cache
    used = tl.load(slot_ptr + used_at, volatile=True)
    for base in tl.static_range(0, HEADER, BLOCK):
        # on their way together with their number
        index = base + tl.arange(0, BLOCK)
        words = tl.load(slot_ptr + index, mask=index < slot_words, volatile=True)
        tl.store(words_ptr + index, words, mask=index < used)
    for base in range((HEADER + BLOCK - 1) // BLOCK * BLOCK, used, BLOCK):
        index = base + tl.arange(0, BLOCK)
        words = tl.load(slot_ptr + index, mask=index < used, volatile=True)
        tl.store(words_ptr + index, words, mask=index < used)
    # every thread has read the turn, and stored its words
    tl.debug_barrier()
    tl.store(turn_ptr, (turn + 1) % num_slots)
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


def fetch_step_triton(
    # [>= slot_words] int32
    words: torch.Tensor,
    # [S, slot_words] int32, pinned host memory
    mailbox: torch.Tensor,
    # [1] int32: the slot to read
    turn: torch.Tensor,
    # [W], any dtype of 32 bits: what the runs write to
    dst: torch.Tensor,
    # [1] int32, on the device, maybe one of `words`
    num_runs: torch.Tensor,
    # int32, maybe a part of `words`: starts [n] | cu_lens [n + 1] | contents [cu_lens[n]]
    runs: torch.Tensor,
    *,
    used_at: int,
) -> None:
    """Copy the slot whose turn it is into `words`, take the next turn, and write the runs that then are there.

    As many words are copied as the slot's word `used_at` says: 0 is legal, nothing is copied.  Whatever stands behind
    `used_at` in a slot is expected to be little.  For each of the n runs ``dst[starts[i] + j] = contents[cu_lens[i] +
    j]``; they must not overlap, and entries past the end of `dst` are dropped.
    """
    num_slots, slot_words = mailbox.shape
    assert mailbox.is_contiguous() and words.shape[0] >= slot_words, "words must have room for a whole slot"
    _fetch_step_kernel[(1,)](
        words,
        mailbox,
        turn,
        dst,
        num_runs,
        runs,
        num_slots,
        slot_words,
        used_at,
        dst.shape[0],
        HEADER=used_at + 1,
        BLOCK=min(_BLOCK, next_power_of_2(slot_words)),
        RUNS=_RUNS,
        WIDTH=_WIDTH,
        PDL=has_pdl(words),
        num_warps=_NUM_WARPS,
    )


def fetch_step_torch(
    # [>= slot_words] int32
    words: torch.Tensor,
    # [S, slot_words] int32, pinned host memory
    mailbox: torch.Tensor,
    # [1] int32: the slot to read
    turn: torch.Tensor,
    # [W], any dtype of 32 bits: what the runs write to
    dst: torch.Tensor,
    # [1] int32, on the device, maybe one of `words`
    num_runs: torch.Tensor,
    # int32, maybe a part of `words`: starts [n] | cu_lens [n + 1] | contents [cu_lens[n]]
    runs: torch.Tensor,
    *,
    used_at: int,
) -> None:
    """Torch reference of `fetch_step`, the implementation of the host backend."""
    slot = mailbox[int(turn)]
    used = int(slot[used_at])
    words[:used] = slot[:used]
    turn.copy_((turn + 1) % mailbox.shape[0])
    apply_runs_torch(dst, int(num_runs), runs)


fetch_step = dispatch(fetch_step_triton, fetch_step_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisation of 256 rows."""
    names = ("words_ptr", "mailbox_ptr", "turn_ptr", "dst_ptr", "num_runs_ptr", "runs_ptr")
    signature: dict[str, str] = dict.fromkeys(names, "*i32")
    signature |= dict.fromkeys(("num_slots", "slot_words", "used_at", "dst_len"), "i32")
    return [
        AotCase(
            kernel=_fetch_step_kernel,
            signature=signature,
            constexprs={"HEADER": 1030, "BLOCK": _BLOCK, "RUNS": _RUNS, "WIDTH": _WIDTH, "PDL": True},
            num_warps=_NUM_WARPS,
            aligned=frozenset({"words_ptr", "mailbox_ptr", "slot_words"}),
        )
    ]
