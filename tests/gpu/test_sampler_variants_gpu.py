"""Sampler variants on a GPU: the same tokens or the same distribution at real vocabularies, and what they launch."""

from __future__ import annotations

import pytest
import torch

from mrv2.config import legal_values
from mrv2.runner.v2.variants import DrawPlan, draw
from mrv2_kernels.sampling import gumbel_truncated
from mrv2_kernels.sampling.noise import gumbel_noise_torch
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.sampling.workspace import DrawWorkspace

pytestmark = pytest.mark.gpu

INF = float("inf")
VOCABS = [49152, 151936, 151937]
VARIANTS = legal_values("sampler")
SAME_TOKENS = ["gumbel_fused", "gumbel_two_pass", "softmax_race"]
# rows of the request state: greedy, plain, cold, hot, top-k, top-p, min-p, both, all, wide nucleus, wide top-k, top-k 1
TEMPERATURES = [0.0, 1.0, 0.3, 2.0, 0.7, 1.0, 0.9, 0.8, 1.1, 2.5, 1.0, 1.0]
MIN_P = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.01, 0.0, 0.0, 0.0]
TOP_K = [5, 0, 0, 0, 50, 0, 0, 50, 100, 0, 3000, 1]
TOP_P = [0.5, 1.0, 1.0, 1.0, 1.0, 0.9, 1.0, 0.9, 0.95, 0.95, 0.99, 1.0]
NUM_SLOTS = len(TEMPERATURES)


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def make_logits(num_rows: int, vocab: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    """Return [num_rows, vocab] logits in a padded buffer (padding NaN)."""
    generator = torch.Generator("cuda").manual_seed(vocab + num_rows)
    buffer = torch.full((num_rows, vocab + 64 - vocab % 64), float("nan"), dtype=dtype)
    buffer[:, :vocab] = scale * torch.randn(num_rows, vocab, generator=generator)
    return buffer[:, :vocab]


class Batch:
    """Rows of the request state and the arguments of a draw."""

    def __init__(self, num_rows: int, temperatures: list[float] | None = None) -> None:
        temperatures = temperatures or TEMPERATURES
        self.slots = torch.arange(num_rows, dtype=torch.int32) % len(temperatures)
        self.positions = torch.arange(num_rows, dtype=torch.int32)
        self.temperature = torch.tensor(temperatures)
        self.seeds = torch.arange(len(temperatures)) * 2**33 + 7
        self.truncation = Truncation(torch.tensor(MIN_P), torch.tensor(TOP_K, dtype=torch.int32), torch.tensor(TOP_P))
        self.workspace = DrawWorkspace.make(num_rows, "cuda")
        self.sampled = torch.full((num_rows,), -9)

    def draw(self, variant: str, logits: torch.Tensor, *, truncated: bool) -> torch.Tensor:
        self.sampled.fill_(-9)
        draw(
            DrawPlan(variant, is_truncated=truncated),
            logits,
            self.sampled,
            self.slots,
            self.positions,
            self.temperature,
            self.seeds,
            truncation=self.truncation if truncated else None,
            workspace=self.workspace,
        )
        return self.sampled.clone()

    def scores(self, logits: torch.Tensor, *, truncated: bool) -> torch.Tensor:
        """Return the float64 scores whose largest one is drawn."""
        is_random = (self.temperature[self.slots] != 0).unsqueeze(1)
        scores = logits.double() / torch.where(is_random, self.temperature[self.slots].double().unsqueeze(1), 1.0)
        if truncated:
            self.truncation.mask(scores, self.slots)
        noise = gumbel_noise_torch(self.seeds[self.slots], self.positions, logits.shape[1], torch.float64)
        return scores + noise * is_random


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_three_variants_draw_the_same_tokens(dtype, vocab, truncated):
    """Equal but for scores nearer than float32 can tell, and for tokens at the border of a nucleus."""
    logits, batch = make_logits(96, vocab, dtype), Batch(96)
    scores = batch.scores(logits, truncated=truncated)
    drawn = {variant: batch.draw(variant, logits, truncated=truncated) for variant in SAME_TOKENS}
    for variant, tokens in drawn.items():
        assert tokens.min() >= 0, variant
        gap = scores.amax(dim=1) - scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
        if truncated:
            # a token that the float64 reference leaves out by a rounding
            gap = gap.where(gap < INF, 0.0)
        assert gap.max() < 3e-5, variant
        assert (tokens != drawn["gumbel_fused"]).sum() <= (0 if dtype == torch.float64 else 1), variant


@pytest.mark.parametrize("num_rows", [1, 2, 31, 132, 512])
def test_any_number_of_rows(num_rows):
    logits, batch = make_logits(num_rows, 151_936, torch.bfloat16), Batch(num_rows)
    for truncated in (False, True):
        expected = batch.draw("gumbel_two_pass", logits, truncated=truncated)
        found = batch.draw("gumbel_fused", logits, truncated=truncated)
        assert (found != expected).sum() <= num_rows // 256
        assert not batch.workspace.best.any() and not batch.workspace.arrived.any()


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(
    ("variant", "dtype", "vocab"),
    [
        ("gumbel_fused", torch.bfloat16, 151_936),
        ("gumbel_blocked", torch.bfloat16, 151_936),
        ("gumbel_blocked", torch.bfloat16, 49_152),
        ("gumbel_blocked", torch.bfloat16, 151_937),
        ("gumbel_blocked", torch.float16, 151_936),
        ("gumbel_blocked", torch.float32, 151_936),
    ],
)
def test_a_row_is_drawn_alike_in_any_batch(variant, dtype, vocab, truncated):
    """Launches are chosen by the number of rows; they are no part of what is drawn."""
    logits = make_logits(300, vocab, dtype)
    drawn = [Batch(n).draw(variant, logits[:n], truncated=truncated) for n in (300, 256, 64, 32, 3, 1)]
    for tokens in drawn[1:]:
        assert torch.equal(tokens, drawn[0][: len(tokens)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_wide_row_is_drawn_alike_among_few_and_many(vocab, dtype):
    """Few are drawn by the programs that left them over, many by another launch."""
    logits, drawn = make_logits(96, vocab, dtype), []
    for num_rows in (96, 64, 16, 2, 1):
        batch = Batch(num_rows)
        batch.slots = 9 + torch.arange(num_rows, dtype=torch.int32) % 2
        drawn.append(batch.draw("gumbel_fused", logits[:num_rows], truncated=True).clone())
        assert (drawn[-1] >= 0).all()
        assert torch.equal(drawn[-1], drawn[0][:num_rows])


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_blocked_kernel_draws_what_its_reference_draws(dtype, vocab, is_padded):
    from mrv2_kernels.sampling.gumbel_blocked import gumbel_blocked_sample

    logits, batch = make_logits(96, vocab, dtype), Batch(96)
    if not is_padded:
        # rows of an odd vocabulary start anywhere
        logits = logits.contiguous()
    args = (batch.slots, batch.positions, batch.temperature, batch.seeds)
    results = []
    for twin in (gumbel_blocked_sample.triton, gumbel_blocked_sample.torch):
        sampled = torch.empty(96, dtype=torch.int64)
        twin(logits, sampled, *args, workspace=batch.workspace, truncation=batch.truncation)
        results.append(sampled)
    # sums in another order may tip a draw
    assert (results[0] != results[1]).sum() <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_cannot_be_sampled(variant):
    batch = Batch(4 * NUM_SLOTS)
    logits = make_logits(4 * NUM_SLOTS, 151_937, torch.bfloat16)
    kinds = torch.arange(4 * NUM_SLOTS) // NUM_SLOTS
    logits[kinds == 0, 150_001] = float("nan")
    logits[kinds == 1] = -INF
    logits[kinds == 2] = -INF
    logits[kinds == 2, 99_999] = -3.0
    for truncated in (False, True):
        tokens = batch.draw(variant, logits, truncated=truncated)
        assert (tokens[kinds <= 1] == -1).all()
        assert (tokens[kinds == 2] == 99_999).all()
        assert (tokens[kinds == 3] >= 0).all()
    assert not batch.workspace.best.any() and not batch.workspace.arrived.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ties_go_to_the_lowest_id(variant):
    logits = torch.zeros(2, 151_936, dtype=torch.bfloat16)
    logits[1, [8000, 151_000, 150_999]] = 1.0
    assert Batch(2, [0.0]).draw(variant, logits, truncated=False).tolist() == [0, 8000]


def test_a_peaked_row_needs_no_second_launch(monkeypatch):
    """Top-k 50 with top-p 0.9 is drawn by the first launch, whatever the number format."""
    monkeypatch.setattr(gumbel_truncated, "draw_wide_rows", lambda *args, **kwargs: None)
    for dtype in (torch.bfloat16, torch.float32):
        logits, batch = make_logits(96, 151_936, dtype), Batch(96)
        tokens = batch.draw("gumbel_fused", logits, truncated=True)
        narrow = torch.tensor([slot not in (5, 9, 10) for slot in batch.slots.tolist()])
        assert (tokens[narrow] >= 0).all()


LIMITS = {
    "plain": (0.0, 0, 1.0),
    "top_k": (0.0, 50, 1.0),
    "top_p": (0.0, 0, 0.9),
    "min_p": (0.02, 0, 1.0),
    "all": (0.001, 200, 0.95),
    "wide": (0.0, 5000, 0.99),
}
# the variants that make tensors of probabilities draw fewer times
NUM_DRAWS = {"gumbel_fused": 400_000, "gumbel_blocked": 400_000}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_follow_the_distribution(variant, limits):
    """Chi-square over bins of about equal mass, as a z-score; vocabulary 151,936, temperature 0.8."""
    vocab, chunk, num_bins = 151_936, 2000, 500
    min_p, top_k, top_p = LIMITS[limits]
    num_draws = NUM_DRAWS.get(variant, 40_000) if limits != "wide" else 20_000
    logits = 2 * torch.randn(vocab, generator=torch.Generator("cuda").manual_seed(0))
    truncation = Truncation(torch.tensor([min_p]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
    zeros = torch.zeros(1, dtype=torch.int32)
    kept = truncation.apply(logits.double().unsqueeze(0), zeros, torch.tensor([0.8]))
    probs = kept.softmax(1).squeeze(0)
    counts = torch.zeros(vocab, dtype=torch.int64)
    workspace, sampled = DrawWorkspace.make(chunk, "cuda"), torch.empty(chunk, dtype=torch.int64)
    for first in range(0, num_draws, chunk):
        draw(
            DrawPlan(variant, is_truncated=limits != "plain", has_greedy=False),
            logits.expand(chunk, -1),
            sampled,
            zeros.expand(chunk).contiguous(),
            torch.arange(first, first + chunk, dtype=torch.int32),
            torch.tensor([0.8]),
            torch.tensor([1234567]),
            truncation=None if limits == "plain" else truncation,
            workspace=workspace,
        )
        counts += sampled.bincount(minlength=vocab)
    # a token at the border of the nucleus may fall on the other side of it
    assert int(counts[probs == 0].sum()) <= 1e-3 * num_draws
    bins = ((probs.cumsum(0) - probs / 2) * num_bins).long().clamp(max=num_bins - 1)
    expected = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, probs) * num_draws
    observed = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, counts.double())
    used = expected > 5
    dof = int(used.sum()) - 1
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    assert abs(chi_square - dof) < 4.5 * (2 * dof) ** 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_rare_tail_tokens_win_as_often_as_they_should(variant):
    """One head logit and 262,144 logits 18 below it: each less likely than 2^-24, together one in 251."""
    vocab, chunk, gap = 262_145, 1000, 18.0
    num_draws = 100_000 if variant.startswith("gumbel") else 20_000
    logits = torch.full((vocab,), -gap)
    logits[77] = 0.0
    workspace, sampled = DrawWorkspace.make(chunk, "cuda"), torch.empty(chunk, dtype=torch.int64)
    num_rare = 0
    for first in range(0, num_draws, chunk):
        draw(
            DrawPlan(variant, has_greedy=False, is_scaled=False, is_truncated=False),
            logits.expand(chunk, -1),
            sampled,
            torch.zeros(chunk, dtype=torch.int32),
            torch.arange(first, first + chunk, dtype=torch.int32),
            torch.tensor([1.0]),
            torch.tensor([20]),
            truncation=None,
            workspace=workspace,
        )
        num_rare += int((sampled != 77).sum())
    expected = num_draws * 262_144 * 2.718281828**-gap
    assert abs(num_rare - expected) < 4 * expected**0.5


@pytest.mark.parametrize("variant", ["gumbel_fused", "gumbel_blocked", "gumbel_two_pass", "softmax_race"])
def test_a_captured_draw_replays(variant):
    """The workspace is left as it was found, so that a graph may be replayed any number of times."""
    logits, batch = make_logits(24, 49_152, torch.bfloat16), Batch(24)
    expected = batch.draw(variant, logits, truncated=True)

    def step() -> None:
        draw(
            DrawPlan(variant),
            logits,
            batch.sampled,
            batch.slots,
            batch.positions,
            batch.temperature,
            batch.seeds,
            truncation=batch.truncation,
            workspace=batch.workspace,
        )

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        batch.sampled.fill_(-9)
        graph.replay()
        assert torch.equal(batch.sampled, expected)
    batch.positions += 1000
    graph.replay()
    assert not torch.equal(batch.sampled, expected)


@pytest.mark.parametrize("variant", ["gumbel_fused", "gumbel_blocked"])
def test_offsets_beyond_two_to_the_31(variant):
    vocab = 50_001
    buffer = torch.empty((1 << 31) + vocab, dtype=torch.bfloat16)
    far = buffer.as_strided((3, vocab), (1 << 30, 1))
    far.copy_(3 * torch.randn(3, vocab, generator=torch.Generator("cuda").manual_seed(3)))
    batch = Batch(3)
    batch.slots += 4
    for truncated in (False, True):
        near = batch.draw(variant, far.contiguous(), truncated=truncated)
        assert torch.equal(batch.draw(variant, far, truncated=truncated), near)
