"""What differs from model to model around a forward, behind one interface that every runner calls.

The runner prepares a `ForwardBatch`; the model state turns it into the arguments of the model's
forward and keeps whatever the model carries from step to step (recurrent state, position tables,
embeddings).  Hooks that write device memory are called inside a device stage, the others on the host.

Legend: B requests and T tokens of a step (``_pad``: of its padded bucket), R rows (slots), MB blocks
per row, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mrv2_models.attention import AttentionBackend, AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.kv_cache import KVCacheGroup, KVCacheSpec, LayerCache

# which steps a CUDA graph may replay: none, those of one token per request, or any
GraphSupport = Literal["none", "uniform_decode", "mixed"]


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """One step as the runner prepared it; tensors are slices of its persistent buffers."""

    # [T_pad] int32
    input_ids: torch.Tensor
    # [T_pad] int32
    positions: torch.Tensor
    # [B] int32, batch row -> slot
    idx_mapping: torch.Tensor
    # [B_pad + 1] int32
    query_start_loc: torch.Tensor
    # [B_pad] int32
    seq_lens: torch.Tensor
    # one [B_pad, MB] int32 per KV cache group
    block_tables: Sequence[torch.Tensor]
    # one [T_pad] int32 per KV cache group
    slot_mappings: Sequence[torch.Tensor]
    # upper bound over the step, in tokens
    max_query_len: int
    # every request has exactly one query token, so T_pad == B_pad
    uniform_decode: bool
    attention_backend: AttentionBackend = "triton"
    # host twins, [B + 1] and [B] (an upper bound); None under CUDA graphs
    query_start_loc_np: np.ndarray | None = None
    max_seq_lens_np: np.ndarray | None = None


class ModelState(ABC):
    """Per-model hooks of a step, in the order in which a runner calls them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    @property
    def graph_support(self) -> GraphSupport:
        """Which steps may be captured."""
        return "mixed"

    @property
    def step_graphs(self) -> bool:
        """Whether a graph may hold a whole step of decodes or verifications.

        Then `apply_staged_writes` has nothing to do, and `preprocess_state` and `postprocess_state` of such a
        batch are device work on tensors that stay where they are, without effect on padding rows.
        """
        return False

    @abstractmethod
    def kv_cache_specs(self, block_size: int) -> list[KVCacheSpec]:
        """Return one spec per layer; `block_size` in tokens."""

    @abstractmethod
    def initialize_kv_cache(self, groups: Sequence[KVCacheGroup], kv_caches: Sequence[LayerCache]) -> None:
        """Learn the groups and the allocated caches, once, before the first step."""

    def add_request(self, row: int, token_ids: np.ndarray, num_computed_tokens: int) -> None:
        """A request moved into slot `row` with these known tokens ``[prefill_len]``; stage its state."""

    def remove_request(self, row: int) -> None:
        """The request in slot `row` finished, was aborted or was preempted."""

    def apply_staged_writes(self) -> None:
        """Send what `add_request` staged to the device."""

    def preprocess_state(self, batch: ForwardBatch) -> None:
        """Prepare carried state on the device, before the forward."""

    def get_mm_embeddings(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return embeddings ``[T_pad, H]`` that replace those of `input_ids`, or None."""
        return None

    @abstractmethod
    def prepare_inputs(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward other than `attn` and `kv_caches`."""

    @abstractmethod
    def prepare_dummy_inputs(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return `prepare_inputs` for a warm-up or capture step that belongs to no request."""

    @abstractmethod
    def prepare_attn(self, batch: ForwardBatch) -> Any:
        """Return the `attn` argument of the model's forward."""

    def postprocess_state(self, batch: ForwardBatch, num_accepted: torch.Tensor) -> None:
        """Commit carried state: `num_accepted` [B] int32 tokens that the step yielded, on the device."""

    def custom_sampler(self) -> Callable[..., Any] | None:
        """Return a sampler that replaces the runner's, or None."""
        return None


class DefaultModelState(ModelState):
    """Dense decoders with full attention: nothing is carried besides the KV cache, in one group."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.groups: tuple[KVCacheGroup, ...] = ()

    @property
    def step_graphs(self) -> bool:
        """True: there is nothing but the forward."""
        return True

    def kv_cache_specs(self, block_size: int) -> list[KVCacheSpec]:
        """Return the model's own specs."""
        return self.model.kv_cache_specs(block_size)

    def initialize_kv_cache(self, groups: Sequence[KVCacheGroup], kv_caches: Sequence[LayerCache]) -> None:
        """Check that one group covers every layer."""
        num_layers = self.model.config.num_hidden_layers
        assert len(groups) == 1 and len(kv_caches) == num_layers, (
            f"{type(self.model).__name__} needs one KV cache group over {num_layers} layers, "
            f"got {len(groups)} groups and {len(kv_caches)} caches"
        )
        self.groups = tuple(groups)

    def prepare_inputs(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return token ids and positions."""
        return {"input_ids": batch.input_ids, "positions": batch.positions}

    def prepare_dummy_inputs(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return the same tensors: a captured forward reads the runner's persistent buffers."""
        return self.prepare_inputs(batch)

    def prepare_attn(self, batch: ForwardBatch) -> AttentionMetadata:
        """Return the metadata of the only group."""
        return AttentionMetadata(
            block_tables=batch.block_tables[0],
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mappings[0],
            max_query_len=batch.max_query_len,
            uniform_decode=batch.uniform_decode,
            backend=batch.attention_backend,
            query_start_loc_np=batch.query_start_loc_np,
            max_seq_lens_np=batch.max_seq_lens_np,
        )


def resolve_model_state(model: CausalLM) -> ModelState:
    """Return the state object of a loaded model: its class's own, else the default."""
    return (model.model_state_cls or DefaultModelState)(model)
