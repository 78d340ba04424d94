"""Training of draft heads on a CUDA device: the captured step of generation, and a run in bfloat16."""

from __future__ import annotations

import time

import pytest
import torch

from mrv2.training.generation import DialogueWriter, Limits, write_dialogues
from mrv2.training.heads import METHODS
from mrv2.training.scripts import Plan
from mrv2.training.target import FrozenTarget
from mrv2.training.trainer import Trainer
from training.cases import SCRIPTS, greedy_dialogues, options, tiny_target

pytestmark = pytest.mark.gpu
LIMITS = Limits(length=48, max_answer=24, window=5)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget("tiny-llama", dtype="bfloat16", device=torch.device("cuda"), load_format="dummy")


def test_a_captured_step_writes_what_an_eager_one_writes(target: FrozenTarget) -> None:
    plans = [Plan((1, 7 + i, 20 + i), 0.0, answer_first=True) for i in range(12)]

    def write(use_graph: bool) -> list[list[int]]:
        writer = DialogueWriter(target, SCRIPTS, 4, LIMITS, use_graph=use_graph)
        assert (writer._graph is not None) == use_graph
        parts = write_dialogues(writer, iter(plans), deadline=time.monotonic() + 60, max_answer_tokens=10**9)
        return sorted(d.token_ids.tolist() for part in parts for d in part)

    assert write(True) == write(False)


def test_draws_differ_from_replay_to_replay(target: FrozenTarget) -> None:
    """The noise moves on although the graph is the same."""
    writer = DialogueWriter(target, SCRIPTS, 4, LIMITS, use_graph=True)
    plans = [Plan((1, 7), 1.0, answer_first=True) for _ in range(16)]
    parts = write_dialogues(writer, iter(plans), deadline=time.monotonic() + 60, max_answer_tokens=10**9)
    found = [tuple(d.token_ids.tolist()) for part in parts for d in part]
    assert len(set(found)) == len(found) == 16


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_bfloat16_learns(method: str, target: FrozenTarget) -> None:
    dialogues = greedy_dialogues(tiny_target(), 48, num_chat=8)
    trainer = Trainer(target, dialogues, options(method, max_steps=60, learning_rate=3e-3))
    rows = trainer.rows[:8]
    before = trainer.loss(rows)[1][0].tolist()
    trainer.run(on_step=lambda: None, on_save=lambda: None)
    after = trainer.loss(rows)[1][0].tolist()
    assert all(new < old - 0.3 for new, old in zip(after, before, strict=True)), (before, after)
