"""Stable rows: a request takes one when it is added and keeps it until it finishes or is preempted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2.device import Device
from mrv2.logits_processor import RowTable
from mrv2.runner.protocol import NewRequest
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampler import SAMPLING_SECTIONS, Sampler


class RequestState:
    """The device's truth about every request, and the host's few mirrors of it.

    The host writes a row when it is taken; afterwards only the device advances `num_computed_tokens`,
    `total_len`, `last_sampled_tokens` and the token history.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        blocks_per_row: int,
        num_groups: int,
        max_num_spec_tokens: int,
        tables: Sequence[RowTable] = (),
    ) -> None:
        rows = (max_num_seqs,)
        sections: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": ((max_num_seqs, max_model_len), torch.int32),
            "prompt_len": (rows, torch.int32),
            "prefill_len": (rows, torch.int32),
            "total_len": (rows, torch.int32),
            "num_computed_tokens": (rows, torch.int32),
            "num_blocks": (rows, torch.int32),
            **{
                name: ((max_num_seqs, width) if width else rows, dtype)
                for name, (width, dtype) in SAMPLING_SECTIONS.items()
            },
        }
        for table in tables:
            sections[table.name] = ((max_num_seqs, table.width), table.dtype)
        for group in range(num_groups):
            sections[f"block_table_{group}"] = ((max_num_seqs, blocks_per_row), torch.int32)
        self.arena = DeviceArena(device, sections)
        self.num_groups = num_groups
        # device only: [R] int64, [R, K_max] int64 (-1 = no draft; a row's first drafts may be its predecessor's)
        self.last_sampled_tokens = device.zeros(rows, torch.int64)
        self.draft_tokens = device.full((max_num_seqs, max_num_spec_tokens), -1, torch.int64)
        # [R] host mirrors
        self.prefill_len_np = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_blocks_np = np.zeros(max_num_seqs, dtype=np.int32)
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def free(self, req_ids: list[str]) -> list[int]:
        """Give rows back and return them; `req_ids` are sorted, so that every rank frees in one order."""
        rows = [self.row_of.pop(req_id) for req_id in req_ids]
        self._free_rows.extend(rows)
        return rows

    def add(self, request: NewRequest, sampler: Sampler) -> int:
        """Take a row for `request` and stage everything the device must know of it."""
        assert self._free_rows, f"no free row for request {request.req_id}: the scheduler admitted too many"
        row = self._free_rows.pop()
        self.row_of[request.req_id] = row
        arena, num_tokens = self.arena, len(request.token_ids)
        self.prefill_len_np[row] = num_tokens
        self.num_blocks_np[row] = len(request.block_ids[0])
        arena.stage("token_ids", row, request.token_ids)
        arena.stage_scalar("prompt_len", row, request.prompt_len)
        arena.stage_scalar("prefill_len", row, num_tokens)
        arena.stage_scalar("total_len", row, num_tokens)
        arena.stage_scalar("num_computed_tokens", row, request.num_computed_tokens)
        arena.stage_scalar("num_blocks", row, len(request.block_ids[0]))
        for group, block_ids in enumerate(request.block_ids):
            arena.stage(f"block_table_{group}", row, block_ids)
        sampler.add(row, request.sampling, request.prompt_len)
        return row

    def append_blocks(self, new_block_ids: dict[str, tuple[list[int], ...]]) -> None:
        """Extend the block tables of requests, by id; all that take one block a group are staged together."""
        ones = {req_id: blocks for req_id, blocks in new_block_ids.items() if len(blocks[0]) == 1}
        if ones:
            rows = np.array([self.row_of[req_id] for req_id in ones], dtype=np.int32)
            for group in range(self.num_groups):
                added = np.array([blocks[group][0] for blocks in ones.values()], dtype=np.int32)
                self.arena.stage_words(f"block_table_{group}", rows, self.num_blocks_np[rows], added)
            self.num_blocks_np[rows] += 1
            self.arena.stage_words("num_blocks", rows, 0, self.num_blocks_np[rows])
        if len(ones) == len(new_block_ids):
            return
        for req_id in new_block_ids.keys() - ones.keys():
            self._append_many(self.row_of[req_id], new_block_ids[req_id])

    def _append_many(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        start = int(self.num_blocks_np[row])
        for group, new in enumerate(block_ids):
            self.arena.stage(f"block_table_{group}", row, new, start)
        self.num_blocks_np[row] += len(block_ids[0])
        self.arena.stage_scalar("num_blocks", row, int(self.num_blocks_np[row]))

    def reset(self) -> None:
        """Forget every request."""
        self.free(sorted(self.row_of))
