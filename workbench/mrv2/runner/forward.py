"""The forward pass both runners share: persistent input buffers, buckets, and CUDA graphs.

Legend: T = tokens, B = requests, R = rows (``max_num_seqs``), MB = blocks a row, G = KV cache groups.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from mrv2.config import Knobs
from mrv2.device import Device, Graph, Stream
from mrv2.instrument import stages
from mrv2.runner.graph_demand import GraphDemand
from mrv2.runner.protocol import SchedulerOutput
from mrv2_models.causal_lm import CausalLM
from mrv2_models.kv_cache import LayerCache
from mrv2_models.model_state import ForwardBatch, ModelState


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Padded shape of a forward pass: the capture key and the dispatch result at once."""

    num_tokens: int
    num_reqs: int
    # query tokens that every request has at most (1 = decode, 1 + K = verification); 0 = prompts are among them
    query_len: int

    @property
    def uniform_decode(self) -> bool:
        return self.query_len == 1


class Buckets:
    """Padded shapes; a pure function of the batch, the same whether graphs are on or off.

    Batches of requests of at most `max_uniform` tokens (decode, verification) are padded to 1, 2, 4 and
    multiples of 8 requests up to R, of the same number of tokens each; mixed batches of up to `max_mixed` tokens
    to steps of an eighth of the next power of two, with all R rows.  Larger batches, and every batch without CUDA
    (`padded=False`), keep their exact shape.
    """

    def __init__(self, max_num_seqs: int, *, max_mixed: int, padded: bool, max_uniform: int = 1) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_uniform = max_uniform
        sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
        self.decode = tuple(sorted(s for s in sizes if s <= max_num_seqs)) if padded else ()
        self.mixed = tuple(_mixed_sizes(max_mixed)) if padded else ()

    def key(self, num_tokens: int, num_reqs: int, query_len: int) -> GraphKey:
        """Return the padded shape of a batch; `query_len` as `padded_query_len` has it."""
        if 1 <= query_len <= self.max_uniform and self.decode:
            size = self.decode[bisect_left(self.decode, num_reqs)]
            return GraphKey(size * query_len, size, query_len)
        query_len = query_len if query_len == 1 else 0
        if not query_len and self.mixed and num_tokens <= self.mixed[-1]:
            return GraphKey(self.mixed[bisect_left(self.mixed, num_tokens)], self.max_num_seqs, 0)
        return GraphKey(num_tokens, num_reqs, query_len)

    def capturable(self, query_lens: tuple[int, ...] = (1,)) -> list[GraphKey]:
        """Every key that a graph can serve, largest first, so that the shared memory pool is reused."""
        uniform = [GraphKey(size * n, size, n) for n in query_lens for size in self.decode if n <= self.max_uniform]
        mixed = [GraphKey(size, self.max_num_seqs, 0) for size in self.mixed]
        return sorted((*mixed, *uniform), key=lambda key: -key.num_tokens)


