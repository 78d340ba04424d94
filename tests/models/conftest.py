"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mrv2_models.causal_lm import CausalLM
from mrv2_models.registry import load_model
from mrv2_models.smollm2 import ensure_smollm2


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The converted SmolLM2-135M-Instruct; fetched on first use."""
    return ensure_smollm2()


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> CausalLM:
    """SmolLM2 in float32, for contexts of one 1,024-token window."""
    return load_model(smollm2_folder, dtype=torch.float32, max_model_len=1024)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
