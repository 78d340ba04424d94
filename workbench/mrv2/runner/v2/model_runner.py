"""The V2 runner: request state in stable rows on the device, gathered step by step.

Only what is common to every model and every request belongs in this file.  What differs from model
to model goes behind `ModelState`, what belongs to one sampling feature behind its state object.

    host   | execute_model(n)  sample_tokens(n) | execute_model(n+1) ...
    main   |   [upload][staged writes][prepare][forward][logits][sample][verify]|[post-update][draft] ...
    copy   |                                                                    [output copy n]

With a grammar row in the batch, `sample_tokens` applies its mask between logits and sampling.  A batch of
decodes or verifications that `StepGraphs` covers takes one replay for all of it, in `execute_model`.

The host hands over ids and counts; it never reads a number that this step or the one before it
computed on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.async_logprobs import LogprobTensors, StepLogprobs
from mrv2.runner.async_output import OutputSlots, PinnedOutput
from mrv2.runner.forward import ForwardBuffers, padded_query_len
from mrv2.runner.grammar_masks import GrammarMasks
from mrv2.runner.protocol import GrammarMask, GraphSet, RunnerStats, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.drafting import Drafting
from mrv2.runner.v2.grammar_drafts import GrammarDrafts
from mrv2.runner.v2.input_preparation import InputPreparations
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampler import Sampler, SamplingPlan, sample_rows
from mrv2.runner.v2.sampling.context import LogitsHolder, SamplingContext
from mrv2.runner.v2.sampling.logprobs import LogprobPlan, WideRow, gather_prompt, gather_sampled
from mrv2.runner.v2.speculation import Speculation
from mrv2.runner.v2.step_graph import ReplayedStep, StepGraphs
from mrv2.runner.v2.upload import StepUpload, UploadedBatch
from mrv2_kernels.inputs.post_update import post_update
from mrv2_models.causal_lm import CausalLM
from mrv2_models.model_state import ForwardBatch, ModelState


class ExecuteModelState(NamedTuple):
    """The hand-over from `execute_model` to `sample_tokens`."""

    scheduled: SchedulerOutput
    batch: UploadedBatch
    forward_batch: ForwardBatch
    plan: SamplingPlan
    holder: LogitsHolder


class ModelRunnerV2:
    """Device-side input preparation, stateless sampling, one named wait a step."""

    name: Literal["v1", "v2"] = "v2"

    def __init__(self, resources: RunnerResources) -> None:
        r = self.resources = resources
        self.device = r.device
        self.model_state = r.forward.model_state
        self.main = r.device.stream("main")
        self.copy_stream = r.device.stream("copy")
        self.max_queue_depth = r.max_queue_depth
        self.state = RequestState(
            r.device,
            max_num_seqs=r.max_num_seqs,
            max_model_len=r.max_model_len,
            blocks_per_row=r.blocks_per_row,
            num_groups=r.num_groups,
            tables=r.processor_tables,
            max_num_spec_tokens=r.max_num_spec_tokens,
        )
        width = 1 + r.max_num_spec_tokens
        self.inputs = InputPreparations(r, self.state)
        self.speculation = Speculation(r, self.state)
        self.drafting = Drafting(r, self.state)
        self.sampler = Sampler(r, self.state.arena)
        self.upload = StepUpload(
            r.device, self.state.arena, r.max_num_seqs, r.forward.buffers.step_words, depth=r.max_queue_depth + 1
        )
        self.grammar_masks = GrammarMasks(
            r.device,
            r.device.stream("grammar"),
            depth=r.max_queue_depth + 1,
            max_num_masks=r.max_num_seqs * width,
            vocab_size=r.vocab_size,
            max_num_spec_tokens=r.max_num_spec_tokens,
        )
        self.grammar_drafts = GrammarDrafts(r.device, self.state, self.grammar_masks)
        self.output_slots = OutputSlots(
            r.device, count=r.max_queue_depth + 1, max_num_seqs=r.max_num_seqs, max_width=width
        )
        # [R * (1 + K)] int32 0, 1, 2, ...: where row i of the batch is token i
        self.token_index = r.device.empty((r.max_num_seqs * width,), torch.int32)
        self.main.run(stages.UPLOAD, _fill_arange, self.token_index)
        # [R] int32 zeros: nothing is rejected without drafts
        self.num_rejected = r.device.zeros((r.max_num_seqs,), torch.int32)
        # [R * (1 + K)] int32, written by each step
        self.logits_indices = r.device.zeros((r.max_num_seqs * width,), torch.int32)
        held = (self.state, self.sampler, self.upload, self.output_slots, self.token_index)
        drafting = (self.speculation, self.drafting, self.grammar_drafts.mirror.before_drafting)
        self.step_graphs = StepGraphs(r, *held, *drafting)
        self.graph_sets: Sequence[GraphSet] = (self.step_graphs, self.drafting.graphs)
        self.stats = RunnerStats()
        # the batch of the last step, and the same as rows [B] int32
        self._req_ids: list[str] | None = None
        self._rows = np.zeros(0, dtype=np.int32)
        self._pending: ExecuteModelState | ReplayedStep | None = None

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Update rows, prepare the batch on the device, and submit the forward pass."""
        assert self._pending is None, "execute_model was called twice without sample_tokens"
        rows, knobs = self._update_rows(scheduled), self.resources.knobs
        self.stats.num_steps += 1
        if self.step_graphs.replays_again(rows):
            return self._replay(scheduled, rows)
        has_prefill = bool((scheduled.num_computed_tokens < self.state.prefill_len_np[rows]).any())
        plan = self.sampler.plan(scheduled, rows, knobs.sampler)
        query_len = padded_query_len(scheduled, knobs)
        if self.step_graphs.find(scheduled, rows, plan, 0 if has_prefill else query_len):
            return self._replay(scheduled, rows)
        num_reqs, num_tokens = scheduled.num_reqs, scheduled.total_tokens
        num_drafts = int(scheduled.num_draft_tokens.sum())
        key = self.resources.forward.buckets.key(num_tokens, num_reqs, query_len)

        forward = self.resources.forward
        batch = self.upload.submit(self.main, scheduled, rows)
        forward_batch = forward.make_batch(
            key,
            num_reqs=num_reqs,
            max_query_len=key.query_len or int(scheduled.num_scheduled_tokens.max()),
            knobs=knobs,
            query_start_loc_np=np.concatenate(([0], np.cumsum(scheduled.num_scheduled_tokens))),
            max_seq_lens_np=scheduled.num_computed_tokens + scheduled.num_scheduled_tokens,
        )
        num_logits = num_reqs + num_drafts
        # a batch of decodes and verifications alone needs logits of every token
        row_is_token = num_logits == num_tokens
        self.inputs.submit(scheduled, rows, batch, forward_batch, self.logits_indices[:num_logits], has_prefill)
        replayed = forward.run(key, forward_batch, self.main, knobs)

        holder = LogitsHolder()
        self.main.run(
            stages.LOGITS,
            self._compute_logits,
            holder,
            self.resources.model,
            forward.buffers,
            batch,
            (self.token_index if row_is_token else self.logits_indices)[:num_logits],
            *self.speculation.submit_logit_rows(self.main, scheduled, batch),
            # the head's matrix product depends on the padded shape alone
            num_rows=key.num_tokens if row_is_token else 0,
        )
        self.stats.num_graph_replays += replayed
        self._pending = ExecuteModelState(scheduled, batch, forward_batch, plan, holder)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PinnedOutput:
        """Sample and verify, send the output on its way, advance the rows, and draft for the next step."""
        assert self._pending is not None, "sample_tokens needs an execute_model before it"
        pending, self._pending = self._pending, None
        if isinstance(pending, ReplayedStep):
            assert grammar is None, "a step with grammar rows is never replayed whole"
            return self.step_graphs.finish(pending, self.main, self._output_stream())
        scheduled, batch, forward_batch, plan, holder = pending
        num_reqs, num_drafts = scheduled.num_reqs, int(scheduled.num_draft_tokens.sum())
        if grammar is not None:
            self.grammar_masks.submit(grammar.logits_rows(scheduled.num_draft_tokens), holder, grammar.chains)
        # [N, 1]; a fresh tensor a step: the copy stream still reads it when the next step samples
        targets = self.device.empty((num_reqs + num_drafts, 1), torch.int64)
        verified = None
        if num_drafts:
            verified = self.speculation.submit(
                self.main, self.resources.knobs, scheduled, batch, holder, self.sampler, plan, targets
            )
        else:
            self.main.run(stages.SAMPLE, sample_rows, holder, self.sampler, plan, targets)
        logprobs = None
        if plan.logprobs is not None:
            logprobs = self._gather_logprobs(plan.logprobs, holder, forward_batch, targets)
        output = self._copy_output(scheduled, targets, verified, logprobs, plan.errors)
        self.inputs.chosen.follow(output)
        sampled, num_sampled, num_rejected = verified or (targets, batch.num_sampled, self.num_rejected[:num_reqs])
        self.main.run(
            stages.POST_UPDATE,
            self._post_update,
            self.state,
            self.model_state,
            batch,
            forward_batch,
            sampled,
            num_sampled,
            num_rejected,
        )
        self.grammar_drafts.mirror.before_drafting()
        self.drafting.submit_drafts(self.main, self.resources.knobs, scheduled, batch.idx_mapping, num_sampled)
        if grammar is not None:
            self.grammar_drafts.submit(self.resources.knobs, grammar, scheduled, batch.idx_mapping)
        end_of_step = self.main.record_event()
        self.upload.release(batch.sent, end_of_step)
        self.grammar_masks.release(end_of_step)
        return output

    def take_drafts(self, req_ids: list[str]) -> np.ndarray:
        """Return the drafts that lie ready for requests that follow a grammar: a named wait. [n, K_max] int64"""
        return self.grammar_drafts.mirror.read([self.state.row_of[req_id] for req_id in req_ids])

    def reset(self) -> None:
        """Forget every request."""
        self.state.reset()
        self.inputs.reset()
        self._req_ids = None

    def _update_rows(self, scheduled: SchedulerOutput) -> np.ndarray:
        """Apply the scheduler's changes to the rows; return the batch as rows, one array while it lasts. [B]"""
        state = self.state
        for row in state.free(scheduled.freed_req_ids):
            self.model_state.remove_request(row)
            self.drafting.remove_request(self.main, row)
        for request in scheduled.new_requests:
            row = state.add(request, self.sampler)
            self.inputs.chosen.add_request(row, request)
            self.model_state.add_request(row, request.token_ids, request.num_computed_tokens)
        if scheduled.new_block_ids:
            state.append_blocks(scheduled.new_block_ids)
            self.inputs.chosen.append_blocks(scheduled.new_block_ids)
        if scheduled.req_ids is not self._req_ids or scheduled.new_requests:
            row_of = state.row_of
            self._req_ids = scheduled.req_ids if scheduled.total_tokens == scheduled.num_reqs else None
            self._rows = np.array([row_of[req_id] for req_id in scheduled.req_ids], dtype=np.int32)
        return self._rows

    def _replay(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        self._pending = self.step_graphs.replay(scheduled, rows, self.main)
        self.stats.num_graph_replays += 1
        self.stats.num_step_replays += 1

    def _gather_logprobs(
        self, plan: LogprobPlan, holder: LogitsHolder, batch: ForwardBatch, sampled: torch.Tensor
    ) -> StepLogprobs:
        """Submit the log-probabilities of the sampled tokens and of the step's prompt tokens."""
        step, arena = self.sampler.logprobs.transfers(plan, len(sampled)), self.state.arena
        if step.narrow is not None or step.wide:
            wide = [(row, step.wide[row.batch_row].tensors) for row in plan.wide]
            narrow = step.narrow.tensors if step.narrow is not None else None
            self.main.run(stages.SAMPLE, self._gather_sampled, holder, sampled, narrow, wide, arena["logprob_ids"])
        if step.prompts:
            self.main.run(
                stages.PROMPT_LOGPROBS,
                gather_prompt,
                self.resources.model,
                self.resources.forward.buffers.hidden,
                batch.positions,
                batch.idx_mapping,
                batch.query_start_loc,
                arena["token_ids"],
                arena["prompt_len"],
                [(chunk, transfer.tensors) for chunk, transfer in step.prompts],
            )
        return step

    def _copy_output(
        self,
        scheduled: SchedulerOutput,
        # [N, 1] int64
        targets: torch.Tensor,
        verified: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        logprobs: StepLogprobs | None,
        errors: dict[int, str],
    ) -> PinnedOutput:
        """Start the device-to-host copy before anything else of this step runs."""
        sampled = targets if verified is None else verified[0]
        slot = self.output_slots.take(scheduled.num_reqs, sampled.shape[1])
        stream = self._output_stream()
        if stream is not self.main:
            stream.wait_event(self.main.record_event())
        stream.copy(stages.OUTPUT_COPY, slot.sampled, sampled)
        if verified is not None:
            stream.copy(stages.OUTPUT_COPY, slot.num_sampled, verified[1])
        if logprobs is not None:
            logprobs.submit_copies(stream)
        return PinnedOutput(
            step=scheduled.step,
            req_ids=scheduled.req_ids,
            num_sampled=scheduled.yields_token.astype(np.int32) if verified is None else None,
            done=stream.record_event(),
            slot=slot,
            slots=self.output_slots,
            keep_alive=(targets,) if verified is None else verified,
            logprobs=logprobs,
            errors=errors,
        )

    def _output_stream(self) -> Stream:
        return self.copy_stream if self.resources.knobs.output_copy == "side_stream" else self.main

    # Device code: reads nothing but its arguments.

    @staticmethod
    def _compute_logits(
        holder: LogitsHolder,
        model: CausalLM,
        buffers: ForwardBuffers,
        batch: UploadedBatch,
        # [N] each: index of the row's token, request row, place among the request's rows
        logits_indices: torch.Tensor,
        logit_slots: torch.Tensor,
        local_positions: torch.Tensor,
        *,
        # padded rows if row i is token i, else 0
        num_rows: int,
    ) -> None:
        num_logits = logits_indices.shape[0]
        if num_rows:
            hidden, positions = buffers.hidden[:num_rows], buffers.positions[:num_logits]
        else:
            hidden = buffers.hidden.index_select(0, logits_indices)
            positions = buffers.positions.index_select(0, logits_indices)
        holder.logits = model.compute_logits(hidden)[:num_logits]
        holder.ctx = SamplingContext(
            batch.idx_mapping, logit_slots, positions, local_positions, logits_indices, buffers.input_ids
        )

    @staticmethod
    def _gather_sampled(
        holder: LogitsHolder,
        sampled: torch.Tensor,
        narrow: LogprobTensors | None,
        wide: list[tuple[WideRow, LogprobTensors]],
        logprob_ids: torch.Tensor,
    ) -> None:
        gather_sampled(holder.logits, sampled.view(-1), narrow, wide, logprob_ids)

    @staticmethod
    def _post_update(
        state: RequestState,
        model_state: ModelState,
        batch: UploadedBatch,
        forward_batch: ForwardBatch,
        # [B, 1 + K] int64
        sampled: torch.Tensor,
        # [B] int32
        num_sampled: torch.Tensor,
        # [B] int32
        num_rejected: torch.Tensor,
    ) -> None:
        arena = state.arena
        post_update(
            arena["num_computed_tokens"],
            arena["total_len"],
            state.last_sampled_tokens,
            arena["token_ids"],
            batch.idx_mapping,
            forward_batch.query_start_loc,
            sampled,
            num_sampled,
            num_rejected,
        )
        model_state.postprocess_state(forward_batch, num_sampled)


def _fill_arange(out: torch.Tensor) -> None:
    torch.arange(out.shape[0], out=out)
