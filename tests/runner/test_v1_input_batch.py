"""The persistent batch of the V1 runner stays dense, and a row holds all of its request, wherever it moves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mrv2.device import Device, make_device
from mrv2.runner.protocol import RowSampling
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch

NUM_ROWS, LENGTH, NUM_BLOCKS = 6, 32, 4


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


@pytest.fixture
def batch(device: Device) -> InputBatch:
    # two KV cache groups
    tables = [device.zeros((NUM_ROWS, NUM_BLOCKS), torch.int32) for _ in range(2)]
    return InputBatch(device, max_num_seqs=NUM_ROWS, max_model_len=LENGTH, block_tables=tables)


def request(number: int, **sampling: float | int) -> CachedRequestState:
    """Return a request whose every field tells its number."""
    params: dict[str, float | int] = dict(
        temperature=float(number % 3), top_k=number % 2, top_p=1.0 - 0.1 * (number % 4), min_p=0.01 * (number % 5)
    )
    return CachedRequestState(
        req_id=f"r{number}",
        prompt_token_ids=[100 * number + i for i in range(1 + number % 7)],
        output_token_ids=[1000 * number + i for i in range(number % 5)],
        sampling=RowSampling(seed=2**63 + number, num_logprobs=number % 4 - 1, **(params | sampling)),  # type: ignore[arg-type]
        num_computed_tokens=number,
        block_ids=([10 + number] * (1 + number % 3), [50 + number] * (1 + number % 3)),
    )


def check_rows(batch: InputBatch, requests: dict[str, CachedRequestState]) -> None:
    """Every row holds exactly what its request's cached state says."""
    assert sorted(batch.ids) == sorted(requests)
    assert batch.req_ids == batch.ids, "rows [0, num_reqs) are dense"
    for row, req_id in enumerate(batch.ids):
        state, params = requests[req_id], requests[req_id].sampling
        assert batch.req_id_to_index[req_id] == row
        assert batch.num_tokens[row] == state.num_tokens
        assert batch.num_prompt_tokens[row] == state.num_prompt_tokens
        assert batch.num_computed_tokens.np[row] == state.num_computed_tokens
        tokens = batch.token_ids_cpu[row, : state.num_tokens].tolist()
        assert tokens == state.prompt_token_ids + state.output_token_ids
        for table, blocks in zip(batch.block_table.tables, state.block_ids, strict=True):
            assert table.buffer.np[row, : table.num_blocks[row]].tolist() == blocks
        for buffer, value in (
            (batch.temperature, params.temperature),
            (batch.top_p, params.top_p),
            (batch.top_k, params.top_k),
            (batch.min_p, params.min_p),
        ):
            assert buffer.np[row] == np.asarray(value, dtype=buffer.np.dtype)
        assert int(batch.seeds.np[row]) % 2**64 == params.seed
    for members, uses in (
        (batch.greedy_reqs, lambda p: p.temperature == 0),
        (batch.random_reqs, lambda p: p.temperature > 0),
        (batch.top_p_reqs, lambda p: p.top_p < 1),
        (batch.top_k_reqs, lambda p: p.top_k > 0),
        (batch.min_p_reqs, lambda p: p.min_p > 0),
    ):
        assert members == {req_id for req_id, state in requests.items() if uses(state.sampling)}
    assert batch.logprob_reqs == {req_id for req_id, s in requests.items() if s.sampling.num_logprobs >= 0}


def test_a_new_request_takes_the_lowest_hole_then_the_end(batch: InputBatch) -> None:
    for number in range(4):
        assert batch.add_request(request(number)) == number
    assert batch.remove_request("r2") == 2
    assert batch.remove_request("r0") == 0
    assert batch.remove_request("nobody") is None
    assert batch.add_request(request(7)) == 0
    assert batch.add_request(request(8)) == 2
    assert batch.add_request(request(9)) == 4
    check_rows(batch, {s.req_id: s for s in map(request, (1, 3, 7, 8, 9))})


