"""Random request rows with histories, penalties, lists and drafts, and the dense definitions over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels.sampling.token_counts import update_token_counts

INF = float("inf")


@dataclass
class History:
    """Rows of request state and the logits rows of one step over them (tensors on the default device)."""

    # [R, L] int32, [R] int32, [R] int32
    token_ids: torch.Tensor
    prompt_len: torch.Tensor
    total_len: torch.Tensor
    # [R, 3] float32
    penalties: torch.Tensor
    # [N] int32 each, [T] int32
    logit_slots: torch.Tensor
    local_positions: torch.Tensor
    logits_indices: torch.Tensor
    input_ids: torch.Tensor
    # [R, L], [R]
    token_counts: torch.Tensor
    counted_len: torch.Tensor

    @property
    def drafts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.local_positions, self.logits_indices, self.input_ids

    def outputs(self, row: int) -> list[int]:
        """Outputs before what logits row `row` samples, drafts included."""
        slot, local, last = int(self.logit_slots[row]), int(self.local_positions[row]), int(self.logits_indices[row])
        committed = self.token_ids[slot, int(self.prompt_len[slot]) : int(self.total_len[slot])].tolist()
        return committed + self.input_ids[last - local + 1 : last + 1].tolist()

    def prompt(self, row: int) -> list[int]:
        slot = int(self.logit_slots[row])
        return self.token_ids[slot, : int(self.prompt_len[slot])].tolist()

    def count(self, twin: str, *, has_new: bool = True) -> None:
        getattr(update_token_counts, twin)(
            self.token_counts,
            self.counted_len,
            self.token_ids,
            self.prompt_len,
            self.total_len,
            self.penalties,
            torch.arange(self.token_ids.shape[0], dtype=torch.int32),
            has_new=has_new,
        )

    def append(self, tokens: list[int]) -> None:
        """Give every row one more output."""
        for slot, token in enumerate(tokens):
            self.token_ids[slot, int(self.total_len[slot])] = token
        self.total_len += 1


PENALTIES = [(1.3, 0.0, 0.0), (0.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.0, 0.0, 0.0), (0.8, 0.5, 1.1), (1.0, 0.0, 0.0)]


def make_history(seed: int, *, num_drafts: int = 0, vocab: int = 97, row_len: int = 200) -> History:
    """Return six rows; every request has `num_drafts` drafts in flight and so many logits rows and one."""
    gen = torch.Generator().manual_seed(seed)
    num_rows = len(PENALTIES)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32)

    prompt_len = draw(1, row_len // 3, (num_rows,))
    num_outputs = draw(0, row_len // 3, (num_rows,))
    width = 1 + num_drafts
    device = torch.get_default_device()
    tensors = dict(
        # few distinct tokens, so that they repeat
        token_ids=draw(0, vocab // 3, (num_rows, row_len)),
        prompt_len=prompt_len,
        total_len=prompt_len + num_outputs,
        penalties=torch.tensor(PENALTIES, device="cpu")[torch.randperm(num_rows, generator=gen, device="cpu")],
        logit_slots=torch.randperm(num_rows, generator=gen, device="cpu").int().repeat_interleave(width),
        local_positions=torch.arange(width, dtype=torch.int32, device="cpu").repeat(num_rows),
        logits_indices=torch.arange(num_rows * width, dtype=torch.int32, device="cpu"),
        input_ids=draw(0, vocab // 2, (num_rows * width,)),
        token_counts=torch.zeros(num_rows, row_len, dtype=torch.int16, device="cpu"),
        counted_len=torch.zeros(num_rows, dtype=torch.int32, device="cpu"),
    )
    return History(**{name: tensor.to(device) for name, tensor in tensors.items()})


def make_logits(history: History, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return strided [N, vocab] logits; row 1 is all -inf but one, the padding is NaN."""
    num_rows = len(history.logit_slots)
    gen = torch.Generator().manual_seed(seed)
    buffer = torch.full((num_rows, vocab + 5), float("nan"), dtype=dtype)
    logits = buffer[:, :vocab]
    logits.copy_(3 * torch.randn(num_rows, vocab, generator=gen, device="cpu"))
    logits[1, 1:] = -INF
    return logits


def dense_penalties(history: History, logits: torch.Tensor) -> torch.Tensor:
    """Return the float64 result of the definition with a count for every token of the vocabulary."""
    out = logits.double().clone()
    num_rows, vocab = out.shape
    for row in range(num_rows):
        repetition, frequency, presence = history.penalties[history.logit_slots[row]].double().tolist()
        repetition = repetition or 1.0
        counts = torch.bincount(torch.tensor(history.outputs(row), dtype=torch.int64), minlength=vocab).double()
        in_prompt = torch.bincount(torch.tensor(history.prompt(row), dtype=torch.int64), minlength=vocab) > 0
        repeated = (counts > 0) | in_prompt
        x = out[row]
        x = torch.where(repeated, torch.where(x > 0, x / repetition, x * repetition), x)
        out[row] = x - frequency * counts - presence * (counts > 0)
    return out
