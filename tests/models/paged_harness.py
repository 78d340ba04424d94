"""Runs a model over a paged KV cache without an engine: a few requests, any split into steps.

The pool is filled with NaN and its blocks are handed out in a shuffled order, so that a read of a slot
which nobody wrote, or of another request's, shows in the result.
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2_models.attention import AttentionBackend
from mrv2_models.causal_lm import CausalLM
from mrv2_models.kv_cache import allocate_kv_caches, group_specs, kept_dtype
from mrv2_models.model_state import ForwardBatch, resolve_model_state


class PagedHarness:
    """Owns the pool of one model and the progress of its requests, which are named by any string."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        backend: AttentionBackend = "triton",
        kv_cache_dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        self.model, self.backend, self.block_size = model, backend, block_size
        self.state = resolve_model_state(model)
        groups = group_specs(self.state.kv_cache_specs(block_size), kept_dtype(kv_cache_dtype, model.device))
        self.kv_caches = allocate_kv_caches(
            groups, num_blocks, lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype, device=model.device)
        )
        self.state.initialize_kv_cache(groups, self.kv_caches)
        # block 0 is the null block
        self.free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def step(
        self, tokens: dict[str, list[int]], *, pad_tokens: int = 0, pad_requests: int = 0
    ) -> dict[str, torch.Tensor]:
        """Run the next tokens of some requests; return their logits, ``[number of tokens, V]`` each."""
        batch = self.batch(tokens, pad_tokens, pad_requests)
        inputs, attn = self.state.prepare_inputs(batch), self.state.prepare_attn(batch)
        hidden = self.model(**inputs, attn=attn, kv_caches=self.kv_caches)
        num_tokens = sum(map(len, tokens.values()))
        logits = self.model.compute_logits(hidden[:num_tokens])
        for req_id, new in tokens.items():
            self.computed[req_id] += len(new)
        return dict(zip(tokens, logits.split([len(new) for new in tokens.values()]), strict=True))

    def batch(self, tokens: dict[str, list[int]], pad_tokens: int = 0, pad_requests: int = 0) -> ForwardBatch:
        """Prepare a step without running it; blocks are handed out as needed."""
        lengths = [len(new) for new in tokens.values()]
        ids = [token for new in tokens.values() for token in new]
        positions, slots, tables, seq_lens = [], [], [], []
        for req_id, new in tokens.items():
            start = self.computed.setdefault(req_id, 0)
            table = self.blocks.setdefault(req_id, [])
            while len(table) * self.block_size < start + len(new):
                table.append(self.free.pop())
            span = range(start, start + len(new))
            positions += span
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            tables.append(table)
            seq_lens.append(start + len(new))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        width = max(map(len, tables)) + 1
        padded_tables = [table + [0] * (width - len(table)) for table in tables] + [[0] * width] * pad_requests
        seq_lens_np = np.array(seq_lens)
        uniform = max(lengths) == 1 and pad_tokens == pad_requests
        return ForwardBatch(
            input_ids=self._int32(ids + [0] * pad_tokens),
            positions=self._int32(positions + [0] * pad_tokens),
            idx_mapping=self._int32(list(range(len(tokens)))),
            query_start_loc=self._int32(starts.tolist() + [len(ids)] * pad_requests),
            seq_lens=self._int32(seq_lens + [0] * pad_requests),
            block_tables=[self._int32(padded_tables)],
            slot_mappings=[self._int32(slots + [-1] * pad_tokens)],
            max_query_len=max(lengths),
            uniform_decode=uniform,
            attention_backend=self.backend,
            query_start_loc_np=starts,
            max_seq_lens_np=seq_lens_np,
        )

    def _int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)
