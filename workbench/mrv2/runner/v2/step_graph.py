"""Whole steps as one graph: staged writes, inputs, forward, logits, draws, commit and drafting in one replay.

    host   | post, replay, copy      | post, replay, copy      |
    main   | [step graph n] .........| [step graph n+1] .......|
    copy   |              [output n] |                         |

A graph reads and writes fixed addresses, so what changes from step to step lies in pinned memory, which the graph
reads first (`StepUpload.post`): how many requests there are, how many runs of staged writes, and which row of the
device's output ring the tokens go to.  Where the host is ahead by a step, the graph before has read it already.
That row is the step's pinned output slot too, and is given back only when the host has the tokens: no replay
overwrites what a copy still reads.  Batches are padded to the bucket with rows that touch nothing.

Batches of decodes and of verifications have graphs (`step_keys`); whatever these do not cover (prompts, sampler
features, log-probabilities, grammars, a number of drafts on its way to another) takes the other path, stage by
stage; both leave the same state behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mrv2.config import Knobs
from mrv2.device import Graph, Stream
from mrv2.instrument import stages
from mrv2.runner.async_output import OutputSlot, OutputSlots, PinnedOutput
from mrv2.runner.forward import Buckets
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.drafters.graphs import DraftKey
from mrv2.runner.v2.drafting import Drafting
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampler import Sampler, SamplingPlan
from mrv2.runner.v2.speculation import Speculation
from mrv2.runner.v2.step_keys import StepKey, first_keys, step_drafting, step_key, wanted_keys
from mrv2.runner.v2.step_work import DraftedStep, PlainStep, StepTensors
from mrv2.runner.v2.upload import SentStep, StepUpload
from mrv2.speculators import MODEL_METHODS


class ReplayedStep(NamedTuple):
    """The hand-over from `execute_model` to `sample_tokens` when the graph has done the work of both."""

    scheduled: SchedulerOutput
    sent: SentStep
    slot: OutputSlot
    # tokens of each request
    query_len: int


class StepGraphs:
    """The graphs of whole steps: which batch may use one, and its two halves on the host."""

    def __init__(
        self,
        resources: RunnerResources,
        state: RequestState,
        sampler: Sampler,
        upload: StepUpload,
        output_slots: OutputSlots,
        # [R * W] int32 0, 1, 2, ...
        token_index: torch.Tensor,
        speculation: Speculation,
        drafting: Drafting,
        # lets the main stream wait until drafts that lie ready may be overwritten
        before_drafting: Callable[[], None],
    ) -> None:
        device, rows, width = resources.device, resources.max_num_seqs, 1 + resources.max_num_spec_tokens
        self.resources = resources
        self.speculation = speculation
        self.drafting = drafting
        self.before_drafting = before_drafting
        self.device = device
        self.upload = upload
        self.output_slots = output_slots
        # padded on every device: the host backend plays the same hazards
        self.buckets = Buckets(rows, max_mixed=0, padded=True, max_uniform=width)
        self.tensors = StepTensors(
            state=state,
            forward=resources.forward,
            token_draw=sampler.token_draw,
            block_size=resources.block_size,
            words=upload.words,
            mailbox=upload.mailbox,
            peeked=upload.peeked,
            num_reqs=upload.num_reqs,
            num_runs=upload.num_runs,
            output_slot=upload.output_slot,
            yields=upload.yields,
            runs=upload.runs,
            no_drafts_before=speculation.no_drafts_before,
            token_index=token_index,
            logit_slots=speculation.logit_slots,
            local_positions=speculation.local_positions,
            live_rows=device.full((rows,), -1, torch.int32),
            drawn=device.zeros((rows * width,), torch.int64),
            emitted=device.zeros((rows * width,), torch.int64),
            num_emitted=device.zeros((rows,), torch.int32),
            num_rejected=device.zeros((rows,), torch.int32),
            ones=device.full((rows,), 1, torch.int32),
            outputs=device.zeros((output_slots.count, rows * width), torch.int64),
            output_counts=device.zeros((output_slots.count, rows), torch.int32),
        )
        self.graphs: dict[StepKey, Graph] = {}
        # what was found last, for which batch, under which knobs
        self._key: StepKey | None = None
        self._rows: np.ndarray | None = None
        self._knobs: Knobs | None = None
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def replays_again(self, rows: np.ndarray) -> bool:
        """Say whether the graph found last serves the batch `rows`: the very array of that step, and the same knobs."""
        return rows is self._rows and self.resources.knobs is self._knobs

    def find(self, scheduled: SchedulerOutput, rows: np.ndarray, plan: SamplingPlan, query_len: int) -> bool:
        """Find the graph that does the whole step of the batch `rows` [B]; False if no graph does.

        `query_len` is `padded_query_len`, or 0 if a prompt is not at its end.
        """
        knobs, self._rows = self.resources.knobs, None
        if (
            not self._may_replay(knobs)
            or not query_len
            or scheduled.has_grammar
            or plan.features
            or plan.logprobs is not None
            or not scheduled.yields_token.all()
        ):
            return False
        shape = self.buckets.key(scheduled.total_tokens, scheduled.num_reqs, query_len)
        key = step_key(shape, plan.draw, step_drafting(knobs, query_len - 1, scheduled.num_next_drafts))
        if key not in self.graphs:
            if self.resources.graph_demand.lazy and key in self._dispatched(knobs):
                self.resources.graph_demand.ask(key)
            return False
        self._key, self._rows, self._knobs = key, rows, knobs
        return True

    def replay(self, scheduled: SchedulerOutput, rows: np.ndarray, main: Stream) -> ReplayedStep:
        """Post the step and submit the graph that was found for the batch `rows` [B]."""
        key = self._key
        assert key is not None, "no graph was found for this step"
        slot = self.output_slots.take(scheduled.num_reqs, key.shape.query_len)
        sent = self.upload.post(main, scheduled, rows, slot.index)
        if key.drafted is not None:
            self.before_drafting()
        main.run(stages.STEP_GRAPH, self.graphs[key].replay)
        if self.resources.knobs.fetch_ahead:
            self.upload.announce(sent)
        return ReplayedStep(scheduled, sent, slot, key.shape.query_len)

    def finish(self, step: ReplayedStep, main: Stream, copy: Stream) -> PinnedOutput:
        """Send the tokens of a replayed step on their way; `copy` may be `main`."""
        scheduled, slot = step.scheduled, step.slot
        end_of_step = main.record_event()
        self.upload.release(step.sent, end_of_step)
        if copy is not main:
            copy.wait_event(end_of_step)
        tokens, counts = self._outputs(slot.index, scheduled.num_reqs, step.query_len)
        copy.copy(stages.OUTPUT_COPY, slot.sampled, tokens)
        if step.query_len > 1:
            copy.copy(stages.OUTPUT_COPY, slot.num_sampled, counts)
        return PinnedOutput(
            step=scheduled.step,
            req_ids=scheduled.req_ids,
            # without drafts one token computed, one sampled
            num_sampled=scheduled.num_scheduled_tokens if step.query_len == 1 else None,
            done=copy.record_event(),
            slot=slot,
            slots=self.output_slots,
        )

    def _outputs(self, slot: int, num_reqs: int, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's part of the output ring; views are made once. [B, 1 + K] int64, [B] int32"""
        views = self._views.get((slot, num_reqs, query_len))
        if views is None:
            t = self.tensors
            tokens = t.outputs[slot, : num_reqs * query_len].view(num_reqs, query_len)
            views = self._views[slot, num_reqs, query_len] = tokens, t.output_counts[slot, :num_reqs]
        return views

    def missing(self, knobs: Knobs) -> list[StepKey]:
        """Return the keys that `knobs` dispatch, that are wanted by now and that have no graph yet."""
        keys = self._dispatched(knobs)
        return self.resources.graph_demand.missing(keys, first_keys(keys, knobs), self.graphs)

    def _dispatched(self, knobs: Knobs) -> list[StepKey]:
        """Return the keys that steps under `knobs` replay, largest first."""
        if not self._may_replay(knobs):
            return []
        return wanted_keys(knobs, self.buckets, self.resources.max_num_spec_tokens)

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture what is missing under `knobs`; no step is in flight."""
        for key in self.missing(knobs):
            step = self._step(key, knobs)
            if self.device.type == "cuda":
                # compiles what is not compiled yet
                sent = self.upload.post_nothing()
                stream.run(stages.STEP_GRAPH, step)
                self.upload.release(sent, stream.record_event())
            self.graphs[key] = self.device.capture(step, stream)

    def _step(self, key: StepKey, knobs: Knobs) -> PlainStep | DraftedStep:
        """Return the device code of a key."""
        shape, drafted, forward, t = key.shape, key.drafted, self.resources.forward, self.tensors
        batch = forward.make_batch(shape, num_reqs=shape.num_reqs, max_query_len=shape.query_len, knobs=knobs)
        inputs = forward.model_state.prepare_dummy_inputs(batch)
        if drafted is None:
            return PlainStep(t, key.draw, batch, inputs)
        acceptance = None
        if drafted.by_probability:
            acceptance = self.speculation.acceptance(knobs, scaled=key.draw.is_truncated)
        num_sampled = (t.num_emitted if shape.query_len > 1 else t.yields)[: shape.num_reqs]
        draft_key = DraftKey(drafted.method, shape, drafted.num_next, drafted.choice)
        propose = self.drafting.bind(draft_key, t.live_rows[: shape.num_reqs], num_sampled)
        keeps_hidden = drafted.method in MODEL_METHODS
        return DraftedStep(t, key.draw, batch, inputs, acceptance, propose, keeps_hidden)

    def _may_replay(self, knobs: Knobs) -> bool:
        return (
            knobs.cuda_graphs == "step"
            and knobs.input_prep == "device"
            and knobs.attention == "triton"
            and self.resources.forward.model_state.step_graphs
            and len(self.resources.forward.buffers.block_tables) == 1
        )
