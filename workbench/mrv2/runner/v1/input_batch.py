"""The persistent batch: dense rows [0, num_reqs) that are the model input themselves.

A request that leaves, or is merely not scheduled, leaves a hole; `condense` moves the last rows into the
holes, field by field.  Order within the batch changes by swapping rows.

Legend: R rows (``max_num_seqs``), L ``max_model_len``, B requests in the batch.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import torch

from mrv2.device import Device, Stream
from mrv2.runner.v1.block_table import MultiGroupBlockTable
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.cpu_gpu_buffer import CpuGpuBuffer
from mrv2.runner.v1.sampling_metadata import SamplingMetadata


class InputBatch:
    """Host arrays indexed by batch row, their device twins, and the sets that say who uses which feature."""

    def __init__(
        self,
        device: Device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        # G x [R, MB] int32, device
        block_tables: list[torch.Tensor],
        # seeds travel for greedy requests too
        always_seeds: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.always_seeds = always_seeds
        # None = a hole
        self.req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        # [R, L]; too large to pin, so it never travels as it is
        self.token_ids_cpu_tensor = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int32)
        self.token_ids_cpu = self.token_ids_cpu_tensor.numpy()
        # [R]
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed_tokens = CpuGpuBuffer(device, max_num_seqs, torch.int32)
        self.block_table = MultiGroupBlockTable(device, block_tables)

        # [R] each
        self.temperature = CpuGpuBuffer(device, max_num_seqs, torch.float32)
        self.top_p = CpuGpuBuffer(device, max_num_seqs, torch.float32)
        self.top_k = CpuGpuBuffer(device, max_num_seqs, torch.int32)
        self.min_p = CpuGpuBuffer(device, max_num_seqs, torch.float32)
        self.seeds = CpuGpuBuffer(device, max_num_seqs, torch.int64)
        self._parameters = (self.temperature, self.top_p, self.top_k, self.min_p, self.seeds)
        self.greedy_reqs: set[str] = set()
        self.random_reqs: set[str] = set()
        self.top_p_reqs: set[str] = set()
        self.top_k_reqs: set[str] = set()
        self.min_p_reqs: set[str] = set()
        # bias, allowed tokens, minimum length, penalties, bad words, thinking budget
        self.feature_reqs: set[str] = set()
        # of these, the ones that look at output tokens
        self.history_reqs: set[str] = set()
        self.logprob_reqs: set[str] = set()
        # [R] int32: row i of the logits is row i of the batch
        self.rows = CpuGpuBuffer(device, max_num_seqs, torch.int32)
        self.rows.np[:] = np.arange(max_num_seqs)
        self.rows.copy_to_gpu(device.main, max_num_seqs)

        self._holes: list[int] = []
        self._changed = True
        self.sampling_metadata = SamplingMetadata(all_greedy=True, all_random=False)
        self.num_moves = 0
        self.num_refreshes = 0

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    @property
    def ids(self) -> list[str]:
        """The batch in row order; valid once it is condensed."""
        assert not self._holes, f"rows {self._holes} are holes: condense the batch first"
        return [req_id for req_id in self.req_ids if req_id is not None]

    def add_request(self, request: CachedRequestState) -> int:
        """Give the request the lowest hole, else the next row, and fill every field of it; return the row."""
        req_id = request.req_id
        assert req_id not in self.req_id_to_index, f"request {req_id} is in the batch already"
        row = heappop(self._holes) if self._holes else len(self.req_ids)
        assert row < self.max_num_seqs, f"no row for request {req_id}: {self.num_reqs} of {self.max_num_seqs} are taken"
        if row == len(self.req_ids):
            self.req_ids.append(req_id)
        else:
            self.req_ids[row] = req_id
        self.req_id_to_index[req_id] = row
        self._changed = True

        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        self.token_ids_cpu[row, :num_prompt] = request.prompt_token_ids
        self.token_ids_cpu[row, num_prompt:num_tokens] = request.output_token_ids
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens.np[row] = request.num_computed_tokens
        self.block_table.add_row(row, request.block_ids)
        self._add_sampling(row, request)
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Make the request's row a hole and return it; None if it had none.  `condense` must follow."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        heappush(self._holes, row)
        self.req_ids[row] = None
        self._changed = True
        for members in (self.greedy_reqs, self.random_reqs, self.top_p_reqs, self.top_k_reqs, self.min_p_reqs):
            members.discard(req_id)
        self.feature_reqs.discard(req_id)
        self.history_reqs.discard(req_id)
        self.logprob_reqs.discard(req_id)
        return row

    def condense(self) -> None:
        """Move the last rows into the lowest holes until the batch is dense."""
        while self._holes:
            while self.req_ids and self.req_ids[-1] is None:
                self.req_ids.pop()
            hole = heappop(self._holes)
            if hole >= len(self.req_ids):
                self._holes.clear()
                break
            self._move_row(len(self.req_ids) - 1, hole)

    def swap_states(self, a: int, b: int) -> None:
        """Exchange two rows, field by field."""
        id_a, id_b = self.req_ids[a], self.req_ids[b]
        assert id_a is not None and id_b is not None, f"rows {a} and {b} must both hold a request to be swapped"
        self.req_ids[a], self.req_ids[b] = id_b, id_a
        self.req_id_to_index[id_a], self.req_id_to_index[id_b] = b, a
        used = max(self.num_tokens[a], self.num_tokens[b])
        kept = self.token_ids_cpu[a, :used].copy()
        self.token_ids_cpu[a, :used] = self.token_ids_cpu[b, :used]
        self.token_ids_cpu[b, :used] = kept
        for array in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens.np):
            array[a], array[b] = array[b], array[a]
        for parameter in self._parameters:
            parameter.np[a], parameter.np[b] = parameter.np[b], parameter.np[a]
        self.block_table.swap_row(a, b)
        self._changed = True
        self.num_moves += 1

    def reorder(self, num_scheduled: dict[str, int]) -> None:
        """Swap rows until the decodes (one scheduled token) stand before everything else."""
        is_decode = [num_scheduled[req_id] == 1 for req_id in self.ids]
        num_decodes = sum(is_decode)
        late = [row for row in range(num_decodes, len(is_decode)) if is_decode[row]]
        early = [row for row in range(num_decodes) if not is_decode[row]]
        for a, b in zip(early, late, strict=True):
            self.swap_states(a, b)

    def refresh_metadata(self, stream: Stream) -> None:
        """After any change of the batch, send the parameters in use again and describe them anew."""
        if not self._changed:
            return
        self._changed = False
        self.num_refreshes += 1
        num_reqs = self.num_reqs
        all_greedy, shaped = not self.random_reqs, bool(self.top_p_reqs or self.top_k_reqs)
        self.sampling_metadata = SamplingMetadata(
            all_greedy=all_greedy,
            all_random=not self.greedy_reqs,
            rows=self.rows.gpu[:num_reqs],
            temperature=None if all_greedy else self.temperature.copy_to_gpu(stream, num_reqs),
            seeds=None if all_greedy and not self.always_seeds else self.seeds.copy_to_gpu(stream, num_reqs),
            # one kernel reads both
            top_p=self.top_p.copy_to_gpu(stream, num_reqs) if shaped else None,
            top_k=self.top_k.copy_to_gpu(stream, num_reqs) if shaped else None,
            min_p=self.min_p.copy_to_gpu(stream, num_reqs) if self.min_p_reqs else None,
        )

    def clear(self) -> None:
        """Forget every request."""
        for req_id in list(self.req_id_to_index):
            self.remove_request(req_id)
        self.condense()

    def _add_sampling(self, row: int, request: CachedRequestState) -> None:
        req_id, params = request.req_id, request.sampling
        (self.random_reqs if params.temperature > 0.0 else self.greedy_reqs).add(req_id)
        self.temperature.np[row] = params.temperature
        # the low 64 bits, as the device reads them
        self.seeds.np[row] = np.uint64(params.seed & (2**64 - 1)).astype(np.int64)
        self.top_p.np[row] = params.top_p
        if params.top_p < 1.0:
            self.top_p_reqs.add(req_id)
        self.top_k.np[row] = params.top_k
        if params.top_k > 0:
            self.top_k_reqs.add(req_id)
        self.min_p.np[row] = params.min_p
        if params.min_p > 0.0:
            self.min_p_reqs.add(req_id)
        if max(params.num_logprobs, params.num_prompt_logprobs) >= 0 or params.logprob_token_ids:
            self.logprob_reqs.add(req_id)
        if params.has_penalty or params.bad_words or params.thinking is not None:
            self.history_reqs.add(req_id)
        if params.has_bias or req_id in self.history_reqs:
            self.feature_reqs.add(req_id)

    def _move_row(self, last: int, hole: int) -> None:
        """Move the last row into a hole and cut it off."""
        req_id = self.req_ids.pop()
        assert req_id is not None, f"row {last} is a hole itself"
        self.req_ids[hole] = req_id
        self.req_id_to_index[req_id] = hole
        used = self.num_tokens[last]
        self.token_ids_cpu[hole, :used] = self.token_ids_cpu[last, :used]
        for array in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens.np):
            array[hole] = array[last]
        for parameter in self._parameters:
            parameter.np[hole] = parameter.np[last]
        self.block_table.move_row(last, hole)
        self._changed = True
        self.num_moves += 1
