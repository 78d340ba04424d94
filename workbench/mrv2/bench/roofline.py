"""The static cost card: what a workload must read, write and compute, step by step, and the time that takes.

A step reads every weight once and, for each running request, the keys and values of its whole context;
it writes those of its new tokens.  Activations, logits and the embedding rows that are looked up are
left out: they are small beside these.  So the bound is a floor, not a forecast:

    seconds >= sum over steps of max(bytes / bandwidth, FLOPs / peak)

The steps are those of the engine's own scheduling rule (token budget, row limit, chunked prefill) with
enough KV blocks for every running request: preemption is extra work and never part of a floor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch

from mrv2.bench.workloads import Workload
from mrv2_models.config import ModelConfig


@dataclass(frozen=True)
class ModelCost:
    """Costs of a model that do not depend on the batch."""

    # read by every step; a tied embedding counts once, an untied input embedding not at all
    weight_bytes: int
    # keys and values of one token, all layers
    kv_bytes_per_token: int
    # multiply and add count as two
    flops_per_token: int
    flops_per_logits_row: int
    # one query token against one context token, all layers and heads
    flops_per_attended_pair: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        quantization: Literal["fp8"] | None = None,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    ) -> ModelCost:
        """Count from the shape of the model.

        With `quantization` "fp8" a weight of the layers' products is one byte, a scale four; with `kv_cache_dtype`
        "fp8" an element of a key or value is one byte.
        """
        head_weights = config.vocab_size * config.hidden_size
        embedding_weights = head_weights * (1 if config.tie_word_embeddings else 2)
        layer_weights = config.num_parameters - embedding_weights
        weight_bytes = (layer_weights + head_weights) * dtype.itemsize
        if quantization == "fp8":
            hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
            qkv = (heads + 2 * config.num_key_value_heads) * config.head_dim
            products = hidden * qkv + heads * config.head_dim * hidden + 3 * hidden * inner
            scales = qkv + hidden + 2 * inner + hidden
            weight_bytes += config.num_hidden_layers * (products * (1 - dtype.itemsize) + 4 * scales)
        return cls(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=2
            * config.num_hidden_layers
            * config.num_key_value_heads
            * config.head_dim
            * (1 if kv_cache_dtype == "fp8" else dtype.itemsize),
            flops_per_token=2 * layer_weights,
            flops_per_logits_row=2 * head_weights,
            flops_per_attended_pair=4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )


@dataclass(slots=True)
class StepWork:
    """What one step computes, counted in tokens."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    # requests that yield a token
    num_logits_rows: int = 0
    # summed context lengths of the scheduled requests, this step's tokens included
    num_context_tokens: int = 0
    # (query, visible context) pairs of causal attention
    num_attended_pairs: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def add(self, num_tokens: int, context_len: int, *, decode: bool, yields_token: bool) -> None:
        """Count a request that computes `num_tokens` tokens and ends with `context_len` of them."""
        if decode:
            self.num_decode_tokens += num_tokens
        else:
            self.num_prefill_tokens += num_tokens
        self.num_logits_rows += yields_token
        self.num_context_tokens += context_len
        self.num_attended_pairs += num_tokens * context_len - num_tokens * (num_tokens - 1) // 2


@dataclass(slots=True)
class _Progress:
    input_len: int
    output_len: int
    computed: int = 0
    produced: int = 0

    @property
    def remaining(self) -> int:
        """Tokens known but not computed."""
        return self.input_len + self.produced - self.computed


def plan_steps(workload: Workload, *, max_num_seqs: int, max_num_batched_tokens: int) -> list[StepWork]:
    """Return the steps that the synchronous engine runs for `workload` when the KV pool never runs out."""
    waiting = deque(_Progress(r.input_len, r.output_len) for r in workload.requests)
    running: list[_Progress] = []
    steps: list[StepWork] = []
    while waiting or running:
        step, budget = StepWork(), max_num_batched_tokens
        scheduled = list(running)
        for request in scheduled:
            budget -= _advance(request, budget, step)
        while waiting and budget > 0 and len(running) < max_num_seqs:
            request = waiting.popleft()
            running.append(request)
            budget -= _advance(request, budget, step)
        running = [request for request in running if request.produced < request.output_len]
        steps.append(step)
    return steps


