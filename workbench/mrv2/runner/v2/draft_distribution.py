"""What a drafter drew its drafts from: handed to the verification that accepts by a ratio of probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2.device import Device
from mrv2.instrument import stages
from mrv2_kernels.spec.draft_probs import DraftProbs


@dataclass(slots=True)
class DraftDistribution:
    """The distribution of every draft of every request row, written by the drafter that sampled them.

    Column k of row r belongs to ``RequestState.draft_tokens[r, k]``: the probabilities after temperature,
    top-k, top-p and min-p, each row sums to one, and the draft itself has more than none.  Without this
    object every draft is taken as certain (probability one): greedy drafts, n-gram, suffix.
    """

    # [R, K_max, V_d] float32
    probs: torch.Tensor
    # [V_d] int64, draft id -> target id, each target id at most once; None = both vocabularies are one
    to_target: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        device: Device,
        *,
        max_num_seqs: int,
        max_num_spec_tokens: int,
        draft_vocab_size: int,
        # [V_d] int64
        to_target: torch.Tensor | None = None,
    ) -> DraftDistribution:
        """Take the memory: 4 R K_max V_d bytes."""
        assert to_target is None or to_target.shape == (draft_vocab_size,), (
            f"to_target has shape {tuple(to_target.shape)}, the drafter {draft_vocab_size} tokens"
        )
        return cls(device.zeros((max_num_seqs, max_num_spec_tokens, draft_vocab_size), torch.float32), to_target)

    def draft_probs(self, device: Device, vocab_size: int) -> DraftProbs:
        """Return the same as verification reads it, with the way back from target ids."""
        if self.to_target is None:
            return DraftProbs(self.probs)
        from_target = device.full((vocab_size,), -1, torch.int32)
        device.main.run(stages.UPLOAD, _invert, from_target, self.to_target)
        return DraftProbs(self.probs, from_target)


def _invert(from_target: torch.Tensor, to_target: torch.Tensor) -> None:
    """Device code: draft id of each target id, -1 where there is none."""
    from_target[to_target] = torch.arange(to_target.shape[0], dtype=torch.int32, device=to_target.device)
