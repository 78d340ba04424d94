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
# # 1 · One step, stage by stage
#
# **Goal.** You will be able to say what happens between "these requests are running" and "here is one more token for
# each", who does it (host or device), and which single moment of it makes the host wait.
#
# 10 minutes. Runs on a GPU, or on a CPU with the [host backend](../docs/glossary.md#host-backend). Words in links are
# explained in the [glossary](../docs/glossary.md).
#
# ```
# host   | S(n) E(n) T(n) | S(n+1) E(n+1) T(n+1) | wait out(n) -> U(n) | S(n+2) ...
# main   |      [prepare n][forward n][logits+sample n][post-update n] [prepare n+1][forward n+1] ...
# copy   |                                             [D2H out n]
# ```
#
# **S** schedule, **E** execute_model, **T** sample_tokens, **U** update from output. We first do S, E, T and U by hand.

# %%
import inspect

import numpy as np

from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.lab.exercise import Exercise, pick, progress

config = EngineConfig(
    model="tiny-llama",
    load_format="dummy",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    num_gpu_blocks=128,
    enable_prefix_caching=False,
    knobs=Knobs(async_scheduling=False),
)
core = EngineCore(config)
print(f"{config.model} with random weights on the {core.device.type} backend")

# %% [markdown]
# Three requests with prompts of 5, 3 and 40 tokens. The engine may compute 32 tokens a step, so the last prompt does not
# fit into one step: it is computed in [chunks](../docs/glossary.md#chunked-prefill).

# %%
rng = np.random.default_rng(1)
PROMPTS = {"alice": 5, "carol": 3, "bob": 40}
for name, length in PROMPTS.items():
    prompt = rng.integers(3, 500, size=length).tolist()
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)
    core.add_request(EngineRequest(req_id=name, prompt_token_ids=prompt, params=params))
core.snapshot().num_waiting

# %% [markdown]
# ## S: schedule
#
# The scheduler knows requests. What it hands down are only **ids and counts**: no token that the device has not got yet
# is needed to decide who computes how many tokens.

# %%
scheduled = core.scheduler.schedule()
for req_id, computed, tokens, yields in zip(
    scheduled.req_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens, scheduled.yields_token
):
    print(f"{req_id:6} {computed:3} computed before, {tokens:3} tokens in this step, yields a token: {yields}")

# %% [markdown]
# `bob` gets what is left of the budget. His step ends inside his prompt, so it yields no token: there is nothing to
# sample from yet.

# %% jupyter={"source_hidden": true}
budget = Exercise(
    "1.1",
    "How many tokens of `bob`'s prompt are left for later steps, and how many sequences will have a new token after "
    "this step? Answer with a pair `(left, num_new)`.",
    check=lambda a: (
        tuple(a)
        == (
            PROMPTS["bob"] - int(scheduled.num_scheduled_tokens[scheduled.req_ids.index("bob")]),
            int(scheduled.yields_token.sum()),
        )
    ),
    hints=["The budget is `config.max_num_batched_tokens` for the whole step.", "`scheduled.yields_token` says who."],
    solution="""
mine = scheduled.num_scheduled_tokens[scheduled.req_ids.index("bob")]
answer = (PROMPTS["bob"] - int(mine), int(scheduled.yields_token.sum()))
""",
    refuses=[(0, 3), (40, 2)],
)
budget

# %%
budget.check(...)

# %% [markdown]
# ## E: execute_model
#
# `execute_model` **submits** work and returns nothing. The rows of the requests, the inputs of the model and the forward
# pass are work of the device, in the order in which they are submitted.

# %%
core.executor.execute_model(scheduled)
print("returned; the device may still be busy")

# %% [markdown]
# In a running engine nobody looks at the inputs now. We may: we stop the world first, by a wait that has a
# [name](../docs/glossary.md#named-wait).

# %%
core.device.synchronize("the notebook looks at the inputs")
num_reqs, num_tokens = scheduled.num_reqs, scheduled.total_tokens
buffers = core.executor.buffers
inputs = {
    "idx_mapping": buffers.idx_mapping[:num_reqs],
    "query_start_loc": buffers.query_start_loc[: num_reqs + 1],
    "seq_lens": buffers.seq_lens[:num_reqs],
    "positions": buffers.positions[:num_tokens],
    "input_ids": buffers.input_ids[:num_tokens],
    "slot_mapping": buffers.slot_mappings[0][:num_tokens],
}
inputs = {name: tensor.cpu().numpy().copy() for name, tensor in inputs.items()}
for name, values in inputs.items():
    print(f"{name:16} {values}")

