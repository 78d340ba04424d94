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
# # 6 · Speculation
#
# **Goal.** You will write a drafter and both kinds of verification, see that no number has to come back to the host, and compute from your
# own measurements when speculation **loses**.
#
# 10 minutes, no GPU needed. Terms: [glossary](../docs/glossary.md).
#
# ```
# step n     ... sample -> post-update -> [draft: K guesses a request]
# step n+1   [prepare: last token and K drafts] [forward over 1 + K tokens] [target's draw at every position] [verify]
# ```
#
# One forward pass over 1 + K tokens reads the weights once, as a decode step does. If m drafts are kept, the step yields m + 1 tokens.

# %%
import os

import numpy as np
import plotly.graph_objects as go
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.config import legal_values
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.instrument import recording, sync_guard
from mrv2.lab.exercise import Exercise, fast, pick, progress
from mrv2.viz import theme
from mrv2_kernels.spec.ngram import propose_ngram_torch
from mrv2_kernels.spec.verify import verify_token_exact_torch

K = 4
config = EngineConfig(
    model="tiny-llama",
    load_format="dummy",
    max_model_len=512,
    max_num_seqs=8,
    num_gpu_blocks=300,
    max_num_spec_tokens=K,
    ngram_min=1,
    enable_prefix_caching=False,
    knobs=Knobs(num_spec_tokens=K),
)
core = EngineCore(config)
print("drafters here:", ", ".join(legal_values("spec_method")))

# %% [markdown]
# ## Draft
#
# The simplest [drafter](../docs/glossary.md#drafter) has no weights: it looks for the last place where the request's own suffix occurred
# before, and proposes what followed there. Code, JSON, quotations and summaries repeat themselves a lot.

# %% jupyter={"source_hidden": true}
HISTORIES = [
    [1, 2, 3, 4, 1, 2, 3],
    [5, 6, 7, 8],
    [1, 2, 9, 1, 2, 8, 1, 2],
    [7, 7, 7, 7],
    [3, 1, 2, 9, 4, 2, 5, 1, 2],
    *[np.random.default_rng(i).integers(0, 4, size=20).tolist() for i in range(12)],
]


