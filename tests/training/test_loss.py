"""The chunked loss is the plain one, and so is its gradient."""

from __future__ import annotations

import pytest
import torch

from mrv2.training import loss as loss_module
from mrv2.training.loss import soft_cross_entropy


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_loss_and_gradient_are_autograds(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    hidden, rows, teacher = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5), torch.randn(9, 11)
    index = torch.tensor([8, 0, 3, 3, 1, 7, 2])
    loss, agreed = soft_cross_entropy(hidden, rows, teacher, index)
    (3.0 * loss).backward()
    got = hidden.grad
    hidden.grad = None
    p = torch.softmax(teacher[index], -1)
    expected = -(p * torch.log_softmax(hidden @ rows.T, -1)).sum(-1).mean()
    (3.0 * expected).backward()
    torch.testing.assert_close(loss, expected)
    assert got is not None and hidden.grad is not None
    torch.testing.assert_close(got, hidden.grad)
    assert int(agreed) == int(((hidden @ rows.T).argmax(-1) == p.argmax(-1)).sum())


def test_no_rows_give_no_loss() -> None:
    hidden = torch.zeros(0, 5, requires_grad=True)
    loss, agreed = soft_cross_entropy(hidden, torch.randn(11, 5), torch.randn(9, 11), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == 0.0 and int(agreed) == 0
