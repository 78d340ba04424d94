"""EAGLE-3 and MTP in the V1 runner: who prepares a draft head's inputs, and how its drafts come back.

    sync    host | [wait: v1: accepted tokens] bookkeep, lay out the kept tokens, launch [wait: v1: draft ids] -> lists
            main |                                (idle)  [H2D x 9][first pass][draw][step]...[D2H]
    async   host | launch everything behind the verification at once; the drafts are read where they lie
            main | [verify][inputs of the padded pass][first pass][draw][step] ... [next step: scatter]

Sync mode throws the rejected tokens out of the drafter's batch, for which the host must know them.  Async mode
keeps the target's shape and finds the last accepted token on the device.

Legend: B requests, T tokens of the target's step, R rows, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mrv2.config import Knobs
from mrv2.device import Event, Stream
from mrv2.instrument import stages
from mrv2.runner.forward import ForwardBuffers, GraphKey
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.cpu_gpu_buffer import CpuGpuBuffer
from mrv2.runner.v1.draft_passes import DraftBuffers, DraftPasses, Draw, PassKey, PassKind, advance, draw_step
from mrv2.runner.v1.input_batch import InputBatch
from mrv2_kernels.spec.draft_probs import DraftProbs

DRAFTS_WAIT = "v1: draft ids"


class PaddedStep(NamedTuple):
    """What the padded pass is prepared from; device tensors."""

    # [B] int64 and int32: last accepted token, and number of rejected drafts; anything where nothing was sampled
    next_tokens: torch.Tensor
    num_rejected: torch.Tensor
    # [B] bool
    discard: torch.Tensor
    # [B] int32: the prompt token behind the step, and tokens computed before it
    backup_tokens: torch.Tensor
    num_computed: torch.Tensor


class HeadProposer:
    """Drafts with the heads that the engine was loaded with."""

    def __init__(self, resources: RunnerResources, batch: InputBatch, main: Stream) -> None:
        r = self.resources = resources
        self.batch, self.main = batch, main
        self.drafters = {d.method: d for d in r.drafters if not d.extra}
        device, target = r.device, r.forward.buffers
        rows, tokens = (r.max_num_seqs, target.input_ids.shape[0]) if self.drafters else (0, 0)
        self.buffers = b = DraftBuffers(
            device,
            max_num_seqs=rows,
            max_num_tokens=tokens,
            hidden_size=target.hidden.shape[1],
            dtype=target.hidden.dtype,
        )
        self.passes = DraftPasses(r, self.drafters, b)
        self.input_ids = CpuGpuBuffer(device, tokens, torch.int32, b.input_ids)
        self.positions = CpuGpuBuffer(device, tokens, torch.int32, b.positions)
        self.slots = CpuGpuBuffer(device, tokens, torch.int32, b.slots)
        self.token_indices = CpuGpuBuffer(device, tokens, torch.int32, b.token_indices)
        self.starts = CpuGpuBuffer(device, rows + 1, torch.int32, b.starts)
        self.seq_lens = CpuGpuBuffer(device, rows, torch.int32, b.seq_lens)
        self.sample_index = CpuGpuBuffer(device, rows, torch.int32, b.sample_index)
        self.total_len = CpuGpuBuffer(device, rows, torch.int32, b.total_len)
        self.num_computed = CpuGpuBuffer(device, rows, torch.int32, b.num_computed)
        self.num_blocks = CpuGpuBuffer(device, rows, torch.int32, b.num_blocks)
        # async mode: the prompt token behind the step of each request
        self.backup_tokens = CpuGpuBuffer(device, rows, torch.int32)
        # [R, K]: drafts on the host
        self.pinned = device.pinned((rows, max(1, r.max_num_spec_tokens)), torch.int64)
        self._copied: Event = device.event()
        self._draft_probs: dict[str, DraftProbs] = {}
        for drafter in self.drafters.values():
            if drafter.distribution is not None:
                self._draft_probs[drafter.method] = drafter.distribution.draft_probs(device, r.vocab_size)

    def is_on(self, knobs: Knobs) -> bool:
        """Say whether a head follows every step, be it only to fill its cache."""
        return knobs.spec_method in self.drafters

    def draft_probs(self, knobs: Knobs) -> DraftProbs | None:
        """Return what drafts are drawn from under `knobs`; None = every draft is certain."""
        if knobs.draft_sampling != "sampled" or knobs.verification != "standard":
            return None
        return self._draft_probs.get(knobs.spec_method)

    # Sync mode: the host knows what was accepted.

    def prepare_kept(
        self,
        # [B] tokens of the target's step, of these rejected drafts, and tokens computed before it
        num_scheduled: np.ndarray,
        num_rejected: np.ndarray,
        computed: np.ndarray,
    ) -> GraphKey:
        """Lay out the step without its rejected drafts, every token moved on by one, and send it array by array."""
        batch, num_reqs, block_size = self.batch, len(num_scheduled), self.resources.block_size
        kept = num_scheduled - num_rejected
        ends, target_starts = np.cumsum(kept, dtype=np.int32), np.cumsum(num_scheduled) - num_scheduled
        num_tokens, longest = int(ends[-1]), int(kept.max())
        uniform = longest if num_tokens == num_reqs * longest else 0
        key = self.resources.forward.buckets.key(num_tokens, num_reqs, uniform)
        req_indices = np.repeat(np.arange(num_reqs), kept)
        query_pos = np.arange(num_tokens, dtype=np.int32) - np.repeat(ends - kept, kept)
        positions = computed[req_indices] + query_pos
        table = batch.block_table.tables[0]
        blocks = table.buffer.np[req_indices, positions // block_size]
        padding = slice(num_tokens, key.num_tokens)
        per_token = (
            # a row of NaN sampled -1
            (self.input_ids, np.maximum(batch.token_ids_cpu[req_indices, positions + 1], 0), 0),
            (self.positions, positions, 0),
            (self.slots, blocks * block_size + positions % block_size, -1),
            (self.token_indices, target_starts[req_indices] + query_pos, 0),
        )
        for buffer, values, inert in per_token:
            buffer.np[:num_tokens] = values
            buffer.np[padding] = inert
            buffer.copy_to_gpu(self.main, key.num_tokens)
        self.starts.np[0] = 0
        self.starts.np[1 : num_reqs + 1] = ends
        self.starts.np[num_reqs + 1 :] = num_tokens
        self.starts.copy_to_gpu(self.main, len(self.starts.np))
        per_request = (
            (self.seq_lens, computed + kept),
            (self.sample_index, ends - 1),
            (self.total_len, batch.num_tokens[:num_reqs]),
            (self.num_computed, computed + kept),
            (self.num_blocks, table.num_blocks[:num_reqs]),
        )
        for buffer, values in per_request:
            buffer.np[:num_reqs] = values
            buffer.np[num_reqs:] = 0
            buffer.copy_to_gpu(self.main, len(buffer.np))
        return key

    def read(self, drafts: torch.Tensor) -> np.ndarray:
        """Copy drafts [B, K] to the host and wait for them: the second wait of a step. [B, K] int64"""
        num_reqs, num_drafts = drafts.shape
        self.submit_copy(drafts, self.main)
        return self.wait(num_reqs, num_drafts)

    # Async mode: the device knows it.

    def send_padded(self, num_reqs: int, computed_after: np.ndarray) -> None:
        """Send what the padded pass takes from the host, with the inputs of the target's step.

        `computed_after` holds, for each request, the tokens computed with the step. [B] int32
        """
        batch = self.batch
        last = batch.token_ids_cpu.shape[1] - 1
        self.backup_tokens.np[:num_reqs] = batch.token_ids_cpu[np.arange(num_reqs), np.minimum(computed_after, last)]
        self.backup_tokens.copy_to_gpu(self.main, num_reqs)
        self.num_blocks.np[:num_reqs] = batch.block_table.tables[0].num_blocks[:num_reqs]
        self.num_blocks.copy_to_gpu(self.main, num_reqs)

    def prepare_padded(self, key: GraphKey, step: PaddedStep) -> None:
        """Submit the device's part of the inputs of the padded pass."""
        self.main.run(stages.DRAFT, _prepare_padded, self.buffers, self.resources.forward.buffers, key, step)

    def submit_copy(self, drafts: torch.Tensor, stream: Stream) -> None:
        """Submit the copy of drafts [B, K] to the host."""
        if stream is not self.main:
            stream.wait_event(self.main.record_event())
        num_reqs, num_drafts = drafts.shape
        stream.copy(stages.DRAFT_COPY, self._destination(num_reqs, num_drafts), drafts)
        self._copied = stream.record_event()

    def wait(self, num_reqs: int, num_drafts: int) -> np.ndarray:
        """Wait for the newest copy, of drafts [B, K]. [B, K] int64"""
        self._copied.synchronize(DRAFTS_WAIT)
        return self._destination(num_reqs, num_drafts).numpy().copy()

    # Both.

    def submit(self, kind: PassKind, key: GraphKey, num_reqs: int, num_drafts: int) -> torch.Tensor:
        """Submit the passes behind a prepared step; return its drafts, -1 = none. [B, K] int64"""
        r, knobs = self.resources, self.resources.knobs
        drafter, target = self.drafters[knobs.spec_method], r.forward.buffers
        draw = Draw.of(knobs, self.batch.sampling_metadata, self.buffers) if num_drafts else None
        self.passes.submit(self.main, PassKey(drafter.method, kind, key), draw)
        # drawn by their own parameters, the batch is not padded: these have no rows behind it
        is_padded = draw is not None and draw.choice == "greedy"
        shape = r.forward.buckets.key(num_reqs, num_reqs, 1) if is_padded else GraphKey(num_reqs, num_reqs, 1)
        starts = (self.buffers.starts if kind == "kept" else target.query_start_loc)[: shape.num_reqs + 1]
        # a fresh tensor a step: the next one, and a copy, still read it
        drafts = r.device.empty((shape.num_reqs, max(1, num_drafts)), torch.int64)
        for step in range(num_drafts):
            assert draw is not None, "there are drafts to choose"
            if step:
                self.passes.submit(self.main, PassKey(drafter.method, "step", shape), draw)
            if draw.choice != "greedy":
                self.main.run(stages.DRAFT, draw_step, drafter, self.buffers, starts, draw, step)
            self.main.run(
                stages.DRAFT,
                advance,
                drafter,
                target,
                self.buffers,
                starts,
                drafts,
                step,
                r.block_size,
                r.max_model_len,
            )
        return drafts[:num_reqs, :num_drafts]

    def _destination(self, num_reqs: int, num_drafts: int) -> torch.Tensor:
        """Return contiguous pinned memory for drafts. [B, K] int64"""
        return self.pinned.view(-1)[: num_reqs * num_drafts].view(num_reqs, num_drafts)


