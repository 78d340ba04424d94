"""How one matrix product is to be computed: a variant and its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from mrv2_kernels._triton import cdiv

Variant = Literal["library", "gemv", "streamed", "turned", "resident", "warpgroup", "ring"]
# what a program may have on Hopper and Blackwell, less what the compiler takes
SHARED_BYTES = 226 << 10
# of 64 outputs and 128 inputs each, 32 registers of a thread
MAX_HELD = 6
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class LinearPlan:
    """A variant and its tile; ``library`` is torch's own product and ignores the rest.

    A program computes `block_m` rows x `block_n` outputs over 1 / `splits` of the inputs, with `num_warps` warps
    and `stages` blocks of inputs in flight.  The result stays as it is by `ahead`, `early`, `release_late` and `held`
    alone.
    """

    variant: Variant
    block_m: int = 16
    block_n: int = 16
    splits: int = 1
    num_warps: int = 4
    stages: int = 4
    # start before the predecessor has ended, where the device can
    ahead: bool = True
    # of ``resident``: weights are in registers, of the dtype of x, before the predecessor has ended
    early: bool = False
    # of ``warpgroup`` in a layer: takes in the norm before it and the partial sums that this adds
    normed: bool = False
    # of ``warpgroup``: the successor may start when all is multiplied, not at once; one of many programs, as attention
    # is, would crowd the multiprocessors that this one leaves free
    release_late: bool = False
    # of ``warpgroup``: blocks of weights that are in registers before the predecessor has ended, on Hopper
    held: int = 0

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r}: legal are {', '.join(VARIANTS)}")
        for name in ("block_m", "block_n", "splits", "num_warps", "stages"):
            value = getattr(self, name)
            if value < 1 or (value & (value - 1) and name not in ("splits", "stages")):
                raise ValueError(f"{name} = {value}: must be positive, and a power of two for blocks and warps")
        if not 0 <= self.held <= MAX_HELD:
            raise ValueError(f"held = {self.held}: at most {MAX_HELD} blocks of weights fit in registers")
        if self.normed and (self.variant != "warpgroup" or self.splits > 1):
            raise ValueError(f"{self.label}: only warpgroup without splits takes in a norm of partial sums")
        for name, variant in (("early", "resident"), ("release_late", "warpgroup"), ("held", "warpgroup")):
            if getattr(self, name) and self.variant != variant:
                raise ValueError(f"{name} with variant {self.variant!r}: only {variant} has a choice")

    @property
    def label(self) -> str:
        """Short name, as in ``resident m16 n32 s1 w4 x4``."""
        if self.variant == "library":
            return self.variant
        late = ("" if self.ahead else " late") + (" early" if self.early else "") + (" normed" if self.normed else "")
        late += (" release" if self.release_late else "") + (f" held{self.held}" if self.held else "")
        return f"{self.variant} m{self.block_m} n{self.block_n} s{self.splits} w{self.num_warps} x{self.stages}{late}"


LIBRARY = LinearPlan("library")


@dataclass(frozen=True)
class LinearWorkspace:
    """What products that split their inputs share on one stream: partial sums, and a counter per output tile.

    Counters are zero between products: whoever counts last sets them back.
    """

    # [splits * M * N] at least
    partials: torch.Tensor
    # [tiles of M * tiles of N] at least, int32
    counters: torch.Tensor

    @classmethod
    def of(cls, device: torch.device | str, *, num_partials: int, num_tiles: int) -> LinearWorkspace:
        """Return one of the given sizes, counters zero."""
        return cls(
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )

    def require(self, plan: LinearPlan, num_rows: int, num_outputs: int) -> None:
        """Raise `ValueError` if the workspace is too small for a product."""
        tiles = cdiv(num_rows, plan.block_m) * cdiv(num_outputs, plan.block_n)
        partials = plan.splits * num_rows * num_outputs
        if self.counters.numel() < tiles or self.partials.numel() < partials:
            raise ValueError(
                f"workspace of {self.partials.numel()} partial sums and {self.counters.numel()} counters: "
                f"{num_rows} x {num_outputs} outputs by {plan.label} need {partials} and {tiles}"
            )
