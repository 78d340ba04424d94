"""State and input kernels on a GPU: equal to the reference, also far into large tables and in a graph."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.inputs.post_update import count_sampled_and_rejected, post_update
from mrv2_kernels.inputs.prepare import prepare_pos_seq_lens, prepare_prefill_inputs
from mrv2_kernels.state.block_table import compute_slot_mapping, gather_block_tables
from mrv2_kernels.state.staged_write import apply_staged_writes

pytestmark = pytest.mark.gpu

NUM_ROWS, MAX_LEN, BLOCK_SIZE = 300, 4096, 16


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_state(num_drafts: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    prefill_len = torch.randint(1, 3000, (NUM_ROWS,), generator=g, dtype=torch.int32)
    state = {
        "token_ids": torch.randint(0, 150_000, (NUM_ROWS, MAX_LEN), generator=g, dtype=torch.int32),
        "prefill_len": prefill_len,
        "total_len": prefill_len + 40,
        "num_computed_tokens": torch.randint(0, 3000, (NUM_ROWS,), generator=g, dtype=torch.int32),
        "last_sampled_tokens": torch.randint(0, 150_000, (NUM_ROWS,), generator=g),
        "draft_tokens": torch.randint(0, 150_000, (NUM_ROWS, num_drafts), generator=g),
        "block_tables": torch.randint(1, 10**6, (NUM_ROWS, MAX_LEN // BLOCK_SIZE), generator=g, dtype=torch.int32),
        "num_blocks": torch.randint(0, MAX_LEN // BLOCK_SIZE + 1, (NUM_ROWS,), generator=g, dtype=torch.int32),
    }
    return {name: tensor.cuda() for name, tensor in state.items()}


def run_step(twin: str, num_reqs: int, num_drafts: int, padding: int, seed: int) -> list[torch.Tensor]:
    """Run every state and input kernel once; return all that they wrote."""
    s = make_state(num_drafts, seed)
    g = torch.Generator().manual_seed(seed + 1)
    idx_mapping = torch.randperm(NUM_ROWS, generator=g)[:num_reqs].to(torch.int32).cuda()
    query_lens = torch.randint(1, 40, (num_reqs,), generator=g)
    query_lens[: num_reqs // 4] = 1200
    num_logits = torch.minimum(torch.randint(1, num_drafts + 2, (num_reqs,), generator=g), query_lens)
    query_start_loc = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).to(torch.int32).cuda()
    cu_num_logits = torch.cat([torch.zeros(1), num_logits.cumsum(0)]).to(torch.int32).cuda()
    num_tokens, num_logit_rows = int(query_lens.sum()), int(num_logits.sum())
    max_query_len = int(query_lens.max()) if num_reqs else 0

    def filled(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32, device="cuda")

    tables = filled(num_reqs + padding, MAX_LEN // BLOCK_SIZE)
    slot_mapping, positions, input_ids = filled(3, num_tokens + padding)
    seq_lens, num_rejected = filled(2, num_reqs + padding)
    logits_indices = filled(num_logit_rows + padding)
    sampled = torch.randint(-1, 150_000, (num_reqs, num_drafts + 1), generator=g).cuda()
    num_sampled = torch.minimum(torch.randint(1, num_drafts + 2, (num_reqs,), generator=g), num_logits)
    num_sampled = num_sampled.to(torch.int32).cuda()
    state = (s["prefill_len"], s["num_computed_tokens"])
    batch = (idx_mapping, query_start_loc)

    def call(op, *args, **kwargs) -> None:
        getattr(op, twin)(*args, **kwargs)

    call(gather_block_tables, tables, s["block_tables"], s["num_blocks"], idx_mapping)
    call(prepare_prefill_inputs, input_ids, *batch, s["token_ids"], *state, max_query_len=max_query_len)
    call(prepare_pos_seq_lens, positions, seq_lens, *batch, state[1], max_query_len=max_query_len)
    call(compute_slot_mapping, slot_mapping, s["block_tables"], *batch, positions, block_size=BLOCK_SIZE)
    combined = (s["prefill_len"], s["last_sampled_tokens"], s["draft_tokens"], cu_num_logits)
    call(combine_sampled_and_draft_tokens, input_ids, logits_indices, *batch, seq_lens, *combined)
    counted = (idx_mapping, seq_lens, s["prefill_len"], cu_num_logits)
    call(count_sampled_and_rejected, num_sampled, num_rejected, *counted)
    committed = (s["num_computed_tokens"], s["total_len"], s["last_sampled_tokens"], s["token_ids"])
    call(post_update, *committed, *batch, sampled, num_sampled, num_rejected)
    written = [tables, slot_mapping, positions, input_ids, seq_lens, num_rejected, logits_indices, num_sampled]
    return [*written, *committed]


@pytest.mark.parametrize("num_reqs", [0, 1, 7, 256])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_whole_step_equals_the_reference(num_reqs, num_drafts):
    seed = 10 * num_reqs + num_drafts
    by_triton = run_step("triton", num_reqs, num_drafts, 5, seed)
    by_torch = run_step("torch", num_reqs, num_drafts, 5, seed)
    for index, (mine, reference) in enumerate(zip(by_triton, by_torch, strict=True)):
        assert torch.equal(mine, reference), f"output {index}"


def test_staged_writes_equal_the_reference():
    g = torch.Generator().manual_seed(0)
    lens = torch.randint(0, 3000, (200,), generator=g)
    rows = torch.randperm(NUM_ROWS, generator=g)[:200].to(torch.int32).cuda()
    starts = torch.randint(0, MAX_LEN, (200,), generator=g, dtype=torch.int32).cuda()
    cu_lens = torch.cat([torch.zeros(1), lens.cumsum(0)]).to(torch.int32).cuda()
    contents = torch.randint(0, 10**6, (int(lens.sum()),), generator=g, dtype=torch.int32).cuda()
    tables = [torch.zeros(NUM_ROWS, MAX_LEN, dtype=torch.int32, device="cuda") for _ in range(2)]
    apply_staged_writes.triton(tables[0], rows, starts, cu_lens, contents, max_len=int(lens.max()))
    apply_staged_writes.torch(tables[1], rows, starts, cu_lens, contents, max_len=int(lens.max()))
    assert torch.equal(*tables)


def test_rows_beyond_two_to_the_31_elements():
    """Row 2 of the table starts 2^31 elements into its storage."""
    table = torch.empty((1 << 31) + 64, dtype=torch.int32, device="cuda").as_strided((3, 64), (1 << 30, 1))
    table.fill_(0)
    apply_staged_writes(table, int32([2]), int32([4]), int32([0, 3]), int32([11, 12, 13]), max_len=3)
    assert table[2, 3:8].tolist() == [0, 11, 12, 13, 0]

    input_ids = int32([0, 0])
    batch = (int32([2]), int32([0, 2]))
    prepare_prefill_inputs(input_ids, *batch, table, int32([9, 9, 9]), int32([0, 0, 5]), max_query_len=2)
    assert input_ids.tolist() == [12, 13]

    last = torch.zeros(3, dtype=torch.int64, device="cuda")
    sampled = torch.tensor([[77]], device="cuda")
    post_update(int32([0, 0, 5]), int32([0, 0, 7]), last, table, *batch, sampled, int32([1]), int32([0]))
    assert table[2, 4:9].tolist() == [11, 12, 13, 77, 0]

    gathered, slots = torch.empty(1, 64, dtype=torch.int32, device="cuda"), int32([0, 0])
    gather_block_tables(gathered, table, int32([0, 0, 6]), int32([2]))
    assert gathered[0, 3:8].tolist() == [0, 11, 12, 0, 0]
    compute_slot_mapping(slots, table, *batch, int32([64, 81]), block_size=16)
    assert slots.tolist() == [11 * 16, 12 * 16 + 1]


def test_input_kernels_can_be_captured_in_a_graph():
    num_computed, positions, seq_lens = int32([5, 6]), int32([0] * 4), int32([0] * 3)
    batch = (int32([1, 0]), int32([0, 1, 2]))

    def step() -> None:
        prepare_pos_seq_lens(positions, seq_lens, *batch, num_computed, max_query_len=1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    num_computed.copy_(int32([50, 60]))
    graph.replay()
    assert positions.tolist() == [60, 50, 0, 0]
    assert seq_lens.tolist() == [61, 51, 0]