def num_rejected_of(num_drafts: np.ndarray, token_lists: list[list[int]]) -> np.ndarray:
    """Return how many drafts of each request, of `num_drafts` [B], are not among its new tokens. [B] int32"""
    counts = np.array([len(tokens) for tokens in token_lists], dtype=np.int32)
    return np.where(counts > 0, num_drafts + 1 - counts, 0).astype(np.int32)


# Device code: reads nothing but its arguments.


def _prepare_padded(buffers: DraftBuffers, target: ForwardBuffers, key: GraphKey, step: PaddedStep) -> None:
    """Move the step's tokens on by one, put the last accepted one in, and find it."""
    num_reqs, num_tokens = step.next_tokens.shape[0], key.num_tokens
    starts = target.query_start_loc[: num_reqs + 1]
    rejected = torch.where(step.discard, 0, step.num_rejected)
    last = starts[1:] - 1 - rejected
    buffers.input_ids[: num_tokens - 1].copy_(target.input_ids[1:num_tokens])
    buffers.input_ids[num_tokens - 1 : num_tokens].zero_()
    tokens = torch.where(step.discard, step.backup_tokens, step.next_tokens.clamp(min=0)).to(torch.int32)
    buffers.input_ids.index_copy_(0, last.long(), tokens)
    buffers.sample_index.zero_()
    buffers.sample_index[:num_reqs].copy_(last)
    computed = step.num_computed + starts.diff() - rejected
    buffers.num_computed[:num_reqs].copy_(computed)
    # a request that yields knows one token more than it has computed; the others more than that
    buffers.total_len[:num_reqs].copy_(computed + 1 + step.discard)


def keep_valid(
    # [B] int64, [B] int32, out: last accepted token, and number of rejected drafts
    next_tokens: torch.Tensor,
    num_rejected: torch.Tensor,
    # [B, 1 + K] int64, -1 behind the tokens of each request
    sampled: torch.Tensor,
    # [B] int32: drafts up to and with each request's; None = there are none
    cu_num_draft_tokens: torch.Tensor | None,
) -> None:
    """Count what verification left of each request, as `parse_output` does on the host."""
    num_valid = (sampled >= 0).sum(dim=1).clamp(min=1)
    next_tokens.copy_(sampled.gather(1, num_valid.unsqueeze(1) - 1).squeeze(1))
    if cu_num_draft_tokens is None:
        num_rejected.zero_()
        return
    num_drafts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    num_rejected.copy_(num_drafts + 1 - num_valid)