def engine_drafts(history: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """What the engine's own drafter proposes."""
    out = torch.full((1, k), -1, dtype=torch.int64)
    one = torch.tensor([0], dtype=torch.int32)
    tokens = torch.tensor([history], dtype=torch.int32)
    total = torch.tensor([len(history)], dtype=torch.int32)
    bounds = dict(num_draft_tokens=k, min_n=min_n, max_n=max_n, max_len=len(history))
    propose_ngram_torch(out, one, tokens, total, torch.tensor([1], dtype=torch.int32), **bounds)
    return [t for t in out[0].tolist() if t >= 0]


def drafts_agree(f) -> bool | str:
    """Compare with the engine's drafter."""
    for history in HISTORIES:
        for min_n, max_n in ((1, 3), (2, 4)):
            wanted, mine = engine_drafts(history, K, min_n, max_n), list(f(list(history), K, min_n, max_n))
            if mine != wanted:
                return f"history {history}, suffixes of {min_n} to {max_n}: {mine}, the engine drafts {wanted}"
    return True


ngram = Exercise(
    "6.1",
    "Write `f(history, k, min_n, max_n)`. Take the longest n from max_n down to min_n for which the last n tokens occur earlier as well; among "
    "several places the last one. Return the up to k tokens behind it (they may overlap the suffix).",
    check=drafts_agree,
    hints=[
        "A place is an end e < len(history) with `history[e - n : e] == history[-n:]`.",
        "Try the places from right to left and take the first that fits; then `history[e : e + k]`.",
    ],
    solution="""
def answer(history, k, min_n, max_n):
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                return history[end : end + k]
    return []
""",
    refuses=[lambda history, k, min_n, max_n: history[-k:], lambda *a: []],
)
ngram

# %%
ngram.check(...)

# %% [markdown]
# On a GPU this is two small kernels over the token history that lives on the device anyway; a step behind, nobody waits for it.
#
# ## Verify: `token_exact`
#
# At each of the 1 + K positions the target draws **its own** token, with the noise of that position. A draft is kept if it *is* that token.
# At the first difference the target's own token is used instead, so a step always yields at least one. See
# [token_exact](../docs/glossary.md#token_exact).


# %% jupyter={"source_hidden": true}
def engine_verifies(targets: list[int], drafts: list[int]) -> list[int]:
    """What the engine's own kernel emits."""
    sampled, counts = torch.empty((1, K + 1), dtype=torch.int64), torch.empty((2, 1), dtype=torch.int32)
    padded = torch.tensor([drafts + [-1] * (K - len(drafts))], dtype=torch.int64)
    rows = torch.tensor([0, len(drafts) + 1], dtype=torch.int32)
    one = torch.tensor([0], dtype=torch.int32)
    verify_token_exact_torch(sampled, counts[0], counts[1], torch.tensor(targets), padded, one, rows, one + 1)
    return sampled[0, : counts[0, 0]].tolist()


def verification_agrees(f) -> bool | str:
    """Compare with the engine's kernel."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        drafts = rng.integers(0, 3, size=rng.integers(1, K + 1)).tolist()
        targets = rng.integers(0, 3, size=len(drafts) + 1).tolist()
        wanted, mine = engine_verifies(targets, drafts), list(f(list(targets), list(drafts)))
        if mine != wanted:
            return f"targets {targets}, drafts {drafts}: {mine}, the engine emits {wanted}"
    return True


exact = Exercise(
    "6.2",
    "Write `f(targets, drafts)`: `targets` has one token more than `drafts`. Return the tokens that the step emits.",
    check=verification_agrees,
    hints=[
        "`targets[0]` is what would have been sampled without speculation.",
        "Everything emitted is a target token.",
    ],
    solution="""
def answer(targets, drafts):
    kept = 0
    while kept < len(drafts) and drafts[kept] == targets[kept]:
        kept += 1
    return targets[: kept + 1]
""",
    refuses=[lambda targets, drafts: targets, lambda targets, drafts: targets[:1]],
)
exact

# %%
exact.check(...)

# %% [markdown]
# Everything emitted is a token that the target drew itself. So a seeded request yields **the same tokens** with and without speculation,
# which we now check on the engine.
#
# Real text repeats itself; our model has random weights and babbles. So we let it use three tokens only: a text of few words, which its own past
# predicts.


# %%
def serve(num: int = 6, length: int = 64, temperature: float = 0.0, words: int | None = 3, **knobs):
    """Serve a load that may use `words` tokens only; return tokens, engine steps, and (drafted, accepted) by position."""
    core.set_knobs(**knobs)
    before, first = core.snapshot(), core.scheduler.step
    tokens: dict[str, list[int]] = {}
    for i in range(num):
        prompt = np.random.default_rng(i).integers(3, 500, size=12).tolist()
        allowed = None if words is None else list(range(100, 100 + words))
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=length, ignore_eos=True, allowed_token_ids=allowed
        )
        core.add_request(EngineRequest(req_id=str(i), prompt_token_ids=prompt, params=params))
    while core.has_unfinished:
        for said in core.step():
            tokens.setdefault(said.req_id, []).extend(said.new_token_ids)
    after = core.snapshot()

    def new(name: str) -> np.ndarray:
        old = np.array(getattr(before, name), dtype=int)
        now = np.array(getattr(after, name), dtype=int)
        now[: len(old)] -= old
        return now[:K]

    return tokens, core.scheduler.step - first, (new("num_drafted"), new("num_accepted"))


LENGTH = pick(160, 48)
plain, plain_steps, _ = serve(length=LENGTH, spec_method="off")
spec, spec_steps, (drafted, accepted) = serve(length=LENGTH, spec_method="ngram")
assert spec == plain, "token_exact: the same tokens"
print(f"{sum(map(len, spec.values()))} tokens: {plain_steps} steps without drafts, {spec_steps} with")

# %% [markdown]
# [Acceptance](../docs/glossary.md#acceptance) by
# position: a draft can only be kept if the one before it was.

# %%
assert (np.diff(accepted) <= 0).all(), "position j is kept only if position j - 1 was"
mean_length = 1 + accepted.sum() / drafted[0]
go.Figure(
    [
        go.Bar(
            x=[f"draft {j + 1}" for j in range(K)], y=drafted, name="seen by the target", marker={"color": "#BBBBBB"}
        ),
        go.Bar(x=[f"draft {j + 1}" for j in range(K)], y=accepted, name="kept", marker={"color": "#009E73"}),
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": f"Drafts by position; a verification yields {mean_length:.2f} tokens on average"},
        height=300,
        margin={"t": 80},
        barmode="overlay",
    ),
)

# %% [markdown]
# ## Count sync or none
#
# How many drafts were kept is known to the device only. A runner that builds its inputs on the host must wait for that number before it can
# prepare the next step: the [count sync](../docs/glossary.md#count-sync). It undoes async scheduling, just where a step costs most.
#
# Here positions, lengths and tokens are computed by the device from its own counters. The host schedules 1 + K tokens a request and learns one
# step later how many were kept. To prove it, serve under a [guard](../docs/glossary.md#sync-guard) that raises at any wait without a name:

# %%
# once before: what is compiled, captured or allocated for the first time waits for the device, too
serve(length=24, spec_method="ngram", async_scheduling=True)
with sync_guard(core.device, mode="error") as guard:
    served, _, _ = serve(length=24)
# a launch call that takes long waits for no number
assert not [found for found in guard.violations if found.kind != "launch_backpressure"]
print("waits with a name:", dict(guard.waits))
assert set(guard.waits) == {"output"}

# %% [markdown]
# The other way round: V1 looks n-grams up **on the host**. It must know what was kept before it can look anything up, so with this drafter it cannot run
# ahead. Same tokens; look at who waits, and at what the engine answers when we ask V1 to run ahead.

# %%
from mrv2 import ConfigError

before = dict(core.device.waits)
v1_tokens, v1_steps, _ = serve(length=LENGTH, runner="v1", async_scheduling=False, spec_method="ngram")
waits = {reason: n - before.get(reason, 0) for reason, n in core.device.waits.items() if n > before.get(reason, 0)}
print(f"V1 waits in {v1_steps} steps: {waits}")
assert v1_tokens == plain, "the same tokens"
try:
    core.set_knobs(async_scheduling=True)
except ConfigError as error:
    print("refused:", error)
_ = core.set_knobs(runner="v2", async_scheduling=True)

# %% jupyter={"source_hidden": true}
with recording(core.device) as recorder:
    serve(num=2, length=pick(48, 24), spec_method="ngram", async_scheduling=True, queue_depth=2)
    core.device.synchronize("end of the recording")
launches = {s.step: s.start_ns for s in recorder.spans() if s.name == "execute_model"}
arrivals = {s.step: s.end_ns for s in recorder.spans() if s.name == "wait_output"}
blind = sum(n - 1 in arrivals and arrivals[n - 1] > launches[n] for n in launches)
ahead = Exercise(
    "6.3",
    "`launches[n]` is when step n was launched, `arrivals[n]` when the host knew what step n had kept (both by step, in nanoseconds). How many "
    "steps were launched **before** the host knew what the step before them had kept?",
    check=lambda a: a == blind and blind > 0,
    hints=["Compare `arrivals[n - 1]` with `launches[n]`; the first step has none before it."],
    solution="answer = sum(n - 1 in arrivals and arrivals[n - 1] > launches[n] for n in launches)",
    refuses=[0],
)
ahead

# %%
ahead.check(...)

# %% [markdown]
# ## When it loses
#
# Speculation trades longer steps for fewer. With $t_0$ the time of a plain step and $t_K$ that of a verifying one, and $\bar m$ the mean number of
# tokens a verification yields,
#
# $$\text{speed-up} = \bar m \cdot \frac{t_0}{t_K}$$
#
# Drafting itself, a batch so large that the forward is bound by arithmetic and not by reading weights, and text that nobody can guess all work
# against it. We compare the text of few words with one that nobody can guess: all 512 tokens of the vocabulary, sampled at temperature 1.

# %%
import time


def timed(**knobs) -> tuple[float, float, float]:
    """Return tokens per second, milliseconds a step, and tokens per verification."""
    start = time.perf_counter()
    tokens, steps, (drafted, accepted) = serve(length=pick(96, 32), **knobs)
    took = time.perf_counter() - start
    length = 1 + accepted.sum() / drafted[0] if len(drafted) and drafted[0] else 1.0
    return sum(map(len, tokens.values())) / took, 1e3 * took / steps, length


rows = []
for label, load in (("few words", {}), ("unguessable", {"temperature": 1.0, "words": None})):
    runs = {m: [] for m in ("off", "ngram")}
    for _ in range(pick(3, 1)):
        for method, results in runs.items():
            results.append(timed(spec_method=method, **load))
    plain_run, spec_run = (np.median(runs[m], axis=0) for m in ("off", "ngram"))
    rows.append((label, *plain_run[:2], *spec_run))
    print(
        f"{label:12} plain {plain_run[0]:7.0f} tok/s   n-gram {spec_run[0]:7.0f} tok/s   "
        f"{spec_run[2]:.2f} tokens per verification   step {plain_run[1]:.1f} -> {spec_run[1]:.1f} ms"
    )

# %% [markdown]
# **Look for:** fewer tokens per verification in the second line, and steps that are not cheaper for it. A model this small, and a CPU, pay for every
# further token of a step; a GPU that spends a step reading the weights of a large model hardly notices four more.

# %% jupyter={"source_hidden": true}
t_0, t_k = rows[0][2], rows[0][4]
break_even = Exercise(
    "6.4",
    "`t_0` and `t_k` hold your milliseconds a step without and with drafts (first line). How many tokens must a verification yield on average so "
    "that speculation just breaks even?",
    check=lambda a: abs(a - t_k / t_0) < 0.01,
    hints=["Set the speed-up to 1 and solve for the mean length."],
    solution="answer = t_k / t_0",
    refuses=[2 * t_k / t_0, -1.0],
)
break_even

# %%
break_even.check(...)

# %% [markdown]
# ## Draft less when it does not pay
#
# The knob `adaptive_drafts` does this sum for you, step by step: from the acceptance of the last steps and the cost of one more draft (`draft_cost` at
# load) it chooses how many drafts to ask for, from none to K. Now and then it probes whether that is still right.

# %%
for label, load in (("few words", {}), ("unguessable", {"temperature": 1.0, "words": None})):
    asked = {}
    for adaptive in (False, True):
        said, _, (drafted, accepted) = serve(
            length=pick(160, 64), spec_method="ngram", adaptive_drafts=adaptive, **load
        )
        asked[adaptive] = (said, drafted.sum(), accepted.sum())
        print(
            f"{label:12} {'adaptive' if adaptive else f'always {K}':9}  {drafted.sum():5} drafts, {accepted.sum():4} kept"
        )
    assert asked[True][0] == asked[False][0], "how many are drafted changes no token"
    if label == "unguessable":
        assert asked[True][1] <= asked[False][1], "what is refused is not drafted for ever"
_ = core.set_knobs(adaptive_drafts=False)

# %% [markdown]
# ## How good must a drafter be?
#
# A drafter with weights drafts by running a smaller model. The best conceivable one *is* the target: then every draft is kept, and a verification yields
# 1 + K tokens. We take such a twin (drafter = target = `tiny-llama`, `spec_method="draft_model"`) and spoil its weights, more and more.

# %%
SPOILT = pick((0.0, 0.01, 0.02, 0.05, 0.1, 0.2), (0.0, 0.02, 0.2))


def tokens_per_verification(spoilt: float) -> float:
    """Return the mean length with a twin whose weights were multiplied by 1 + spoilt * noise."""
    fields = {
        f: getattr(config, f) for f in ("model", "load_format", "max_model_len", "max_num_seqs", "num_gpu_blocks")
    }
    twin = EngineCore(
        EngineConfig(
            **fields,
            dtype="float32" if torch.cuda.is_available() else "float64",
            max_num_spec_tokens=K,
            speculators=("draft_model=tiny-llama",),
            enable_prefix_caching=False,
            knobs=Knobs(spec_method="draft_model", num_spec_tokens=K, cuda_graphs="off"),
        )
    )
    noise = torch.Generator().manual_seed(5)
    for weights in twin.executor.drafters[0].model.parameters():
        weights.mul_(1 + spoilt * torch.randn(weights.shape, generator=noise).to(weights))
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=pick(60, 20), ignore_eos=True)
        twin.add_request(EngineRequest(req_id=str(i), prompt_token_ids=[5, 6, 7, 8 + i], params=params))
    while twin.has_unfinished:
        twin.step()
    length = twin.snapshot().mean_accepted_length
    twin.shutdown()
    return length


# %%
lengths = [tokens_per_verification(spoilt) for spoilt in SPOILT]
shown = go.Figure(
    [
        go.Scatter(x=SPOILT, y=lengths, mode="lines+markers", name="measured", line={"color": "#009E73"}),
        go.Scatter(
            x=[SPOILT[0], SPOILT[-1]],
            y=[t_k / t_0] * 2,
            mode="lines",
            name="break-even of 6.4",
            line={"dash": "dash"},
        ),
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": "Tokens per verification"},
        height=300,
        margin={"t": 80},
        xaxis={"title": {"text": "noise on the drafter's weights"}},
        yaxis={"range": [0.8, K + 1.2]},
    ),
)
# requests end inside a run of drafts, so that the very last verification may be shorter
assert torch.cuda.is_available() or lengths[0] > K, "the twin's drafts are all kept"
shown

# %% [markdown]
# Between the lookup and a whole model stand **heads**: one layer that drafts from the target's own hidden states, trained on it. Two come with this engine,
# for `smollm2-135m-instruct`: EAGLE-3 and MTP. With `FAST=1` (or without the 93 MB of the target's weights) heads of random weights stand in, whose drafts
# are mostly refused: the tokens are the target's all the same.

# %%
from mrv2 import LLM
from mrv2.lab import model_or

TARGET = "tiny-llama" if fast() else model_or("smollm2-135m-instruct", "tiny-llama")
TALKS = TARGET != "tiny-llama"
questions = ["Explain what a KV cache is.", "Write a Python function that reverses a string."]
texts = [[{"role": "user", "content": question}] for question in questions] if TALKS else [[5, 6, 7, 8], [9, 8, 7]]
said = {}
with LLM(TARGET, max_model_len=256, max_num_seqs=4, max_num_spec_tokens=3, speculators=["eagle3", "mtp"]) as llm:
    for method in ("off", "ngram", "eagle3", "mtp"):
        llm.set(spec_method=method)
        chosen = SamplingParams(temperature=0.0, max_tokens=pick(48, 16))
        ask = llm.chat if TALKS else llm.generate
        answers = ask(texts, chosen, use_tqdm=False)
        said[method] = [list(answer.outputs[0].token_ids) for answer in answers]
        counts = [answer.metrics.drafts for answer in answers]
        kept = sum(sum(each.num_accepted) for each in counts)
        verified = sum(each.num_drafted[0] for each in counts if each.num_drafted)
        same = sum(a == b for a, b in zip(said[method], said["off"]))
        print(
            f"{method:7} {f'{1 + kept / verified:.2f} tokens per verification' if verified else 'no drafts':30}"
            f"{same} of {len(texts)} texts as without drafts"
        )

# %% [markdown]
# **Look for:** what the heads keep on real text (without `FAST=1`), against the lookup; and the same texts, unless two tokens were equally likely but for
# rounding, which in bfloat16 happens. In `%wb` or the panel of the
# [quickstart](00_quickstart.ipynb) the same drafters are values of the knob `spec_method`, once they were named at load.

# %% [markdown]
# ## Verify: `standard`
#
# A drafter that *samples* its drafts from a distribution q can do better than equality: keep the draft x with probability min(1, p(x) / q(x)),
# else draw from the excess. The tokens are others than without speculation, but their **distribution** is exactly the target's p. That is
# [rejection sampling](../docs/glossary.md#rejection-sampling).


# %% jupyter={"source_hidden": true}
def restores_target(f) -> bool | str:
    """Whatever is drafted, what comes out must follow p: computed exactly, not sampled."""
    for number in range(20):
        rng = np.random.default_rng(number)
        p, q = rng.dirichlet(np.full(8, 0.5), size=2)
        keep = np.minimum(1, p / q)
        mine = np.asarray(f(p, q), dtype=float)
        if mine.min() < -1e-12 or abs(mine.sum() - 1) > 1e-9:
            return "the excess must be a distribution: no negative entry, sum 1"
        outcome = q * keep + (1 - (q * keep).sum()) * mine
        if not np.allclose(outcome, p):
            return f"p={p.round(3)}, q={q.round(3)}: tokens come out as {outcome.round(3)}"
    return True


excess = Exercise(
    "6.5",
    "Write `f(p, q)`: the distribution to draw from when the draft is rejected, so that the outcome follows p whatever q is.",
    check=restores_target,
    hints=[
        "What is kept of token x has probability min(p(x), q(x)).",
        "What is missing is p(x) - min(p(x), q(x)); scale it to 1.",
    ],
    solution="""
def answer(p, q):
    rest = np.maximum(p - q, 0)
    return rest / rest.sum()
""",
    refuses=[lambda p, q: p, lambda p, q: q],
)
excess

# %%
excess.check(...)

# %%
p, q = np.random.default_rng(3).dirichlet(np.full(8, 0.5), size=2)
print(
    f"a draft from q is kept with probability {np.minimum(p, q).sum():.2f}, two independent draws agree with {(p * q).sum():.2f}"
)
assert np.minimum(p, q).sum() >= (p * q).sum()

# %% [markdown]
# An n-gram draft is certain (q = 1 for one token), and then both rules keep it with the same probability p(x): `token_exact` costs nothing and
# keeps every token. The kinds side by side (`synthetic`, the fourth, changes the output: for benchmarks only):

# %%
for kind in ("token_exact", "standard", "block"):
    tokens, steps, (drafted, accepted) = serve(length=LENGTH, spec_method="ngram", temperature=0.7, verification=kind)
    same, _, _ = serve(length=LENGTH, spec_method="off", temperature=0.7)
    share = np.mean([a == b for name in same for a, b in zip(tokens[name], same[name])])
    print(
        f"{kind:12} {accepted.sum():4} of {drafted.sum():4} drafts kept; {100 * share:5.1f} % the tokens of plain decoding"
    )
    assert kind != "token_exact" or tokens == same

# %%
core.shutdown()
progress()

# %% [markdown]
# **Next:** [7 · Structured output](07_structured_output.ipynb).
