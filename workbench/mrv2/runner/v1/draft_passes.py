"""Passes of a draft head in the V1 runner: one over the step's tokens, then one token a request at a time.

    first, kept     the step without its rejected drafts, laid out by the host, which has waited for them
    first, padded   the step as the target ran it, corrected on the device: for the async mode
    step            one token of each request, launched again and again by the host: K - 1 times

Each kind of pass is a graph of its own, where greedy drafts are asked for; between two passes the host launches
the work that moves the inputs on.

Legend: B requests (padding included), T tokens, R rows, K most drafts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from mrv2.config import Knobs
from mrv2.device import Device, Graph, Stream
from mrv2.instrument import stages
from mrv2.runner.forward import ForwardBuffers, GraphKey, verified_lengths
from mrv2.runner.loaded_drafter import LoadedDrafter
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.noise import DRAFT_DOMAIN
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.spec.draft_draw import draw_drafts, keep_draft_probs
from mrv2_kernels.spec.draft_inputs import advance_draft
from mrv2_models.attention import AttentionMetadata

# the likeliest tokens, draws with the target's noise, or draws of their own whose probabilities are kept
Choice = Literal["greedy", "shared", "own"]
PassKind = Literal["kept", "padded", "step"]


class DraftBuffers:
    """Device inputs of the passes, written anew by each proposal."""

    def __init__(
        self, device: Device, *, max_num_seqs: int, max_num_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        rows, tokens = max_num_seqs, max_num_tokens
        # first pass: [T] each; of the kept tokens, index of each in the target's step
        self.input_ids = device.zeros((tokens,), torch.int32)
        self.positions = device.zeros((tokens,), torch.int32)
        self.slots = device.full((tokens,), -1, torch.int32)
        self.token_indices = device.zeros((tokens,), torch.int32)
        # [R + 1], [R], [R]: the last is the index of the token to draft from
        self.starts = device.zeros((rows + 1,), torch.int32)
        self.seq_lens = device.zeros((rows,), torch.int32)
        self.sample_index = device.zeros((rows,), torch.int32)
        # [R] each: known and computed tokens behind the step; blocks of each row
        self.total_len = device.zeros((rows,), torch.int32)
        self.num_computed = device.zeros((rows,), torch.int32)
        self.num_blocks = device.zeros((rows,), torch.int32)
        # steps: [R] each, and [R + 1] 0, 1, 2, ...
        self.step_ids = device.zeros((rows,), torch.int32)
        self.step_positions = device.zeros((rows,), torch.int32)
        self.step_seq_lens = device.zeros((rows,), torch.int32)
        self.step_slots = device.full((rows,), -1, torch.int32)
        self.step_starts = device.zeros((rows + 1,), torch.int32)
        # [R, H], [R] int64: what a pass leaves
        self.hidden = device.zeros((rows, hidden_size), dtype)
        self.drawn = device.full((rows,), -1, torch.int64)
        # [R] each: neutral parameters
        self.no_temperature = device.zeros((rows,), torch.float32)
        self.no_seeds = device.zeros((rows,), torch.int64)
        self.no_top_k = device.zeros((rows,), torch.int32)
        self.no_top_p = device.full((rows,), 1.0, torch.float32)
        device.main.run(stages.UPLOAD, _fill_arange, self.step_starts)


class PassKey(NamedTuple):
    """What tells one pass from another."""

    method: str
    kind: PassKind
    shape: GraphKey


class Draw(NamedTuple):
    """How the drafts of a batch are chosen; parameters by batch row, [R] each."""

    choice: Choice
    temperature: torch.Tensor
    seeds: torch.Tensor
    truncation: Truncation

    @classmethod
    def of(cls, knobs: Knobs, metadata: SamplingMetadata, buffers: DraftBuffers) -> Draw:
        """Return the draw that the knobs ask for; a batch of greedy requests gets the likeliest tokens."""
        m, choice = metadata, "own" if knobs.verification == "standard" else "shared"
        if knobs.draft_sampling == "greedy" or m.temperature is None or m.seeds is None:
            return cls("greedy", buffers.no_temperature, buffers.no_seeds, buffers_truncation(m, buffers))
        return cls(choice, m.temperature, m.seeds, buffers_truncation(m, buffers))


def buffers_truncation(metadata: SamplingMetadata, buffers: DraftBuffers) -> Truncation:
    """Return the masks of a batch, neutral ones where no request has any."""
    return Truncation(
        buffers.no_temperature if metadata.min_p is None else metadata.min_p,
        buffers.no_top_k if metadata.top_k is None else metadata.top_k,
        buffers.no_top_p if metadata.top_p is None else metadata.top_p,
    )


class DraftPasses:
    """Runs the passes of the loaded heads, as graphs where there are any."""

    def __init__(self, resources: RunnerResources, drafters: dict[str, LoadedDrafter], buffers: DraftBuffers) -> None:
        self.resources, self.drafters, self.buffers = resources, drafters, buffers
        self.graphs: dict[PassKey, Graph] = {}
        self.num_replays = 0

    def submit(self, stream: Stream, key: PassKey, draw: Draw | None) -> None:
        """Submit a pass and, unless `draw` is None, the likeliest or drawn token of each request."""
        graph = self.graphs.get(key) if self.resources.knobs.cuda_graphs != "off" else None
        if graph is not None and draw is not None and draw.choice == "greedy":
            self.num_replays += 1
            stream.run(stages.DRAFT, graph.replay)
            return
        stream.run(stages.DRAFT, run_pass, *self._arguments(key), draw is not None and draw.choice == "greedy")

    def missing(self, knobs: Knobs) -> Sequence[PassKey]:
        """Return the keys that `knobs` will dispatch and that have no graph yet."""
        buckets = self.resources.forward.buckets
        if knobs.spec_method not in self.drafters or knobs.cuda_graphs == "off" or not buckets.decode:
            return []
        kind: PassKind = "padded" if knobs.async_scheduling else "kept"
        # whatever was rejected, a kept batch may have any uniform length
        lengths = tuple(range(1, 2 + knobs.num_spec_tokens)) if kind == "kept" else verified_lengths(knobs)
        keys = [PassKey(knobs.spec_method, kind, shape) for shape in buckets.capturable(lengths)]
        keys += [PassKey(knobs.spec_method, "step", GraphKey(size, size, 1)) for size in reversed(buckets.decode)]
        return [key for key in keys if key not in self.graphs]

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture what `knobs` will dispatch and is not there yet; the buffers must hold inert rows."""
        stream.run(stages.DRAFT, _make_inert, self.buffers)
        for key in self.missing(knobs):
            arguments = self._arguments(key)
            # compiles what is not compiled yet
            stream.run(stages.DRAFT, run_pass, *arguments, True)
            self.graphs[key] = self.resources.device.capture(lambda a=arguments: run_pass(*a, True), stream)

    def _arguments(self, key: PassKey) -> tuple[LoadedDrafter, PassKind, GraphKey, ForwardBuffers, DraftBuffers]:
        return self.drafters[key.method], key.kind, key.shape, self.resources.forward.buffers, self.buffers


