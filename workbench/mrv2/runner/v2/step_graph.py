"""Decode steps as one graph: staged writes, inputs, forward, logits, draw and post-update in one replay.

    host   | upload, replay, copy                | upload, replay, copy                |
    main   | [upload n][step graph n] ...........| [upload n+1][step graph n+1] .......|
    copy   |                          [output n] |                                     |

A graph reads and writes fixed addresses, so what changes from step to step travels in the upload: how many
requests there are, how many runs of staged writes, and which row of the device's output ring the tokens go to.
That row is the step's pinned output slot too, and is given back only when the host has the tokens: no replay
overwrites what a copy still reads.  Batches are padded to the bucket with rows that touch nothing.

Whatever the graphs do not cover (prompts, drafts, sampler features, log-probabilities, grammars) takes the
other path, step by step; both leave the same state behind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mrv2.config import Knobs
from mrv2.device import Graph, Stream
from mrv2.instrument import stages
from mrv2.runner.async_output import OutputSlot, OutputSlots, PinnedOutput
from mrv2.runner.forward import Buckets, ForwardPass, GraphKey
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampler import Sampler, SamplingPlan
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2.runner.v2.upload import SentStep, StepUpload
from mrv2.runner.v2.variants import DrawPlan, TokenDraw, graph_plans
from mrv2.speculators import MODEL_METHODS
from mrv2_kernels.inputs.commit import commit_decode
from mrv2_kernels.inputs.decode import prepare_decode_inputs
from mrv2_kernels.state.staged_write import apply_packed_writes
from mrv2_models.model_state import ForwardBatch


class StepKey(NamedTuple):
    """What tells one step graph from another: padded shape and kind of draw."""

    shape: GraphKey
    draw: DrawPlan


class ReplayedStep(NamedTuple):
    """The hand-over from `execute_model` to `sample_tokens` when the graph has done the work of both."""

    scheduled: SchedulerOutput
    sent: SentStep
    slot: OutputSlot


class StepTensors(NamedTuple):
    """Everything a step graph works on; all of it stays where it is."""

    state: RequestState
    forward: ForwardPass
    token_draw: TokenDraw
    block_size: int
    # [1] int32 each: what the upload says of the step
    num_reqs: torch.Tensor
    num_runs: torch.Tensor
    output_slot: torch.Tensor
    # int32: see `apply_packed_writes`
    runs: torch.Tensor
    # [R] int32: a decode has no drafts, and its logits row i belongs to token i
    no_drafts_before: torch.Tensor
    token_index: torch.Tensor
    # [R] int64
    sampled: torch.Tensor
    # [R] int32 ones: every decode yields a token
    num_sampled: torch.Tensor
    # [S, R] int64: the output ring
    outputs: torch.Tensor


class StepGraphs:
    """The graphs of whole decode steps: which batch may use one, and its two halves on the host."""

    def __init__(
        self,
        resources: RunnerResources,
        state: RequestState,
        sampler: Sampler,
        upload: StepUpload,
        output_slots: OutputSlots,
        # [>= R] int32 0, 1, 2, ...
        token_index: torch.Tensor,
    ) -> None:
        device, rows = resources.device, resources.max_num_seqs
        self.resources = resources
        self.device = device
        self.upload = upload
        self.output_slots = output_slots
        # padded on every device: the host backend plays the same hazards
        self.buckets = Buckets(rows, max_mixed=0, padded=True)
        self.tensors = StepTensors(
            state=state,
            forward=resources.forward,
            token_draw=sampler.token_draw,
            block_size=resources.block_size,
            num_reqs=upload.num_reqs,
            num_runs=upload.num_runs,
            output_slot=upload.output_slot,
            runs=upload.runs,
            no_drafts_before=device.zeros((rows,), torch.int32),
            token_index=token_index,
            sampled=device.zeros((rows,), torch.int64),
            num_sampled=device.full((rows,), 1, torch.int32),
            outputs=device.zeros((output_slots.count, rows), torch.int64),
        )
        self.graphs: dict[StepKey, Graph] = {}
        # what was found last, for which batch, under which knobs
        self._graph: Graph | None = None
        self._rows: np.ndarray | None = None
        self._knobs: Knobs | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def replays_again(self, rows: np.ndarray) -> bool:
        """Say whether the graph found last serves the batch `rows`: the very array of that step, and the same knobs."""
        return rows is self._rows and self.resources.knobs is self._knobs

    def find(self, scheduled: SchedulerOutput, rows: np.ndarray, plan: SamplingPlan, has_prefill: bool) -> bool:
        """Find the graph that does the whole step of the batch `rows` [B]; False if no graph does."""
        knobs, self._rows = self.resources.knobs, None
        if (
            not self._may_replay(knobs)
            or has_prefill
            or scheduled.total_tokens != scheduled.num_reqs
            or scheduled.has_grammar
            or plan.features
            or plan.logprobs is not None
            or not scheduled.yields_token.all()
        ):
            return False
        shape = self.buckets.key(scheduled.num_reqs, scheduled.num_reqs, 1)
        key = StepKey(shape, plan.draw.for_graph())
        self._graph = self.graphs.get(key)
        if self._graph is not None:
            self._rows, self._knobs = rows, knobs
        else:
            self.resources.graph_demand.ask(key)
        return self._graph is not None

    def replay(self, scheduled: SchedulerOutput, rows: np.ndarray, main: Stream) -> ReplayedStep:
        """Submit the upload and the graph that was found for the batch `rows` [B]."""
        assert self._graph is not None, "no graph was found for this step"
        slot = self.output_slots.take(scheduled.num_reqs)
        sent = self.upload.send(main, scheduled, rows, slot.index)
        main.run(stages.STEP_GRAPH, self._graph.replay)
        return ReplayedStep(scheduled, sent, slot)

    def finish(self, step: ReplayedStep, main: Stream, copy: Stream) -> PinnedOutput:
        """Send the tokens of a replayed step on their way; `copy` may be `main`."""
        scheduled, slot = step.scheduled, step.slot
        end_of_step = main.record_event()
        self.upload.release(step.sent, end_of_step)
        if copy is not main:
            copy.wait_event(end_of_step)
        copy.copy(stages.OUTPUT_COPY, slot.sampled, self._tokens(slot.index, scheduled.num_reqs))
        return PinnedOutput(
            step=scheduled.step,
            req_ids=scheduled.req_ids,
            # one token computed, one sampled
            num_sampled=scheduled.num_scheduled_tokens,
            done=copy.record_event(),
            slot=slot,
            slots=self.output_slots,
        )

    def _tokens(self, slot: int, num_reqs: int) -> torch.Tensor:
        """Return a step's part of the output ring; views are made once. [B, 1] int64"""
        view = self._views.get((slot, num_reqs))
        if view is None:
            view = self._views[slot, num_reqs] = self.tensors.outputs[slot, :num_reqs].unsqueeze(1)
        return view

    def missing(self, knobs: Knobs) -> list[StepKey]:
        """Return the keys that `knobs` dispatch, that are wanted by now and that have no graph yet."""
        if not self._may_replay(knobs):
            return []
        plans, shapes = graph_plans(knobs.sampler), self.buckets.capturable()
        keys = [StepKey(shape, plan) for shape in shapes for plan in plans]
        first = {StepKey(shapes[0], plan) for plan in plans} | {StepKey(shapes[-1], plans[0])}
        return self.resources.graph_demand.missing(keys, first, self.graphs)

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture what is missing under `knobs`; the upload must hold a step of no requests."""
        forward = self.resources.forward
        for key in self.missing(knobs):
            batch = forward.make_batch(key.shape, num_reqs=key.shape.num_reqs, max_query_len=1, knobs=knobs)
            inputs = forward.model_state.prepare_dummy_inputs(batch)
            step = _Step(self.tensors, key.draw, batch, inputs)
            if self.device.type == "cuda":
                # compiles what is not compiled yet
                stream.run(stages.STEP_GRAPH, step)
            self.graphs[key] = self.device.capture(step, stream)

    def _may_replay(self, knobs: Knobs) -> bool:
        return (
            knobs.cuda_graphs == "step"
            and not knobs.drafting
            # even without drafts a drafter follows every step
            and knobs.spec_method not in MODEL_METHODS
            and knobs.attention == "triton"
            and self.resources.forward.model_state.step_graphs
            and len(self.resources.forward.buffers.block_tables) == 1
        )


class _Step(NamedTuple):
    """Device code: a whole decode step; reads nothing but its fields."""

    tensors: StepTensors
    draw: DrawPlan
    batch: ForwardBatch
    inputs: dict[str, torch.Tensor]

    def __call__(self) -> None:
        t, batch, arena = self.tensors, self.batch, self.tensors.state.arena
        model, model_state = t.forward.model, t.forward.model_state
        num_rows = batch.input_ids.shape[0]
        apply_packed_writes(arena.words.view(-1), t.num_runs, t.runs)
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
        logits = model.compute_logits(t.forward.hidden(batch, self.inputs))
        ctx = SamplingContext(
            batch.idx_mapping,
            batch.idx_mapping,
            batch.positions,
            t.no_drafts_before[:num_rows],
            t.token_index[:num_rows],
            batch.input_ids,
        )
        sampled = t.sampled[:num_rows]
        t.token_draw.draw(self.draw, logits, ctx, sampled, may_change=False)
        commit_decode(
            t.outputs,
            t.output_slot,
            arena["num_computed_tokens"],
            arena["total_len"],
            t.state.last_sampled_tokens,
            arena["token_ids"],
            batch.idx_mapping,
            t.num_reqs,
            sampled,
        )
        model_state.postprocess_state(batch, t.num_sampled[:num_rows])
