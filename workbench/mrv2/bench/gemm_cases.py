"""What the benchmark of matrix products runs: the four products of a layer, batch sizes, and plans to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mrv2_kernels._triton import cdiv, next_power_of_2
from mrv2_kernels.gemm import LIBRARY, LinearPlan, why_not
from mrv2_kernels.gemm.gemv import MAX_ROWS

DTYPE = torch.bfloat16
NUM_LAYERS = 28
# of the norms
EPS = 1e-6
# most rows of products that take in what surrounds them: above, x, read anew by each program, outweighs it
MAX_FUSED_ROWS = 64
# rows to which a step's batch is padded
BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in bf16."""
        return 2 * self.num_outputs * self.num_inputs


# Qwen3-0.6B: hidden 1024, 16 + 2 x 8 heads of 128, intermediate 3072
PRODUCTS = (
    Product("qkv", 4096, 1024, normed=True),
    Product("o", 1024, 2048),
    Product("gate-up", 6144, 1024, normed=True, gated=True),
    Product("down", 1024, 3072),
)


def candidates(num_rows: int, product: Product) -> list[LinearPlan]:
    """Return the plans to try for one product at one batch size, the library first."""
    plans = [LIBRARY, *_gemv(num_rows, product), *_streamed(num_rows, product), *_resident(num_rows, product)]
    return [p for p in plans if why_not(p, num_rows, product.num_outputs, product.num_inputs, DTYPE) is None]


def fused_candidates(num_rows: int, product: Product) -> list[LinearPlan]:
    """Return the plans to try for a product with what surrounds it in a layer."""
    if num_rows > MAX_FUSED_ROWS:
        return []
    plans = _gemv(num_rows, product)
    if product.gated:
        # a program reads two strips of weights
        plans = list(dict.fromkeys(replace(plan, block_n=plan.block_n // 2) for plan in plans))
    # one row leaves the tensor cores idle
    resident = _resident(num_rows, product) if num_rows > 1 else []
    num_outputs = product.num_outputs // (2 if product.gated else 1)
    return plans + [
        plan
        for plan in resident
        if plan.splits == 1 and why_not(plan, num_rows, num_outputs, product.num_inputs, DTYPE) is None
    ]


def _gemv(num_rows: int, product: Product) -> list[LinearPlan]:
    if num_rows > MAX_ROWS:
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


def _resident(num_rows: int, product: Product) -> list[LinearPlan]:
    if num_rows > 128:
        return []
    block_m = min(64, max(16, next_power_of_2(num_rows)))
    # x at once if it is small, else through a ring; far fewer are tried where several tiles share the weights
    depth = {16: 16, 32: 4, 64: 2}[block_m]
    plans = []
    for block_n in (8, 16, 32, 64) if num_rows <= 64 else (32, 64):
        for splits in (1, 2, 3, 4):
            for num_warps in (4, 8) if num_rows <= 64 else (4,):
                programs = _programs(min(num_rows, 64), product, block_m, block_n, splits)
                if 96 <= programs <= 260 and product.num_inputs % (splits * num_warps * 64) == 0:
                    stages = min(depth, product.num_inputs // (splits * num_warps * 64))
                    plans.append(LinearPlan("resident", block_m, block_n, splits, num_warps, stages))
    return plans
