"""Training-time test: the head runs on its own outputs while it learns, as it will when it drafts.

Step s >= 1 of the chain that starts at index p stands at position p + s.  What it may see is what a drafter
has in its cache then: the keys that true features gave up to p, and its own chain's keys at p + 1 .. p + s.

    query of chain p, step 2          keys of step 0   k0(0) .. k0(p)
                                      its own          k1(p)  k2(p)

So all chains of a dialogue run at once: step 0 is plain causal attention, later steps add one column for
each earlier step, the diagonal of that step's keys.  (EAGLE-3, section 3.2; Li et al. 2025.)

Legend: B rows, T positions, H hidden size, Hq / Hkv heads, D head_dim, S steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mrv2.training.heads import DraftHead
from mrv2.training.target import FrozenTarget, TargetFeatures


class ChainMemory:
    """Keys and values of every step of all chains of a batch; `attend` is called once a step."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._future: torch.Tensor | None = None

    # q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, Hq, T, D]
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend causally to step 0 and, on the diagonal, to the chain's own later steps."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        num_rows, num_heads, length, head_dim = q.shape
        num_kv = k.shape[1]
        if self._future is None:
            self._future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        # query heads of one key head, one after the other: [B, Hkv, Hq / Hkv, T, D]
        q = q.unflatten(1, (num_kv, -1)) * head_dim**-0.5
        flat = (num_rows, num_kv, -1)
        past = (q.reshape(*flat, head_dim) @ self.keys[0].transpose(-1, -2)).view(*q.shape[:4], length)
        own = [(q * key[:, :, None]).sum(-1, keepdim=True) for key in self.keys[1:]]
        scores = torch.cat([past.float().masked_fill(self._future, float("-inf")), *(s.float() for s in own)], dim=-1)
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        out = (weights[..., :length].reshape(*flat, length) @ self.values[0]).view(q.shape)
        for index, value in enumerate(self.values[1:], start=length):
            out = out + weights[..., index : index + 1] * value[:, :, None]
        return out.reshape(num_rows, num_heads, length, head_dim)


# ids [B, T + S] int64 (anything beyond a dialogue's end), features of [B, T] -> S times [B, T, H] float32
def unroll(
    head: DraftHead, target: FrozenTarget, ids: torch.Tensor, features: TargetFeatures, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yield each step's output after the head's norm; row p of step s predicts the token at p + 2 + s."""
    length = ids.shape[1] - num_steps
    memory, hidden = ChainMemory(), head.fuse(features)
    for step in range(num_steps):
        embeddings = F.embedding(ids[:, 1 + step : 1 + step + length], target.embedding)
        cos, sin = target.cos_sin[step : step + length].chunk(2, dim=-1)
        hidden = head.step(embeddings, hidden, cos, sin, memory)
        yield head.norm(hidden)