def _mixed_sizes(limit: int) -> list[int]:
    sizes, size = [], 16
    while size <= limit:
        sizes.append(size)
        size += max(16, (1 << size.bit_length()) // 8)
    if sizes and sizes[-1] != limit:
        sizes.append(limit)
    return sizes


def verified_lengths(knobs: Knobs) -> tuple[int, ...]:
    """Return the query lengths that batches of decodes and verifications usually have: a graph for each."""
    if not (knobs.drafting or knobs.grammar_drafts):
        return (1,)
    most = 1 + knobs.num_spec_tokens
    return tuple(range(1, most + 1)) if knobs.adaptive_drafts or knobs.grammar_drafts else (1, most)


def padded_query_len(scheduled: SchedulerOutput, knobs: Knobs) -> int:
    """Return the tokens that each request of a batch is padded to: 1 for decodes, 1 + K for verifications.

    0 for a batch that holds more than the last token and the drafts of each request.  Requests may have fewer drafts
    than K at their end; the knobs say what K is, so that such a batch has the graph of the others.
    """
    if scheduled.total_tokens > scheduled.num_reqs + int(scheduled.num_draft_tokens.sum()):
        return 0
    most = int(scheduled.num_draft_tokens.max())
    return 1 + (most if knobs.adaptive_drafts or not most else max(most, knobs.num_spec_tokens))


class ForwardBuffers:
    """Device inputs of the forward pass, written anew each step, in stream order, by whichever runner is on."""

    def __init__(
        self,
        device: Device,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        blocks_per_row: int,
        num_groups: int,
        step_words: int,
        hidden_size: int,
        dtype: torch.dtype,
        num_taps: int = 0,
    ) -> None:
        # [T]
        self.input_ids = device.zeros((max_num_tokens,), torch.int32)
        # [T]
        self.positions = device.zeros((max_num_tokens,), torch.int32)
        # [step_words]: what a V2 step uploads, headed by query_start_loc
        self.step_words = device.zeros((step_words,), torch.int32)
        # [R + 1]; entries past the batch repeat the token count
        self.query_start_loc = self.step_words[: max_num_seqs + 1]
        # [R], batch row -> request row
        self.idx_mapping = self.step_words[max_num_seqs + 1 : 2 * max_num_seqs + 1]
        # [R]; 0 past the batch
        self.seq_lens = device.zeros((max_num_seqs,), torch.int32)
        # G x [R, MB]
        self.block_tables = [device.zeros((max_num_seqs, blocks_per_row), torch.int32) for _ in range(num_groups)]
        # G x [T]; -1 past the batch
        self.slot_mappings = [device.full((max_num_tokens,), -1, torch.int32) for _ in range(num_groups)]
        # [T, H], output
        self.hidden = device.zeros((max_num_tokens, hidden_size), dtype)
        # [T, taps * H], output: layers that a drafter taps; None without such a drafter
        self.aux_hidden = device.zeros((max_num_tokens, num_taps * hidden_size), dtype) if num_taps else None


class ForwardPass:
    """Runs the model on the buffers, eagerly or as a graph; the only place that captures graphs."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        model_state: ModelState,
        kv_caches: list[LayerCache],
        buffers: ForwardBuffers,
        buckets: Buckets,
        demand: GraphDemand,
    ) -> None:
        self.device = device
        self.model = model
        self.model_state = model_state
        self.kv_caches = kv_caches
        self.buffers = buffers
        self.buckets = buckets
        self.demand = demand
        self.graphs: dict[GraphKey, Graph] = {}

    def make_batch(
        self,
        key: GraphKey,
        *,
        num_reqs: int,
        max_query_len: int,
        knobs: Knobs,
        query_start_loc_np: np.ndarray | None = None,
        max_seq_lens_np: np.ndarray | None = None,
    ) -> ForwardBatch:
        """Return the padded step as the model state sees it: slices of the persistent buffers."""
        b = self.buffers
        return ForwardBatch(
            input_ids=b.input_ids[: key.num_tokens],
            positions=b.positions[: key.num_tokens],
            idx_mapping=b.idx_mapping[:num_reqs],
            query_start_loc=b.query_start_loc[: key.num_reqs + 1],
            seq_lens=b.seq_lens[: key.num_reqs],
            block_tables=[t[: key.num_reqs] for t in b.block_tables],
            slot_mappings=[s[: key.num_tokens] for s in b.slot_mappings],
            max_query_len=max_query_len,
            uniform_decode=key.uniform_decode,
            attention_backend=knobs.attention if self.device.type == "cuda" else "triton",
            query_start_loc_np=query_start_loc_np,
            max_seq_lens_np=max_seq_lens_np,
        )

    def run(self, key: GraphKey, batch: ForwardBatch, stream: Stream, knobs: Knobs) -> bool:
        """Submit the forward stage for a prepared batch; return whether a graph was replayed."""
        graph = self.graphs.get(key) if knobs.cuda_graphs != "off" and knobs.attention == "triton" else None
        if graph is not None:
            stream.run(stages.FORWARD, graph.replay)
            return True
        if self.demand.lazy and key in self._dispatched(knobs):
            self.demand.ask(key)
        stream.run(stages.FORWARD, self._forward, batch, self.model_state.prepare_inputs(batch))
        return False

    def missing(self, knobs: Knobs) -> list[GraphKey]:
        """Return the keys that `knobs` dispatch, that are wanted by now and that have no graph yet."""
        keys = self._dispatched(knobs)
        return self.demand.missing(keys, (*keys[:1], *keys[-1:]), self.graphs)

    def _dispatched(self, knobs: Knobs) -> list[GraphKey]:
        """Return the keys that steps under `knobs` replay, largest first."""
        support = self.model_state.graph_support
        if knobs.cuda_graphs == "off" or knobs.attention != "triton" or support == "none" or self.device.type != "cuda":
            return []
        keys = self.buckets.capturable(verified_lengths(knobs))
        return [k for k in keys if k.uniform_decode or support == "mixed"]

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture what is missing under `knobs` (CUDA only); the buffers must hold inert rows.

        Tried on an H200, and of no help: the fastest of 8 places in memory for the tensors of a pass of few tokens.
        Timed alone a pass of 1 token took 436 to 451 us at 24 places, but whole runs reached 1,796 tok/s at the first
        place and 1,803 at the fastest, and as much apart at one and the same.
        """
        for key in self.missing(knobs):
            batch = self.make_batch(
                key,
                num_reqs=key.num_reqs,
                max_query_len=key.query_len or key.num_tokens,
                knobs=knobs.with_changes(attention="triton"),
            )
            inputs = self.model_state.prepare_dummy_inputs(batch)
            stream.run(stages.FORWARD, self._forward, batch, inputs)
            self.graphs[key] = self.device.capture(lambda b=batch, i=inputs: self._forward(b, i), stream)

    def hidden(self, batch: ForwardBatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Device code: the model on the buffers. [T_pad, H]"""
        attn = self.model_state.prepare_attn(batch)
        if self.buffers.aux_hidden is not None:
            inputs = inputs | {"aux_hidden": self.buffers.aux_hidden[: batch.positions.shape[0]]}
        return self.model(attn=attn, kv_caches=self.kv_caches, **inputs)

    def _forward(self, batch: ForwardBatch, inputs: dict[str, torch.Tensor]) -> None:
        """Device code: as `hidden`, into `buffers.hidden`."""
        hidden = self.hidden(batch, inputs)
        self.buffers.hidden[: hidden.shape[0]].copy_(hidden)
