"""A run learns, ends annealed, can be cut in two, and leaves a folder that holds what it learnt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrv2.cli import main
from mrv2.errors import ConfigError
from mrv2.training.checkpoint import load_head, save_head
from mrv2.training.dialogues import TRAIN, Dialogues
from mrv2.training.evaluation import Evaluation
from mrv2.training.heads import METHODS
from mrv2.training.target import FrozenTarget
from mrv2.training.trainer import Trainer, learnt_rows
from training.cases import greedy_dialogues, options, tiny_target


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def dialogues(target: FrozenTarget) -> Dialogues:
    return greedy_dialogues(target, 48, num_chat=8)


def run(trainer: Trainer) -> Trainer:
    trainer.run(on_step=lambda: None, on_save=lambda: None)
    return trainer


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_drafts_get_better(method: str, target: FrozenTarget, dialogues: Dialogues) -> None:
    trainer = Trainer(target, dialogues, options(method, max_steps=60, learning_rate=3e-3))
    rows = dialogues.rows_of(TRAIN)[:8]
    evaluation = Evaluation(dialogues, rows)

    def state() -> tuple[list[float], float]:
        with torch.no_grad():
            loss = trainer.loss(rows)[1][0].tolist()
        return loss, evaluation.of_head(trainer.head, target, trainer.draft_ids).tau[2]

    (before, tau_before), _ = state(), run(trainer)
    after, tau_after = state()
    assert all(new < old - 0.3 for new, old in zip(after, before, strict=True)), (before, after)
    assert tau_after > tau_before + 0.3
    assert trainer.progress.step == 60
    last = trainer.curve[-1]
    assert last["learning_rate"] == pytest.approx(0.05 * 3e-3)


def test_the_clock_ends_the_run_annealed(target: FrozenTarget, dialogues: Dialogues) -> None:
    trainer = run(Trainer(target, dialogues, options("mtp", minutes=1.0 / 60.0, warmup_steps=0)))
    assert 1.0 <= trainer.progress.seconds < 30.0 and trainer.progress.step > 0
    assert trainer.learning_rate() == pytest.approx(0.05 * 1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_cut_in_two_takes_the_same_steps(
    method: str, target: FrozenTarget, dialogues: Dialogues, tmp_path: Path
) -> None:
    """Over an epoch's end: 5 batches each."""
    given = options(method, max_steps=9)
    whole = Trainer(target, dialogues, given)
    for _ in range(9):
        whole.step(whole._next_rows())
    first = Trainer(target, dialogues, given)
    for _ in range(4):
        first.step(first._next_rows())
    first.save(tmp_path / "state")
    second = Trainer(target, dialogues, given)
    second.load(tmp_path / "state")
    for _ in range(5):
        second.step(second._next_rows())
    assert second.progress.step == 9 and second.progress.epoch == whole.progress.epoch == 1
    for name, tensor in whole.head.state_dict().items():
        torch.testing.assert_close(second.head.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_a_state_of_another_run_is_refused(target: FrozenTarget, dialogues: Dialogues, tmp_path: Path) -> None:
    Trainer(target, dialogues, options("mtp")).save(tmp_path / "state")
    with pytest.raises(ConfigError, match="another method, unroll"):
        Trainer(target, dialogues, options("eagle3", unroll=2)).load(tmp_path / "state")
    other = greedy_dialogues(target, 12, num_chat=2, seed=5)
    small = options("mtp", draft_vocab_size=64)
    Trainer(target, dialogues, small).save(tmp_path / "small")
    with pytest.raises(ConfigError, match="another data"):
        Trainer(target, other, small).load(tmp_path / "small")


def test_every_epoch_visits_every_dialogue_once(target: FrozenTarget, dialogues: Dialogues) -> None:
    trainer = Trainer(target, dialogues, options("mtp", batch_dialogues=7))
    orders = [np.concatenate(trainer._batches(epoch)) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == dialogues.rows_of(TRAIN).tolist()
    assert orders[0].tolist() != orders[1].tolist()


def test_only_answers_are_learnt() -> None:
    is_answer = np.array([[0, 0, 1, 1, 1, 0, 0, 0]], bool)
    # newest token p + 1 and predicted token p + 2 + s both in 2..4
    assert [rows.tolist() for rows in learnt_rows(is_answer, 3)] == [[1, 2], [1], []]


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_head_is_the_head(method: str, target: FrozenTarget, dialogues: Dialogues, tmp_path: Path) -> None:
    trainer = Trainer(target, dialogues, options(method, max_steps=4, draft_vocab_size=100))
    run(trainer)
    save_head(tmp_path, method, trainer.head, trainer.draft_ids, target)
    name, head, draft_ids = load_head(tmp_path)
    assert name == method and torch.equal(draft_ids, trainer.draft_ids)
    assert torch.equal(target.head[draft_ids], trainer.output_rows)
    for key, tensor in trainer.head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[key], tensor.bfloat16().float(), rtol=0, atol=0)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "midlayer" if method == "eagle3" else "layer"
    expected = {f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"}
    expected |= {f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    expected |= {f"{layer}.{p}_layernorm.weight" for p in ("input", "post_attention")} | {"norm.weight", "d2t"}
    own = {"fc.weight", "midlayer.hidden_norm.weight"}
    expected |= own if method == "eagle3" else {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    assert set(stored) == expected
    assert stored["d2t"].dtype == torch.int64
    assert (stored["d2t"] + torch.arange(100)).tolist() == draft_ids.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["method"], config["draft_vocab_size"], config["vocab_size"]) == (method, 100, 512)
    assert config.get("eagle_config") == (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else None
    )


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not hold a draft head"):
        load_head(tmp_path)


def test_nothing_held_out_is_refused(target: FrozenTarget) -> None:
    with pytest.raises(ConfigError, match="give generation more time"):
        Trainer(target, greedy_dialogues(target, 3, num_chat=0), options("mtp"))


def test_draft_ids_come_from_answers_to_train_on(target: FrozenTarget, dialogues: Dialogues) -> None:
    trainer = Trainer(target, dialogues, options("mtp", draft_vocab_size=40))
    counts = np.bincount(dialogues.answers_of(TRAIN), minlength=512)
    chosen = set(trainer.draft_ids.tolist())
    assert set(target.config.eos_token_ids) <= chosen
    most = [i for i in np.argsort(-counts, kind="stable") if i not in target.config.eos_token_ids]
    assert set(most[: 40 - len(target.config.eos_token_ids)]) <= chosen


def test_the_command_reports_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train-draft", "--method", "mtp", "--model", "tiny-llama", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*argv, "--minutes", "0"]) == 2
    assert "--minutes 0.0 must be positive" in capsys.readouterr().err
    assert main(argv) == 1
    assert "load_format" in capsys.readouterr().err
