"""Build a step's inputs with NumPy in shared pinned buffers and send each of them on its own.

Legend: B requests and T tokens of the step (``_pad``: of its padded bucket), R rows, L ``max_model_len``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mrv2.device import Stream
from mrv2.instrument import stage, stages
from mrv2.runner.forward import GraphKey
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.cpu_gpu_buffer import CpuGpuBuffer
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.rejection_sampler import SpecDecodeMetadata
from mrv2.runner.v1.spec_inputs import SpecInputs
from mrv2.runner.v1.speculation import LogitRows
from mrv2_kernels.state.block_table import compute_slot_mapping
from mrv2_models.model_state import ForwardBatch


@dataclass(slots=True)
class SampledOnDevice:
    """The tokens of the step before, which the host may not have seen yet."""

    # [B, 1] int64, the last one of each request, in the batch order of that step; -1 = its logits held NaN
    tokens: torch.Tensor
    # id -> row of `tokens`, for requests that got a token
    rows: dict[str, int]
    # [B] int32: drafts that were rejected; None = the step had none
    num_rejected: torch.Tensor | None = None
    # [B, K'] int64: drafts behind the tokens, -1 = none; None = there are none on the device
    drafts: torch.Tensor | None = None
    # the host has the tokens by now: what it counts is exact
    arrived: bool = False


@dataclass(slots=True)
class PreparedStep:
    """A step that is ready for the forward pass."""

    key: GraphKey
    batch: ForwardBatch
    # [B] bool: the step ends inside the request's known tokens, so its sampled token is dropped
    discard: np.ndarray
    rows: LogitRows
    # [B] int32, host: tokens of each request, and those computed before the step (async mode: at most)
    num_scheduled: np.ndarray
    computed: np.ndarray
    # None = the step has no drafts
    spec: SpecDecodeMetadata | None = None


class InputPreparer:
    """Owns the pinned buffers of input preparation; one set for all steps."""

    def __init__(self, resources: RunnerResources, batch: InputBatch, main: Stream) -> None:
        r = self.resources = resources
        self.batch = batch
        self.main = main
        device, buffers = r.device, r.forward.buffers
        rows, tokens = r.max_num_seqs, r.forward.buffers.input_ids.shape[0]
        # [T], [R + 1]: the device half is what the model reads
        self.input_ids = CpuGpuBuffer(device, tokens, torch.int32, buffers.input_ids)
        self.query_start_loc = CpuGpuBuffer(device, rows + 1, torch.int32, buffers.query_start_loc)
        # [T]: batch row of each token, and its index within the row's scheduled tokens
        self.req_indices = CpuGpuBuffer(device, tokens, torch.int32)
        self.query_pos = CpuGpuBuffer(device, tokens, torch.int32)
        # [R]
        self.num_scheduled = CpuGpuBuffer(device, rows, torch.int32)
        self.discard = CpuGpuBuffer(device, rows, torch.bool)
        self.scatter_targets = CpuGpuBuffer(device, rows, torch.int64)
        self.scatter_sources = CpuGpuBuffer(device, rows, torch.int64)
        self.correct_targets = CpuGpuBuffer(device, rows, torch.int64)
        self.correct_sources = CpuGpuBuffer(device, rows, torch.int64)
        # [R * K]
        num_drafts = rows * r.max_num_spec_tokens
        self.draft_targets = CpuGpuBuffer(device, num_drafts, torch.int64)
        self.draft_sources = CpuGpuBuffer(device, num_drafts, torch.int64)
        self.spec_inputs = SpecInputs(r, main)
        # [max(R, T)]
        self.arange = np.arange(max(rows, tokens), dtype=np.int32)
        self.num_slices = 0
        self.num_scatters = 0

    def prepare(
        self,
        requests: dict[str, CachedRequestState],
        scheduled: SchedulerOutput,
        num_scheduled: dict[str, int],
        previous: SampledOnDevice | None,
        rows: LogitRows,
        # row in which each request was drafted for
        draft_rows: dict[str, int],
    ) -> PreparedStep:
        """Submit everything before the forward pass; the pinned buffers are free again once it has run."""
        batch, main = self.batch, self.main
        if previous is not None and previous.arrived and previous.num_rejected is not None:
            self._count_exactly(requests, previous)
        num_reqs, num_tokens = batch.num_reqs, scheduled.total_tokens
        batch.block_table.commit(main, num_reqs)

        ids = batch.ids
        for row, drafts in enumerate(rows.drafts):
            if drafts:
                # behind the known tokens, where the next ones overwrite them
                known = int(batch.num_tokens[row])
                batch.token_ids_cpu[row, known : known + len(drafts)] = np.maximum(drafts, 0)
        # [B]
        counts = np.array([num_scheduled[req_id] for req_id in ids], dtype=np.int32)
        computed = batch.num_computed_tokens.np[:num_reqs]
        # [2, 5, 3] -> [0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [2, 7, 10], [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
        req_indices = np.repeat(self.arange[:num_reqs], counts)
        ends = np.cumsum(counts, dtype=np.int32)
        query_pos = self.arange[:num_tokens] - np.repeat(ends - counts, counts)
        # [T], the position of each token and its index in the flat token matrix
        positions = computed[req_indices] + query_pos
        token_indices = positions + req_indices.astype(np.int64) * batch.token_ids_cpu.shape[1]
        torch.index_select(
            batch.token_ids_cpu_tensor.flatten(),
            0,
            torch.from_numpy(token_indices),
            out=self.input_ids.cpu[:num_tokens],
        )
        self.query_start_loc.np[0] = 0
        self.query_start_loc.np[1 : num_reqs + 1] = ends
        self.query_start_loc.np[num_reqs + 1 :] = num_tokens
        self.req_indices.np[:num_tokens] = req_indices
        self.query_pos.np[:num_tokens] = query_pos
        self.num_scheduled.np[:num_reqs] = counts
        known = np.array([requests[req_id].num_tokens for req_id in ids], dtype=np.int32)
        discard = computed + counts < known
        self.discard.np[:num_reqs] = discard

        query_start_loc = self.query_start_loc.copy_to_gpu(main, len(self.query_start_loc.np))
        # only drafters read the mask on the device; it travels in every step all the same
        self.discard.copy_to_gpu(main, num_reqs)
        self._send_input_ids(previous, ends, num_tokens, rows)
        forward, knobs = self.resources.forward, self.resources.knobs
        max_query_len = int(counts.max())
        key = forward.buckets.key(num_tokens, num_reqs, max_query_len if num_tokens == num_reqs * max_query_len else 0)
        forward_batch = forward.make_batch(
            key,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            knobs=knobs,
            query_start_loc_np=np.concatenate(([0], ends)),
            max_seq_lens_np=computed + counts,
        )
        # the batch row is the request row
        forward_batch.idx_mapping = batch.rows.gpu[:num_reqs]
        num_computed = batch.num_computed_tokens.copy_to_gpu(main, num_reqs)
        if previous is not None and not previous.arrived and previous.num_rejected is not None:
            self._send_corrections(num_computed, previous, previous.num_rejected)
        main.run(
            stages.PREPARE_INPUTS,
            _gather_inputs,
            forward_batch,
            query_start_loc,
            self.req_indices.copy_to_gpu(main, num_tokens),
            self.query_pos.copy_to_gpu(main, num_tokens),
            num_computed,
            self.num_scheduled.copy_to_gpu(main, num_reqs),
            self.resources.block_size,
        )
        step = PreparedStep(key, forward_batch, discard, rows, counts, computed.copy())
        if rows.has_drafts:
            unseen = previous.rows if previous is not None and previous.drafts is not None else {}
            step.spec = self.spec_inputs.send(
                rows,
                ends,
                [draft_rows.get(req_id, 0) for req_id in ids],
                previous.drafts if previous is not None else None,
                {row: unseen[req_id] for row, req_id in enumerate(ids) if req_id in unseen and rows.drafts[row]},
            )
        return step

    def _count_exactly(self, requests: dict[str, CachedRequestState], previous: SampledOnDevice) -> None:
        """The scheduler counted every draft of the last step; the host knows by now how many were accepted."""
        for req_id, row in self.batch.req_id_to_index.items():
            if req_id in previous.rows:
                self.batch.num_computed_tokens.np[row] = requests[req_id].num_tokens - 1

    def _send_corrections(
        self,
        # [B] int32, device: as if every draft of the last step had been accepted
        num_computed: torch.Tensor,
        previous: SampledOnDevice,
        num_rejected: torch.Tensor,
    ) -> None:
        """Take the rejected drafts of the last step, which the host does not know yet, back on the device."""
        found = [
            (row, previous.rows[req_id])
            for req_id, row in self.batch.req_id_to_index.items()
            if req_id in previous.rows
        ]
        if not found:
            return
        count = len(found)
        self.correct_targets.np[:count], self.correct_sources.np[:count] = zip(*found, strict=True)
        self.main.run(
            stages.PREPARE_INPUTS,
            _take_back,
            num_computed,
            num_rejected,
            self.correct_targets.copy_to_gpu(self.main, count),
            self.correct_sources.copy_to_gpu(self.main, count),
        )

    def _send_input_ids(
        self,
        previous: SampledOnDevice | None,
        # [B], end of each request's tokens
        ends: np.ndarray,
        num_tokens: int,
        rows: LogitRows,
    ) -> None:
        """Send the ids that the host knows and put the sampled and drafted ones in their places on the device."""
        if previous is None:
            self.input_ids.copy_to_gpu(self.main, num_tokens)
            return
        with stage(stages.V1_SCATTER_TOKENS):
            targets: list[int] = []
            sources: list[int] = []
            draft_targets: list[int] = []
            draft_sources: list[int] = []
            unchanged = True
            last_tokens = (ends - rows.counts).tolist()
            width = 0 if previous.drafts is None else previous.drafts.shape[1]
            for req_id, row in self.batch.req_id_to_index.items():
                source = previous.rows.get(req_id)
                if source is None:
                    continue
                target = last_tokens[row]
                targets.append(target)
                sources.append(source)
                unchanged = unchanged and source == target
                for place in range(len(rows.drafts[row]) if width else 0):
                    draft_targets.append(target + 1 + place)
                    draft_sources.append(source * width + place)
            count, num_drafts = len(targets), len(draft_targets)
            if count + num_drafts < num_tokens:
                self.input_ids.copy_to_gpu(self.main, num_tokens)
            if count == 0:
                return
            ids = self.input_ids.gpu
            if num_drafts and previous.drafts is not None:
                self.draft_targets.np[:num_drafts] = draft_targets
                self.draft_sources.np[:num_drafts] = draft_sources
                self.main.run(
                    stages.PREPARE_INPUTS,
                    _scatter_drafts,
                    ids,
                    previous.drafts,
                    self.draft_targets.copy_to_gpu(self.main, num_drafts),
                    self.draft_sources.copy_to_gpu(self.main, num_drafts),
                )
            if unchanged and max(targets) == count - 1:
                # the same decodes in the same rows: their tokens are one slice
                self.num_slices += 1
                self.main.run(stages.PREPARE_INPUTS, _copy_sampled, ids[:count], previous.tokens[:count])
                return
            self.num_scatters += 1
            self.scatter_targets.np[:count] = targets
            self.scatter_sources.np[:count] = sources
            self.main.run(
                stages.PREPARE_INPUTS,
                _scatter_sampled,
                ids,
                previous.tokens,
                self.scatter_targets.copy_to_gpu(self.main, count),
                self.scatter_sources.copy_to_gpu(self.main, count),
            )


# Device code: reads nothing but its arguments.


def _copy_sampled(
    # [n] int32, out
    input_ids: torch.Tensor,
    # [n, 1] int64
    tokens: torch.Tensor,
) -> None:
    # a row of NaN sampled -1; its request ends when the host hears of it, until then any legal id does
    input_ids.copy_(tokens[:, 0].clamp(min=0))


def _scatter_sampled(
    # [T] int32, out
    input_ids: torch.Tensor,
    # [B, 1] int64, of the step before
    tokens: torch.Tensor,
    # [n] int64: token index in this step, row of `tokens`
    targets: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    input_ids.scatter_(0, targets, tokens[sources, 0].clamp(min=0).to(input_ids.dtype))


def _scatter_drafts(
    # [T] int32, out
    input_ids: torch.Tensor,
    # [B, K] int64
    drafts: torch.Tensor,
    # [n] int64: token index in this step, place in `drafts` row after row
    targets: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    found = drafts.reshape(-1).index_select(0, sources)
    # no draft: any legal id does, its row rejects it
    input_ids.scatter_(0, targets, found.clamp(min=0).to(input_ids.dtype))


def _take_back(
    # [B] int32, in and out
    num_computed: torch.Tensor,
    # [B'] int32
    num_rejected: torch.Tensor,
    # [n] int64: rows of the two
    targets: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    num_computed.index_add_(0, targets, num_rejected.index_select(0, sources), alpha=-1)


def _gather_inputs(
    batch: ForwardBatch,
    # [R + 1] int32
    query_start_loc: torch.Tensor,
    # [T] int32 each
    req_indices: torch.Tensor,
    query_pos: torch.Tensor,
    # [B] int32 each
    num_computed: torch.Tensor,
    num_scheduled: torch.Tensor,
    block_size: int,
) -> None:
    """Positions, sequence lengths and slots; padded rows and tokens are made inert."""
    num_reqs, num_tokens = num_computed.shape[0], req_indices.shape[0]
    torch.add(num_computed.index_select(0, req_indices), query_pos, out=batch.positions[:num_tokens])
    batch.positions[num_tokens:].zero_()
    torch.add(num_computed, num_scheduled, out=batch.seq_lens[:num_reqs])
    batch.seq_lens[num_reqs:].zero_()
    for table, slots in zip(batch.block_tables, batch.slot_mappings, strict=True):
        table[num_reqs:].zero_()
        compute_slot_mapping(slots, table, batch.idx_mapping, query_start_loc, batch.positions, block_size=block_size)