# %% [markdown]
# Read it from top to bottom:
#
# - [`idx_mapping`](../docs/glossary.md#idx_mapping): batch row to **stable row** of the request's state.
# - [`query_start_loc`](../docs/glossary.md#query_start_loc): where each request's tokens begin in the flat batch.
# - `seq_lens`: how long each context is once this step is done.
# - `positions`, `input_ids`: one entry a token. Three requests, one flat line; no padding between them.
# - [`slot_mapping`](../docs/glossary.md#slot): where the key and value of each token go in the KV cache.
#
# These are laws, so they hold for whatever you change above:

# %%
lengths = np.diff(inputs["query_start_loc"])
assert (lengths == scheduled.num_scheduled_tokens).all()
assert (inputs["seq_lens"] == scheduled.num_computed_tokens + lengths).all()
for row in range(num_reqs):
    mine = slice(inputs["query_start_loc"][row], inputs["query_start_loc"][row + 1])
    first = scheduled.num_computed_tokens[row]
    assert (inputs["positions"][mine] == np.arange(first, first + lengths[row])).all()
assert len(set(inputs["slot_mapping"].tolist())) == num_tokens, "no two tokens share a place in the cache"

# %% jupyter={"source_hidden": true}
flat = Exercise(
    "1.2",
    "Which entries of the flat batch are the **last** tokens of their requests? These are the rows that need logits. "
    "Answer with the list of indices.",
    check=lambda a: list(map(int, a)) == (inputs["query_start_loc"][1:] - 1).tolist(),
    hints=["One request's tokens end where the next one's begin."],
    solution='answer = inputs["query_start_loc"][1:] - 1',
    refuses=[[0, 1, 2], [4, 28, 31, 32]],
)
flat

# %%
flat.check(...)

# %% [markdown]
# ## T: sample_tokens
#
# The second call of a step. It submits sampling, **starts the copy of the result at once**, and only then advances the
# rows (post-update). What it returns is a promise.

# %%
pending = core.executor.sample_tokens(scheduled.step, None)
type(pending).__name__

# %% [markdown]
# The wait. It is the only one in a step, and it has a reason that is counted:

# %%
before = dict(core.device.waits)
output = pending.get()
waited = {reason: n - before.get(reason, 0) for reason, n in core.device.waits.items() if n > before.get(reason, 0)}
print("waited for:", waited)
for row, req_id in enumerate(output.req_ids):
    print(f"{req_id:6} {output.sampled_token_ids[row, : output.num_sampled[row]]}")

# %% [markdown]
# ## U: update from output
#
# Now the host learns which tokens these were: it appends them, looks for stops, tells the front end.

# %%
for said in core.scheduler.update_from_output(output):
    print(said.req_id, "->", said.new_token_ids)
assert {req_id for req_id, yields in zip(scheduled.req_ids, scheduled.yields_token) if yields} == {
    req_id for req_id, n in zip(output.req_ids, output.num_sampled) if n > 0
}

# %% [markdown]
# ## The next steps, inspected
#
# The inspector does what we did by hand, for as many steps as it is asked for: it stops the world after a launch and copies the inputs. **Look for**
# `bob`, who gets the rest of his prompt, and then decodes like the others: one token a step, at the position behind the last.

# %%
from mrv2.engine.inspection import Inspector

inspector = Inspector(core)
inspector.look(steps=3)
for _ in range(3):
    core.step()
for seen in inspector.look().steps:
    starts = seen.query_start_loc
    parts = [
        f"{name}: {seen.positions[a]}-{seen.positions[b - 1]}" for name, a, b in zip(seen.req_ids, starts, starts[1:])
    ]
    print(f"step {seen.step}: rows {seen.rows}, positions {', '.join(parts)}")

# %% [markdown]
# ## The same in the loop
#
# `EngineCore` does these four things in two short methods. Read them beside what you have just done:

# %%
print(inspect.getsource(EngineCore._launch_next))
print(inspect.getsource(EngineCore._settle_oldest))

