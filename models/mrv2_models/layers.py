"""Building blocks of every family, and where their weights come from.

Legend: T tokens, N logits rows, V vocabulary, H hidden size.  With more than one rank, "column" layers
hold a part of their outputs, "row" layers a part of their inputs, embeddings a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from mrv2_kernels.gemm import (
    FP8,
    LinearPlan,
    LinearWorkspace,
    Pick,
    add_partials,
    fp8_picks,
    fused_linear,
    linear,
    linear_of_sums,
    linear_parts,
    picks_for,
    picks_of,
    quantise_rows,
    workspace_for,
)
from mrv2_kernels.layers import embed_norm, rms_norm, silu_and_mul
from mrv2_models.parallel import Shard, all_gather_last, all_reduce

Quantization = Literal["fp8"]


@dataclass(frozen=True)
class Placement:
    """Where parameters live: dtype, device and the rank's shard; and how the weights of products are kept."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = Shard()
    # None = in `dtype`; "fp8" = as 8-bit floats with a scale for each output (`mrv2_kernels.gemm.fp8`)
    quantization: Quantization | None = None

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised parameter that takes no gradient."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class WeightSource:
    """One tensor of a checkpoint, the part of it that this rank keeps, and where that goes."""

    name: str
    # shape in the checkpoint
    shape: tuple[int, ...]
    # one slice per dimension
    keep: tuple[slice, ...]
    # view of a parameter, shaped like the kept part
    dest: torch.Tensor
    # distribution of random ("dummy") weights
    mean: float
    std: float
    # [rows kept] float32, view of the parameter that takes the scales of 8-bit weights; None = `dest` is not quantised
    scale: torch.Tensor | None = None

    def store(self, values: torch.Tensor) -> None:
        """Put the kept part of the tensor where it belongs, converted or quantised on the device where it stays."""
        if self.scale is None:
            self.dest.copy_(values)
        else:
            quantised, scale = quantise_rows(values.to(self.dest.device))
            self.dest.copy_(quantised)
            self.scale.copy_(scale)


class Linear(nn.Module):
    """``x @ W.T + b`` with one or several fused outputs; a rank holds part of the outputs or of the inputs.

    `outputs` maps a part's checkpoint name to ``(units, rows per unit)``; units (heads, say) are never cut.
    How a product without bias is computed is a function of its shape alone (`mrv2_kernels.gemm.picks`): every graph
    level and every runner pads a batch to the same number of rows, so all of them add in the same order.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, tuple[int, int]],
        *,
        split: Literal["column", "row"],
        bias: bool,
        place: Placement,
    ) -> None:
        super().__init__()
        self.in_features, self.outputs, self.split, self.shard = in_features, dict(outputs), split, place.shard
        if split == "column":
            rows = sum(self.shard.divide(units, name) * size for name, (units, size) in outputs.items())
            columns = in_features
        else:
            rows = sum(units * size for units, size in outputs.values())
            columns = self.shard.divide(in_features, f"{'+'.join(outputs)} inputs")
        quantised = place.quantization == "fp8"
        self.weight = place.parameter(rows, columns, dtype=FP8 if quantised else None)
        # [rows] float32
        self.scale = place.parameter(rows, dtype=torch.float32) if quantised else None
        self.bias = place.parameter(rows) if bias else None
        if quantised:
            self.picks = fp8_picks(place.device, place.dtype, rows, columns)
        else:
            self.picks = picks_of({} if bias else picks_for(place.device, place.dtype), rows, columns)
        # for plans that split the inputs; `share_workspace` sets it
        self.workspace: LinearWorkspace | None = None

    # x [T, in] -> [T, out], or [S, T, out] float32
    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        # [T, out]
        residual: torch.Tensor | None = None,
        partial: bool = False,
    ) -> torch.Tensor:
        """Return the product, behind a gated activation if `gated`; where it `fuses`, with a norm or residual as well.

        A caller that takes partial sums (`partial`, for `RMSNorm.add`) gets them where leaving them is faster.
        """
        pick = self.picks.at(x.shape[0])
        if norm is not None or residual is not None:
            stands_alone = f"a product of {tuple(x.shape)} and {tuple(self.weight.shape)} stands alone"
            assert pick.fused is not None and self.fuses(x.shape[0]), stands_alone
            norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            parts = {"norm": norm_weight, "eps": eps, "gated": gated, "residual": residual, "scale": self.scale}
            return fused_linear(x, self.weight, pick.fused, **parts)
        plan = self._in_parts(pick)
        if plan is not None and (partial or plan.splits == 1):
            return linear_parts(x, self.weight, plan, gated=gated)
        if self.bias is not None and self.scale is None and (self.split == "column" or self.shard.world_size == 1):
            out = F.linear(x, self.weight, self.bias)
        else:
            out = linear(x, self.weight, pick.plan, self.workspace, scale=self.scale)
            if self.split == "row":
                out = all_reduce(out, self.shard)
            if self.bias is not None:
                out.add_(self.bias)
        return silu_and_mul(out) if gated else out

    # x [T, in] or [S, T, in] float32, residual [T, in] -> ([T, out], [T, in])
    def of_sum(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product of ``norm(x + residual)``, and ``x + residual``; x may be partial sums."""
        plan = self._in_parts(self.picks.at(residual.shape[0]))
        if x.dim() == 3 and plan is not None and plan.normed:
            return linear_of_sums(x, residual, norm.weight, norm.eps, self.weight, plan, gated=gated)
        normed, summed = norm.add(x, residual)
        return self(normed, gated=gated), summed

    def _is_whole(self) -> bool:
        """Whether this rank's weights are the whole product."""
        return self.shard.world_size == 1 and self.bias is None

    def _in_parts(self, pick: Pick) -> LinearPlan | None:
        """Return the plan in parts, if it may be taken; such products know no scales of 8-bit weights."""
        return pick.parts if self._is_whole() and self.scale is None else None

    def fuses(self, num_rows: int) -> bool:
        """Whether products of so many rows take in what surrounds them; never on the host."""
        return self._is_whole() and self.picks.at(num_rows).fused is not None

    def weight_sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensors ``<prefix>.<part>.weight`` (and ``.bias``)."""
        everything, start = slice(None), 0
        for part, (units, size) in self.outputs.items():
            if self.split == "column":
                kept = self.shard.part(units, part)
                rows, columns = slice(kept.start * size, kept.stop * size), everything
                stop = start + rows.stop - rows.start
            else:
                rows, columns = everything, self.shard.part(self.in_features, part)
                stop = start + units * size
            name, shape = f"{prefix}.{part}", (units * size, self.in_features)
            std = self.in_features**-0.5
            scale = None if self.scale is None else self.scale[start:stop]
            yield WeightSource(f"{name}.weight", shape, (rows, columns), self.weight[start:stop], 0.0, std, scale)
            if self.bias is not None:
                yield WeightSource(f"{name}.bias", shape[:1], (rows,), self.bias[start:stop], 0.0, 0.1)
            start = stop


# x [T, H], or partial sums [S, T, H] float32 -> [T, H]
def whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a layer hands on as one tensor of its dtype."""
    return add_partials(x, dtype) if x.dim() == 3 else x


