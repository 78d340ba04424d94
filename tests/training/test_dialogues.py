"""Stored dialogues, what is held out of them, and the vocabulary that a head may draft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrv2.errors import ConfigError
from mrv2.training.dialogues import CHAT, CODE, TRAIN, Dialogue, Dialogues, draft_vocabulary, hold_out


def some_dialogues(num: int, *, greedy_share: float = 0.5, seed: int = 0) -> list[Dialogue]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        question, answer = int(rng.integers(2, 6)), int(rng.integers(8, 20))
        ids = rng.integers(3, 60_000, question + answer)
        made.append(Dialogue(ids, np.arange(question + answer) >= question, bool(rng.random() < greedy_share)))
    return made


@pytest.mark.parametrize("vocab_size, dtype", [(49_152, np.uint16), (150_000, np.uint32)])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    made = [*some_dialogues(9), Dialogue(np.array([60_001, 2]), np.array([False, True]), True, CODE)]
    packed = Dialogues.pack(made, vocab_size, {"target": "x"})
    packed.save(tmp_path / "d.npz")
    read = Dialogues.load(tmp_path / "d.npz")
    assert read.token_ids.dtype == dtype and read.record["target"] == "x" and len(read) == 10
    for row, dialogue in enumerate(made):
        ids, answers = read.tokens_of(row)
        np.testing.assert_array_equal(ids, dialogue.token_ids)
        np.testing.assert_array_equal(answers, dialogue.is_answer)
    assert read.rows_of(CODE).tolist() == [9] and read.answers_of(CODE).tolist() == [2]
    np.testing.assert_array_equal(read.answers_of(TRAIN), np.concatenate([d.token_ids[d.is_answer] for d in made[:9]]))


def test_padding_keeps_every_token() -> None:
    made = some_dialogues(6)
    packed = Dialogues.pack(made, 60_000, {})
    rows = np.array([4, 0, 5])
    ids, answers, lengths = packed.padded(rows)
    for line, row in enumerate(rows):
        n = len(made[row].token_ids)
        assert lengths[line] == n
        np.testing.assert_array_equal(ids[line, :n], made[row].token_ids)
        np.testing.assert_array_equal(answers[line, :n], made[row].is_answer)
        assert not answers[line, n:].any() and not ids[line, n:].any()


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_bytes(b"PK no archive")
    with pytest.raises(ConfigError, match="not a file of dialogues.*delete it"):
        Dialogues.load(tmp_path / "d.npz")


def test_held_out_prompts_are_never_trained_on() -> None:
    made = some_dialogues(80)
    again = [Dialogue(d.token_ids[:-1], d.is_answer[:-1], not d.greedy) for d in made[:40]]
    short = Dialogue(np.arange(12), np.arange(12) >= 8, True)
    kept = hold_out([*made, *again, short], 15, np.random.default_rng(0))
    prompts = [d.token_ids[: int(d.is_answer.argmax())].tobytes() for d in kept]
    assert len(prompts) == len(set(prompts)) == 80
    aside = [d for d in kept if d.split == CHAT]
    assert len(aside) == 15 and all(d.greedy for d in aside)
    assert all(d.split in (CHAT, TRAIN) for d in kept)
    assert sum(d.split == CHAT for d in hold_out(made[:8], 15, np.random.default_rng(0))) <= 2


def test_the_draft_vocabulary_covers_most() -> None:
    """No other set of this size that holds the forced ids covers more answer tokens."""
    rng = np.random.default_rng(0)
    answers = rng.zipf(1.3, 20_000) % 500
    chosen = draft_vocabulary(answers, 512, 60, [2, 511])
    assert len(chosen) == 60 and {2, 511} <= set(chosen.tolist()) and (np.diff(chosen) > 0).all()
    counts = np.bincount(answers, minlength=512)
    free = np.setdiff1d(np.arange(512), [2, 511])
    best = np.sort(counts[free])[::-1][:58].sum() + counts[[2, 511]].sum()
    assert counts[chosen].sum() == best
    # what never occurred: the lowest ids
    assert draft_vocabulary(np.array([9, 9, 300]), 512, 5, [2]).tolist() == [0, 1, 2, 9, 300]


@pytest.mark.parametrize("size", [1, 513])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="must be in 2..512"):
        draft_vocabulary(np.arange(9), 512, size, [2, 3])
