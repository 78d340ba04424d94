"""A step's inputs built on the device (``input_prep="device"``): the host sends an index, kernels do the rest.

host | [index, starts, counts] ->            (needs no number that the device computes)
main | [upload][staged writes][gather block tables][prepare inputs][forward] ...
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2.instrument import stages
from mrv2.runner.async_output import PinnedOutput
from mrv2.runner.protocol import NewRequest, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.upload import UploadedBatch
from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.inputs.decode import prepare_decode_inputs
from mrv2_kernels.inputs.prepare import prepare_pos_seq_lens, prepare_prefill_inputs
from mrv2_kernels.state.block_table import compute_slot_mapping, gather_block_tables
from mrv2_models.model_state import ForwardBatch, ModelState


class DeviceInputs:
    """Kernels read the rows of the batch where they are; nothing of a request is kept on the host."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        self.main, self.state, self.block_size = resources.device.main, state, resources.block_size
        self.model_state = resources.forward.model_state

    def add_request(self, row: int, request: NewRequest) -> None:
        """Nothing to do: the row's staged writes say everything."""

    def append_blocks(self, new_block_ids: dict[str, tuple[list[int], ...]]) -> None:
        """Nothing to do: the row's staged writes say everything."""

    def follow(self, output: PinnedOutput) -> None:
        """Nothing to do: the device knows what it sampled."""

    def reset(self) -> None:
        """Nothing to forget."""

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
        """Submit the kernels that fill the forward's buffers."""
        state, model_state = self.state, self.model_state
        decode_only = forward_batch.uniform_decode and not has_prefill and len(forward_batch.block_tables) == 1
        if decode_only:
            counted = batch.num_reqs, self.block_size
            self.main.run(stages.PREPARE_INPUTS, _prepare_decode_inputs, state, model_state, forward_batch, *counted)
            return
        self.main.run(stages.GATHER_BLOCK_TABLES, _gather_block_tables, state, forward_batch)
        self.main.run(
            stages.PREPARE_INPUTS,
            _prepare_inputs,
            state,
            model_state,
            forward_batch,
            batch.cu_num_logits,
            logits_indices,
            self.block_size,
            has_prefill,
        )


# Device code: reads nothing but its arguments.


def _gather_block_tables(state: RequestState, batch: ForwardBatch) -> None:
    for group, table in enumerate(batch.block_tables):
        source = state.arena[f"block_table_{group}"]
        gather_block_tables(table, source, state.arena["num_blocks"], batch.idx_mapping)


def _prepare_inputs(
    state: RequestState,
    model_state: ModelState,
    batch: ForwardBatch,
    # [B + 1]
    cu_num_logits: torch.Tensor,
    # [N], out
    logits_indices: torch.Tensor,
    block_size: int,
    has_prefill: bool,
) -> None:
    arena = state.arena
    idx_mapping, query_start_loc = batch.idx_mapping, batch.query_start_loc
    if has_prefill:
        prepare_prefill_inputs(
            batch.input_ids,
            idx_mapping,
            query_start_loc,
            arena["token_ids"],
            arena["prefill_len"],
            arena["num_computed_tokens"],
            max_query_len=batch.max_query_len,
        )
    prepare_pos_seq_lens(
        batch.positions,
        batch.seq_lens,
        idx_mapping,
        query_start_loc,
        arena["num_computed_tokens"],
        max_query_len=batch.max_query_len,
    )
    combine_sampled_and_draft_tokens(
        batch.input_ids,
        logits_indices,
        idx_mapping,
        query_start_loc,
        batch.seq_lens,
        arena["prefill_len"],
        state.last_sampled_tokens,
        state.draft_tokens,
        cu_num_logits,
    )
    for group, slots in enumerate(batch.slot_mappings):
        compute_slot_mapping(
            slots,
            arena[f"block_table_{group}"],
            idx_mapping,
            query_start_loc,
            batch.positions,
            block_size=block_size,
        )
    model_state.apply_staged_writes()
    model_state.preprocess_state(batch)


def _prepare_decode_inputs(
    state: RequestState,
    model_state: ModelState,
    batch: ForwardBatch,
    # [1] int32
    num_reqs: torch.Tensor,
    block_size: int,
) -> None:
    """One launch for what `_gather_block_tables` and `_prepare_inputs` do with four."""
    arena = state.arena
    prepare_decode_inputs(
        batch.input_ids,
        batch.positions,
        batch.seq_lens,
        batch.slot_mappings[0],
        batch.block_tables[0],
        batch.idx_mapping,
        arena["num_computed_tokens"],
        state.last_sampled_tokens,
        arena["block_table_0"],
        arena["num_blocks"],
        num_reqs,
        block_size=block_size,
    )
    model_state.apply_staged_writes()
    model_state.preprocess_state(batch)
