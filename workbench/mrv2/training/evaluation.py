"""How many tokens a target step gives with a drafter: exact simulation of greedy drafting on written answers.

An answer that the target wrote greedily is what it would write again, so drafts are accepted exactly where
they equal it.  From the newest known token the head drafts k tokens; the target takes the a that are right
and adds one of its own.  tau(k) is tokens per target step, the first token of an answer (it comes from the
prompt's step) left out; alpha_s is the share of s-th drafts accepted, of those whose predecessors were.

Legend: B rows, T positions, K drafts at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mrv2.training.dialogues import Dialogues
from mrv2.training.heads import DraftHead
from mrv2.training.target import FrozenTarget, upload
from mrv2.training.unroll import unroll

MAX_DRAFTS = 7
NGRAM_LENGTHS = (1, 3)
BATCH_DIALOGUES = 32
ARGMAX_ROWS = 8192


@dataclass(frozen=True)
class Figures:
    """Acceptance on one set of answers."""

    num_answers: int
    num_tokens: int
    # alpha[s] of draft s + 1
    alpha: list[float]
    # tau[k - 1] for k drafts
    tau: list[float]

    def as_record(self) -> dict[str, Any]:
        """Return plain values, rounded."""
        values = asdict(self)
        return {k: [round(x, 4) for x in v] if isinstance(v, list) else v for k, v in values.items()}


# is_answer [n] -> (first, one past the last) of each answer
def answer_spans(is_answer: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of answer tokens of a dialogue."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_answer.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# drafts [n, K] (row i: what follows token i, -1 = none), token_ids and is_answer [n] -> [n] int64
def accepted_runs(drafts: np.ndarray, token_ids: np.ndarray, is_answer: np.ndarray) -> np.ndarray:
    """Return how many leading drafts of each row are right and inside the answer."""
    num, width = drafts.shape
    padded = np.concatenate([np.where(is_answer, token_ids.astype(np.int64), -2), np.full(width, -2)])
    following = np.stack([padded[1 + s : 1 + s + num] for s in range(width)], axis=1)
    return np.cumprod(drafts == following, axis=1).sum(axis=1)


# each answer's accepted runs by index of the newest known token -> figures
def simulate(
    runs: Sequence[np.ndarray], spans: Sequence[Sequence[tuple[int, int]]], max_drafts: int = MAX_DRAFTS
) -> Figures:
    """Walk through every answer as the engine would, for 1 to `max_drafts` drafts a step."""
    num_tokens = sum(end - 1 - first for row in spans for first, end in row)
    tried, accepted, tau = np.zeros(max_drafts), np.zeros(max_drafts), []
    for k in range(1, max_drafts + 1):
        num_steps = 0
        for run, row in zip(runs, spans, strict=True):
            for first, end in row:
                known = first
                while known < end - 1:
                    right = min(int(run[known]), k)
                    if k == max_drafts:
                        # drafts beyond the answer's end are neither right nor wrong
                        tried[: min(right + 1, k, end - 1 - known)] += 1
                        accepted[:right] += 1
                    num_steps += 1
                    known += right + 1
        tau.append(num_tokens / max(num_steps, 1))
    alpha = (accepted / np.maximum(tried, 1)).tolist()
    return Figures(sum(map(len, spans)), num_tokens, alpha, tau)


# token_ids [n] -> [n, K] int64, row i: what followed the last occurrence of the suffix that ends at token i
def ngram_drafts(
    token_ids: np.ndarray, max_drafts: int = MAX_DRAFTS, lengths: tuple[int, int] = NGRAM_LENGTHS
) -> np.ndarray:
    """Draft by lookup: the longest suffix within `lengths` that occurred before, the latest of several."""
    ids = token_ids.tolist()
    drafts = np.full((len(ids), max_drafts), -1, np.int64)
    # for each length: n-gram -> where it was followed
    seen: dict[tuple[int, ...], int] = {}
    for index in range(len(ids)):
        grams = [tuple(ids[index + 1 - n : index + 1]) for n in range(lengths[1], lengths[0] - 1, -1) if n <= index + 1]
        start = next((seen[gram] for gram in grams if gram in seen), None)
        if start is not None:
            found = ids[start : min(start + max_drafts, index + 1)]
            drafts[index, : len(found)] = found
        for gram in grams:
            seen[gram] = index + 1
    return drafts


class Evaluation:
    """The held-out answers of one split and what lookup drafting achieves on them."""

    def __init__(self, dialogues: Dialogues, rows: np.ndarray) -> None:
        self.dialogues, self.rows = dialogues, rows
        self._held = [dialogues.tokens_of(row) for row in rows]
        self._spans = [answer_spans(answers) for _, answers in self._held]

    # draft_ids [V] int64: target id of each draft id
    @torch.no_grad()
    def of_head(self, head: DraftHead, target: FrozenTarget, draft_ids: torch.Tensor) -> Figures:
        """Return a head's figures."""
        output_rows = target.head[draft_ids]
        runs = []
        for start in range(0, len(self.rows), BATCH_DIALOGUES):
            chunk = slice(start, start + BATCH_DIALOGUES)
            drafts = self._drafts(head, target, draft_ids, output_rows, self.rows[chunk])
            runs += [
                accepted_runs(rows[: len(ids)], ids, answers)
                for rows, (ids, answers) in zip(drafts, self._held[chunk], strict=True)
            ]
        return simulate(runs, self._spans)

    def of_ngram(self) -> Figures:
        """Return lookup's figures."""
        runs = [accepted_runs(ngram_drafts(ids), ids, answers) for ids, answers in self._held]
        return simulate(runs, self._spans)

    def coverage(self, draft_ids: np.ndarray) -> float:
        """Return the share of answer tokens that the draft vocabulary holds."""
        tokens = np.concatenate([ids[answers] for ids, answers in self._held] or [np.zeros(0, int)])
        return float(np.isin(tokens, draft_ids).mean()) if len(tokens) else 0.0

    def _drafts(
        self,
        head: DraftHead,
        target: FrozenTarget,
        draft_ids: torch.Tensor,
        output_rows: torch.Tensor,
        rows: np.ndarray,
    ) -> Iterator[np.ndarray]:
        """Yield each dialogue's drafts by index of the newest known token, [T, K]."""
        ids = upload(self.dialogues.padded(rows)[0], target.device).long()
        features = target.features(ids, head.shape.tap_layers)
        found = []
        with autocast(target):
            for hidden in unroll(head, target, F.pad(ids, (0, MAX_DRAFTS)), features, MAX_DRAFTS):
                flat = hidden.flatten(0, 1).to(output_rows.dtype).split(ARGMAX_ROWS)
                best = torch.cat([F.linear(part, output_rows).argmax(-1) for part in flat])
                found.append(draft_ids[best].view(ids.shape))
        drafts = torch.stack(found, dim=-1).cpu().numpy()
        # row p of the head follows token p + 1
        for dialogue in drafts:
            yield np.concatenate([np.full((1, MAX_DRAFTS), -1), dialogue[:-1]])


def autocast(target: FrozenTarget) -> AbstractContextManager[Any]:
    """Compute the head's products in bfloat16 where the target does; float32 otherwise."""
    if target.dtype == torch.bfloat16:
        return torch.autocast(target.device.type, torch.bfloat16)
    return nullcontext()
