"""Dialogues that the rows write: the scripts word by word, the model's tokens between them, the right marks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from mrv2.errors import ConfigError
from mrv2.training.dialogues import Dialogue
from mrv2.training.evaluation import answer_spans
from mrv2.training.generation import MIN_P, DialogueWriter, Limits, draw, write_dialogues
from mrv2.training.scripts import Plan
from mrv2.training.target import FrozenTarget
from training.cases import END, SCRIPTS, tiny_target

LIMITS = Limits(length=48, min_question=1, max_question=12, max_answer=14, window=5)


@pytest.fixture(scope="module")
def ending_target() -> FrozenTarget:
    """A tiny model of flat distributions in which the end token, along the common direction, has some share."""
    target = tiny_target()
    ids = torch.randint(3, 512, (8, 40), generator=torch.Generator().manual_seed(0))
    common = target.features(ids).final.mean((0, 1))
    target.head = 0.3 * target.head
    target.head[END] = 2.5 * common / common.square().sum()
    return target


def written(target: FrozenTarget, plans: Iterator[Plan], num_rows: int = 16) -> list[Dialogue]:
    torch.manual_seed(0)
    writer = DialogueWriter(target, SCRIPTS, num_rows, LIMITS, use_graph=False)
    found = write_dialogues(writer, plans, deadline=time.monotonic() + 60, max_answer_tokens=10**9)
    return [dialogue for some in found for dialogue in some]


def test_dialogues_follow_their_scripts(ending_target: FrozenTarget) -> None:
    plans = list(islice(SCRIPTS.plans(np.random.default_rng(0)), 150))
    dialogues = written(ending_target, iter(plans))
    assert len(dialogues) > 20, "too few to say anything"
    prompts = {plan.prompt for plan in plans}
    second_turns = 0
    for dialogue in dialogues:
        ids = dialogue.token_ids.tolist()
        assert len(ids) <= LIMITS.length
        assert any(tuple(ids[: len(p)]) == p for p in prompts)
        spans = answer_spans(dialogue.is_answer)
        for first, end in spans:
            # end of question, script, answer
            start = first - len(SCRIPTS.to_answer)
            assert tuple(ids[start:first]) == SCRIPTS.to_answer and ids[start - 1] == END
            assert not set(ids[first : end - 1]) & set(SCRIPTS.end_ids), "an answer ends where its end token stands"
            assert end - first == LIMITS.max_answer or end == LIMITS.length or ids[end - 1] in SCRIPTS.end_ids
        if len(spans) == 2:
            second_turns += 1
            after = spans[0][1]
            assert tuple(ids[after : after + len(SCRIPTS.to_question)]) == SCRIPTS.to_question
    assert second_turns, "no plan had a second turn"


def test_greedy_answers_are_the_models_own(ending_target: FrozenTarget) -> None:
    plans = [Plan((1, 7 + i, 20 + i), 0.0, answer_first=True) for i in range(9)]
    dialogues = written(ending_target, iter(plans), num_rows=4)
    assert sorted(d.token_ids[1] for d in dialogues) == [7 + i for i in range(9)], "every plan is written once"
    for dialogue in dialogues:
        assert dialogue.greedy and dialogue.is_answer[3:].all() and not dialogue.is_answer[:3].any()
        ids = torch.from_numpy(dialogue.token_ids)[None]
        best = (ending_target.features(ids).final[0] @ ending_target.head.T).argmax(-1)
        assert best[2:-1].tolist() == ids[0, 3:].tolist()


def test_time_and_amount_end_the_writing(ending_target: FrozenTarget) -> None:
    endless = SCRIPTS.plans(np.random.default_rng(0))
    writer = DialogueWriter(ending_target, SCRIPTS, 4, LIMITS, use_graph=False)
    assert list(write_dialogues(writer, endless, deadline=time.monotonic() - 1, max_answer_tokens=10**9)) == []
    some = list(write_dialogues(writer, endless, deadline=time.monotonic() + 60, max_answer_tokens=60))
    assert 60 <= sum(d.is_answer.sum() for part in some for d in part) < 60 + 4 * 2 * LIMITS.length


def test_a_prompt_must_leave_room(ending_target: FrozenTarget) -> None:
    with pytest.raises(ConfigError, match="1..46 tokens"):
        written(ending_target, iter([Plan(tuple(range(47)), 0.0)]))


def test_draws_have_the_models_distribution() -> None:
    """Chi-squared against the renormalised softmax; tokens below MIN_P never; temperature 0 is the likeliest."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.5, 0.0, -0.7, -6.0])
    temperature = 0.8
    p = torch.softmax(logits / temperature, -1)
    p = torch.where(p < MIN_P * p.max(), 0.0, p)
    p = (p / p.sum())[:4]
    num = 20_000
    tokens = draw(logits.expand(num, -1), torch.full((num,), temperature))
    counts = torch.bincount(tokens, minlength=5)
    assert counts[4] == 0
    chi2 = ((counts[:4] - num * p) ** 2 / (num * p)).sum()
    assert chi2 < 16.3, f"3 degrees of freedom, p = 0.001: {chi2}"
    assert draw(logits.expand(9, -1), torch.zeros(9)).tolist() == [0] * 9
