"""Fixtures of the front end's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.fake_core import byte_fallback_tokenizer, byte_level_tokenizer, fake_core, write_model_folder
from mrv2.llm import LLM
from mrv2.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_tokenizer())


@pytest.fixture
def llm(model_folder: Path) -> Iterator[LLM]:
    """An LLM over the scripted core, which echoes the prompt."""
    with LLM(model_folder, core_factory=fake_core) as made:
        yield made
