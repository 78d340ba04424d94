"""Exercises of the workshop notebooks: a question, folded hints and solution, and an answer that is checked.

    ex = Exercise(
        "4.1",
        "How many steps can be in flight?",
        check=lambda answer: answer == core.knobs.depth,
        solution="answer = core.knobs.depth",
        hints=["It is a knob."],
    )
    ex.check(...)      # not answered yet; put the answer in place of the dots

A check compares with what the reader's own engine did, never with a number from the book.  With the environment
variable ``MRV2_EXERCISES=solve`` an open exercise is answered by its own solution, and a solution that fails its
check is an error: so the run that executes every notebook also tests every exercise.  No widgets are needed.
"""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, TypeVar

from mrv2.errors import MRV2Error
from mrv2_models.shipped import shipped

State = Literal["open", "right", "wrong"]
Check = Callable[[Any], "bool | str"]
_T = TypeVar("_T")

_COLOUR = {"question": "#0072B2", "open": "#999999", "right": "#009E73", "wrong": "#D55E00"}
_WORD = {"open": "not answered yet", "right": "right", "wrong": "not yet"}
_exercises: dict[str, Exercise] = {}


class ExerciseError(MRV2Error):
    """An exercise contradicts itself: its solution fails its own check, or a wrong answer passes it."""


def fast() -> bool:
    """Return whether the notebook should be quick rather than precise (environment variable ``FAST=1``)."""
    return os.environ.get("FAST", "") not in ("", "0")


def pick(full: _T, quick: _T) -> _T:
    """Return `quick` in a fast run (see `fast`), else `full`."""
    return quick if fast() else full


def recorded(name: str) -> Path:
    """Return a recording of the folder ``traces``, for example ``"h200/v2_async.graph.sqlite.gz"``.

    Raises `FileNotFoundError` if neither the checkout nor the installation has it.
    """
    return shipped(f"traces/{name}")


@dataclass(frozen=True)
class Verdict:
    """What a check says of an answer; shows itself in a notebook."""

    name: str
    state: State
    text: str = ""

    def __repr__(self) -> str:
        return f"Exercise {self.name}: {_WORD[self.state]}" + (f". {self.text}" if self.text else "")

    def _repr_html_(self) -> str:
        body = f"<b>Exercise {html.escape(self.name)}: {_WORD[self.state]}.</b> {_inline(self.text)}"
        return _card(self.state, body)


class Exercise:
    """One question with a checked answer; the last line of a cell shows it as a card.

    Args:
        name: number within the notebook; a second exercise of the name takes the place of the first.
        question: text; ``code`` in backticks and **bold** are marked up.
        check: takes the answer; True = right, False or a text that says why = wrong. An exception also means wrong.
        solution: Python code that sets `answer`; it sees the names of the notebook.
        hints: shown folded, each under its own number.
        refuses: answers that the check must not take for right; looked at when solutions are tested.
    """

    def __init__(
        self,
        name: str,
        question: str,
        check: Check,
        *,
        solution: str,
        hints: Sequence[str] = (),
        refuses: Sequence[Any] = (),
    ) -> None:
        self.name = name
        self.question = question
        self.solution = solution.strip("\n")
        self.hints = list(hints)
        self.state: State = "open"
        self._check = check
        self._refuses = list(refuses)
        _exercises[name] = self

    def check(self, answer: Any | EllipsisType = ...) -> Verdict:
        """Judge an answer; ``...`` means that there is none yet.

        Raises `ExerciseError` under ``MRV2_EXERCISES=solve`` when the exercise contradicts itself.
        """
        verdict = Verdict(self.name, "open", "Put your answer in place of the dots.")
        if answer is not ...:
            verdict = self._judge(answer)
        elif os.environ.get("MRV2_EXERCISES") == "solve":
            verdict = self._solve(sys._getframe(1).f_globals)
        self.state = verdict.state
        return verdict

    def _judge(self, answer: Any) -> Verdict:
        try:
            said = self._check(answer)
        except Exception as error:  # whatever the reader's code raises is part of the answer
            return Verdict(self.name, "wrong", f"{type(error).__name__}: {error}")
        # NumPy's bool counts too
        if type(said).__name__ in ("bool", "bool_") and said:
            return Verdict(self.name, "right")
        return Verdict(self.name, "wrong", said if isinstance(said, str) else "Have another look; the hints may help.")

    def _solve(self, names: dict[str, Any]) -> Verdict:
        scope = dict(names)
        exec(compile(self.solution, f"<solution of exercise {self.name}>", "exec"), scope)
        if "answer" not in scope:
            raise ExerciseError(f"exercise {self.name}: the solution does not set `answer`")
        verdict = self._judge(scope["answer"])
        if verdict.state != "right":
            raise ExerciseError(f"exercise {self.name}: its own solution is judged {verdict.state!r}: {verdict.text}")
        for wrong in self._refuses:
            if self._judge(wrong).state == "right":
                raise ExerciseError(f"exercise {self.name}: the check takes the wrong answer {wrong!r} for right")
        return verdict

    def __repr__(self) -> str:
        return f"Exercise {self.name}: {self.question}"

    def _repr_html_(self) -> str:
        parts = [f"<b>Exercise {html.escape(self.name)}.</b> {_inline(self.question)}"]
        for number, hint in enumerate(self.hints, 1):
            parts.append(_folded(f"Hint {number}", _inline(hint)))
        code = f"<pre style='margin:.4em 0 0 1em'><code>{html.escape(self.solution)}</code></pre>"
        parts.append(_folded("Solution", code))
        return _card("question", "".join(parts))


class Progress:
    """How many of the exercises met so far are solved; shows itself as a bar."""

    def __init__(self, exercises: Sequence[Exercise]) -> None:
        self.states: dict[str, State] = {exercise.name: exercise.state for exercise in exercises}

    @property
    def num_right(self) -> int:
        return sum(state == "right" for state in self.states.values())

    def __repr__(self) -> str:
        left = [name for name, state in self.states.items() if state != "right"]
        return f"{self.num_right} of {len(self.states)} exercises solved" + (
            f"; left: {', '.join(left)}" if left else ""
        )

    def _repr_html_(self) -> str:
        pieces = "".join(
            f"<span title='{html.escape(name)}: {_WORD[state]}' style='display:inline-block;width:2.6em;"
            f"margin-right:3px;text-align:center;border-radius:3px;color:#fff;background:{_COLOUR[state]}'>"
            f"{html.escape(name)}</span>"
            for name, state in self.states.items()
        )
        return _card("question", f"{pieces} {html.escape(repr(self))}")


def progress() -> Progress:
    """Return how far the reader is, over all exercises of this session."""
    return Progress(list(_exercises.values()))


def _inline(text: str) -> str:
    """Return text as HTML: ``code`` and **bold** are marked up, blank lines part paragraphs."""
    out = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    out = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", out)
    return out.replace("\n\n", "<br><br>")


def _folded(title: str, body: str) -> str:
    return f"<details style='margin-top:.4em'><summary style='cursor:pointer'>{title}</summary>{body}</details>"


def _card(kind: str, body: str) -> str:
    return (
        f"<div style='border-left:4px solid {_COLOUR[kind]};padding:.5em .9em;margin:.3em 0;max-width:60em;"
        f"background:var(--jp-layout-color2, rgba(128,128,128,.08));line-height:1.5'>{body}</div>"
    )
