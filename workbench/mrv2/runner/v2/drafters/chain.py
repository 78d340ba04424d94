"""A chain of drafts from one drafter: a pass over the target's batch, then one token a request at a time.

    [first pass: the step's tokens, moved on by one]  -> draft 0 of each request
    [draft step 1: draft 0] -> draft 1   ...   [draft step K-1] -> draft K-1

The first pass has the shape of the target's step ("padded drafter"); with K = 0 it only keeps the
drafter's KV cache in step with the target's.  All of it is device code on persistent buffers, so that
a CUDA graph can hold the whole chain.

Legend: B requests (padding included), T tokens, R rows, MB blocks a row, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mrv2.device import Device
from mrv2.runner.forward import ForwardBuffers
from mrv2.runner.loaded_drafter import LoadedDrafter
from mrv2.runner.v2.request_state import RequestState
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.noise import DRAFT_DOMAIN
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.spec.draft_draw import draw_drafts, keep_draft_probs
from mrv2_kernels.spec.draft_inputs import advance_draft, prepare_draft_inputs
from mrv2_models.attention import AttentionMetadata


class DraftBuffers:
    """Inputs of drafter passes, written anew on the device by each; one drafter runs at a time."""

    def __init__(self, device: Device, *, max_num_seqs: int, max_num_tokens: int) -> None:
        rows, tokens = max_num_seqs, max_num_tokens + max_num_seqs
        # first pass: [T + R], [T + R], [T + R], [R + 1], [R]
        self.input_ids = device.zeros((tokens,), torch.int32)
        self.positions = device.zeros((tokens,), torch.int32)
        self.slots = device.full((tokens,), -1, torch.int32)
        self.starts = device.zeros((rows + 1,), torch.int32)
        self.seq_lens = device.zeros((rows,), torch.int32)
        # [R], index of the token to draft from
        self.sample_index = device.zeros((rows,), torch.int32)
        # draft steps: [R] each, and [R + 1] 0, 1, 2, ...
        self.step_ids = device.zeros((rows,), torch.int32)
        self.step_positions = device.zeros((rows,), torch.int32)
        self.step_seq_lens = device.zeros((rows,), torch.int32)
        self.step_slots = device.full((rows,), -1, torch.int32)
        self.step_starts = device.zeros((rows + 1,), torch.int32)
        # [R] int64
        self.drawn = device.full((rows,), -1, torch.int64)
        # [R] float32: greedy drafts of every row
        self.no_temperature = device.zeros((rows,), torch.float32)


# the likeliest tokens, draws with the target's noise, or draws of their own whose probabilities are kept
DraftChoice = Literal["greedy", "shared", "own"]


@dataclass(frozen=True, slots=True)
class ChainShape:
    """What the host knows of a chain; with the buffers' contents it decides everything."""

    # of the target's step, padding included
    num_tokens: int
    num_reqs: int
    # upper bound, in tokens
    max_query_len: int
    # no request has more than max_query_len tokens, and num_tokens = num_reqs * max_query_len
    uniform: bool
    num_drafts: int
    choice: DraftChoice


def fill_starts(buffers: DraftBuffers) -> None:
    """Write 0, 1, 2, ... once; device code."""
    torch.arange(buffers.step_starts.shape[0], out=buffers.step_starts)


def run_chain(
    drafter: LoadedDrafter,
    shape: ChainShape,
    target: ForwardBuffers,
    buffers: DraftBuffers,
    state: RequestState,
    block_size: int,
) -> None:
    """Follow the step in `target` and write ``state.draft_tokens`` of its rows; device code."""
    hidden = _first_pass(drafter, shape, target, buffers, state, block_size)
    num_reqs, row_len = shape.num_reqs, state.arena["token_ids"].shape[1]
    attn = AttentionMetadata(
        block_tables=target.block_tables[0][:num_reqs],
        query_start_loc=buffers.step_starts[: num_reqs + 1],
        seq_lens=buffers.step_seq_lens[:num_reqs],
        slot_mapping=buffers.step_slots[:num_reqs],
        max_query_len=1,
        uniform_decode=True,
    )
    ids, positions = buffers.step_ids[:num_reqs], buffers.step_positions[:num_reqs]
    arena = state.arena
    for step in range(shape.num_drafts):
        if step:
            hidden = drafter.run(ids, hidden, positions, attn)
        drawn = buffers.drawn[:num_reqs]
        _draw(drafter, drafter.logits(hidden), drawn, shape.choice, step, target, buffers, state)
        advance_draft(
            ids,
            positions,
            attn.seq_lens,
            attn.slot_mapping,
            state.draft_tokens,
            drawn,
            drafter.to_target,
            target.query_start_loc[: num_reqs + 1],
            target.idx_mapping,
            arena["total_len"],
            arena["num_computed_tokens"],
            arena["block_table_0"],
            arena["num_blocks"],
            step=step,
            extra=drafter.extra,
            block_size=block_size,
            row_len=row_len,
        )


