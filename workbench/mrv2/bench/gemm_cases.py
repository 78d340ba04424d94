"""What the benchmark of matrix products runs: the four products of a layer, batch sizes, and plans to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mrv2_kernels._triton import cdiv, next_power_of_2
from mrv2_kernels.gemm import FP8, LIBRARY, LinearPlan, why_not
from mrv2_kernels.gemm.gemv import MAX_ROWS
from mrv2_kernels.gemm.plan import MAX_HELD
from mrv2_kernels.gemm.warpgroup import BLOCK_N as _WARPGROUP_N

# how weights are kept: None = in `DTYPE`
Quantization = Literal["fp8"]
# of a product in a layer: bare; with what surrounds it (`gemm.fused_linear`); with its gate, or leaving partial sums
# to the norm behind it (`gemm.linear_parts`)
Form = Literal["alone", "fused", "parts"]

DTYPE = torch.bfloat16
NUM_LAYERS = 28
# of the norms
EPS = 1e-6
# most rows of products that take in what surrounds them: above, x, read anew by each program, outweighs it
MAX_FUSED_ROWS = 64
# most rows of products in parts that take in the norm before them, which every program computes: it has no more
MAX_NORMED_ROWS = 8
# rows to which a step's batch is padded
BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
# of 8-bit weights also those of prompts, up to where the library with weights made 16-bit again is the fastest
FP8_BUCKETS = (*BUCKETS, 512, 1024)


@dataclass(frozen=True)
class Product:
    """One product of a layer: [M, num_inputs] x [num_outputs, num_inputs].T."""

    name: str
    num_outputs: int
    num_inputs: int
    # what surrounds it in a layer: a norm before it, or else the residual addition behind it;
    # a gated activation behind it
    normed: bool = False
    gated: bool = False

    def bytes_read(self, quantization: Quantization | None = None) -> int:
        """Return the bytes of its weights, of 8-bit ones with a scale of four bytes for each output."""
        scales = 0 if quantization is None else 4 * self.num_outputs
        return weight_bytes(quantization) * self.num_outputs * self.num_inputs + scales


# Qwen3-0.6B: hidden 1024, 16 + 2 x 8 heads of 128, intermediate 3072
PRODUCTS = (
    Product("qkv", 4096, 1024, normed=True),
    Product("o", 1024, 2048),
    Product("gate-up", 6144, 1024, normed=True, gated=True),
    Product("down", 1024, 3072),
)


def candidates(num_rows: int, product: Product, quantization: Quantization | None = None) -> list[LinearPlan]:
    """Return the plans to try for one product at one batch size, the library first."""
    plans = [LIBRARY, *_gemv(num_rows, product, quantization), *_resident(num_rows, product, quantization)]
    if quantization is None:
        plans += _streamed(num_rows, product) + _warpgroup(num_rows, product, (1,))
    else:
        plans += _turned(num_rows, product)
    return [plan for plan in plans if _suits(plan, num_rows, product, product.num_outputs, quantization)]


def fused_candidates(num_rows: int, product: Product, quantization: Quantization | None = None) -> list[LinearPlan]:
    """Return the plans to try for a product with what surrounds it in a layer."""
    if num_rows > MAX_FUSED_ROWS:
        return []
    plans = _gemv(num_rows, product, quantization)
    if product.gated:
        # a program reads two strips of weights
        plans = list(dict.fromkeys(replace(plan, block_n=plan.block_n // 2) for plan in plans))
    # one row leaves the tensor cores idle
    resident = _resident(num_rows, product, quantization) if num_rows > 1 else []
    # nor do several tiles of rows pay, each of which would read and normalise anew
    plans += [plan for plan in resident if plan.splits == 1 and plan.block_m >= num_rows]
    num_outputs = product.num_outputs // (2 if product.gated else 1)
    return [plan for plan in plans if _suits(plan, num_rows, product, num_outputs, quantization)]


def parts_candidates(num_rows: int, product: Product, quantization: Quantization | None = None) -> list[LinearPlan]:
    """Return the plans to try for a product with its gate, or that leaves partial sums to the norm behind it."""
    if quantization is not None:
        return []
    # rotary embedding and attention read whole sums, and so does a gate
    plans = _warpgroup(num_rows, product, (1,) if product.normed else (2, 3, 4, 6, 8))
    # registers for weights are left beside the sums of few rows; beside the norm of one or two, more of them
    held = MAX_HELD if num_rows <= 2 else 4
    plans = [replace(plan, held=held) if plan.block_m <= 8 else plan for plan in plans]
    if product.normed and num_rows <= MAX_NORMED_ROWS:
        plans += [replace(plan, normed=True) for plan in plans]
    num_outputs = product.num_outputs // (2 if product.gated else 1)
    return [plan for plan in plans if _suits(plan, num_rows, product, num_outputs, quantization)]


def sums_before(num_rows: int, product: Product) -> tuple[int, ...]:
    """Return in how many parts the product before one in a layer may leave its sums."""
    before = PRODUCTS[PRODUCTS.index(product) - 1]
    return tuple(sorted({plan.splits for plan in parts_candidates(num_rows, before)}))


CANDIDATES: dict[Form, Callable[[int, Product, Quantization | None], list[LinearPlan]]] = {
    "alone": candidates,
    "fused": fused_candidates,
    "parts": parts_candidates,
}


def weight_bytes(quantization: Quantization | None) -> int:
    """Return the bytes of a weight."""
    return DTYPE.itemsize if quantization is None else FP8.itemsize


def _suits(
    plan: LinearPlan, num_rows: int, product: Product, num_outputs: int, quantization: Quantization | None
) -> bool:
    return why_not(plan, num_rows, num_outputs, product.num_inputs, DTYPE, weight_bytes(quantization)) is None


def _gemv(num_rows: int, product: Product, quantization: Quantization | None) -> list[LinearPlan]:
    # converting 8-bit weights to float32 for each row outweighs their bytes soon
    if num_rows > (MAX_ROWS if quantization is None else 2):
        return []
    return [
        LinearPlan("gemv", block_n=block_n, num_warps=num_warps)
        for num_warps in (4, 8)
        for block_n in (8, 16, 32)
        # a thread holds up to 256 weights in 128 registers
        if 64 <= block_n * next_power_of_2(product.num_inputs) // (32 * num_warps) <= 256
        and cdiv(product.num_outputs, block_n) >= 64
    ]


def _programs(num_rows: int, product: Product, block_m: int, block_n: int, splits: int) -> int:
    return cdiv(product.num_outputs, block_n) * splits * cdiv(num_rows, block_m)


def _streamed(num_rows: int, product: Product) -> list[LinearPlan]:
    block_m = min(64, max(16, next_power_of_2(num_rows)))
    plans = []
    for block_n in (32, 64):
        for splits in (1, 2, 4):
            # about one wave, or two
            if 96 <= _programs(min(num_rows, 64), product, block_m, block_n, splits) <= 192:
                plans.append(LinearPlan("streamed", block_m, block_n, splits, 4, 4))
    return plans


def _turned(num_rows: int, product: Product) -> list[LinearPlan]:
    if num_rows < 64:
        return []
    plans = []
    for block_m in (64, 128):
        for block_n, num_warps in ((64, 4), (128, 8)):
            for splits in (1, 2, 4):
                programs = _programs(num_rows, product, block_m, block_n, splits)
                # about one wave, up to four of them with many rows
                if block_m <= num_rows and 64 <= programs <= (264 if splits > 1 else 528):
                    stages = 3 if block_m == block_n == 128 else 4
                    plans.append(LinearPlan("turned", block_m, block_n, splits, num_warps, stages))
    return plans


def _warpgroup(num_rows: int, product: Product, splits: tuple[int, ...]) -> list[LinearPlan]:
    # tensor cores take rows by the eight
    top = min(256, max(8, next_power_of_2(num_rows)))
    plans = []
    # several tiles of rows read the same weights again, from L2
    for block_m in sorted({top, max(8, top // 2), max(64, top // 4) if top > 64 else top}):
        # the sums of 256 rows take half of the registers of one warp group
        for num_warps in (4, 8) if block_m > 128 else (4,):
            for split in splits:
                # from a quarter of a wave, for many sums cost whoever adds them, up to three of them
                if 32 <= _programs(num_rows, product, block_m, _WARPGROUP_N, split) <= 400:
                    # of x, as many blocks as there is room for
                    plans.append(LinearPlan("warpgroup", block_m, _WARPGROUP_N, split, num_warps, 16))
    return plans


def _resident(num_rows: int, product: Product, quantization: Quantization | None) -> list[LinearPlan]:
    eight_bits = quantization is not None
    if num_rows > 128 or (eight_bits and num_rows == 1):
        return []
    top = min(64, max(16, next_power_of_2(num_rows)))
    # x at once if it is small, else through a ring; 8-bit weights leave it more room
    depth = {16: 16, 32: 8 if eight_bits else 4, 64: 4 if eight_bits else 2}
    warps = (4,) if num_rows > 64 or (eight_bits and product.num_inputs <= 1024) else (4, 8)
    plans = []
    # several tiles of rows read the same weights again, from L2, and each of them fewer rows of x
    for block_m in (16, 32, 64) if num_rows >= 64 else (top,):
        for block_n in (8, 16, 32, 64) if num_rows <= 64 else (32, 64):
            for splits in ((1, 2, 4) if eight_bits else (1, 2, 3, 4)) if block_m == top else (1,):
                for num_warps in warps:
                    programs = _programs(num_rows, product, block_m, block_n, splits)
                    if 96 <= programs <= 260 and product.num_inputs % (splits * num_warps * 64) == 0:
                        stages = min(depth[block_m], product.num_inputs // (splits * num_warps * 64))
                        plans.append(LinearPlan("resident", block_m, block_n, splits, num_warps, stages))
    if eight_bits and num_rows <= 32:
        # early ones hold up to 64 registers of weights
        plans += [
            replace(plan, early=True)
            for plan in plans
            if plan.splits == 1 and plan.block_n * product.num_inputs <= 256 * 32 * plan.num_warps
        ]
    return plans
