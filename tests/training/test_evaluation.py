"""Simulated drafting against drafting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mrv2.training.dialogues import CHAT
from mrv2.training.evaluation import (
    MAX_DRAFTS,
    Evaluation,
    accepted_runs,
    answer_spans,
    ngram_drafts,
    simulate,
)
from mrv2.training.heads import METHODS, DraftHead
from mrv2.training.target import FrozenTarget
from mrv2.training.unroll import unroll
from mrv2_kernels.spec.ngram import propose_ngram_torch
from training.cases import greedy_dialogues, random_head, tiny_target


def by_hand(drafts: np.ndarray, ids: np.ndarray, spans: list[tuple[int, int]], k: int) -> tuple[int, int]:
    """Return tokens and steps of an engine that takes `k` drafts a step, one comparison after the other."""
    tokens = steps = 0
    for first, end in spans:
        written = [ids[first]]
        while len(written) < end - first:
            newest = first + len(written) - 1
            steps += 1
            for draft in [*drafts[newest, :k].tolist(), None]:
                if len(written) == end - first:
                    break
                right = ids[first + len(written)]
                written.append(right)
                tokens += 1
                if draft != right:
                    break
    return tokens, steps


def test_simulation_is_what_an_engine_does() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, 120)
    is_answer = (np.arange(120) % 40) >= 12
    drafts = rng.integers(0, 3, (120, MAX_DRAFTS))
    spans = answer_spans(is_answer)
    assert spans == [(12, 40), (52, 80), (92, 120)]
    figures = simulate([accepted_runs(drafts, ids, is_answer)], [spans])
    for k in range(1, MAX_DRAFTS + 1):
        tokens, steps = by_hand(drafts, ids, spans, k)
        assert tokens == figures.num_tokens == 81
        assert figures.tau[k - 1] == pytest.approx(tokens / steps)
    assert figures.alpha[0] == pytest.approx(1 / 3, abs=0.15)


def test_perfect_and_useless_drafts() -> None:
    ids, is_answer = np.arange(50), np.arange(50) >= 10
    perfect = np.stack([np.arange(50) + 1 + s for s in range(MAX_DRAFTS)], axis=1)
    figures = simulate([accepted_runs(perfect, ids, is_answer)], [answer_spans(is_answer)])
    # 39 tokens after the first one, in steps of k + 1
    assert figures.tau == [39 / -(-39 // (k + 1)) for k in range(1, MAX_DRAFTS + 1)]
    assert figures.alpha == [1.0] * MAX_DRAFTS
    useless = simulate([accepted_runs(perfect * 0 - 1, ids, is_answer)], [answer_spans(is_answer)])
    assert useless.tau == [1.0] * MAX_DRAFTS and useless.alpha[0] == 0.0


@pytest.mark.parametrize("lengths", [(1, 3), (2, 4)])
def test_lookup_drafts_are_the_engines(lengths: tuple[int, int]) -> None:
    ids = np.random.default_rng(1).integers(0, 4, 60)
    ours = ngram_drafts(ids, 5, lengths)
    for newest in range(60):
        out = torch.full((1, 5), -9, dtype=torch.int64)
        one = torch.ones(1, dtype=torch.int32)
        history = torch.from_numpy(ids).int()[None]
        propose_ngram_torch(
            out,
            one * 0,
            history,
            one * (newest + 1),
            one,
            num_draft_tokens=5,
            min_n=lengths[0],
            max_n=lengths[1],
            max_len=60,
        )
        assert ours[newest].tolist() == out[0].tolist(), f"after token {newest}"


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_heads_figures_are_those_of_drafting_freely(method: str) -> None:
    """The evaluation feeds written tokens; an engine feeds the drafts themselves. Accepted drafts are the same."""
    target = tiny_target()
    head = random_head(target, method)
    dialogues = greedy_dialogues(target, 6, num_chat=6, answer=12)
    # a small vocabulary of what the answers hold, so that a random head is right now and then
    draft_ids = torch.unique(torch.from_numpy(dialogues.answers_of(CHAT).astype(np.int64)))[:6]
    evaluation = Evaluation(dialogues, dialogues.rows_of(CHAT))
    figures = evaluation.of_head(head, target, draft_ids)
    rows = target.head[draft_ids]
    tokens = steps = 0
    for row in dialogues.rows_of(CHAT):
        ids, answers = dialogues.tokens_of(row)
        (first, end), ids = answer_spans(answers)[0], ids.astype(np.int64)
        known = first
        while known < end - 1:
            drafts: list[int] = []
            for s in range(3):
                # the whole chain anew each time, with the drafts so far as its tokens
                context = torch.tensor([[*ids[: known + 1].tolist(), *drafts]])
                hidden = chain(head, target, context, known - 1, s)
                drafts.append(int(draft_ids[F.linear(hidden, rows).argmax()]))
            steps += 1
            for draft in [*drafts, -1]:
                known += 1
                tokens += 1
                if known >= end - 1 or draft != ids[known]:
                    break
    assert tokens == figures.num_tokens
    assert figures.tau[2] == pytest.approx(tokens / steps)


def chain(head: DraftHead, target: FrozenTarget, context: torch.Tensor, base: int, step: int) -> torch.Tensor:
    features = target.features(context[:, : base + 1], head.shape.tap_layers)
    padded = F.pad(context, (0, step + 1 + base + 1 - context.shape[1] + 1))[:, : base + 1 + step + 1]
    return list(unroll(head, target, padded, features, step + 1))[step][0, base]
