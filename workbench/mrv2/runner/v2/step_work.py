"""Device code of a whole step, as a graph holds it; reads and writes nothing but what it was handed.

    plain     upload, inputs, forward, logits, draw, commit
    drafted   upload, inputs, forward, logits, draws and verification, commit, drafts of the next step

An upload applies its staged writes itself.

Legend: R = rows, W = 1 + most drafts of a request, S = output slots; B_pad requests of up to 1 + K tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mrv2.instrument import captured_stage, stages
from mrv2.runner.forward import ForwardPass
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2.runner.v2.variants import DrawPlan, TokenDraw
from mrv2.runner.v2.verification import Acceptance, VerifiedRows, verify_by_probability, verify_exact
from mrv2_kernels.inputs.commit import commit_decode
from mrv2_kernels.inputs.commit_verified import commit_verified
from mrv2_kernels.inputs.decode import prepare_decode_inputs
from mrv2_kernels.inputs.verification import prepare_verification_inputs
from mrv2_kernels.state.mailbox import Mailbox, fetch_step, peek_step
from mrv2_models.model_state import ForwardBatch


class StepTensors(NamedTuple):
    """Everything a step graph works on; all of it stays where it is."""

    state: RequestState
    forward: ForwardPass
    token_draw: TokenDraw
    block_size: int
    # of the upload: [words] int32, what a step is told, whence that comes, and [slot_words + 1] int32, what came early
    words: torch.Tensor
    mailbox: Mailbox
    peeked: torch.Tensor
    # [1] int32 each: what the upload says of the step
    num_reqs: torch.Tensor
    num_runs: torch.Tensor
    output_slot: torch.Tensor
    # [R] int32, of the upload: 1 for a request, 0 for padding
    yields: torch.Tensor
    # int32: see `fetch_step`
    runs: torch.Tensor
    # [R] int32: a decode has no drafts
    no_drafts_before: torch.Tensor
    # [R * W] int32 each: logits row i belongs to token i; its request row, and its place among the request's
    token_index: torch.Tensor
    logit_slots: torch.Tensor
    local_positions: torch.Tensor
    # [R] int32: request row, -1 for padding
    live_rows: torch.Tensor
    # [R * W] int64: the draw of every logits row, and the tokens that are emitted
    drawn: torch.Tensor
    emitted: torch.Tensor
    # [R] int32 each
    num_emitted: torch.Tensor
    num_rejected: torch.Tensor
    # [R] int32 ones: every decode yields a token
    ones: torch.Tensor
    # [S, R * W] int64 and [S, R] int32: the output ring
    outputs: torch.Tensor
    output_counts: torch.Tensor


class PlainStep(NamedTuple):
    """A decode step."""

    tensors: StepTensors
    draw: DrawPlan
    batch: ForwardBatch
    inputs: dict[str, torch.Tensor]

    def __call__(self) -> None:
        t, batch, arena = self.tensors, self.batch, self.tensors.state.arena
        model_state = t.forward.model_state
        num_rows = batch.input_ids.shape[0]
        with captured_stage(stages.UPLOAD):
            _upload(t)
        with captured_stage(stages.PREPARE_INPUTS):
            prepare_decode_inputs(
                batch.input_ids,
                batch.positions,
                batch.seq_lens,
                batch.slot_mappings[0],
                batch.block_tables[0],
                batch.idx_mapping,
                arena["num_computed_tokens"],
                t.state.last_sampled_tokens,
                arena["block_table_0"],
                arena["num_blocks"],
                t.num_reqs,
                block_size=t.block_size,
            )
            model_state.preprocess_state(batch)
        with captured_stage(stages.FORWARD):
            hidden = t.forward.hidden(batch, self.inputs)
        logits = _logits(t, hidden)
        ctx = SamplingContext(
            batch.idx_mapping,
            batch.idx_mapping,
            batch.positions,
            t.no_drafts_before[:num_rows],
            t.token_index[:num_rows],
            batch.input_ids,
        )
        with captured_stage(stages.SAMPLE):
            t.token_draw.draw(self.draw, logits, ctx, t.drawn[:num_rows], may_change=False)
        with captured_stage(stages.POST_UPDATE):
            _commit_draws(t, batch)


class DraftedStep(NamedTuple):
    """A step that verifies drafts, proposes drafts, or lets a drafter keep step."""

    tensors: StepTensors
    draw: DrawPlan
    batch: ForwardBatch
    inputs: dict[str, torch.Tensor]
    # None = by the tokens that the target draws
    acceptance: Acceptance | None
    # writes the drafts of the next step; None = nobody drafts
    propose: Callable[[], None] | None
    # a drafter reads the target's hidden states
    keeps_hidden: bool

    def __call__(self) -> None:
        t, batch, arena = self.tensors, self.batch, self.tensors.state.arena
        model_state = t.forward.model_state
        num_tokens, num_reqs = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        logit_slots, places = t.logit_slots[:num_tokens], t.local_positions[:num_tokens]
        with captured_stage(stages.UPLOAD):
            _upload(t)
        with captured_stage(stages.PREPARE_INPUTS):
            prepare_verification_inputs(
                batch.input_ids,
                batch.positions,
                batch.seq_lens,
                batch.slot_mappings[0],
                batch.block_tables[0],
                logit_slots,
                places,
                t.live_rows[:num_reqs],
                batch.idx_mapping,
                batch.query_start_loc,
                arena["num_computed_tokens"],
                t.state.last_sampled_tokens,
                t.state.draft_tokens,
                arena["block_table_0"],
                arena["num_blocks"],
                block_size=t.block_size,
            )
            model_state.preprocess_state(batch)
        with captured_stage(stages.FORWARD):
            hidden = t.forward.hidden(batch, self.inputs)
            if self.keeps_hidden:
                t.forward.buffers.hidden[:num_tokens].copy_(hidden)
        logits = _logits(t, hidden)
        index = t.token_index[:num_tokens]
        ctx = SamplingContext(batch.idx_mapping, logit_slots, batch.positions, places, index, batch.input_ids)
        if num_tokens == num_reqs:
            with captured_stage(stages.SAMPLE):
                t.token_draw.draw(self.draw, logits, ctx, t.drawn[:num_tokens], may_change=False)
            with captured_stage(stages.POST_UPDATE):
                _commit_draws(t, batch)
        else:
            self._verify(logits, ctx)
        if self.propose is not None:
            with captured_stage(stages.DRAFT):
                self.propose()

    # logits [B_pad * (1 + K), V]
    def _verify(self, logits: torch.Tensor, ctx: SamplingContext) -> None:
        t, batch, arena = self.tensors, self.batch, self.tensors.state.arena
        num_tokens, num_reqs = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        drawn, num_emitted, num_rejected = t.drawn[:num_tokens], t.num_emitted[:num_reqs], t.num_rejected[:num_reqs]
        emitted = t.emitted[:num_tokens].view(num_reqs, -1)
        # every token has its logits; padding has neither
        rows = VerifiedRows(batch.idx_mapping, batch.query_start_loc, t.yields[:num_reqs])
        with captured_stage(stages.VERIFY):
            if self.acceptance is None:
                t.token_draw.draw(self.draw, logits, ctx, drawn, may_change=False)
                verify_exact(emitted, num_emitted, num_rejected, drawn, t.state, rows)
            else:
                target = t.token_draw.target(self.draw, logits, ctx)
                verify_by_probability(
                    emitted, num_emitted, num_rejected, drawn, target, ctx, t.state, rows, self.acceptance
                )
        with captured_stage(stages.POST_UPDATE):
            commit_verified(
                t.outputs,
                t.output_counts,
                t.output_slot,
                arena["num_computed_tokens"],
                arena["total_len"],
                t.state.last_sampled_tokens,
                arena["token_ids"],
                batch.idx_mapping,
                batch.query_start_loc,
                emitted,
                num_emitted,
                num_rejected,
            )
            t.forward.model_state.postprocess_state(batch, num_emitted)


def _upload(t: StepTensors) -> None:
    """Read what the step is told, and apply the writes that are part of it."""
    words = t.state.arena.words.view(-1)
    fetch_step(t.words, t.mailbox, t.peeked, words, t.num_runs, t.runs)


def _logits(t: StepTensors, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of `hidden` [T_pad, H], [T_pad, V]; beside that long launch the next step's words arrive."""
    with captured_stage(stages.LOGITS):
        logits = t.forward.model.compute_logits(hidden)
        peek_step(t.peeked, t.mailbox)
    return logits


def _commit_draws(t: StepTensors, batch: ForwardBatch) -> None:
    """Commit the one token that each request drew."""
    arena, num_rows = t.state.arena, batch.input_ids.shape[0]
    commit_decode(
        t.outputs,
        t.output_slot,
        arena["num_computed_tokens"],
        arena["total_len"],
        t.state.last_sampled_tokens,
        arena["token_ids"],
        batch.idx_mapping,
        t.num_reqs,
        t.drawn[:num_rows],
    )
    t.forward.model_state.postprocess_state(batch, t.ones[:num_rows])
