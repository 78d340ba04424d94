"""Exercises: what is right, wrong and open; solutions that must pass, wrong answers that must not; no widgets."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mrv2.lab import exercise
from mrv2.lab.exercise import Exercise, ExerciseError, fast, pick, progress, recorded


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "_exercises", {})
    monkeypatch.delenv("MRV2_EXERCISES", raising=False)


def six(**changes) -> Exercise:
    settings = dict(name="1.1", question="What is 2 * 3?", check=lambda a: a == 6, solution="answer = 2 * 3")
    return Exercise(**(settings | changes))


def test_an_answer_is_right_wrong_or_open() -> None:
    ex = six()
    assert ex.check().state == "open" and ex.check(...).state == "open"
    assert ex.check(6).state == "right" and ex.state == "right"
    assert ex.check(7).state == "wrong" and ex.state == "wrong"


@pytest.mark.parametrize("said", ["too small", False, None, 0])
def test_only_true_is_right(said) -> None:
    verdict = six(check=lambda answer: said).check(6)
    assert verdict.state == "wrong" and (said in verdict.text if isinstance(said, str) else verdict.text)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_comparison_of_numpy_counts_as_one_of_python(wanted: bool) -> None:
    assert six(check=lambda answer: np.int64(answer) == np.int64(6)).check(6 if wanted else 5).state == (
        "right" if wanted else "wrong"
    )


def test_an_error_in_the_answer_is_a_verdict_and_names_itself() -> None:
    verdict = six(check=lambda f: f(3) == 6).check(lambda n: n / 0)
    assert verdict.state == "wrong" and "ZeroDivisionError" in verdict.text


def test_solutions_are_tested_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRV2_EXERCISES", "solve")
    assert six(refuses=[5, "6"]).check().state == "right"
    with pytest.raises(ExerciseError, match="own solution"):
        six(solution="answer = 7").check()
    with pytest.raises(ExerciseError, match="does not set"):
        six(solution="result = 6").check()
    with pytest.raises(ExerciseError, match="wrong answer 8"):
        six(check=lambda answer: answer % 2 == 0, refuses=[5, 8]).check()
    assert six().check(7).state == "wrong", "an answer that was given is judged, not replaced"


NUMBER = 3


def test_a_solution_sees_the_names_of_the_notebook_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRV2_EXERCISES", "solve")
    assert six(solution="answer = helper = 2 * NUMBER").check().state == "right"
    assert "helper" not in globals() and "answer" not in globals()


def test_the_card_folds_hints_and_solution_and_escapes_them() -> None:
    card = six(question="Is `a < b`?", hints=["look at **b**"], solution="answer = 1 < 2")._repr_html_()
    assert "<code>a &lt; b</code>" in card and "<b>b</b>" in card and "answer = 1 &lt; 2" in card
    assert card.count("<details") == 2 and "<details open" not in card


def test_progress_counts_each_name_once() -> None:
    six(), six(name="1.2").check(6), six(name="1.1")
    assert repr(progress()) == "1 of 2 exercises solved; left: 1.1"
    assert progress().num_right == 1 and "1.2" in progress()._repr_html_()


@pytest.mark.parametrize("value, quick", [("1", True), ("yes", True), ("0", False), ("", False)])
def test_fast(monkeypatch: pytest.MonkeyPatch, value: str, quick: bool) -> None:
    monkeypatch.setenv("FAST", value)
    assert fast() is quick and pick(100, 5) == (5 if quick else 100)


def test_recordings_are_found_from_any_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recorded("h200/v2_async.graph.sqlite.gz").is_file()
    with pytest.raises(FileNotFoundError, match=r"traces/b\.npz did not come with this installation"):
        recorded("b.npz")


def test_neither_widgets_nor_torch_are_needed() -> None:
    code = "import sys, mrv2.lab.exercise; print([m for m in ('torch', 'ipywidgets', 'plotly') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
