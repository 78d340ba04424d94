"""What fills the forward's buffers before a step: kernels on the device, or NumPy on the host (knob `input_prep`)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from mrv2.instrument import stages
from mrv2.runner.async_output import PinnedOutput
from mrv2.runner.protocol import NewRequest, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.device_inputs import DeviceInputs
from mrv2.runner.v2.host_inputs import HostInputs
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.upload import UploadedBatch
from mrv2_kernels.state.staged_write import apply_staged_writes
from mrv2_models.model_state import ForwardBatch


class InputPreparation(Protocol):
    """One way; it hears of every row that is taken while it is the one in force."""

    def add_request(self, row: int, request: NewRequest) -> None:
        """`request` took `row`."""
        ...

    def append_blocks(self, new_block_ids: dict[str, tuple[list[int], ...]]) -> None:
        """The block tables of requests grew: id -> blocks of each group."""
        ...

    def submit(
        self,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
        batch: UploadedBatch,
        forward_batch: ForwardBatch,
        # [N] int32, out: token of each logits row, if some token has none
        logits_indices: torch.Tensor,
        has_prefill: bool,
    ) -> None:
        """Fill the buffers of `forward_batch`, behind the staged writes of the step."""
        ...

    def follow(self, output: PinnedOutput) -> None:
        """The output of the step submitted last is on its way."""
        ...

    def reset(self) -> None:
        """Every row was given up."""
        ...


class InputPreparations:
    """The verbs of `InputPreparation`, for the way that the knobs name."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        self.resources, self.state, self.main = resources, state, resources.device.main
        self.ways: dict[str, InputPreparation] = {
            "device": DeviceInputs(resources, state),
            "host": HostInputs(resources, state),
        }

    @property
    def chosen(self) -> InputPreparation:
        return self.ways[self.resources.knobs.input_prep]

    def submit(
        self,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
        batch: UploadedBatch,
        forward_batch: ForwardBatch,
        # [N] int32, out
        logits_indices: torch.Tensor,
        has_prefill: bool,
    ) -> None:
        """Submit the staged writes of a step and everything that its forward pass reads."""
        if batch.num_runs:
            self.main.run(stages.STAGED_WRITES, _apply_runs, self.state.arena.words, batch)
        self.chosen.submit(scheduled, rows, batch, forward_batch, logits_indices, has_prefill)

    def reset(self) -> None:
        """Every row was given up."""
        for way in self.ways.values():
            way.reset()


def _apply_runs(
    # [1, words] int32, in and out
    words: torch.Tensor,
    batch: UploadedBatch,
) -> None:
    """Device code: reads nothing but its arguments."""
    apply_staged_writes(
        words, batch.run_rows, batch.run_starts, batch.run_cu_lens, batch.run_contents, max_len=batch.max_run
    )
