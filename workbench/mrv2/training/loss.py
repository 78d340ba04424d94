"""Cross-entropy against the target's own distribution over the draft vocabulary, a chunk of rows at a time.

For student logits z = h W^T and teacher probabilities p the loss of a row is ``-sum_v p_v log softmax(z)_v``
and its gradient by z is ``softmax(z) - p``.  W is frozen, so the gradient by h is all that the backward
needs; it is computed beside the loss, and no logits outlive their chunk.

Legend: N rows, M teacher rows, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK_ROWS = 8192


class SoftCrossEntropy(torch.autograd.Function):
    """The sum over rows of the loss above, and how many rows agree with the teacher on the likeliest token."""

    @staticmethod
    def forward(
        ctx: Any,
        # [N, H]
        hidden: torch.Tensor,
        # [V, H]
        output_rows: torch.Tensor,
        # [M, V]
        teacher_logits: torch.Tensor,
        # [N] int64, the teacher row of each hidden row
        teacher_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        agreed = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = F.linear(hidden[rows].to(output_rows.dtype), output_rows).float()
            teacher = teacher_logits[teacher_index[rows]].float()
            agreed += (logits.argmax(-1) == teacher.argmax(-1)).sum()
            p, log_q = torch.softmax(teacher, -1), torch.log_softmax(logits, -1)
            loss -= (p * log_q).sum()
            grad[rows] = ((log_q.exp_() - p).to(output_rows.dtype) @ output_rows).to(grad.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(agreed)
        return loss, agreed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None


# hidden [N, H], output_rows [V, H], teacher_logits [M, V], teacher_index [N] -> scalar, scalar
def soft_cross_entropy(
    hidden: torch.Tensor, output_rows: torch.Tensor, teacher_logits: torch.Tensor, teacher_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of the rows (0 for none) and the number of rows that agree with the teacher."""
    result = SoftCrossEntropy.apply(hidden, output_rows, teacher_logits, teacher_index)
    assert isinstance(result, tuple), "the loss comes with the number of agreeing rows"
    return result[0] / max(hidden.shape[0], 1), result[1]