# %% [markdown]
# And this is the device's half in the [V2 runner](../docs/glossary.md#runner). Every `self.main.run(stages.X, ...)` is one
# named [stage](../docs/glossary.md#stage):

# %%
from mrv2.runner.v2.model_runner import ModelRunnerV2

print(inspect.getsource(ModelRunnerV2.sample_tokens))

# %% [markdown]
# ## The picture
#
# The rest of the requests, recorded. `record` keeps the name, start and end of every stage on host and device.

# %%
import mrv2.trace
from mrv2.instrument import recording
from mrv2.viz import Timeline

with recording(core.device) as recorder:
    while core.has_unfinished:
        core.step()
    core.device.synchronize("end of the recording")
trace = mrv2.trace.from_recorder(recorder)
steps = trace.steps()
Timeline(trace, window=steps.take(slice(2, 5)), title="Three decode steps, synchronous")

# %% [markdown]
# **Look for:** the host lane (schedule, execute_model, sample_tokens), the main stream below it, the copy on its own
# stream, and `wait: output` on the host while the device works. Synchronous: host and device take turns.
#
# Where does the time of a step go?

# %%
from mrv2.viz.figures import stage_box

stage_box(trace.analyze())

# %% jupyter={"source_hidden": true}
device_stages = sorted(
    {span.name for span in recorder.spans() if span.kind == "device"},
    key=lambda name: -sum(s.end_ns - s.start_ns for s in recorder.spans() if s.kind == "device" and s.name == name),
)
longest = Exercise(
    "1.3",
    "In your recording: which **device** stage took the most time, summed over all steps? Answer with its name.",
    check=lambda a: a == device_stages[0],
    hints=["`recorder.summary()` has one row per name and kind, the largest total of each kind first."],
    solution='answer = next(row.name for row in recorder.summary() if row.kind == "device")',
    refuses=["schedule", "wait: output"],
)
longest

# %%
longest.check(...)

# %% [markdown]
# ## Change one thing
#
# The same requests twice: as above, and with `async_scheduling` on. The tokens stay the same: sampling depends on
# (seed, position), not on when a step is launched.


# %%
def serve(length: int) -> dict[str, list[int]]:
    """Return what each request yields."""
    generated: dict[str, list[int]] = {}
    for name in PROMPTS:
        prompt = np.random.default_rng(len(name)).integers(3, 500, size=PROMPTS[name]).tolist()
        params = SamplingParams(temperature=0.8, seed=7, max_tokens=length, ignore_eos=True)
        core.add_request(EngineRequest(req_id=name, prompt_token_ids=prompt, params=params))
    while core.has_unfinished:
        for said in core.step():
            generated.setdefault(said.req_id, []).extend(said.new_token_ids)
    return generated


length = pick(48, 16)
taking_turns = serve(length)
core.set_knobs(async_scheduling=True)
with recording(core.device) as recorder:
    side_by_side = serve(length)
    core.device.synchronize("end of the recording")
assert taking_turns == side_by_side
trace = mrv2.trace.from_recorder(recorder)
Timeline(trace, window=trace.steps().take(slice(4, 8)), title="Four steps, asynchronous")

# %% [markdown]
# The host now prepares step n+1 before it has seen the tokens of step n. [Notebook 4](04_async_scheduling.ipynb) measures
# what that is worth.

# %% jupyter={"source_hidden": true}
waits = Exercise(
    "1.4",
    "Write a function that takes a recorder and returns the set of reasons for which the **host** waited.",
    check=lambda f: (
        f(recorder) == {s.name.removeprefix("wait: ") for s in recorder.spans() if s.kind == "wait"}
        or "Compare with the spans of kind 'wait'."
    ),
    hints=[
        "`recorder.spans()` returns spans with `lane`, `name`, `start_ns`, `end_ns`, `step`, `kind`.",
        "Cut off `wait: `.",
    ],
    solution="""
def answer(recorder):
    return {span.name.removeprefix("wait: ") for span in recorder.spans() if span.kind == "wait"}
""",
    refuses=[lambda recorder: set()],
)
waits

# %%
waits.check(...)

# %%
core.shutdown()
progress()

# %% [markdown]
# **Next:** [2 · The persistent batch](02_persistent_batch.ipynb).