@pytest.mark.parametrize(
    "removed, order",
    [
        ([0], ["r4", "r1", "r2", "r3"]),
        ([4], ["r0", "r1", "r2", "r3"]),
        ([3, 0], ["r4", "r1", "r2"]),
        ([2, 3, 4], ["r0", "r1"]),
        ([0, 1, 2, 3], ["r4"]),
        ([4, 3, 2, 1, 0], []),
    ],
)
def test_condense_moves_the_last_rows_into_the_lowest_holes(
    batch: InputBatch, removed: list[int], order: list[str]
) -> None:
    requests = {f"r{n}": request(n) for n in range(5)}
    for state in requests.values():
        batch.add_request(state)
    for number in removed:
        batch.remove_request(f"r{number}")
        del requests[f"r{number}"]
    batch.condense()
    assert batch.ids == order
    check_rows(batch, requests)


def test_swap_exchanges_everything(batch: InputBatch) -> None:
    requests = {f"r{n}": request(n) for n in (3, 4, 5)}
    for state in requests.values():
        batch.add_request(state)
    batch.swap_states(0, 2)
    assert batch.ids == ["r5", "r4", "r3"]
    check_rows(batch, requests)


def test_reorder_puts_decodes_first_with_one_swap_a_pair(batch: InputBatch) -> None:
    requests = {f"r{n}": request(n) for n in range(5)}
    for state in requests.values():
        batch.add_request(state)
    batch.reorder({"r0": 5, "r1": 1, "r2": 9, "r3": 1, "r4": 1})
    assert batch.ids == ["r3", "r1", "r4", "r0", "r2"]
    assert batch.num_moves == 2
    check_rows(batch, requests)
    batch.reorder({"r0": 5, "r1": 1, "r2": 9, "r3": 1, "r4": 1})
    assert batch.num_moves == 2, "an ordered batch is left alone"


def test_any_sequence_of_changes_keeps_rows_and_requests_together(batch: InputBatch) -> None:
    rng = np.random.default_rng(0)
    requests: dict[str, CachedRequestState] = {}
    for number in range(300):
        for req_id in [r for r in requests if rng.random() < 0.3]:
            batch.remove_request(req_id)
            del requests[req_id]
        while len(requests) < NUM_ROWS and rng.random() < 0.6:
            state = request(number * NUM_ROWS + len(requests))
            state.prompt_token_ids = state.prompt_token_ids[:4]
            requests[state.req_id] = state
            batch.add_request(state)
        batch.condense()
        batch.reorder({req_id: int(rng.integers(1, 3)) for req_id in requests})
        check_rows(batch, requests)
    batch.clear()
    check_rows(batch, {})


def test_metadata_is_rebuilt_when_the_batch_changes_and_only_then(device: Device, batch: InputBatch) -> None:
    main = device.main
    batch.add_request(request(0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0))
    batch.refresh_metadata(main)
    first = batch.sampling_metadata
    assert first.all_greedy and not first.all_random
    assert first.temperature is first.top_k is first.top_p is first.min_p is first.seeds is None
    batch.refresh_metadata(main)
    assert batch.sampling_metadata is first

    batch.add_request(request(1, temperature=0.5, top_k=0, top_p=0.9, min_p=0.0))
    batch.refresh_metadata(main)
    mixed = batch.sampling_metadata
    assert not mixed.all_greedy and not mixed.all_random and mixed.min_p is None
    assert mixed.temperature is not None and mixed.top_p is not None and mixed.top_k is not None
    device.synchronize("test")
    assert mixed.temperature.tolist() == [0.0, 0.5]
    assert mixed.top_p.tolist() == pytest.approx([1.0, 0.9])
    assert mixed.top_k.tolist() == [0, 0]

    batch.remove_request("r0")
    batch.condense()
    batch.refresh_metadata(main)
    assert batch.sampling_metadata.all_random


def test_a_request_cannot_have_two_rows_nor_a_row_beyond_the_last(batch: InputBatch) -> None:
    for number in range(NUM_ROWS):
        batch.add_request(request(number))
    with pytest.raises(AssertionError, match="no row for request r99"):
        batch.add_request(request(99))
    with pytest.raises(AssertionError, match="r1 is in the batch already"):
        batch.add_request(request(1))
