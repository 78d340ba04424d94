"""Five ways to draw: the same tokens, or the same distribution; never anything but logits, seed and position."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.test_gumbel_stats import chi_square_z
from mrv2.config import legal_values
from mrv2.runner.v2.variants import DrawPlan, draw
from mrv2_kernels.sampling import gumbel_blocked, gumbel_fused, gumbel_truncated, gumbel_wide, noise
from mrv2_kernels.sampling.gumbel_blocked import gumbel_blocked_sample
from mrv2_kernels.sampling.gumbel_fused import gumbel_fused_sample, gumbel_fused_sample_triton
from mrv2_kernels.sampling.launches import (
    BLOCKED,
    FUSED,
    TRUNCATED,
    BlockedLaunch,
    FusedLaunch,
    TruncatedLaunch,
    launch_of,
)
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.sampling.workspace import DrawWorkspace

INF = float("inf")
NAN = float("nan")
VARIANTS = legal_values("sampler")
SAME_TOKENS = ["gumbel_fused", "gumbel_two_pass", "softmax_race"]
SEEDS = torch.tensor([1, -2, 3**39, 2**62, 5, 17, 2**40])
# row of the request state: greedy, plain, top-k, top-p, min-p, all, top-k beyond the vocabulary
TEMPERATURE = torch.tensor([0.0, 1.0, 0.6, 1.7, 0.9, 1.1, 1.0])
TRUNCATION = Truncation(
    min_p=torch.tensor([0.2, 0.0, 0.0, 0.0, 0.1, 0.01, 0.0]),
    top_k=torch.tensor([3, 0, 5, 0, 0, 20, 9999], dtype=torch.int32),
    top_p=torch.tensor([0.5, 1.0, 1.0, 0.9, 1.0, 0.8, 1.0]),
)
NUM_SLOTS = len(SEEDS)


# one launch, in which the last arriver draws; two, with blocks beyond the row's end in a program's share, and a third
# for rows left over; few warps, and no row is left over
LAUNCHES = {
    "one": (FusedLaunch(block=64, step=32), BlockedLaunch(), TruncatedLaunch(repeats=2, collect=64)),
    "two": (
        FusedLaunch(block=32, step=32, span=3, is_split=True),
        BlockedLaunch(span=3, pick_warps=4),
        TruncatedLaunch(repeats=2, collect=64, is_split=True),
    ),
    "few": (
        FusedLaunch(block=16, step=8, span=5),
        BlockedLaunch(span=2, pick_warps=1),
        TruncatedLaunch(repeats=3, collect=128, is_split=True, draw_warps=1, draws_wide=True),
    ),
}


@pytest.fixture(params=LAUNCHES.values(), ids=LAUNCHES)
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Many blocks, chunks and groups in a row of a few hundred tokens, and little room for candidates."""
    for module, sizes in (
        (gumbel_fused, {"_TAKEN_ROWS": 4, "FUSED": ((1, request.param[0]),)}),
        (gumbel_blocked, {"_BLOCK": 64, "_NUM_WARPS": 2, "BLOCKED": ((1, request.param[1]),)}),
        (gumbel_truncated, {"_LANES": 8, "_HOT": 16, "_FEW": 32, "TRUNCATED": ((1, request.param[2]),)}),
        (gumbel_wide, {"_BLOCK": 64, "_FEW": 32}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def make_logits(
    kind: str, num_rows: int, vocab: int, dtype: torch.dtype, *, width: int | None = None, begin: int = 0
) -> torch.Tensor:
    """Return a [num_rows, vocab] view, from `begin` on, of a wider buffer; the padding is NaN."""
    generator = torch.Generator().manual_seed(num_rows * vocab)
    logits = 2 * torch.randn(num_rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = logits / 100
    elif kind == "masked":
        logits = logits.masked_fill(torch.rand(num_rows, vocab, generator=generator) < 0.95, -INF)
        logits[:, vocab // 2] = 1.0
    buffer = torch.full((num_rows, width or vocab + 3), NAN, dtype=dtype)
    view = buffer[:, begin : begin + vocab]
    view.copy_(logits)
    return view


def drawn(
    variant: str, logits: torch.Tensor, slots: list[int], *, truncated: bool = True, first_position: int = 0
) -> list[int]:
    """Return the tokens that a variant draws for rows of the request state given by `slots`."""
    num_rows = logits.shape[0]
    sampled = torch.full((num_rows,), -9)
    before = logits.clone()
    draw(
        DrawPlan(variant, is_truncated=truncated),
        logits,
        sampled,
        torch.tensor(slots, dtype=torch.int32),
        torch.arange(first_position, first_position + num_rows, dtype=torch.int32),
        TEMPERATURE,
        SEEDS,
        truncation=TRUNCATION if truncated else None,
        workspace=DrawWorkspace.make(num_rows, "cpu"),
    )
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return sampled.tolist()


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_three_variants_draw_the_same_tokens(dtype, kind, truncated):
    slots = [row % NUM_SLOTS for row in range(28)]
    logits = make_logits(kind, 28, 1003, dtype)
    tokens = drawn(SAME_TOKENS[0], logits, slots, truncated=truncated)
    for variant in SAME_TOKENS[1:]:
        assert drawn(variant, logits, slots, truncated=truncated) == tokens, variant


def both_twins(op, logits: torch.Tensor, slots: list[int], truncation: Truncation | None) -> list[list[int]]:
    num_rows = logits.shape[0]
    results = []
    for twin in ("triton", "torch"):
        sampled, workspace = torch.full((num_rows,), -9), DrawWorkspace.make(num_rows, "cpu")
        getattr(op, twin)(
            logits,
            sampled,
            torch.tensor(slots, dtype=torch.int32),
            torch.arange(num_rows, dtype=torch.int32),
            TEMPERATURE,
            SEEDS,
            workspace=workspace,
            truncation=truncation,
        )
        assert not workspace.best.any() and not workspace.arrived.any(), "the workspace must be left zero"
        results.append(sampled.tolist())
    return results


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 203), (torch.bfloat16, 128)])
@pytest.mark.usefixtures("small_blocks")
def test_the_fused_kernels_draw_what_the_reference_draws(dtype, vocab, kind):
    logits = make_logits(kind, NUM_SLOTS, vocab, dtype)
    for truncation in (None, TRUNCATION):
        kernel, reference = both_twins(gumbel_fused_sample, logits, list(range(NUM_SLOTS)), truncation)
        assert kernel == reference


# (vocabulary, width, first column) of logits; pairs of bfloat16, 16 bytes a lane, and one entry after another
LAYOUTS = {
    "pairs": (208, 224, 0),
    "aligned": (203, 208, 0),
    "odd rows": (203, 203, 0),
    "even rows": (202, 204, 0),
    "odd start": (192, 208, 1),
    "later start": (192, 208, 8),
}


def blocked_logits(kind: str, num_rows: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    vocab, width, begin = LAYOUTS[layout]
    return make_logits(kind, num_rows, vocab, dtype, width=width, begin=begin)


@pytest.mark.parametrize("small_blocks", [LAUNCHES["two"]], indirect=True, ids=["two"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "random"), (torch.float16, "masked"), (torch.bfloat16, "random")]
)
@pytest.mark.usefixtures("small_blocks")
def test_the_blocked_kernel_draws_what_its_reference_draws(dtype, layout, kind):
    logits = blocked_logits(kind, NUM_SLOTS, dtype, layout)
    for truncation in (None, TRUNCATION):
        kernel, reference = both_twins(gumbel_blocked_sample, logits, list(range(NUM_SLOTS)), truncation)
        assert kernel == reference


def test_lanes_read_sixteen_bytes_wherever_all_rows_allow_it():
    """How a block lies over lanes hangs on the tensor's layout, never on its number of rows."""
    expected = {
        torch.float32: {"pairs": (4, False), "aligned": (4, False), "later start": (4, False)},
        torch.float16: {"pairs": (8, False), "aligned": (8, False), "later start": (8, False)},
        torch.bfloat16: {"pairs": (4, True), "aligned": (8, False), "later start": (4, True)},
    }
    for dtype, wide in expected.items():
        for layout in LAYOUTS:
            for num_rows in (1, 7):
                tile = gumbel_blocked._tile(blocked_logits("random", num_rows, dtype, layout))
                assert (tile["INNER"], tile["IN_PAIRS"]) == wide.get(layout, (1, False)), (dtype, layout)
                # a lane's share of a block is whole
                assert 1024 // (2 if tile["IN_PAIRS"] else 1) % (tile["LANES"] * tile["INNER"]) == 0
                assert tile["LANES"] == 32


@pytest.mark.parametrize("layout", ["pairs", "odd rows"])
def test_launches_are_no_part_of_a_blocked_draw(layout, monkeypatch):
    """Any share of blocks a warp and any number of warps, those of every batch among them: the same tokens."""
    monkeypatch.setattr(gumbel_blocked, "_BLOCK", 16)
    logits, slots = blocked_logits("random", 5, torch.bfloat16, layout), [1, 0, 3, 4, 1]
    forms = [(launch, gumbel_blocked._NUM_WARPS) for _, launch in BLOCKED]
    forms += [(BlockedLaunch(1), 1), (BlockedLaunch(2), 2), (BlockedLaunch(3), 4), (BlockedLaunch(5, pick_warps=2), 1)]
    for launch, warps in forms:
        monkeypatch.setattr(gumbel_blocked, "_NUM_WARPS", warps)
        monkeypatch.setattr(gumbel_blocked, "BLOCKED", ((1, launch),))
        kernel, reference = both_twins(gumbel_blocked_sample, logits, slots, None)
        assert kernel == reference, (launch, warps)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shift", [-400.0, -90.0, 90.0, 400.0])
def test_masses_of_blocks_neither_overflow_nor_vanish(shift):
    """A draw does not hang on a constant that is added to all logits, however far ``exp`` of it is from float32."""
    logits = (make_logits("random", 7, 203, torch.float32) * 8).round() / 8
    kernel, reference = both_twins(gumbel_blocked_sample, logits + shift, [1] * 7, None)
    assert kernel == reference == both_twins(gumbel_blocked_sample, logits, [1] * 7, None)[0]


@pytest.mark.usefixtures("small_blocks")
def test_best_logits_side_by_side_are_no_wide_nucleus(monkeypatch):
    """The k-th largest maximum of a span lies far below the k-th logit where few spans hold the best: groups decide."""
    monkeypatch.setattr(gumbel_truncated, "draw_wide_rows", lambda *args, **kwargs: None)
    launch = TruncatedLaunch(repeats=1, collect=64, is_split=gumbel_truncated.TRUNCATED[0][1].is_split, draw_warps=1)
    for name, size in {"_LANES": 32, "TRUNCATED": ((1, launch),), "_HOT": 64, "_FEW": 64}.items():
        monkeypatch.setattr(gumbel_truncated, name, size)
    # 128 of 1,026 groups, and 8 of 66 spans
    logits = make_logits("random", 3, 8203, torch.float32)
    logits[:, 1024:2048] += 20.0
    truncation = Truncation(torch.zeros(7), torch.full((7,), 20, dtype=torch.int32), torch.ones(7))
    kernel, reference = both_twins(gumbel_fused_sample, logits, [1, 2, 3], truncation)
    assert kernel == reference


@pytest.mark.usefixtures("small_blocks")
def test_only_rows_with_many_candidates_are_left_over(monkeypatch):
    """Without the second launch a nucleus of hundreds keeps its mark, -2; nothing else does."""
    monkeypatch.setattr(gumbel_truncated, "draw_wide_rows", lambda *args, **kwargs: None)
    launch = TruncatedLaunch(repeats=1, collect=64, is_split=gumbel_truncated.TRUNCATED[0][1].is_split)
    for name, size in {"_LANES": 32, "TRUNCATED": ((1, launch),), "_HOT": 64, "_FEW": 64}.items():
        monkeypatch.setattr(gumbel_truncated, name, size)
    logits = make_logits("random", 5, 1203, torch.float32) * 5
    logits[4] = 0.0
    kernel, reference = both_twins(gumbel_fused_sample, logits, [2, 3, 4, 5, 3], TRUNCATION)
    assert kernel[:4] == reference[:4]
    assert kernel[4] == -2


def test_rivals_within_the_looseness_of_a_bound_are_scored(monkeypatch):
    """Rows in which the token of the best bound is not that of the best score."""
    monkeypatch.setattr(gumbel_fused, "FUSED", ((1, FusedLaunch(block=256, step=64)),))
    positions, vocab = torch.arange(2000, dtype=torch.int32), 256
    logits = 2 * torch.randn(2000, vocab, generator=torch.Generator().manual_seed(0))
    seeds = SEEDS[1].expand(2000)
    bits = noise._hash_torch(seeds, positions, torch.arange(vocab, dtype=torch.int32), 0).to(torch.int64) & 0xFFFFFFFF
    bound = logits * (2**23 / math.log(2)) - bits.to(torch.float32).view(torch.int32).to(torch.float32)
    best = (logits + noise.gumbel_noise_torch(seeds, positions, vocab)).argmax(dim=1)
    hard = (bound.argmax(dim=1) != best).nonzero().squeeze(1)[:8]
    assert len(hard) == 8
    sampled, workspace = torch.full((8,), -9), DrawWorkspace.make(8, "cpu")
    slots = torch.ones(8, dtype=torch.int32)
    where = (logits[hard], sampled, slots, positions[hard], TEMPERATURE, SEEDS)
    gumbel_fused_sample_triton(*where, workspace=workspace)
    assert sampled.tolist() == best[hard].tolist()


@pytest.mark.parametrize("table", [FUSED, BLOCKED, TRUNCATED])
def test_a_batch_takes_the_first_launch_that_it_fits(table):
    sizes = [most for most, _ in table]
    assert sizes == sorted(set(sizes))
    for index, (most, launch) in enumerate(table):
        assert launch_of(table, most) is launch
        least = table[index - 1][0] + 1 if index else 0
        assert launch_of(table, least) is launch
    assert launch_of(table, sizes[-1] + 1) is table[-1][1]


@pytest.mark.usefixtures("small_blocks")
def test_a_batch_of_truncated_rows_alone_needs_no_second_kernel(monkeypatch):
    monkeypatch.setattr(gumbel_fused, "_fused_kernel", None)
    logits = make_logits("random", 3, 203, torch.float32)
    kernel, reference = both_twins(gumbel_fused_sample, logits, [2, 4, 5], TRUNCATION._replace(all_rows=True))
    assert kernel == reference


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("op", [gumbel_fused_sample, gumbel_blocked_sample])
def test_kernels_say_which_rows_cannot_be_sampled(op):
    for slots in ([0] * 5, [1] * 5, [3] * 5):
        logits = torch.zeros(5, 110)
        logits[0, 100] = NAN
        logits[1] = -INF
        logits[2] = -INF
        logits[2, 101] = -3.0
        logits[3, [8, 77]] = INF
        kernel, reference = both_twins(op, logits, slots, TRUNCATION)
        assert kernel[:4] == reference[:4] == [-1, -1, 101, 8]
        assert 0 <= kernel[4] < 110


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("op", "dtype", "layout"),
    [
        (gumbel_fused_sample, torch.float32, "even rows"),
        (gumbel_fused_sample, torch.bfloat16, "odd rows"),
        (gumbel_blocked_sample, torch.float32, "odd rows"),
        (gumbel_blocked_sample, torch.bfloat16, "odd rows"),
        (gumbel_blocked_sample, torch.bfloat16, "pairs"),
    ],
)
def test_greedy_rows_take_the_lowest_id_of_the_maximum_wherever_it_lies(op, dtype, layout):
    """Ties within a block, across blocks and across programs; NaN wins from any place, beyond the vocabulary none."""
    generator = torch.Generator().manual_seed(8)
    logits = blocked_logits("ties", 40, dtype, layout)
    vocab = logits.shape[1]
    logits[8:20] = logits[8:20].clamp(max=1.0)
    logits[20:28] = -INF
    logits[20:28].scatter_(1, torch.randint(vocab, (8, 2), generator=generator), -7.0)
    logits[27, : vocab - 5] = -INF
    logits[27, vocab - 5 :] = -7.0
    logits[28:34, 31] = INF
    expected = [row.index(max(row)) for row in logits.tolist()]
    logits[34:40].scatter_(1, torch.randint(vocab, (6, 1), generator=generator), NAN)
    expected[34:40] = [-1] * 6
    assert len({token // 64 for token in expected}) > 3
    for truncation in (None, TRUNCATION):
        kernel, reference = both_twins(op, logits, [0] * 40, truncation)
        assert kernel == reference == expected


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", [1e-30, 1e8, 3e31, 1e38])
def test_extreme_logits_are_compared_exactly(scale):
    """Bounds that overflow, or that cannot tell scores apart, must not decide."""
    for sign in (1, -1):
        logits = sign * scale * make_logits("random", 6, 150, torch.float32)
        for op in (gumbel_fused_sample, gumbel_blocked_sample):
            kernel, reference = both_twins(op, logits, [0, 1, 2, 3, 4, 5], None)
            assert kernel == reference


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_lowest_finite_logit_are_drawn(dtype):
    """A mask of that number is finite: its multiples are not."""
    logits = torch.full((4, 208), torch.finfo(dtype).min, dtype=dtype)
    logits[1, 150] = -1e38
    kernel, reference = both_twins(gumbel_blocked_sample, logits, [1, 1, 0, 1], None)
    assert kernel == reference == [0, 150, 0, 0]


@pytest.mark.parametrize("small_blocks", [LAUNCHES["two"]], indirect=True, ids=["two"])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, "odd rows"),
        (torch.float16, "aligned"),
        (torch.bfloat16, "aligned"),
        (torch.bfloat16, "pairs"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_nan_anywhere_in_a_random_row_is_seen(dtype, layout):
    """Every place of a lane, a pair and a warp; and -inf everywhere but there is no NaN."""
    vocab = LAYOUTS[layout][0]
    places = [0, 1, 6, 7, 8, 63, 64, 127, 128, 191, vocab - 2, vocab - 1]
    for slots in ([1] * len(places), [0] * len(places)):
        logits = blocked_logits("random", len(places), dtype, layout)
        logits[torch.arange(len(places)), places] = NAN
        assert both_twins(gumbel_blocked_sample, logits, slots, None)[0] == [-1] * len(places)
        logits.fill_(-INF)
        assert both_twins(gumbel_blocked_sample, logits, slots, None)[0] == [-1] * len(places)
        logits[torch.arange(len(places)), places] = -3.0
        assert both_twins(gumbel_blocked_sample, logits, slots, None)[0] == places


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_cannot_be_sampled_give_minus_one(variant):
    for slot in range(NUM_SLOTS):
        logits = torch.zeros(4, 2500)
        logits[0, 2400] = NAN
        logits[1] = -INF
        logits[2] = -INF
        logits[2, 2301] = -3.0
        tokens = drawn(variant, logits, [slot] * 4)
        assert tokens[:3] == [-1, -1, 2301]
        assert 0 <= tokens[3] < 2500


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ties_go_to_the_lowest_id(variant):
    logits = torch.zeros(3, 9000)
    logits[1, [8000, 4100, 4700]] = 1.0
    logits[2, [8999, 17]] = 2.0
    assert drawn(variant, logits, [0, 0, 0]) == [0, 4100, 17]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_draw_depends_on_its_own_row_alone(variant):
    logits = make_logits("random", 21, 700, torch.float32)
    slots = [(5 * row + 1) % NUM_SLOTS for row in range(21)]
    batch = drawn(variant, logits, slots)
    for row in range(21):
        assert drawn(variant, logits[row : row + 1], slots[row : row + 1], first_position=row) == [batch[row]]


def kept_probs(logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """Return the distribution by definition. [V] float64"""
    probs = (logits.double() / temperature).softmax(0)
    ranked = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    kept = [i for i in ranked if probs[i] >= min_p * probs.max()][: top_k or None]
    mass = torch.tensor([float(probs[i]) for i in kept])
    before = mass.cumsum(0) - mass
    nucleus = [i for i, b in zip(kept, before.tolist(), strict=True) if b < top_p * mass.sum()]
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


LIMITS = {
    "plain": (0.0, 0, 1.0),
    "top_k": (0.0, 9, 1.0),
    "top_p": (0.0, 0, 0.85),
    "min_p": (0.05, 0, 1.0),
    "all": (0.01, 30, 0.95),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_follow_the_distribution(variant, limits, monkeypatch):
    monkeypatch.setattr(gumbel_blocked, "_BLOCK", 16)
    num_draws, vocab, temperature = 20_000, 61, 0.8
    min_p, top_k, top_p = LIMITS[limits]
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    steps = torch.arange(num_draws, dtype=torch.int32)
    sampled = torch.empty(num_draws, dtype=torch.int64)
    draw(
        DrawPlan(variant, is_truncated=limits != "plain"),
        logits.expand(num_draws, -1),
        sampled,
        torch.zeros(num_draws, dtype=torch.int32),
        steps,
        torch.tensor([temperature]),
        torch.tensor([2024]),
        truncation=None
        if limits == "plain"
        else Truncation(torch.tensor([min_p]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p])),
        workspace=DrawWorkspace.make(num_draws, "cpu"),
    )
    probs = kept_probs(logits, temperature, min_p, top_k, top_p)
    counts = sampled.bincount(minlength=vocab)
    assert not counts[probs == 0].any(), "a token was drawn that is left out"
    assert abs(chi_square_z(counts, probs)) < 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_rare_tokens_win_as_often_as_they_should(variant):
    """30,000 tokens of probability 5e-6 each beside a sure one; their draws spread over the vocabulary."""
    num_draws, vocab, gap = 300, 30_001, 12.0
    logits = torch.full((vocab,), -gap)
    logits[77] = 0.0
    sampled = torch.empty(num_draws, dtype=torch.int64)
    draw(
        DrawPlan(variant, is_truncated=False),
        logits.expand(num_draws, -1),
        sampled,
        torch.zeros(num_draws, dtype=torch.int32),
        torch.arange(num_draws, dtype=torch.int32),
        torch.tensor([1.0]),
        torch.tensor([11]),
        truncation=None,
        workspace=DrawWorkspace.make(num_draws, "cpu"),
    )
    tail = sampled[sampled != 77]
    share = (vocab - 1) * 2.718281828**-gap
    expected = num_draws * share / (1 + share)
    assert abs(len(tail) - expected) < 4 * expected**0.5
    # mean of uniform ids
    assert abs(float(tail.double().mean()) / vocab - 0.5) < 4 * (1 / 12 / len(tail)) ** 0.5
