# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · The sampler
#
# **Goal.** You will draw tokens without a softmax, test with χ² that five ways of doing it follow the right distribution, and write
# a logits processor of your own that runs in the engine.
#
# 10 minutes, no GPU needed. Terms: [glossary](../docs/glossary.md).

# %%
import numpy as np
import plotly.graph_objects as go
import torch

from mrv2.lab.exercise import Exercise, pick, progress
from mrv2.runner.v2.variants import DrawPlan, draw
from mrv2.viz import theme
from mrv2_kernels.sampling.noise import gumbel_noise_torch
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.sampling.workspace import DrawWorkspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 24
logits = (2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))).to(DEVICE)
target = logits.double().softmax(0).cpu()

# %% [markdown]
# ## Gumbel-max
#
# Add independent [Gumbel noise](../docs/glossary.md#gumbel-max) $g_i$ to the logits and take the arg-max:
#
# $$\Pr\big[\arg\max_i\,(\ell_i / T + g_i) = j\big] = \mathrm{softmax}(\ell / T)_j$$
#
# No sum over the vocabulary, no probability tensor: one pass. And the noise is [stateless](../docs/glossary.md#stateless-noise): a hash
# of (seed, position, token).

# %%
NUM_DRAWS = pick(60_000, 20_000)
seed = torch.tensor([2], device=DEVICE)
positions = torch.arange(NUM_DRAWS, dtype=torch.int32, device=DEVICE)
noise = gumbel_noise_torch(seed.expand(NUM_DRAWS), positions, VOCAB)
drawn = (logits + noise).argmax(dim=1).cpu()
frequency = drawn.bincount(minlength=VOCAB) / NUM_DRAWS

go.Figure(
    [
        go.Bar(y=target, name="target: softmax", marker={"color": "#56B4E9"}),
        go.Scatter(y=frequency, name="drawn", mode="markers", marker={"color": "#D55E00", "symbol": "x", "size": 8}),
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": f"{NUM_DRAWS:,} draws of one token each"},
        height=300,
        margin={"t": 80},
        yaxis={"type": "log", "title": {"text": "probability"}},
        xaxis={"title": {"text": "token"}},
    ),
)


# %% [markdown]
# ## Is that the right distribution? χ²
#
# With $O_j$ draws of token $j$ and $E_j = n\,p_j$ expected, $\sum_j (O_j - E_j)^2 / E_j$ follows a χ² law with one degree of freedom
# less than there are tokens. A p-value far below one in a thousand says: wrong distribution.


