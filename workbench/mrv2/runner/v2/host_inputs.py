"""A step's inputs built with NumPy (``input_prep="host"``): what it costs not to prepare on the device.

    host | build_inputs n+1: ids of prompts, positions, lengths, slots, block tables
    main | [upload x 4 or 5][prepare inputs: sampled ids into their places][forward n+1] ...

The host keeps tables, prompts and progress of every row, and gathers them anew in every step.  The last sampled
tokens and the drafts it does not know: `combine_sampled_and_draft_tokens` puts those in their places.  How far a
request is follows from what was scheduled, unless a step had drafts; then the host must learn how many were accepted
before it can build the next one, and there is nothing that the device could do meanwhile:

    host | E(n) T(n) | E(n+1): [wait: accepted tokens ............][build_inputs n+1] T(n+1)
    main | [prepare n][forward n][sample, verify n][draft n]  (idle)             [prepare n+1][forward n+1]
    copy |                                        [output n]

Legend: B requests and T tokens of a step (``_pad``: of its padded bucket), R rows, MB blocks a row, G cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mrv2.device import PinnedRing
from mrv2.instrument import stage, stages
from mrv2.runner.async_output import PinnedOutput
from mrv2.runner.protocol import NewRequest, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.upload import UploadedBatch
from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_models.model_state import ForwardBatch, ModelState

ACCEPTED_WAIT = "accepted tokens"  # of the step before, if it had drafts, by this name


@dataclass(slots=True)
class DraftedStep:
    """A step whose drafts all count as computed, until the host has learnt which were accepted."""

    # [B] int32: row of each request, and how often it had been taken
    rows: np.ndarray
    taken: np.ndarray
    # [B] int32: tokens that the request yields if every draft is accepted; 0 = it yields nothing
    most: np.ndarray
    output: PinnedOutput | None = None


class HostInputs:
    """What the host knows of every row, and the pinned slots in which it lays out a step."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        r = self.resources = resources
        self.state, self.main = state, r.device.main
        rows = r.max_num_seqs
        # G x [R, MB] int32; 0 behind the blocks of a row, which `state.num_blocks_np` counts
        self.block_tables = [np.zeros((rows, r.blocks_per_row), dtype=np.int32) for _ in range(r.num_groups)]
        # R arrays [prefill_len] int32
        self.token_ids = [np.zeros(0, dtype=np.int32)] * rows
        # [R] int32: blocks in a row's tables; tokens computed by the steps built so far; how often it was taken
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.num_computed = np.zeros(rows, dtype=np.int32)
        self.taken = np.zeros(rows, dtype=np.int32)
        # what `settle` has to take back before the next step is built
        self._drafted: DraftedStep | None = None
        self._ring: PinnedRing | None = None

    def add_request(self, row: int, request: NewRequest) -> None:
        """Keep what `request` brings into `row`."""
        self.taken[row] += 1
        self.token_ids[row] = request.token_ids
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[row] = len(request.block_ids[0])
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table[row] = 0
            table[row, : len(block_ids)] = block_ids

    def append_blocks(self, new_block_ids: dict[str, tuple[list[int], ...]]) -> None:
        """Extend the tables of requests, by id."""
        for req_id, groups in new_block_ids.items():
            row = self.state.row_of[req_id]
            start = self.num_blocks[row]
            for table, block_ids in zip(self.block_tables, groups, strict=True):
                table[row, start : start + len(block_ids)] = block_ids
            self.num_blocks[row] += len(groups[0])

    def submit(
        self,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
        batch: UploadedBatch,
        forward_batch: ForwardBatch,
        # [N] int32, out
        logits_indices: torch.Tensor,
        has_prefill: bool,
    ) -> None:
        """Build the step, submit the copies into the forward's buffers, and the ids that only the device knows.

        Waits for the output of the step before if that had drafts (`ACCEPTED_WAIT`).
        """
        self._await_accepted()
        with stage(stages.BUILD_INPUTS, scheduled.step):
            slot = self._take_slot(scheduled.step)
            copies = self._build(slot, scheduled.num_scheduled_tokens, rows, forward_batch, has_prefill)
        for target, source in copies:
            self.main.copy(stages.UPLOAD, target, source)
        assert self._ring is not None, "a slot was taken"
        self._ring.release(slot, self.main.record_event())
        self.num_computed[rows] += scheduled.num_scheduled_tokens
        if scheduled.num_draft_tokens.any():
            most = np.where(scheduled.yields_token, 1 + scheduled.num_draft_tokens, 0)
            self._drafted = DraftedStep(rows, self.taken[rows], most)
        self.main.run(
            stages.PREPARE_INPUTS,
            _place_sampled_ids,
            self.state,
            self.resources.forward.model_state,
            forward_batch,
            batch.cu_num_logits,
            logits_indices,
        )

    def follow(self, output: PinnedOutput) -> None:
        """Learn from `output`, when it arrives, how many drafts of the step just submitted were accepted."""
        step = self._drafted
        if step is not None:
            step.output = output
            output.on_ready = partial(self._settle, step)

    def reset(self) -> None:
        """Forget every request."""
        self._drafted = None

    def _await_accepted(self) -> None:
        """Wait until it is known how far the requests of the step before are, unless the engine has its output."""
        step = self._drafted
        if step is not None:
            assert step.output is not None, "the next step is built before the last one has sampled"
            step.output.done.synchronize(ACCEPTED_WAIT)
            self._settle(step)

    def _settle(self, step: DraftedStep, _sampled: np.ndarray | None = None) -> None:
        """Take the rejected drafts of `step` back, if nobody has; a row that was given up meanwhile has none."""
        if step is not self._drafted or step.output is None:
            return
        self._drafted = None
        num_sampled = step.output.slot.num_sampled_np
        rejected = np.where(step.most, step.most - num_sampled, 0)
        same = self.taken[step.rows] == step.taken
        self.num_computed[step.rows[same]] -= rejected[same]

    def _take_slot(self, step: int) -> torch.Tensor:
        """Return pinned memory for everything that `step` uploads. int32"""
        if self._ring is None:
            r = self.resources
            num_tokens = r.forward.buffers.input_ids.shape[0]
            size = (2 + r.num_groups) * num_tokens + (1 + r.num_groups * r.blocks_per_row) * r.max_num_seqs
            self._ring = PinnedRing(r.device, r.max_queue_depth + 1, (size,), torch.int32, name="host inputs")
        return self._ring.acquire(step)

    def _build(
        self,
        # int32, pinned
        slot: torch.Tensor,
        # [B] int32
        counts: np.ndarray,
        # [B] int32
        rows: np.ndarray,
        batch: ForwardBatch,
        has_prefill: bool,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Lay the step out in `slot`; return the copies to make, as targets and sources."""
        layout, num_reqs, num_tokens = _Layout(slot), len(rows), int(counts.sum())
        computed, ends = self.num_computed[rows], np.cumsum(counts, dtype=np.int32)
        starts = ends - counts

        positions = layout.place(batch.positions)
        np.add(np.arange(num_tokens, dtype=np.int32), np.repeat(computed - starts, counts), out=positions[:num_tokens])
        positions[num_tokens:] = 0
        seq_lens = layout.place(batch.seq_lens)
        np.add(computed, counts, out=seq_lens[:num_reqs])
        seq_lens[num_reqs:] = 0
        if has_prefill:
            ids = layout.place(batch.input_ids)
            # the ids in the gaps, behind the prompts, are put in on the device
            ids[:] = 0
            for i in np.flatnonzero(computed < self.state.prefill_len_np[rows]):
                known = self.token_ids[rows[i]][computed[i] : computed[i] + counts[i]]
                ids[starts[i] : starts[i] + len(known)] = known

        column, offset = np.divmod(positions[:num_tokens], np.int32(self.resources.block_size))
        token_rows = np.repeat(rows, counts)
        for table, slots, gathered in zip(self.block_tables, batch.slot_mappings, batch.block_tables, strict=True):
            width = table.shape[1]
            block = table[token_rows, np.minimum(column, width - 1)]
            out = layout.place(slots)
            out[:num_tokens] = np.where(column < width, block * self.resources.block_size + offset, -1)
            out[num_tokens:] = -1
            tables = layout.place(gathered).reshape(-1, width)
            np.take(table, rows, axis=0, out=tables[:num_reqs], mode="clip")
            tables[num_reqs:] = 0
        return layout.copies


class _Layout:
    """Hands out the words of a pinned slot one after the other, each run with the device tensor that it is for."""

    def __init__(
        self,
        # int32, pinned
        slot: torch.Tensor,
    ) -> None:
        self.slot, self.words_np, self.used = slot, slot.numpy(), 0
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(self, target: torch.Tensor) -> np.ndarray:
        """Return the words that will be copied into `target`, a contiguous int32 tensor. [target.numel()]"""
        begin = self.used
        self.used += target.numel()
        self.copies.append((target, self.slot[begin : self.used].view(target.shape)))
        return self.words_np[begin : self.used]


def _place_sampled_ids(
    state: RequestState,
    model_state: ModelState,
    batch: ForwardBatch,
    # [B + 1] int32
    cu_num_logits: torch.Tensor,
    # [N] int32, out
    logits_indices: torch.Tensor,
) -> None:
    """Device code: write the ids behind the prompts, which the host does not know."""
    combine_sampled_and_draft_tokens(
        batch.input_ids,
        logits_indices,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        state.arena["prefill_len"],
        state.last_sampled_tokens,
        state.draft_tokens,
        cu_num_logits,
    )
    model_state.apply_staged_writes()
    model_state.preprocess_state(batch)
