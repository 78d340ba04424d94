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
# # 10 · A model family of your own
#
# **Goal.** You will add a model that carries state from step to step, without touching the runner, and see which test catches a state that is not
# carried properly.
#
# 10 minutes, no GPU needed. Terms: [glossary](../docs/glossary.md).
#
# What is common to all models is the runner's. What differs goes behind [`ModelState`](../docs/glossary.md#model-state), whose hooks the runner calls in
# a fixed order:
#
# | hook | where | when |
# |---|---|---|
# | `add_request`, `remove_request` | host | a request takes or leaves a [stable row](../docs/glossary.md#stable-row) |
# | `preprocess_state` | device | before the forward |
# | `prepare_inputs` | host | what the model's `forward` is called with |
# | `postprocess_state` | device | after sampling |

# %%
import json
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import mrv2_models.config
from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.lab.exercise import Exercise, pick, progress
from mrv2_models.llama import LlamaForCausalLM
from mrv2_models.model_state import DefaultModelState
from mrv2_models.registry import FAMILIES

# %% [markdown]
# ## The model: a Llama with a token shift
#
# Each token's vector also holds half of the vector **of the token before it**. Within a step that token stands beside it. Between two steps, somebody has
# to remember it.


# %%
class ShiftForCausalLM(LlamaForCausalLM):
    """x_t = embed(token_t) + 0.5 * embed(token_{t-1}); no token stands before position 0 (id -1)."""

    @torch.no_grad()
    def forward(self, input_ids, positions, attn, kv_caches, previous):
        shifted = self.embed(previous.clamp(min=0)) * (previous >= 0).unsqueeze(1)
        x, residual = self.embed(input_ids) + 0.5 * shifted, None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, attn, kv_cache)
        return self.norm.add(x, residual)[0]


# %% [markdown]
# ## The state: one token id a row
#
# `preprocess_state` builds `previous` for the flat batch: the neighbour within the step, and for each request's first token what was remembered in its row.
# Device code: no value may be read on the host, so there is no `if`.


# %%
class ForgetfulState(DefaultModelState):
    """Prepares `previous`, but remembers nothing from step to step."""

    MAX_TOKENS, MAX_ROWS = 512, 64

    def __init__(self, model):
        super().__init__(model)
        # [T] and [R] int32, on the device
        self.previous = torch.full((self.MAX_TOKENS,), -1, dtype=torch.int32, device=model.device)
        self.last = torch.full((self.MAX_ROWS,), -1, dtype=torch.int32, device=model.device)

    def preprocess_state(self, batch):
        num_reqs, num_tokens = batch.idx_mapping.shape[0], batch.input_ids.shape[0]
        starts = batch.query_start_loc[:num_reqs].long()
        self.previous[1:num_tokens] = batch.input_ids[:-1]
        remembered = self.last[batch.idx_mapping.long()]
        # position 0 has no past, whoever used the row before
        self.previous[starts] = torch.where(batch.positions[starts] == 0, -1, remembered)

    def prepare_inputs(self, batch):
        return {**super().prepare_inputs(batch), "previous": self.previous[: batch.input_ids.shape[0]]}


# %% [markdown]
# ## Register it
#
# In the package this is an entry in two tables; here we make it at run time. Nothing else changes: no line of the runner, the scheduler or the sampler.

# %%
mrv2_models.config.ModelType = Literal["llama", "qwen3", "shift"]
FAMILIES["shift"] = ShiftForCausalLM

shape = json.loads((mrv2_models.config.PRESET_DIR / "tiny-llama.json").read_text())
folder = Path(tempfile.mkdtemp()) / "tiny-shift"
folder.mkdir()
(folder / "config.json").write_text(json.dumps({**shape, "model_type": "shift"}))

# %% [markdown]
# ## The test that matters
#
# A request's tokens must not depend on how its work is cut into steps. So: whole prompts against chunks of 8, alone against side by side, synchronous
# against asynchronous. In float64 (on a CPU), so that rounding is no excuse.

# %%
PROMPTS = [np.random.default_rng(i).integers(3, 500, size=n).tolist() for i, n in enumerate((30, 5, 19, 2))]


def serve(state_cls, *, chunk: int = 256, rows: int = 4, **knobs) -> list[list[int]]:
    """Return the tokens of each prompt under a state class and some settings."""
    ShiftForCausalLM.model_state_cls = state_cls
    core = EngineCore(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            dtype="float32" if torch.cuda.is_available() else "float64",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=rows,
            max_num_batched_tokens=256,
            long_prefill_token_threshold=chunk,
            num_gpu_blocks=64,
            enable_prefix_caching=False,
            knobs=Knobs(cuda_graphs="off", **knobs),
        )
    )
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=pick(24, 10), ignore_eos=True)
        core.add_request(EngineRequest(req_id=str(i), prompt_token_ids=prompt, params=params))
    while core.has_unfinished:
        for said in core.step():
            tokens.setdefault(said.req_id, []).extend(said.new_token_ids)
    core.shutdown()
    return [tokens[str(i)] for i in range(len(PROMPTS))]


