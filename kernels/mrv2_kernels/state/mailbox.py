"""A step's words, read by the device itself out of pinned host memory.

A graph that begins with this launch needs no copy in front of it: a copy between two graphs makes the second start
anew when it has ended.  The slots are used in turn, and the device keeps count: whoever launches this has filled the
next slot before, once for every launch.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

# words that one program has on their way at once
_BLOCK = 2048


@triton.jit
def _fetch_kernel(
    words_ptr,
    mailbox_ptr,
    turn_ptr,
    num_slots,
    slot_words,
    used_at,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    # every thread has read the turn
    tl.debug_barrier()
    tl.store(turn_ptr, (turn + 1) % num_slots)


def fetch_words_triton(
    # [>= slot_words] int32
    words: torch.Tensor,
    # [S, slot_words] int32, pinned host memory
    mailbox: torch.Tensor,
    # [1] int32: the slot to read
    turn: torch.Tensor,
    *,
    used_at: int,
) -> None:
    """Copy the slot whose turn it is into `words`, as many words as its word `used_at` says, and take the next turn.

    0 words are legal: nothing is copied.  Whatever stands behind `used_at` in a slot is expected to be little.
    """
    num_slots, slot_words = mailbox.shape
    assert mailbox.is_contiguous() and words.shape[0] >= slot_words, "words must have room for a whole slot"
    _fetch_kernel[(1,)](
        words,
        mailbox,
        turn,
        num_slots,
        slot_words,
        used_at,
        HEADER=used_at + 1,
        BLOCK=min(_BLOCK, next_power_of_2(slot_words)),
        num_warps=8,
    )


def fetch_words_torch(
    # [>= slot_words] int32
    words: torch.Tensor,
    # [S, slot_words] int32
    mailbox: torch.Tensor,
    # [1] int32
    turn: torch.Tensor,
    *,
    used_at: int,
) -> None:
    """Torch reference of `fetch_words`, the implementation of the host backend."""
    slot = mailbox[int(turn)]
    used = int(slot[used_at])
    words[:used] = slot[:used]
    turn.copy_((turn + 1) % mailbox.shape[0])


fetch_words = dispatch(fetch_words_triton, fetch_words_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisation of 256 rows."""
    signature: dict[str, str] = dict.fromkeys(("words_ptr", "mailbox_ptr", "turn_ptr"), "*i32")
    signature |= dict.fromkeys(("num_slots", "slot_words", "used_at"), "i32")
    return [
        AotCase(
            kernel=_fetch_kernel,
            signature=signature,
            constexprs={"HEADER": 1030, "BLOCK": _BLOCK},
            num_warps=8,
            aligned=frozenset({"words_ptr", "mailbox_ptr", "slot_words"}),
        )
    ]
