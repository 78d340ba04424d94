"""Tests of this folder need a CUDA device and are skipped where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False here")
