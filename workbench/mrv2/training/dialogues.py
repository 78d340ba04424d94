"""Dialogues that a model wrote, as flat arrays: storage, held-out sets, draft vocabulary.

Legend: N dialogues, W tokens of all dialogues together.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.errors import ConfigError

TRAIN, CHAT, CODE = 0, 1, 2
FORMAT = 1
MIN_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Dialogue:
    """One dialogue as it was written."""

    # [n]
    token_ids: np.ndarray
    # [n] bool; what the model wrote as an answer, end tokens included
    is_answer: np.ndarray
    greedy: bool
    split: int = TRAIN


@dataclass
class Dialogues:
    """Many dialogues; dialogue i is ``token_ids[offsets[i]:offsets[i + 1]]``."""

    # [W] uint16 if the vocabulary allows, else uint32
    token_ids: np.ndarray
    # [W] bool
    is_answer: np.ndarray
    # [N + 1] int64
    offsets: np.ndarray
    # [N] bool
    greedy: np.ndarray
    # [N] uint8: TRAIN, CHAT or CODE
    split: np.ndarray
    # how they were made
    record: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def pack(cls, dialogues: Sequence[Dialogue], vocab_size: int, record: dict[str, Any]) -> Dialogues:
        """Join dialogues, in their order."""
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        lengths = [len(d.token_ids) for d in dialogues]
        empty = np.zeros(0, dtype)
        return cls(
            np.concatenate([empty, *(d.token_ids.astype(dtype) for d in dialogues)]),
            np.concatenate([empty.astype(bool), *(d.is_answer for d in dialogues)]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([d.greedy for d in dialogues], dtype=bool),
            np.array([d.split for d in dialogues], dtype=np.uint8),
            record,
        )

    def __len__(self) -> int:
        return len(self.greedy)

    def rows_of(self, split: int) -> np.ndarray:
        """Return the dialogues of one split, [n] int64."""
        return np.flatnonzero(self.split == split)

    def tokens_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a dialogue's token ids and answer flags, [n] each."""
        span = slice(self.offsets[row], self.offsets[row + 1])
        return self.token_ids[span], self.is_answer[span]

    def answers_of(self, split: int) -> np.ndarray:
        """Return all answer tokens of one split, [n]."""
        per_token = np.repeat(self.split, np.diff(self.offsets))
        return self.token_ids[self.is_answer & (per_token == split)]

    def padded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return token ids [n, T] int32 (0 beyond the end), answer flags [n, T] and lengths [n] of some dialogues."""
        lengths = np.diff(self.offsets)[rows]
        width = int(lengths.max(initial=0))
        ids, answers = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
        inside = np.arange(width) < lengths[:, None]
        index = (self.offsets[rows][:, None] + np.arange(width))[inside]
        ids[inside], answers[inside] = self.token_ids[index], self.is_answer[index]
        return ids, answers, lengths

    def save(self, path: Path) -> None:
        """Write one ``.npz`` file; a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        with scratch.open("wb") as file:
            np.savez(
                file,
                token_ids=self.token_ids,
                is_answer=self.is_answer,
                offsets=self.offsets,
                greedy=self.greedy,
                split=self.split,
                record=np.frombuffer(json.dumps({"format": FORMAT, **self.record}).encode(), np.uint8),
            )
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> Dialogues:
        """Read what `save` wrote; raises `ConfigError` for anything else."""
        try:
            with np.load(path) as held:
                arrays = {name: held[name] for name in ("token_ids", "is_answer", "offsets", "greedy", "split")}
                record = json.loads(held["record"].tobytes())
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} is not a file of dialogues: {error}; delete it to have it made anew") from error
        if record.get("format") != FORMAT:
            raise ConfigError(f"{path} has format {record.get('format')}, this version reads {FORMAT}; delete it")
        return cls(**arrays, record=record)


def hold_out(dialogues: Sequence[Dialogue], num_chat: int, rng: np.random.Generator) -> list[Dialogue]:
    """Drop short and repeated dialogues and set greedy ones aside for evaluation.

    A dialogue repeats another if everything before its first answer is the same; so no held-out prompt
    is trained on.  At most a quarter of the dialogues is set aside.
    """
    unique: dict[bytes, Dialogue] = {}
    for dialogue in dialogues:
        if dialogue.is_answer.sum() >= MIN_ANSWER_TOKENS:
            prompt = dialogue.token_ids[: int(dialogue.is_answer.argmax())]
            unique.setdefault(np.ascontiguousarray(prompt, np.int64).tobytes(), dialogue)
    kept = list(unique.values())
    greedy = [i for i, dialogue in enumerate(kept) if dialogue.greedy]
    aside = set(rng.permutation(greedy)[: min(num_chat, len(kept) // 4)].tolist())
    return [
        Dialogue(d.token_ids, d.is_answer, d.greedy, CHAT if index in aside else TRAIN) for index, d in enumerate(kept)
    ]


# answers [n], always [m] -> [size] int64, rising
def draft_vocabulary(answers: np.ndarray, vocab_size: int, size: int, always: Sequence[int]) -> np.ndarray:
    """Return the target ids that a head may draft: `always`, then the most frequent, then the lowest.

    Raises `ConfigError` if `size` is above the vocabulary or too small for `always`.
    """
    if not len(set(always)) <= size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} must be in {len(set(always))}..{vocab_size}")
    counts = np.bincount(answers, minlength=vocab_size).astype(np.int64)
    counts[list(always)] = np.iinfo(np.int64).max
    # stable: among equals, the never seen ones included, the lowest ids
    return np.sort(np.argsort(-counts, kind="stable")[:size])
