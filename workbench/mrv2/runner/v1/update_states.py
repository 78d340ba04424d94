"""Bring the cached requests and the persistent batch in line with what the scheduler decided.

Plain Python loops over requests, as in the original: their cost grows with the batch.
"""

from __future__ import annotations

from mrv2.device import Stream
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch


def update_states(
    requests: dict[str, CachedRequestState],
    batch: InputBatch,
    scheduled: SchedulerOutput,
    num_scheduled: dict[str, int],
    stream: Stream,
) -> None:
    """Leave the batch dense, decodes first, holding exactly the scheduled requests.

    `num_scheduled` maps each scheduled id to its tokens in this step.
    """
    for req_id in scheduled.freed_req_ids:
        del requests[req_id]
        batch.remove_request(req_id)
    # a request that sits this step out loses its row; its cached state remembers everything
    for req_id in [held for held in batch.req_id_to_index if held not in num_scheduled]:
        batch.remove_request(req_id)

    to_add: list[CachedRequestState] = []
    for new in scheduled.new_requests:
        state = requests[new.req_id] = CachedRequestState.of(new)
        to_add.append(state)
    arriving = {state.req_id for state in to_add}
    for req_id, num_computed in zip(scheduled.req_ids, scheduled.num_computed_tokens.tolist(), strict=True):
        if req_id in arriving:
            continue
        state = requests[req_id]
        state.num_computed_tokens = num_computed
        new_block_ids = scheduled.new_block_ids.get(req_id)
        if new_block_ids is not None:
            for blocks, new_blocks in zip(state.block_ids, new_block_ids, strict=True):
                blocks.extend(new_blocks)
        row = batch.req_id_to_index.get(req_id)
        if row is None:
            to_add.append(state)
            continue
        batch.num_computed_tokens.np[row] = num_computed
        if new_block_ids is not None:
            batch.block_table.append_row(row, new_block_ids)
    for state in to_add:
        batch.add_request(state)
    batch.condense()
    batch.reorder(num_scheduled)
    batch.refresh_metadata(stream)