# Device code: reads nothing but its arguments.


def run_pass(
    drafter: LoadedDrafter,
    kind: PassKind,
    shape: GraphKey,
    target: ForwardBuffers,
    buffers: DraftBuffers,
    takes_likeliest: bool,
) -> None:
    """Run one pass into `buffers.hidden`; with `takes_likeliest` choose each request's likeliest token too."""
    num_tokens, num_reqs = shape.num_tokens, shape.num_reqs
    out = buffers.hidden[:num_reqs]
    if kind == "step":
        out.copy_(
            drafter.run(
                buffers.step_ids[:num_reqs],
                out,
                buffers.step_positions[:num_reqs],
                AttentionMetadata(
                    block_tables=target.block_tables[0][:num_reqs],
                    query_start_loc=buffers.step_starts[: num_reqs + 1],
                    seq_lens=buffers.step_seq_lens[:num_reqs],
                    slot_mapping=buffers.step_slots[:num_reqs],
                    max_query_len=1,
                    uniform_decode=True,
                ),
            )
        )
    else:
        is_kept = kind == "kept"
        attn = AttentionMetadata(
            block_tables=target.block_tables[0][:num_reqs],
            query_start_loc=(buffers.starts if is_kept else target.query_start_loc)[: num_reqs + 1],
            seq_lens=(buffers.seq_lens if is_kept else target.seq_lens)[:num_reqs],
            slot_mapping=(buffers.slots if is_kept else target.slot_mappings[0])[:num_tokens],
            max_query_len=shape.query_len or num_tokens,
            uniform_decode=shape.query_len == 1,
        )
        tapped, final = target.aux_hidden, target.hidden
        if is_kept:
            indices = buffers.token_indices[:num_tokens]
            tapped = None if tapped is None else tapped.index_select(0, indices)
            final = final.index_select(0, indices)
        features = drafter.features(None if tapped is None else tapped[:num_tokens], final[:num_tokens])
        positions = (buffers.positions if is_kept else target.positions)[:num_tokens]
        hidden = drafter.run(buffers.input_ids[:num_tokens], features, positions, attn)
        out.copy_(hidden.index_select(0, buffers.sample_index[:num_reqs]))
    if takes_likeliest:
        gumbel_sample(
            drafter.logits(out),
            buffers.drawn[:num_reqs],
            buffers.step_starts[:num_reqs],
            buffers.step_positions[:num_reqs],
            buffers.no_temperature,
            buffers.no_seeds,
        )


