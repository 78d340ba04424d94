"""A drafter that was loaded: its module, its KV cache, and how one pass of it runs.

Its layers form KV cache groups of their own, with memory of their own.  As every group here keeps all
positions, they share the block ids of the target's group: one id names one block in each layer of all.

Legend: T tokens, N logits rows, H hidden size, V_d draft vocabulary.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import torch

from mrv2.config import EngineConfig
from mrv2.device import Device
from mrv2.errors import ConfigError
from mrv2.runner.v2.draft_distribution import DraftDistribution
from mrv2.speculators import parse_speculators
from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.drafters.config import DraftMethod
from mrv2_models.drafters.head import DraftHead
from mrv2_models.drafters.loading import load_head, random_head, shipped_head_of, shipped_heads
from mrv2_models.kv_cache import (
    EmptyFn,
    KVCacheGroup,
    KVCacheSpec,
    LayerCache,
    allocate_kv_caches,
    group_specs,
    kept_dtype,
)
from mrv2_models.registry import load_model, resolve_model

log = logging.getLogger(__name__)


class LoadedDrafter(ABC):
    """What drafting asks of any drafter with weights; `run` and `logits` are device code."""

    method: str
    # tokens that its first pass has beyond the target's step, a request: see `prepare_draft_inputs`
    extra: Literal[0, 1]
    draft_vocab_size: int
    # [V_d] int64, draft id -> target id; None = both vocabularies are one
    to_target: torch.Tensor | None
    groups: list[KVCacheGroup]
    kv_caches: list[LayerCache]

    def __init__(self, specs: Sequence[KVCacheSpec], kept: torch.dtype | None) -> None:
        self.groups = group_specs(specs, kept)
        self.kv_caches = []
        # None = no memory is kept for the probabilities of drafts
        self.distribution: DraftDistribution | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id costs in this drafter's layers."""
        return sum(group.bytes_per_block for group in self.groups)

    def allocate(self, num_blocks: int, empty_fn: EmptyFn) -> None:
        """Take the memory of the KV cache."""
        self.kv_caches = allocate_kv_caches(self.groups, num_blocks, empty_fn)

    def keep_probabilities(self, device: Device, *, max_num_seqs: int, max_num_spec_tokens: int) -> None:
        """Take the memory for what drafts are drawn from."""
        self.distribution = DraftDistribution.make(
            device,
            max_num_seqs=max_num_seqs,
            max_num_spec_tokens=max_num_spec_tokens,
            draft_vocab_size=self.draft_vocab_size,
            to_target=self.to_target,
        )

    # tapped [T, taps * H], final [T, H] -> [T, H]
    @abstractmethod
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        """Return what the first pass reads of the target's step."""

    @abstractmethod
    def run(
        self,
        # [T] int32
        input_ids: torch.Tensor,
        # [T, H]
        features: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:
        """Write keys and values; return hidden states [T, H], the features of the next positions."""

    # hidden [N, H] -> [N, V_d]
    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that follow."""


class HeadDrafter(LoadedDrafter):
    """EAGLE-3 or MTP: one layer that reads the target's hidden states."""

    extra: Literal[0, 1] = 0

    def __init__(self, head: DraftHead, block_size: int, kept: torch.dtype | None = None) -> None:
        super().__init__(head.kv_cache_specs(block_size), kept)
        self.head = head
        self.method = head.config.method
        self.draft_vocab_size = head.config.draft_vocab_size
        self.to_target = head.to_target

    # tapped [T, taps * H], final [T, H] -> [T, H]
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        return self.head.features(tapped, final)

    def run(
        self,
        # [T] int32
        input_ids: torch.Tensor,
        # [T, H]
        features: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:
        return self.head(input_ids, features, positions, attn, self.kv_caches[0])

    # hidden [N, H] -> [N, V_d]
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.compute_logits(hidden)


class ModelDrafter(LoadedDrafter):
    """A smaller language model of the same vocabulary, which reads tokens alone."""

    method = "draft_model"
    extra: Literal[0, 1] = 1
    to_target = None

    def __init__(self, model: CausalLM, block_size: int, kept: torch.dtype | None = None) -> None:
        super().__init__(model.kv_cache_specs(block_size), kept)
        self.model = model
        self.draft_vocab_size = model.config.vocab_size

    # tapped [T, taps * H], final [T, H] -> [T, H]
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        return final

    def run(
        self,
        # [T] int32
        input_ids: torch.Tensor,
        # anything: a language model reads no features
        features: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:
        return self.model(input_ids=input_ids, positions=positions, attn=attn, kv_caches=self.kv_caches)

    # hidden [N, H] -> [N, V_d]
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


def load_drafters(config: EngineConfig, target: CausalLM, target_folder: Path | None) -> list[LoadedDrafter]:
    """Load what ``config.speculators`` names, in its order; at most one drafter taps the target's layers.

    Raises `ConfigError` or `ModelFileError` if something is missing or does not fit the target.
    """
    drafters: list[LoadedDrafter] = []
    kept = kept_dtype(config.kv_cache_dtype, target.device)
    for method, model in parse_speculators(config.speculators).items():
        if method == "draft_model":
            assert model is not None, "parse_speculators asks for a model"
            drafters.append(ModelDrafter(_load_draft_model(config, model, target), config.block_size, kept))
        elif method != "suffix":
            head = _load_head(config, cast(DraftMethod, method), model, target, target_folder)
            drafters.append(HeadDrafter(head, config.block_size, kept))
            if head.config.aux_layer_ids:
                target.aux_layer_ids = head.config.aux_layer_ids
    return drafters


def _load_head(
    config: EngineConfig, method: DraftMethod, model: str | None, target: CausalLM, folder: Path | None
) -> DraftHead:
    found: str | Path | None = model
    if found is None:
        if folder is None or config.load_format == "dummy":
            return random_head(method, target, seed=config.seed)
        found = shipped_head_of(method, target.config.name) or shipped_head_of(method, config.model)
        if found is None:
            raise ConfigError(
                f"speculators: no {method} head ships for {config.model!r}; name one as '{method}=FOLDER' "
                f"(shipped: {', '.join(shipped_heads()) or 'none'})"
            )
    head = load_head(found, target, target_folder=folder, strict=config.strict_speculators)
    if head.config.method != method:
        raise ConfigError(
            f"speculators: {model!r} holds a head of method {head.config.method!r}, not {method!r}; "
            f"write '{head.config.method}={model}'"
        )
    return head


def _load_draft_model(config: EngineConfig, name: str, target: CausalLM) -> CausalLM:
    found = resolve_model(name)
    theirs, ours = found.config.vocab_size, target.config.vocab_size
    if theirs != ours:
        raise ConfigError(
            f"speculators: draft model {name!r} has a vocabulary of {theirs} tokens, the target one of {ours}; "
            "drafts are compared by token id, so both must share one vocabulary"
        )
    if found.config.max_model_len < target.max_model_len:
        raise ConfigError(
            f"speculators: draft model {name!r} reads at most {found.config.max_model_len} tokens, max_model_len="
            f"{target.max_model_len}; lower max_model_len"
        )
    model = load_model(
        found.folder if found.folder is not None else found.config,
        dtype=target.dtype,
        device=target.device,
        load_format="dummy" if found.folder is None else config.load_format,
        seed=config.seed,
        max_model_len=target.max_model_len,
    )
    if model.model_state_cls is not None or len(group_specs(model.kv_cache_specs(config.block_size))) != 1:
        raise ConfigError(
            f"speculators: draft model {name!r} keeps more than the keys and values of full attention, which a "
            "rejected draft could not take back; choose a plain decoder"
        )
    return model
