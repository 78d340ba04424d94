"""Grammar masks on their way to the device: a pinned ring, a stream, one kernel.

    host    | fill slot(n+1) | submit ...
    upload  |                 [grammar_upload n+1]
    main    | ... [forward n+1][logits n+1] ------ [apply_grammar n+1][sample n+1] ... [draft n+1]

Legend: R = masks of a step at most (one a logits row), V = vocabulary, W = ``ceil(V / 32)``, G = masks of a step;
B = requests at most, M = tokens of a chain at most, C = chains of a step.
A slot holds what the step drafts from, if anything, the logits row of each mask, and the masks:

    | batch rows [B] | starts [B] | lengths [B] | chains [B, M] | rows [R] | bits [G, W] |
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from mrv2.device import Device, Event, PinnedRing, Stream
from mrv2.instrument import stages
from mrv2.runner.protocol import DraftChains
from mrv2_kernels.sampling.bitmask import apply_bitmask


class HasLogits(Protocol):
    """The hand-over object of either runner; filled in stream order."""

    # [N, V]
    logits: torch.Tensor


class GrammarMasks:
    """Uploads and applies the masks of each step that has any.

    The device buffer is one: its upload waits, on the device, until the step before has applied its masks.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        *,
        depth: int,
        max_num_masks: int,
        vocab_size: int,
        max_num_spec_tokens: int = 0,
    ) -> None:
        """Upload on `stream`, which may be the main stream; `depth` must exceed the steps in flight."""
        self.main, self.stream = device.main, stream
        self.max_num_masks, self.num_words = max_num_masks, -(-vocab_size // 32)
        # a request has 1 + K masks at most; a chain, its K drafts and as many that may follow them
        self.max_num_chains = max_num_masks // (1 + max_num_spec_tokens) if max_num_spec_tokens else 0
        self.chain_width = 2 * max_num_spec_tokens + 1
        # where the rows of the masks begin
        self.rows_at = self.max_num_chains * (3 + self.chain_width)
        size = self.rows_at + max_num_masks * (1 + self.num_words)
        self.ring = PinnedRing(device, depth, (size,), torch.int32, name="grammar mask")
        # [B * (3 + M) + R + R * W]
        self.words = device.zeros((size,), torch.int32)
        self._slot: torch.Tensor | None = None
        self._applied: Event = device.event()

    def take(self, step: int, num_masks: int) -> np.ndarray:
        """Return the pinned [num_masks, W] int32 that the host fills for `step`."""
        assert self._slot is None, f"the masks taken before step {step} were never submitted"
        slot = self._slot = self.ring.acquire(step)
        start = self.rows_at + self.max_num_masks
        return slot.numpy()[start : start + num_masks * self.num_words].reshape(num_masks, self.num_words)

    def submit(
        self,
        # [G] int32: the logits row of each mask
        logits_rows: np.ndarray,
        holder: HasLogits,
        chains: DraftChains | None = None,
    ) -> None:
        """Upload the masks that `take` gave out, and apply them to the raw logits; `release` must follow.

        `chains` travel with them, for `chains_on_device`.
        """
        slot, num_masks, at = self._slot, len(logits_rows), self.rows_at
        assert slot is not None, "no masks were taken for this step"
        host = slot.numpy()
        host[at : at + num_masks] = logits_rows
        if chains is not None:
            self._write_chains(host, chains)
        first = at if chains is None else 0
        start = at + self.max_num_masks
        used = start + num_masks * self.num_words
        if self.stream is not self.main:
            self.stream.wait_event(self._applied)
        self.stream.copy(stages.GRAMMAR_UPLOAD, self.words[first:used], slot[first:used])
        if self.stream is not self.main:
            self.main.wait_event(self.stream.record_event())
        bits = self.words[start:used].view(num_masks, self.num_words)
        self.main.run(stages.APPLY_GRAMMAR, _apply, holder, bits, self.words[at : at + num_masks])
        self._applied = self.main.record_event()

    def chains_on_device(self, num_chains: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the step's batch rows, starts, lengths [C] and tokens [C, M], int32; `chains_read` must follow."""
        rows, width = self.max_num_chains, self.chain_width
        batch_rows, starts, lengths = (self.words[i * rows : i * rows + num_chains] for i in range(3))
        return batch_rows, starts, lengths, self.words[3 * rows :][: num_chains * width].view(num_chains, width)

    def chains_read(self) -> None:
        """Whoever reads the step's chains is submitted: the next upload waits for it."""
        self._applied = self.main.record_event()

    def _write_chains(self, host: np.ndarray, chains: DraftChains) -> None:
        rows, count = self.max_num_chains, len(chains.batch_rows)
        for index, values in enumerate((chains.batch_rows, chains.starts, chains.lengths)):
            host[index * rows : index * rows + count] = values
        tokens = host[3 * rows : 3 * rows + count * self.chain_width].reshape(count, self.chain_width)
        tokens[:, : chains.tokens.shape[1]] = chains.tokens

    def release(self, end_of_step: Event) -> None:
        """Give the slot back once `end_of_step` has passed; nothing happens in a step without masks."""
        if self._slot is not None:
            self.ring.release(self._slot, end_of_step)
            self._slot = None


def _apply(
    holder: HasLogits,
    # [G, W] int32
    bits: torch.Tensor,
    # [G] int32
    rows: torch.Tensor,
) -> None:
    apply_bitmask(holder.logits, bits, rows)
