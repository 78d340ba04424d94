"""Bias, penalties, bad words and thinking budget, written down by the host from its token lists in every step.

Legend: B logits rows (one a request, and one behind each draft), V vocabulary, n entries (a logits row and a token
id each).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from mrv2.device import Device, Stream
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.speculation import LogitRows
from mrv2.runner.v1.step_sender import StepSender
from mrv2_kernels.sampling.thinking_budget import FORCED_LOGIT, forced_token


@dataclass(slots=True)
class _Entries:
    """Entries (row, token id, value) that grow one by one."""

    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, ids: Iterable[int]) -> None:
        for token in ids:
            self.rows.append(row)
            self.ids.append(token)


@dataclass(slots=True, kw_only=True)
class FeatureTensors:
    """What a step's features do to its logits; device tensors, empty where nothing is to be done."""

    # [words] int32: the memory of all the others
    words: torch.Tensor
    # [m] rows that have a list of allowed tokens, [n] and [n] its entries
    allowed_rows: torch.Tensor
    allowed: tuple[torch.Tensor, torch.Tensor]
    # [n], [n], [n] float32
    biased: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # [n], [n]: masked before the minimum length
    stops: tuple[torch.Tensor, torch.Tensor]
    # [B, longest prompt], [B, longest output], V where a list has ended; [B, 3] float32
    prompts: torch.Tensor
    outputs: torch.Tensor
    penalties: torch.Tensor
    # [n], [n]
    bad_words: tuple[torch.Tensor, torch.Tensor]
    forced: tuple[torch.Tensor, torch.Tensor]


class FeatureBuilder:
    """Writes a step's features down and sends them."""

    def __init__(self, device: Device, vocab_size: int, *, depth: int) -> None:
        self.vocab_size = vocab_size
        self.sender = StepSender(device, "v1 features", depth=depth)

    def build(
        self,
        step: int,
        batch: InputBatch,
        requests: dict[str, CachedRequestState],
        rows: LogitRows,
        stream: Stream,
    ) -> FeatureTensors | None:
        """Return the step's features on the device; None if no request of the batch has any."""
        if not batch.feature_reqs:
            return None
        allowed_rows: list[int] = []
        allowed, biased, stops, bad_words, forced = (_Entries() for _ in range(5))
        has_penalties = False
        states: list[CachedRequestState] = []
        # of each logits row: the outputs before it, drafts included
        histories: list[list[int]] = []
        ids = batch.ids
        for row, (owner, place) in enumerate(rows.places()):
            state = requests[ids[owner]]
            params, outputs = state.sampling, state.output_token_ids
            if place:
                outputs = outputs + [max(draft, 0) for draft in rows.drafts[owner][:place]]
            states.append(state)
            histories.append(outputs)
            has_penalties = has_penalties or params.has_penalty
            if params.allowed_token_ids:
                allowed_rows.append(row)
                allowed.add(row, params.allowed_token_ids)
            biased.add(row, params.logit_bias)
            biased.values += params.logit_bias.values()
            if len(outputs) < params.min_tokens:
                stops.add(row, params.stop_token_ids)
            for word in params.bad_words:
                prefix = word[:-1]
                if len(prefix) <= len(outputs) and tuple(outputs[len(outputs) - len(prefix) :]) == prefix:
                    bad_words.add(row, word[-1:])
            if (thinking := params.thinking) is not None:
                tokens = state.prompt_token_ids + outputs
                end = forced_token(tokens, len(state.prompt_token_ids), thinking.budget, thinking.start, thinking.end)
                forced.add(row, () if end is None else (end,))
        if not has_penalties:
            states, histories = [], []
        penalties = [
            (s.sampling.repetition_penalty, s.sampling.frequency_penalty, s.sampling.presence_penalty) for s in states
        ]
        parts: list[np.ndarray] = [np.array(allowed_rows, dtype=np.int32)]
        for entries in (allowed, biased, stops, bad_words, forced):
            parts += [np.array(entries.rows, dtype=np.int32), np.array(entries.ids, dtype=np.int32)]
        parts += [
            np.array(biased.values, dtype=np.float32).view(np.int32),
            self._padded([s.prompt_token_ids for s in states]),
            self._padded(histories),
            np.array(penalties, dtype=np.float32).reshape(len(states), 3).view(np.int32),
        ]
        words, (first, *views) = self.sender.send(step, parts, stream)
        pairs = [(rows, ids) for rows, ids in zip(views[0:10:2], views[1:10:2], strict=True)]
        values, prompts, outputs_padded, penalty_words = views[10:]
        return FeatureTensors(
            words=words,
            allowed_rows=first,
            allowed=pairs[0],
            biased=(*pairs[1], values.view(torch.float32)),
            stops=pairs[2],
            prompts=prompts,
            outputs=outputs_padded,
            penalties=penalty_words.view(torch.float32),
            bad_words=pairs[3],
            forced=pairs[4],
        )

    def _padded(self, lists: list[list[int]]) -> np.ndarray:
        """Return the lists as rows of one array, the vocabulary size behind their ends."""
        out = np.full((len(lists), max(map(len, lists), default=0)), self.vocab_size, dtype=np.int32)
        for row, tokens in enumerate(lists):
            out[row, : len(tokens)] = tokens
        # a row of NaN sampled -1; its request ends when the host hears of it
        return np.maximum(out, 0)


def apply_features(
    # [B, V] float32 or float64, in and out
    logits: torch.Tensor,
    features: FeatureTensors,
) -> None:
    """Change the logits in the sampler's order; device code."""
    if len(features.allowed_rows):
        is_dropped = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        is_dropped.index_fill_(0, features.allowed_rows.long(), True)
        rows, ids = features.allowed
        # a value on the device: no copy from the host
        is_dropped.index_put_((rows.long(), ids.long()), torch.zeros_like(rows, dtype=torch.bool))
        logits.masked_fill_(is_dropped & ~logits.isnan(), float("-inf"))
    rows, ids, values = features.biased
    if len(rows):
        logits[rows.long(), ids.long()] += values.to(logits.dtype)
    _put(logits, features.stops, float("-inf"))
    if len(features.penalties):
        _apply_penalties(logits, features)
    _put(logits, features.bad_words, float("-inf"))
    _put(logits, features.forced, FORCED_LOGIT)


def _put(logits: torch.Tensor, entries: tuple[torch.Tensor, torch.Tensor], value: float) -> None:
    """Write one value to all entries, except over NaN."""
    rows, ids = entries
    if len(rows):
        index = (rows.long(), ids.long())
        logits[index] = torch.where(logits[index].isnan(), logits[index], value)


def _apply_penalties(logits: torch.Tensor, features: FeatureTensors) -> None:
    """Count every token of the vocabulary for every row, and penalise."""
    num_rows, vocab = logits.shape
    counts = torch.zeros(2, num_rows, vocab + 1, dtype=torch.int64, device=logits.device)
    for count, tokens in zip(counts, (features.prompts, features.outputs), strict=True):
        count.scatter_add_(1, tokens.long(), torch.ones_like(tokens, dtype=torch.int64))
    in_prompt, num_outputs = counts[0, :, :vocab] > 0, counts[1, :, :vocab]
    repetition, frequency, presence = features.penalties.to(logits.dtype).unsqueeze(2).unbind(dim=1)
    repetition = torch.where(in_prompt | (num_outputs > 0), repetition, 1.0)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits -= frequency * num_outputs.to(logits.dtype)
    logits -= presence * (num_outputs > 0)
