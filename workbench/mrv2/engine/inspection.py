"""What the runner was fed, step by step, and who holds which KV blocks: copies for a reader, never live tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2.errors import ConfigError
from mrv2.instrument import sync_allowed
from mrv2.runner.protocol import SchedulerOutput

INSPECTION = "inspection"
# the newest inspected steps that are kept
MAX_STEPS = 64


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The inputs of one forward pass, as the device had them (B = requests, T = tokens, G = KV cache groups)."""

    step: int
    runner: str
    # B ids, in batch order
    req_ids: list[str]
    # [B] int32: row of each request in the runner's state
    rows: np.ndarray
    # [B] int32: tokens of this step, and drafts among them
    num_scheduled: np.ndarray
    num_drafts: np.ndarray
    # [T] int32
    input_ids: np.ndarray
    positions: np.ndarray
    # [B + 1] int32
    query_start_loc: np.ndarray
    # [B] int32
    seq_lens: np.ndarray
    # G x [T] int32: place of each token in the KV cache
    slots: list[np.ndarray]


@dataclass(slots=True, kw_only=True)
class RequestBlocks:
    """The blocks that one request holds."""

    req_id: str
    num_computed: int
    num_known: int
    prompt_len: int
    # block ids of the first group
    block_ids: list[int]


@dataclass(slots=True, kw_only=True)
class Inspection:
    """A picture between two steps."""

    step: int
    block_size: int
    num_blocks: int
    requests: list[RequestBlocks] = field(default_factory=list)
    # oldest first
    steps: list[StepInputs] = field(default_factory=list)
    # steps that are still to be inspected
    num_left: int = 0


class Inspector:
    """Stands in front of an executor's `execute_model` for as many steps as are asked for, then steps aside."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._left = 0
        self._steps: deque[StepInputs] = deque(maxlen=MAX_STEPS)
        self._original: Callable[[SchedulerOutput], None] | None = None

    def look(self, steps: int = 0) -> Inspection:
        """Return what there is; inspect the next `steps` steps (0 = change nothing).

        Raises `ConfigError` for a number outside 0..MAX_STEPS.
        """
        if not 0 <= steps <= MAX_STEPS:
            raise ConfigError(f"inspect(steps={steps}): the number of steps must be in 0..{MAX_STEPS}")
        core = self._core
        if steps:
            self._left = steps
            self._step_in()
        core.scheduler.bring_up_to_date()
        return Inspection(
            step=core.scheduler.step,
            block_size=core.kv.block_size,
            num_blocks=core.kv.pool.num_usable,
            requests=[
                RequestBlocks(
                    req_id=r.req_id,
                    num_computed=r.num_computed,
                    num_known=r.num_known,
                    prompt_len=r.prompt_len,
                    block_ids=list(r.block_ids[0]) if r.block_ids else [],
                )
                for r in core.scheduler.running
            ],
            steps=list(self._steps),
            num_left=self._left,
        )

    def _step_in(self) -> None:
        if self._original is None:
            executor = self._core.executor
            self._original = executor.execute_model
            executor.execute_model = self._execute

    def _step_aside(self) -> None:
        self._original = None
        del self._core.executor.execute_model

    def _execute(self, scheduled: SchedulerOutput) -> None:
        assert self._original is not None, "an inspector without an executor was called"
        self._original(scheduled)
        with sync_allowed(INSPECTION):
            self._core.device.synchronize(INSPECTION)
            self._steps.append(_read_inputs(self._core.executor, scheduled))
        self._left -= 1
        if not self._left:
            self._step_aside()


def _read_inputs(executor: Any, scheduled: SchedulerOutput) -> StepInputs:
    """Copy what the forward pass read; the device is idle."""
    buffers, num_reqs, num_tokens = executor.buffers, scheduled.num_reqs, scheduled.total_tokens

    def copied(tensor: Any, size: int) -> np.ndarray:
        return tensor[:size].to("cpu", copy=True).numpy()

    runner, ids, order = executor.runner, list(scheduled.req_ids), np.arange(num_reqs)
    if runner.name == "v1":
        # v1 keeps its requests dense, in an order of its own: the row is the place in the batch
        ids, rows = list(runner.batch.ids), np.arange(num_reqs, dtype=np.int32)
        order = np.array([scheduled.req_ids.index(req_id) for req_id in ids])
    else:
        rows = copied(buffers.idx_mapping, num_reqs)
    return StepInputs(
        step=scheduled.step,
        runner=runner.name,
        req_ids=ids,
        rows=rows,
        num_scheduled=scheduled.num_scheduled_tokens[order],
        num_drafts=scheduled.num_draft_tokens[order],
        input_ids=copied(buffers.input_ids, num_tokens),
        positions=copied(buffers.positions, num_tokens),
        query_start_loc=copied(buffers.query_start_loc, num_reqs + 1),
        seq_lens=copied(buffers.seq_lens, num_reqs),
        slots=[copied(mapping, num_tokens) for mapping in buffers.slot_mappings],
    )
