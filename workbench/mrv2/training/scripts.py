"""What a model is made to say so that it writes dialogues by itself, and the plan of each dialogue.

Given only its chat prefix up to the user's turn, an instruction-tuned model writes a question of its own;
the template's next words are then forced and it answers.  (Magpie; Xu et al. 2024.)  Some dialogues begin with
given first words or with another system line, some have a second turn.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrv2.errors import ConfigError
from mrv2.tokenizer import Tokenizer

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You answer in one or two short sentences.",
    "You are a patient teacher who explains step by step.",
    "You are an experienced programmer.",
)
FIRST_WORDS = (
    "Write a Python function",
    "Summarise",
    "Translate",
    "Calculate",
    "Explain",
    "Write a short story",
    "Give me a list",
    "Rewrite the following sentence",
    "What is the difference between",
    "How do I",
)
SECOND_TURN_SHARE, FIRST_WORDS_SHARE, SYSTEM_LINE_SHARE, GREEDY_SHARE = 0.15, 0.15, 0.10, 0.5
TEMPERATURES = (0.7, 1.0)
_QUESTION, _ANSWER = "QUESTION-SLOT", "ANSWER-SLOT"


@dataclass(frozen=True)
class Plan:
    """One dialogue to be written."""

    # forced at the start
    prompt: tuple[int, ...]
    # of the answers; 0 = greedy.  Questions are always drawn at 1
    temperature: float
    # turns after the first
    more_turns: int = 0
    # the prompt ends where the answer begins
    answer_first: bool = False


@dataclass(frozen=True)
class ChatScripts:
    """Token ids of the template's fixed parts; what ends a turn is left to the model."""

    # before a question; the plain system line of the template first
    prefixes: Sequence[tuple[int, ...]]
    first_words: Sequence[tuple[int, ...]]
    # between a question's end token and the answer
    to_answer: tuple[int, ...]
    # between an answer's end token and the next question
    to_question: tuple[int, ...]
    end_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatScripts:
        """Cut the chat template at its contents.

        Raises `ConfigError` if a turn of this template does not end with one of the model's end tokens.
        """

        def pieces(system: str | None) -> list[str]:
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
            text = tokenizer.apply_chat_template([*messages, messages[-2]], add_generation_prompt=True)
            before, to_answer, _ = text.split(_QUESTION)
            to_answer, to_question = to_answer.split(_ANSWER)
            return [before, to_answer, to_question]

        def after_end(text: str) -> tuple[int, ...]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if not ids or ids[0] not in tokenizer.eos_token_ids:
                raise ConfigError(
                    f"the chat template closes a turn with {text!r}, which does not begin with an end token; "
                    "dialogues cannot be cut into turns"
                )
            return tuple(ids[1:])

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        _, to_answer, to_question = pieces(None)
        prefixes = tuple(encode(pieces(system)[0]) for system in (None, *SYSTEM_LINES))
        words = tuple(encode(text) for text in FIRST_WORDS)
        return cls(prefixes, words, after_end(to_answer), after_end(to_question), tokenizer.eos_token_ids)

    def plans(self, rng: np.random.Generator) -> Iterator[Plan]:
        """Yield dialogues without end, in the shares named above."""
        while True:
            draw = rng.random(4)
            prompt = self.prefixes[0]
            if draw[0] < SYSTEM_LINE_SHARE and len(self.prefixes) > 1:
                prompt = self.prefixes[1 + int(rng.integers(len(self.prefixes) - 1))]
            if draw[1] < FIRST_WORDS_SHARE and self.first_words:
                prompt = (*prompt, *self.first_words[int(rng.integers(len(self.first_words)))])
            temperature = 0.0 if draw[2] < GREEDY_SHARE else float(rng.uniform(*TEMPERATURES))
            yield Plan(prompt, temperature, more_turns=int(draw[3] < SECOND_TURN_SHARE))


def code_plans(path: Path, tokenizer: Tokenizer, *, max_tokens: int, limit: int | None = None) -> list[Plan]:
    """Return greedy plans for the prompts of a JSONL file (``.gz`` too) with one object ``{"prompt": ...}`` a line.

    Prompts above `max_tokens` are left out.  Raises `ConfigError` if the file cannot be read so.
    """
    try:
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not JSON lines of objects with a 'prompt': {error!r}") from error
    plans = []
    for prompt in prompts[:limit]:
        message = {"role": "user", "content": f"Complete this Python function.\n\n{prompt}"}
        ids = tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)
        if len(ids) <= max_tokens:
            plans.append(Plan(tuple(ids), 0.0, answer_first=True))
    return plans