def draw_step(
    drafter: LoadedDrafter,
    buffers: DraftBuffers,
    # [B + 1] int32
    starts: torch.Tensor,
    draw: Draw,
    step: int,
) -> None:
    """Draw draft number `step` of each request from what the last pass left, by its own parameters."""
    num_reqs = starts.shape[0] - 1
    rows = buffers.step_starts[:num_reqs]
    drawn = buffers.drawn[:num_reqs]
    processed = draw.truncation.apply(drafter.logits(buffers.hidden[:num_reqs]), rows, draw.temperature)
    purpose = (1 + step) * DRAFT_DOMAIN if draw.choice == "own" else 0
    draw_drafts(
        processed,
        drawn,
        rows,
        buffers.total_len,
        drafter.to_target,
        draw.temperature,
        draw.seeds,
        step=step,
        purpose=purpose,
    )
    if draw.choice == "own":
        assert drafter.distribution is not None, "check_knobs refuses draws of their own without memory for them"
        probs = processed.softmax(dim=-1)
        keep_draft_probs(drafter.distribution.probs, probs, drawn, starts, rows, draw.temperature, step=step)


def advance(
    drafter: LoadedDrafter,
    target: ForwardBuffers,
    buffers: DraftBuffers,
    # [B + 1] int32
    starts: torch.Tensor,
    # [>= B, K] int64, out: column `step`
    draft_tokens: torch.Tensor,
    step: int,
    block_size: int,
    max_model_len: int,
) -> None:
    """Keep draft number `step` and make it the input of the next pass; rows past the batch become inert."""
    num_reqs = starts.shape[0] - 1
    advance_draft(
        buffers.step_ids[:num_reqs],
        buffers.step_positions[:num_reqs],
        buffers.step_seq_lens[:num_reqs],
        buffers.step_slots[:num_reqs],
        draft_tokens,
        buffers.drawn[:num_reqs],
        drafter.to_target,
        starts,
        buffers.step_starts[:num_reqs],
        buffers.total_len,
        buffers.num_computed,
        target.block_tables[0],
        buffers.num_blocks,
        step=step,
        extra=0,
        block_size=block_size,
        row_len=max_model_len,
    )


def _fill_arange(out: torch.Tensor) -> None:
    torch.arange(out.shape[0], out=out)


def _make_inert(buffers: DraftBuffers) -> None:
    for tensor in (buffers.input_ids, buffers.positions, buffers.token_indices, buffers.starts, buffers.seq_lens):
        tensor.zero_()
    for tensor in (buffers.sample_index, buffers.step_ids, buffers.step_positions, buffers.step_seq_lens):
        tensor.zero_()
    for tensor in (buffers.slots, buffers.step_slots):
        tensor.fill_(-1)