def share_workspace(model: nn.Module) -> None:
    """Give the products of a model what those that split their inputs need; one stream runs them one by one."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    products = [
        (pick.plan, num_rows, each.weight.shape[0])
        for each in layers
        for num_rows, pick in zip(each.picks.num_rows, each.picks.picks, strict=True)
    ]
    workspace = workspace_for(products, layers[0].weight.device) if layers else None
    for each in layers:
        each.workspace = workspace


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, optionally of ``x + residual``."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place.parameter(size)

    # x [T, H] -> [T, H]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = rms_norm(x, self.weight, self.eps)
        assert isinstance(out, torch.Tensor), "rms_norm without a residual returns one tensor"
        return out

    # x [T, H] or partial sums [S, T, H], residual [T, H] -> (normalised [T, H], x + residual [T, H])
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream and normalise the sum."""
        out = rms_norm(x, self.weight, self.eps, residual)
        assert isinstance(out, tuple), "rms_norm with a residual returns (normalised, new residual)"
        return out

    def weight_sources(self, name: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensor ``<name>.weight``."""
        size = self.weight.shape[0]
        yield WeightSource(f"{name}.weight", (size,), (slice(None),), self.weight, 1.0, 0.1)


class VocabEmbedding(nn.Module):
    """The table of token vectors, read by id at the bottom and multiplied at the top of a model."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.shard = vocab_size, hidden_size, place.shard
        self.rows = self.shard.part(vocab_size, "vocab_size")
        self.weight = place.parameter(self.rows.stop - self.rows.start, hidden_size)
        self.picks = picks_of(picks_for(place.device, place.dtype), *self.weight.shape)

    # input_ids [T] int32 -> [T, H]
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.shard.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.rows.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        out = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0.0), self.shard)

    # input_ids [T] int32 -> ([T, H], [T, H])
    def normed(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of the tokens, and the norm of these; one launch unless several ranks share the table."""
        if self.shard.world_size == 1:
            return embed_norm(input_ids, self.weight, norm.weight, norm.eps)
        x = self(input_ids)
        return x, norm(x)

    # hidden [N, H] -> [N, V]
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token; with several ranks each rank gets all of them."""
        plan = self.picks.at(hidden.shape[0]).plan
        return all_gather_last(linear(hidden, self.weight, plan), self.shard)

    def weight_sources(self, name: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensor ``<name>.weight``."""
        shape = (self.vocab_size, self.hidden_size)
        # random logits of a normalised hidden state get a standard deviation of about 3
        std = 3.0 * self.hidden_size**-0.5
        yield WeightSource(f"{name}.weight", shape, (self.rows, slice(None)), self.weight, 0.0, std)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, place: Placement) -> None:
        super().__init__()
        gate_up = {"gate_proj": (intermediate_size, 1), "up_proj": (intermediate_size, 1)}
        self.gate_up = Linear(hidden_size, gate_up, split="column", bias=bias, place=place)
        self.down = Linear(intermediate_size, {"down_proj": (hidden_size, 1)}, split="row", bias=bias, place=place)

    # x, residual [T, H] -> [T, H]
    def forward(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the MLP of `x`; with `norm` and `residual`, for which it must fuse, ``residual + mlp(norm(x))``."""
        return self.down(self.gate_up(x, norm=norm, gated=True), residual=residual)

    # x [T, H] or [S, T, H] float32, residual [T, H] -> ([T, H] or [S, T, H] float32, [T, H])
    def of_sum(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP of ``norm(x + residual)``, and ``x + residual``; of the MLP maybe partial sums (`whole`)."""
        hidden, summed = self.gate_up.of_sum(x, residual, norm, gated=True)
        return self.down(hidden, partial=True), summed

    def fuses(self, num_rows: int) -> bool:
        """Whether both products take in what surrounds them."""
        return self.gate_up.fuses(num_rows) and self.down.fuses(num_rows)

    def weight_sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yield the three projections under ``<prefix>``."""
        yield from self.gate_up.weight_sources(prefix)
        yield from self.down.weight_sources(prefix)
