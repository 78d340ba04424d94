"""Whole chains as CUDA graphs: the first pass and every draft step in one replay, a graph for each bucket.

A chain reads nothing but persistent buffers, so that the graph of a bucket serves every step that the
forward pass pads to it.  Chains of 0, 1 and the most drafts are captured when their drafter is switched on,
others when the knobs first ask for them; either happens between two steps with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mrv2.config import Knobs
from mrv2.device import Graph, Stream
from mrv2.instrument import stages
from mrv2.runner.forward import ForwardBuffers, GraphKey, verified_lengths
from mrv2.runner.loaded_drafter import LoadedDrafter
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.drafters.chain import ChainShape, DraftBuffers, DraftChoice, run_chain
from mrv2.runner.v2.request_state import RequestState


class DraftKey(NamedTuple):
    """What tells one chain from another."""

    method: str
    shape: GraphKey
    num_drafts: int
    choice: DraftChoice

    def chain_shape(self) -> ChainShape:
        """Return the chain of a step that is padded to this key."""
        shape = self.shape
        return ChainShape(
            num_tokens=shape.num_tokens,
            num_reqs=shape.num_reqs,
            max_query_len=shape.query_len or shape.num_tokens,
            uniform=shape.query_len > 0,
            num_drafts=self.num_drafts,
            choice=self.choice,
        )


def draft_choice(knobs: Knobs) -> DraftChoice:
    """Return how the knobs have drafts chosen."""
    if knobs.draft_sampling == "greedy":
        return "greedy"
    return "own" if knobs.verification in ("standard", "block") else "shared"


class DraftGraphs:
    """Runs the chains of the loaded drafters, as graphs where there are any."""

    def __init__(
        self,
        resources: RunnerResources,
        state: RequestState,
        buffers: DraftBuffers,
        drafters: dict[str, LoadedDrafter],
    ) -> None:
        self.resources, self.state, self.buffers, self.drafters = resources, state, buffers, drafters
        self.graphs: dict[DraftKey, Graph] = {}
        self.num_replays = 0

    def submit(self, stream: Stream, key: DraftKey) -> None:
        """Submit the draft stage of the step in the forward's buffers, which is padded to ``key.shape``."""
        knobs = self.resources.knobs
        graph = self.graphs.get(key) if knobs.cuda_graphs != "off" else None
        if graph is not None:
            self.num_replays += 1
            stream.run(stages.DRAFT, graph.replay)
        else:
            stream.run(stages.DRAFT, run_chain, *self.arguments(key))

    def missing(self, knobs: Knobs) -> Sequence[DraftKey]:
        """Return the keys that `knobs` will dispatch and that have no graph yet."""
        buckets = self.resources.forward.buckets
        if knobs.spec_method not in self.drafters or knobs.cuda_graphs == "off" or not buckets.decode:
            return []
        counts = {0, 1, self.resources.max_num_spec_tokens, knobs.num_spec_tokens}
        if knobs.adaptive_drafts:
            # any number may follow any number
            counts |= set(range(knobs.num_spec_tokens))
        keys = []
        for count in sorted(counts, reverse=True):
            varies = knobs.adaptive_drafts or knobs.grammar_drafts
            steady = knobs if varies else knobs.with_changes(num_spec_tokens=count)
            for shape in buckets.capturable(verified_lengths(steady)):
                keys.append(DraftKey(knobs.spec_method, shape, count, draft_choice(knobs)))
        return [key for key in keys if key not in self.graphs]

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture what `knobs` will dispatch and is not there yet; the forward's buffers must hold inert rows."""
        for key in self.missing(knobs):
            arguments = self.arguments(key)
            # compiles what is not compiled yet
            stream.run(stages.DRAFT, run_chain, *arguments)
            self.graphs[key] = self.resources.device.capture(lambda a=arguments: run_chain(*a), stream)

    def arguments(
        self, key: DraftKey
    ) -> tuple[LoadedDrafter, ChainShape, ForwardBuffers, DraftBuffers, RequestState, int]:
        """Return what `run_chain` takes for a key; all of it stays where it is."""
        r = self.resources
        drafter = self.drafters[key.method]
        return drafter, key.chain_shape(), r.forward.buffers, self.buffers, self.state, r.block_size