def run_missed(drafter: LoadedDrafter, state: RequestState, row: int, positions: range, block_size: int) -> None:
    """Let a drafter that reads tokens alone take in a stretch of a row's history; device code."""
    arena, device = state.arena, state.draft_tokens.device
    where = torch.arange(positions.start, positions.stop, dtype=torch.int32, device=device)
    ids = arena["token_ids"][row, positions.start : positions.stop]
    table = arena["block_table_0"][row : row + 1]
    attn = AttentionMetadata(
        block_tables=table,
        query_start_loc=torch.arange(2, dtype=torch.int32, device=device) * len(positions),
        seq_lens=torch.full((1,), positions.stop, dtype=torch.int32, device=device),
        slot_mapping=table[0].index_select(0, where // block_size) * block_size + where % block_size,
        max_query_len=len(positions),
        uniform_decode=False,
    )
    drafter.run(ids, ids, where, attn)


def _first_pass(
    drafter: LoadedDrafter,
    shape: ChainShape,
    target: ForwardBuffers,
    buffers: DraftBuffers,
    state: RequestState,
    block_size: int,
) -> torch.Tensor:
    """Run the drafter over the target's tokens; return the hidden states to draft from. [B, H]"""
    num_reqs, extra, arena = shape.num_reqs, drafter.extra, state.arena
    num_tokens = shape.num_tokens + extra * num_reqs
    ids, positions, slots = (t[:num_tokens] for t in (buffers.input_ids, buffers.positions, buffers.slots))
    starts, seq_lens = buffers.starts[: num_reqs + 1], buffers.seq_lens[:num_reqs]
    sample_index = buffers.sample_index[:num_reqs]
    prepare_draft_inputs(
        ids,
        positions,
        slots,
        starts,
        seq_lens,
        sample_index,
        state.draft_tokens,
        target.positions[: shape.num_tokens],
        target.query_start_loc[: num_reqs + 1],
        target.idx_mapping,
        arena["token_ids"],
        arena["total_len"],
        arena["block_table_0"],
        arena["num_blocks"],
        extra=extra,
        block_size=block_size,
        max_query_len=shape.max_query_len,
    )
    if not extra:
        positions, slots = target.positions[:num_tokens], target.slot_mappings[0][:num_tokens]
        starts, seq_lens = target.query_start_loc[: num_reqs + 1], target.seq_lens[:num_reqs]
    attn = AttentionMetadata(
        block_tables=target.block_tables[0][:num_reqs],
        query_start_loc=starts,
        seq_lens=seq_lens,
        slot_mapping=slots,
        max_query_len=shape.max_query_len + extra,
        uniform_decode=shape.uniform and shape.max_query_len + extra == 1,
    )
    tapped = None if target.aux_hidden is None else target.aux_hidden[: shape.num_tokens]
    features = drafter.features(tapped, target.hidden[: shape.num_tokens])
    return drafter.run(ids, features, positions, attn).index_select(0, sample_index)


def _draw(
    drafter: LoadedDrafter,
    # [B, V_d]
    logits: torch.Tensor,
    # [B] int64, out
    drawn: torch.Tensor,
    choice: DraftChoice,
    step: int,
    target: ForwardBuffers,
    buffers: DraftBuffers,
    state: RequestState,
) -> None:
    """Choose draft number `step` of each request; -1 where there is none."""
    num_reqs, arena = drawn.shape[0], state.arena
    rows, temperature, seeds = target.idx_mapping[:num_reqs], arena["temperature"], arena["seeds"]
    if choice == "greedy":
        positions = buffers.step_positions[:num_reqs]
        gumbel_sample(logits, drawn, buffers.step_starts[:num_reqs], positions, buffers.no_temperature, seeds)
        return
    processed = Truncation(arena["min_p"], arena["top_k"], arena["top_p"]).apply(logits, rows, temperature)
    purpose = (1 + step) * DRAFT_DOMAIN if choice == "own" else 0
    draw_drafts(
        processed,
        drawn,
        rows,
        arena["total_len"],
        drafter.to_target,
        temperature,
        seeds,
        step=step,
        purpose=purpose,
    )
    if choice == "own":
        assert drafter.distribution is not None, "check_knobs refuses draws of their own without memory for them"
        probs = processed.softmax(dim=-1)
        starts = target.query_start_loc[: num_reqs + 1]
        keep_draft_probs(drafter.distribution.probs, probs, drawn, starts, rows, temperature, step=step)