# %%
def p_value(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return how likely a deviation at least this large is, if the draws follow `probabilities`."""
    expected = probabilities * len(drawn)
    kept = expected >= 5  # the law needs some draws a cell: the rest become one
    observed = drawn.bincount(minlength=len(probabilities)).double()
    cells = (
        torch.cat([observed[kept], observed[~kept].sum()[None]]),
        torch.cat([expected[kept], expected[~kept].sum()[None]]),
    )
    used = cells[1] > 0
    assert observed[probabilities == 0].sum() == 0, "a token that cannot be drawn was drawn"
    statistic = ((cells[0][used] - cells[1][used]) ** 2 / cells[1][used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2))


print(f"the right distribution: p = {p_value(drawn, target):.3f}")
print(f"a slightly wrong one:   p = {p_value(drawn, (1.1 * logits.double()).softmax(0).cpu()):.1e}")
assert p_value(drawn, target) > 1e-5 > p_value(drawn, (1.1 * logits.double()).softmax(0).cpu())

# %% [markdown]
# The draws are a pure function of the seed, so these two numbers are the same on every machine, up to rounding. Change the seed above
# to see others.


# %% jupyter={"source_hidden": true}
def stateless(f) -> bool | str:
    """The answer must draw what the engine draws, one position at a time, in any order."""
    order = np.random.default_rng(0).permutation(200)
    for position in order.tolist():
        if int(f(position)) != int(drawn[position]):
            return f"position {position}: {int(f(position))}, the batch above drew {int(drawn[position])}"
    return True


single = Exercise(
    "5.1",
    "Write `f(position)` that draws the token of **one** position with the seed above, without looking at the other positions. It must "
    "agree with the batch, in whatever order it is called.",
    check=stateless,
    hints=["`gumbel_noise_torch(seeds [N], positions [N] int32, vocab)`, here with N = 1."],
    solution="""
def answer(position):
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    return (logits + gumbel_noise_torch(seed, where, VOCAB)[0]).argmax()
""",
    refuses=[lambda position: logits.argmax()],
)
single

# %%
single.check(...)

# %% [markdown]
# That is why a request's tokens do not depend on its neighbours, on its row, on how steps are split, or on async scheduling.
#
# ## Tails
#
# A rare token wins when its noise is large: $\Pr[g > x] \approx e^{-x}$. Noise made of 24 random bits cannot exceed
# $\ln 2^{24} \approx 16.6$, so tokens below that would never be drawn from a large vocabulary. The engine's noise uses 32 bits and is
# dense where it matters. Its tail, against the law:

# %%
samples = gumbel_noise_torch(
    torch.arange(pick(24, 8), device=DEVICE), torch.zeros(pick(24, 8), dtype=torch.int32, device=DEVICE), 1 << 16
).double()
levels = np.arange(0.0, 13.0, 0.5)
num = samples.numel()
observed = np.array([int((samples > x).sum()) for x in levels])
law = num * -np.expm1(-np.exp(-levels))
go.Figure(
    [
        go.Scatter(x=levels, y=law, name="law", mode="lines", line={"color": "#56B4E9"}),
        go.Scatter(
            x=levels, y=observed, name="engine's noise", mode="markers", marker={"color": "#D55E00", "symbol": "x"}
        ),
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": f"How many of {num:,} values exceed x"},
        height=300,
        margin={"t": 80},
        yaxis={"type": "log"},
        xaxis={"title": {"text": "x"}},
    ),
)

# %%
deviation = (observed - law) / np.sqrt(law * (1 - law / num))
assert np.abs(deviation).max() < 5, "each count is binomial: within five standard deviations of the law"
print(f"largest value {float(samples.max()):.2f}; deviations from {deviation.min():.1f} to {deviation.max():.1f} sigma")

# %% jupyter={"source_hidden": true}
bits = Exercise(
    "5.2",
    "With b random bits, u is at least 2**-b, and the largest Gumbel value is about -log(-log(1 - 2**-b)). Write a function of b that "
    "returns it (natural logarithms).",
    check=lambda f: all(abs(f(b) - b * np.log(2)) < 1e-3 for b in (16, 24, 32)),
    hints=["For small x, log(1 - x) is about -x.", "`np.log1p(-x)` keeps the precision that `np.log(1 - x)` loses."],
    solution="answer = lambda b: -np.log(-np.log1p(-(2.0**-b)))",
    refuses=[lambda b: float(b), lambda b: -np.log(2.0**-b) / 2],
)
bits

# %%
bits.check(...)

# %% [markdown]
# ## Five ways to draw
#
# The knob `sampler`. Three of them draw **the same tokens** ([class T](../docs/glossary.md#effect-class)), two draw others **of the same
# distribution** (class D). (`gumbel_blocked` makes noise for one block of the vocabulary only; our 24 tokens are one block, so here it
# agrees with the others.) We truncate too: top-k, top-p and min-p in one row.

# %%
from mrv2.config import SAME_TOKEN_SAMPLERS, legal_values

batch = pick(20_000, 4_000)
rows = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
truncation = Truncation(*(torch.tensor([value], device=DEVICE) for value in (0.002, 12, 0.97)), all_rows=True)
truncation = truncation._replace(top_k=truncation.top_k.int())
temperature = torch.tensor([0.8], device=DEVICE)


def draw_with(variant: str) -> torch.Tensor:
    """Return one token a row, drawn by a variant of the knob."""
    sampled = torch.empty(batch, dtype=torch.int64, device=DEVICE)
    draw(
        DrawPlan(variant, has_greedy=False, all_truncated=True),
        logits.expand(batch, -1).contiguous(),
        sampled,
        rows,
        positions[:batch],
        temperature,
        seed,
        truncation=truncation,
        workspace=DrawWorkspace.make(batch, DEVICE),
    )
    return sampled.cpu()


kept = truncation.apply(logits[None], rows[:1], temperature)[0].double().softmax(0).cpu()
results = {variant: draw_with(variant) for variant in legal_values("sampler")}
for variant, tokens in results.items():
    same = float((tokens == results["gumbel_fused"]).double().mean())
    print(f"{variant:16} p = {p_value(tokens, kept):.3f}   {100 * same:5.1f} % the tokens of gumbel_fused")

# %%
for variant in SAME_TOKEN_SAMPLERS:
    assert torch.equal(results[variant], results["gumbel_fused"]), variant
for variant, tokens in results.items():
    assert p_value(tokens, kept) > 1e-5, variant


# %% jupyter={"source_hidden": true}
def top_p_agrees(f) -> bool | str:
    """Compare with the engine's own mask."""
    for number in range(12):
        raw = torch.randn(VOCAB, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 2
        p = 0.3 + 0.05 * number
        mask = Truncation(torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.tensor([p]), all_rows=True)
        one = torch.zeros(1, dtype=torch.int32)
        wanted = mask.apply(raw[None], one, torch.ones(1))[0] > float("-inf")
        mine = np.asarray(f(raw.softmax(0).numpy(), p))
        if not np.array_equal(mine, wanted.numpy()):
            return f"p={p:.2f}: you keep {mine.sum()} tokens, the engine {int(wanted.sum())}"
    return True


nucleus = Exercise(
    "5.3",
    "Top-p. Write `f(probabilities, p)` that returns a boolean array: which tokens are kept. Kept are the most likely tokens, until their "
    "sum **reaches** p; at least one.",
    check=top_p_agrees,
    hints=[
        "Sort downwards: `order = np.argsort(-probabilities)`.",
        "A token is kept if the sum of those **before** it is below p.",
    ],
    solution="""
def answer(probabilities, p):
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(probabilities), dtype=bool)
    kept[order[before < p]] = True
    return kept
""",
    refuses=[lambda probabilities, p: probabilities >= 1 - p, lambda probabilities, p: np.ones(VOCAB, dtype=bool)],
)
nucleus

# %%
nucleus.check(...)

# %% [markdown]
# ## Your own logits processor
#
# A [logits processor](../docs/glossary.md#logits-processor) runs on the device inside the step. Numbers of a request travel with the
# step's one upload, in a *table* with one row a request. This one comes along:

# %%
import inspect

from mrv2.processors.frequency_cap import FrequencyCap

print(inspect.getsource(FrequencyCap))

# %% jupyter={"source_hidden": true}
from mrv2 import LLM, SamplingParams
from mrv2.logits_processor import LogitsProcessor


def keeps_to_the_rule(cls) -> bool | str:
    """Serve requests with and without the argument on a real engine."""
    if not issubclass(cls, LogitsProcessor) or cls.argument != "multiple_of":
        return "it must be a subclass of LogitsProcessor, and its `argument` must be 'multiple_of'"
    options = dict(load_format="dummy", max_model_len=64, max_num_seqs=8, num_gpu_blocks=40)
    with LLM("tiny-llama", logits_processors=[cls], **options) as llm, LLM("tiny-llama", **options) as plain:
        prompts = [[5, 6, 7, i] for i in range(4)]
        base = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
        params = [base, base.replace(extra_args={"multiple_of": 3}), base, base.replace(extra_args={"multiple_of": 7})]
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        free = [o.outputs[0].token_ids for o in plain.generate(prompts, base, use_tqdm=False)]
    if any(o.finish_reason == "error" for o in outputs):
        return f"a request ended in an error: {[o.stop_reason for o in outputs]}"
    for number, step in ((1, 3), (3, 7)):
        if bad := [t for t in outputs[number].token_ids if t % step]:
            return f"multiple_of={step}, yet the tokens {bad} came"
    if any(outputs[n].token_ids != free[n] for n in (0, 2)):
        return "a request that did not ask for the processor got other tokens than without it"
    return True


multiple = Exercise(
    "5.4",
    "Write a class: `SamplingParams(extra_args={'multiple_of': 3})` allows only token ids that are multiples of 3. Other requests of the "
    "batch must not notice. Take `FrequencyCap` as a pattern.",
    check=keeps_to_the_rule,
    hints=[
        "The table: `self.steps = setup.table('step', 1)`; stage the request's number in `add_request`.",
        "In `apply`: `self.steps.tensor[ctx.slots.long()]` is `[N, 1]`, `torch.arange(logits.shape[1], device=...)` is `[V]`.",
        "Rows of requests that do not use the processor are put back afterwards, but their step is 0: avoid `% 0`.",
    ],
    solution="""
class answer(LogitsProcessor):
    argument = "multiple_of"

    def __init__(self, setup):
        super().__init__(setup)
        self.steps = setup.table("step", 1)

    def validate(self, params):
        step = params.extra_args[self.argument]
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"{step!r} must be an integer >= 1")

    def add_request(self, row, params):
        self.steps.stage(row, [params.extra_args[self.argument]])

    def apply(self, logits, ctx):
        steps = self.steps.tensor[ctx.slots.long()].clamp(min=1)
        tokens = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_((tokens % steps != 0) & ctx.used.unsqueeze(1), float("-inf"))
""",
    refuses=[FrequencyCap],
)
multiple

# %%
multiple.check(...)

# %% [markdown]
# What a draw costs on your device, against reading the logits once: `mrv2 bench --samplers`.

# %%
progress()

# %% [markdown]
# **Next:** [6 · Speculation](06_speculation.ipynb).