def _advance(request: _Progress, budget: int, step: StepWork) -> int:
    """Compute what the budget allows of a request; return the tokens used."""
    num_tokens = min(request.remaining, budget)
    if num_tokens <= 0:
        return 0
    request.computed += num_tokens
    decode = request.produced > 0
    yields_token = request.remaining == 0
    step.add(num_tokens, request.computed, decode=decode, yields_token=yields_token)
    request.produced += yields_token
    return num_tokens


@dataclass(frozen=True)
class CostCard:
    """A workload's steps on a model."""

    cost: ModelCost
    num_output_tokens: int
    steps: list[StepWork] = field(repr=False)

    @classmethod
    def of(cls, workload: Workload, cost: ModelCost, *, max_num_seqs: int, max_num_batched_tokens: int) -> CostCard:
        """Plan the steps of `workload` under the engine's limits."""
        steps = plan_steps(workload, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        return cls(cost, workload.num_output_tokens, steps)

    def step_bytes(self, step: StepWork) -> int:
        """Bytes read and written by one step: weights, context, new keys and values."""
        kv_tokens = step.num_context_tokens + step.num_tokens
        return self.cost.weight_bytes + kv_tokens * self.cost.kv_bytes_per_token

    def step_flops(self, step: StepWork) -> int:
        """Floating-point operations of one step."""
        cost = self.cost
        return (
            step.num_tokens * cost.flops_per_token
            + step.num_logits_rows * cost.flops_per_logits_row
            + step.num_attended_pairs * cost.flops_per_attended_pair
        )

    @property
    def weight_bytes(self) -> int:
        return len(self.steps) * self.cost.weight_bytes

    @property
    def kv_read_bytes(self) -> int:
        return sum(step.num_context_tokens for step in self.steps) * self.cost.kv_bytes_per_token

    @property
    def kv_written_bytes(self) -> int:
        return sum(step.num_tokens for step in self.steps) * self.cost.kv_bytes_per_token

    @property
    def flops(self) -> int:
        return sum(map(self.step_flops, self.steps))

    def step_seconds(self, step: StepWork, bandwidth: float, peak_flops: float | None = None) -> float:
        """Floor of one step.

        Args:
            bandwidth: measured bytes a second.
            peak_flops: measured FLOP/s; None = the memory floor alone.
        """
        seconds = self.step_bytes(step) / bandwidth
        return seconds if peak_flops is None else max(seconds, self.step_flops(step) / peak_flops)

    def seconds(self, bandwidth: float, peak_flops: float | None = None) -> float:
        """Floor of the whole workload, prefill included."""
        return sum(self.step_seconds(step, bandwidth, peak_flops) for step in self.steps)

    def tokens_per_second(self, bandwidth: float, peak_flops: float | None = None) -> float:
        """Output tokens a second that nothing can exceed."""
        return self.num_output_tokens / self.seconds(bandwidth, peak_flops)

    def as_dict(self, bandwidth: float, peak_flops: float) -> dict[str, float]:
        """Return the card as plain numbers for a record; times in milliseconds."""
        decode = [self.step_seconds(s, bandwidth, peak_flops) for s in self.steps if not s.num_prefill_tokens]
        return {
            "weight_bytes_per_step": self.cost.weight_bytes,
            "kv_bytes_per_token": self.cost.kv_bytes_per_token,
            "num_steps": len(self.steps),
            "num_prefill_steps": len(self.steps) - len(decode),
            "num_prefill_tokens": sum(step.num_prefill_tokens for step in self.steps),
            "weight_bytes": self.weight_bytes,
            "kv_read_bytes": self.kv_read_bytes,
            "kv_written_bytes": self.kv_written_bytes,
            "flops": self.flops,
            "decode_step_floor_ms_median": 1e3 * median(decode) if decode else 0.0,
            "decode_step_floor_ms_max": 1e3 * max(decode, default=0.0),
            "memory_seconds": self.seconds(bandwidth),
            "memory_tok_s": self.tokens_per_second(bandwidth),
            "seconds": self.seconds(bandwidth, peak_flops),
            "tok_s": self.tokens_per_second(bandwidth, peak_flops),
        }
