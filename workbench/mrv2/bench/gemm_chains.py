"""Chains of the products of all layers that the benchmark of matrix products times: bare, and as layers run them.

Three forms of a layer compute the same function: products alone with kernels for norms, activation and additions
between them; products that take those in; and products that multiply by their gate or leave partial sums to the norm
behind them.  Each form ends with the model's last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mrv2.bench.gemm_cases import DTYPE, EPS, NUM_LAYERS, PRODUCTS, Form, Product
from mrv2.bench.gemm_stack import Stack
from mrv2_kernels.gemm import (
    LinearPlan,
    LinearWorkspace,
    fused_linear,
    linear,
    linear_of_sums,
    linear_parts,
    workspace_for,
)
from mrv2_kernels.layers import rms_norm, silu_and_mul

# partial sums that a product alone takes in with the norm before it
_NUM_SUMS = 8

# of each of `PRODUCTS`
Plans = tuple[LinearPlan, ...]


class Chain(NamedTuple):
    """What to launch, and the tensor that it leaves its result in."""

    launch: Callable[[], None]
    result: torch.Tensor


class Chains:
    """The chains of one batch size over the weights of a stack, and their buffers."""

    def __init__(self, stack: Stack, num_rows: int) -> None:
        self.stack, self.num_rows = stack, num_rows
        device = stack.device
        # per product: [M, N] bf16
        self.outs = [device.zeros((num_rows, product.num_outputs), DTYPE) for product in PRODUCTS]
        # per product: [M, K], a part of what the product before wrote
        self.inputs = [self.outs[index - 1][:, : product.num_inputs] for index, product in enumerate(PRODUCTS)]
        # [M, H]
        generator = torch.Generator(stack.norm.device).manual_seed(num_rows)
        self.start = torch.randn(
            self.outs[-1].shape, generator=generator, device=stack.norm.device, dtype=torch.float32
        ).to(DTYPE)

    def restart(self) -> None:
        """Put the first input where a chain finds it."""
        self.outs[-1].copy_(self.start)

    def one(self, index: int, plan: LinearPlan, form: Form) -> Chain:
        """One product of every layer, ``alone`` or in ``parts``, all on the same random input."""
        product, stack = PRODUCTS[index], self.stack
        workspace = self._workspace((plan,), (product,)) if form == "alone" else None
        x = self.start.new_ones((self.num_rows, product.num_inputs)).normal_()
        gated = form == "parts" and product.gated
        out = self._sums(index, plan, gated=gated) if form == "parts" else self.outs[index]
        sums = x.float().repeat(_NUM_SUMS, 1, 1) if plan.normed else None

        def launch() -> None:
            for weight, scale in stack.weights[index]:
                if sums is not None:
                    linear_of_sums(sums, x, stack.norm, EPS, weight, plan, gated=gated)
                elif form == "parts":
                    linear_parts(x, weight, plan, gated=gated, out=out)
                else:
                    linear(x, weight, plan, workspace, out, scale)

        return Chain(launch, out)

    def alone(self, plans: Plans) -> Chain:
        """The products alone; each reads a part of what the one before wrote."""
        workspace, stack = self._workspace(plans), self.stack

        def launch() -> None:
            for layer in range(NUM_LAYERS):
                for index, plan in enumerate(plans):
                    weight, scale = stack.weights[index][layer]
                    linear(self.inputs[index], weight, plan, workspace, self.outs[index], scale)

        return Chain(launch, self.outs[-1])

    def parts_alone(self, plans: Plans) -> Chain:
        """The products alone, whose partial sums nobody adds: each reads what the last whole one before it wrote."""
        sums = [self._sums(index, plan, gated=False) for index, plan in enumerate(plans)]

        def launch() -> None:
            for layer in range(NUM_LAYERS):
                for index, plan in enumerate(plans):
                    linear_parts(self.inputs[index], self.stack.weights[index][layer].values, plan, out=sums[index])

        return Chain(launch, sums[-1])

    def layers(self, plans: Plans) -> Chain:
        """Kernels for norms, activation and additions between the products."""
        workspace, stack, norm = self._workspace(plans), self.stack, self.stack.norm

        def product(x: torch.Tensor, index: int, layer: int) -> torch.Tensor:
            weight, scale = stack.weights[index][layer]
            return linear(x, weight, plans[index], workspace, scale=scale)

        def launch() -> None:
            x, residual = self._normed(self.start), self.start
            for layer in range(NUM_LAYERS):
                out = product(product(x, 0, layer)[:, : PRODUCTS[1].num_inputs], 1, layer)
                x, residual = rms_norm(out, norm, EPS, residual)
                out = product(silu_and_mul(product(x, 2, layer)), 3, layer)
                x, residual = rms_norm(out, norm, EPS, residual)
            self.outs[-1].copy_(x)

        return Chain(launch, self.outs[-1])

    def parts(self, plans: Plans) -> Chain:
        """qkv; o; norm of its sums; gate-up and activation; down; norm of its sums. Plans may take in such a norm."""
        stack, norm = self.stack, self.stack.norm

        def product(x: torch.Tensor, index: int, layer: int) -> torch.Tensor:
            return linear_parts(x, stack.weights[index][layer].values, plans[index], gated=PRODUCTS[index].gated)

        def normed(
            sums: torch.Tensor, residual: torch.Tensor, index: int, layer: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            plan, gated = plans[index], PRODUCTS[index].gated
            if plan.normed and sums.dim() == 3:
                weight = stack.weights[index][layer].values
                return linear_of_sums(sums, residual, norm, EPS, weight, plan, gated=gated)
            x, residual = rms_norm(sums, norm, EPS, residual)
            return product(x, index, layer), residual

        def launch() -> None:
            qkv, residual = product(self._normed(self.start), 0, 0), self.start
            for layer in range(NUM_LAYERS):
                sums = product(qkv[:, : PRODUCTS[1].num_inputs], 1, layer)
                gated, residual = normed(sums, residual, 2, layer)
                sums = product(gated, 3, layer)
                if layer + 1 < NUM_LAYERS:
                    qkv, residual = normed(sums, residual, 0, layer + 1)
            self.outs[-1].copy_(rms_norm(sums, norm, EPS, residual)[0])

        return Chain(launch, self.outs[-1])

    def fused(self, plans: Plans) -> Chain:
        """norm and qkv; o and residual; norm, gate-up and activation; down and residual."""
        stack = self.stack
        stream, qkv = torch.empty_like(self.start), self.outs[0]
        gated = self.outs[2].new_empty((self.num_rows, PRODUCTS[3].num_inputs))
        normed = {"norm": stack.norm, "eps": EPS}

        def product(x: torch.Tensor, index: int, layer: int, out: torch.Tensor, **around: Any) -> None:
            weight, scale = stack.weights[index][layer]
            fused_linear(x, weight, plans[index], out=out, scale=scale, **around)

        def launch() -> None:
            residual = self.start
            for layer in range(NUM_LAYERS):
                product(residual, 0, layer, qkv, **normed)
                product(qkv[:, : PRODUCTS[1].num_inputs], 1, layer, stream, residual=residual)
                product(stream, 2, layer, gated, gated=True, **normed)
                product(gated, 3, layer, stream, residual=stream)
                residual = stream
            self.outs[-1].copy_(self._normed(stream))

        return Chain(launch, self.outs[-1])

    # [M, H] -> [M, H]
    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        out = rms_norm(x, self.stack.norm, EPS)
        assert isinstance(out, torch.Tensor), "rms_norm without a residual returns one tensor"
        return out

    def _workspace(self, plans: Plans, products: Sequence[Product] = PRODUCTS) -> LinearWorkspace | None:
        wanted = [(plan, self.num_rows, product.num_outputs) for plan, product in zip(plans, products, strict=True)]
        return workspace_for(wanted, self.stack.norm.device)

    # -> [M, N], or [S, M, N] float32
    def _sums(self, index: int, plan: LinearPlan, *, gated: bool) -> torch.Tensor:
        """Return a buffer for a product in parts; a bare and whole one's is the next product's input."""
        if plan.splits > 1:
            return self.start.new_empty((plan.splits, *self.outs[index].shape), dtype=torch.float32)
        return self.start.new_empty((self.num_rows, PRODUCTS[3].num_inputs)) if gated else self.outs[index]
