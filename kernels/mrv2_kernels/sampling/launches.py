"""How the drawing kernels are launched, by the number of rows: pure data, and never a part of what is drawn.

A table holds (most rows, launch) in ascending order; a batch takes the first entry that it fits, a larger one the
last.  In a captured graph the rows are those of the padded batch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")
Table = tuple[tuple[int, T], ...]


class FusedLaunch(NamedTuple):
    """Launch of `gumbel_fused`; every one draws the same tokens."""

    # tokens that are looked at together
    block: int = 4096
    num_warps: int = 4
    # tokens whose exact scores are computed together, where a bound does not decide
    step: int = 512
    # blocks a program; the next one is fetched while one is looked at
    span: int = 1
    # a second launch writes the tokens, else the program that arrives last at a row
    is_split: bool = False


class BlockedLaunch(NamedTuple):
    """Launches of `gumbel_blocked`; every one draws the same tokens."""

    # blocks a warp; the next one is fetched while one is summed
    span: int = 1
    # of a program of the second launch, which draws
    pick_warps: int = 8


class TruncatedLaunch(NamedTuple):
    """Launch of `gumbel_truncated`; every one draws the same tokens but for roundings of a nucleus' mass."""

    # runs of 1,024 tokens a program = tokens of a group / 8
    repeats: int = 8
    num_warps: int = 4
    # a second launch of `draw_warps` a row draws, else the program that arrives last at a row
    is_split: bool = False
    draw_warps: int = 8
    # logits that are looked at together when groups are read again
    collect: int = 2048
    # the second launch also draws what it leaves over, else a third one does
    draws_wide: bool = False


# measured on an H200 at 1, 32, 64 and 256 rows of 151,936 tokens in bf16 (traces/bench/h200-samplers-spans.json,
# of TRUNCATED h200-sampler-tuning.json and, up to 64 rows, h200-sampler-tuning-3.json, of BLOCKED
# h200-sampler-tuning-2.json without 64): the fastest there or within 7 % of it, of FUSED and BLOCKED for rows of
# temperature 0 and above alike
FUSED: Table[FusedLaunch] = (
    (16, FusedLaunch(block=4096, num_warps=4)),
    (1 << 30, FusedLaunch(block=1024, num_warps=1, step=64, span=5, is_split=True)),
)
BLOCKED: Table[BlockedLaunch] = (
    (16, BlockedLaunch()),
    (128, BlockedLaunch(span=2)),
    (1 << 30, BlockedLaunch()),
)
TRUNCATED: Table[TruncatedLaunch] = (
    (16, TruncatedLaunch(repeats=3, is_split=True, draw_warps=16, draws_wide=True)),
    (64, TruncatedLaunch(repeats=5, is_split=True, draw_warps=16, collect=4096, draws_wide=True)),
    (1 << 30, TruncatedLaunch(repeats=5, is_split=True)),
)


def launch_of(table: Table[T], num_rows: int) -> T:
    """Return the launch for a padded batch of `num_rows` rows."""
    for most, launch in table:
        if num_rows <= most:
            return launch
    return table[-1][1]