SETTINGS = {
    "chunks of 8": {"chunk": 8},
    "one request at a time": {"rows": 1},
    "synchronous": {"async_scheduling": False},
    "three steps ahead, chunks of 8": {"chunk": 8, "queue_depth": 4},
}
whole = serve(ForgetfulState)
for name, settings in SETTINGS.items():
    print(f"{name:32}", "the same tokens" if serve(ForgetfulState, **settings) == whole else "OTHER TOKENS")

# %% [markdown]
# The forgetful state gives other tokens when the prompt is cut: each chunk begins as if nothing stood before it. (And each decode step too, but there all
# settings are wrong alike. A test that compares settings only would miss that: so we need a reference that is right.)
#
# ## A reference
#
# One request, and after each token the *whole* sequence again as one prompt. Nothing is ever carried, so nothing can be forgotten. Slow, and right.


# %%
def reference(num_tokens: int = 4) -> list[list[int]]:
    """Return the first tokens of each prompt, each computed from scratch."""
    global PROMPTS
    kept, grown = PROMPTS, [list(prompt) for prompt in PROMPTS]
    try:
        for _ in range(num_tokens):
            PROMPTS = grown
            for sequence, tokens in zip(grown, serve(ForgetfulState)):
                sequence.append(tokens[0])
    finally:
        PROMPTS = kept
    return [sequence[len(prompt) :] for sequence, prompt in zip(grown, kept)]


EXPECTED = reference()
print("carried by nobody, right:", EXPECTED[0])
print("forgetful:               ", whole[0][:4])


# %% jupyter={"source_hidden": true}
def carries(state_cls) -> bool | str:
    """Compare with the reference, and all settings with each other."""
    base = serve(state_cls)
    if [tokens[: len(EXPECTED[0])] for tokens in base] != EXPECTED:
        return "whole prompts: the decode steps differ from the reference"
    for name, settings in SETTINGS.items():
        if serve(state_cls, **settings) != base:
            return f"{name}: other tokens than with whole prompts"
    return True


class RemembersTheFirst(ForgetfulState):
    """Wrong: takes each request's first token of the step instead of its last."""

    def postprocess_state(self, batch, num_accepted):
        num_reqs = batch.idx_mapping.shape[0]
        self.last[batch.idx_mapping.long()] = batch.input_ids[batch.query_start_loc[:num_reqs].long()]


remember = Exercise(
    "10.1",
    "Write a subclass of `ForgetfulState` with the missing hook `postprocess_state(self, batch, num_accepted)`: after the step, each scheduled row "
    "remembers the last token that it computed.",
    check=carries,
    hints=[
        "`batch.query_start_loc[1 : num_reqs + 1] - 1` are the indices of the requests' last tokens.",
        "`self.last[rows] = values` with rows and values on the device makes nobody wait.",
        "`num_accepted` matters with speculation only, which this engine has not loaded.",
    ],
    solution="""
class answer(ForgetfulState):
    def postprocess_state(self, batch, num_accepted):
        num_reqs = batch.idx_mapping.shape[0]
        ends = batch.query_start_loc[1 : num_reqs + 1].long() - 1
        self.last[batch.idx_mapping.long()] = batch.input_ids[ends]
""",
    refuses=[ForgetfulState, RemembersTheFirst],
)
remember

# %%
remember.check(...)

# %% [markdown]
# ## Why prefix caching is off
#
# A prefix hit starts a request at position k > 0, with keys and values of the KV cache and **without** a step that could have filled the row's `last`. A
# model with state must either bring it along (`add_request` hands the known tokens and how many of them are computed) or do without hits.

# %% jupyter={"source_hidden": true}
stages_of = Exercise(
    "10.2",
    "Write `f(token_ids, num_computed_tokens)`: what `add_request` would have to put into the row's `last` for a request that starts there, -1 if "
    "nothing stands before it.",
    check=lambda f: (
        f(np.array([7, 8, 9]), 0) == -1 and f(np.array([7, 8, 9]), 2) == 8 and f(np.array([7, 8, 9]), 1) == 7
    ),
    hints=["The next token to compute is `token_ids[num_computed_tokens]`."],
    solution="""
def answer(token_ids, num_computed_tokens):
    return int(token_ids[num_computed_tokens - 1]) if num_computed_tokens else -1
""",
    refuses=[lambda token_ids, n: int(token_ids[n]), lambda token_ids, n: int(token_ids[n - 1])],
)
stages_of

# %%
stages_of.check(...)

# %% [markdown]
# ## What the runner knows of your model
#
# Nothing, and that is checked rather than promised:

# %%
import inspect

from mrv2.runner.v2 import model_runner

source = inspect.getsource(model_runner)
assert "shift" not in source.lower().replace("bitwise_right_shift", "") and "llama" not in source.lower()
hooks = [name for name in dir(DefaultModelState) if f"model_state.{name}" in source]
print(f"{len(source.splitlines())} lines, hooks that it calls: {', '.join(hooks)}")

# %% [markdown]
# To make this family part of the package: one file in `mrv2_models/`, an entry in `registry.py` and `config.py`, a tiny preset, and the test above.
# `CONTRIBUTING.md` says how.
#
# **Next:** [11 · Speed](11_speed.ipynb).

# %%
del FAMILIES["shift"]
progress()
