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
# # 9 · Nsight recordings
#
# **Goal.** You will read recordings of an H200 without having one: find out what a step does, what its gaps are made of, what two runners do
# differently, and which conclusions a recording does **not** allow.
#
# 10 minutes, no GPU needed: the recordings lie in `traces/`. Terms: [glossary](../docs/glossary.md).

# %%
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import mrv2.trace
from mrv2.lab.exercise import Exercise, progress, recorded
from mrv2.viz import Timeline
from mrv2.viz.compare import delta_plot, step_times
from mrv2.viz.figures import bubble_stack, kernel_bars, overlap_bars

v1 = mrv2.trace.load(recorded("h200/v1_async.graph.sqlite.gz"))
v2 = mrv2.trace.load(recorded("h200/v2_async.graph.sqlite.gz"))
v2.meta["gpu_name"], v2.meta["versions"], v2.meta["granularity"]

# %% [markdown]
# 30 turns of the step loop: 32 requests of Qwen3-0.6B decode, both runners with async scheduling. What a recording holds, and what it
# lacks, it says itself. A figure without evidence is `None` everywhere, never 0:

# %%
for key in ("ops", "api", "ranges", "syncs", "waits.gil"):
    entry = v2.coverage[key]
    print(f"{key:10} {entry.status:14} {entry.rows:6} rows  {entry.reason}")

# %% [markdown]
# ## One step each
#
# The top rows are the host, the bottom rows the GPU. **Look for** where the GPU's row is empty, and what the host does above the gap.

# %%
Timeline(v1, window=v1.steps().take(slice(12, 14)), title="V1, two steps")

# %%
Timeline(v2, window=v2.steps().take(slice(12, 14)), title="V2, two steps")

# %% jupyter={"source_hidden": true}
medians = {name: float(np.median(trace.steps().wall_ns)) / 1e3 for name, trace in (("v1", v1), ("v2", v2))}
step_time = Exercise(
    "9.1",
    "How long is the median step of V1 and of V2, in microseconds? Answer with a pair.",
    check=lambda a: all(abs(x - y) < 1 for x, y in zip(a, (medians["v1"], medians["v2"]), strict=True)),
    hints=["`trace.steps().wall_ns`"],
    solution="answer = tuple(np.median(trace.steps().wall_ns) / 1e3 for trace in (v1, v2))",
    refuses=[(medians["v2"], medians["v1"])],
)
step_time

# %%
step_time.check(...)

# %% [markdown]
# ## Where the time goes
#
# Each step in four parts that sum to it:

# %%
overlap_bars(v1.analyze())

# %%
overlap_bars(v2.analyze())

# %% [markdown]
# The GPU's [bubbles](../docs/glossary.md#bubble), by cause. Every nanosecond of a gap has exactly one:

# %%
bubble_stack(v1.analyze())

# %%
for trace in (v1, v2):
    bubbles = trace.bubbles()
    assert sum(bubbles.by_cause().values()) == bubbles.total_ns, "the causes are a partition"

# %% jupyter={"source_hidden": true}
causes = v1.bubbles().by_cause()
worst = next(iter(causes))
cause = Exercise(
    "9.2",
    "Which single cause makes up the largest part of V1's bubbles, and what share of them? Answer with `(cause, share)`, the share from 0 to 1.",
    check=lambda a: a[0] == worst and abs(a[1] - causes[worst] / sum(causes.values())) < 0.01,
    hints=["`v1.bubbles().by_cause()` is a dict from cause to nanoseconds, the largest first."],
    solution="""
causes = v1.bubbles().by_cause()
first = next(iter(causes))
answer = (first, causes[first] / sum(causes.values()))
""",
    refuses=[("launch_api", 0.19), (worst, 1.0)],
)
cause

# %%
cause.check(...)

# %% [markdown]
# ## Two recordings side by side
#
# Steps are paired; each difference has a bootstrap interval of 95 %.

# %%
comparison = v1.compare(v2, names=("V1", "V2"))
delta_plot(comparison)

# %%
step_times(v1, v2, names=("V1", "V2"))

# %% [markdown]
# ## Attribution: by launch, not by time
#
# Which range does a kernel belong to? The one in which it was **launched**. When it ran, the host may have been two stages further: that is what
# running ahead means. The tool's [correlation id](../docs/glossary.md#correlation-id) ties the two ends together.

# %%
launches = v2.analyze().launches()
ahead = launches.run_ahead[~np.isnan(launches.run_ahead)]
print(f"when V2 launches, the GPU is {np.median(ahead):.0f} steps behind in the median")
print(f"when V1 launches, {np.nanmedian(v1.analyze().launches().run_ahead):.0f}")


# %% jupyter={"source_hidden": true}
def inside_wrong_range() -> float:
    """The share of operations that started while the host was already in a later step than the one that launched them."""
    steps, ops = v2.steps(), v2.ops
    of = v2.analyze().step_ids.of_ops
    at = np.searchsorted(steps.start, ops.start, side="right") - 1
    known = (of >= 0) & (at >= 0)
    return float((steps.step[at[known]] != of[known]).mean())


wrong = inside_wrong_range()
attribution = Exercise(
    "9.3",
    "`of_ops` holds, for each GPU operation of `v2`, the step that launched it (-1 = unknown). What share of the known ones **started** while the "
    "host was in another step? (`steps.start` has the starts of the host's steps, `steps.step` their numbers.)",
    check=lambda a: abs(a - wrong) < 0.01,
    hints=[
        "`np.searchsorted(steps.start, v2.ops.start, side='right') - 1` is the index of the host's step at that moment.",
        "Leave out operations before the first step (index -1).",
    ],
    solution="""
at = np.searchsorted(steps.start, v2.ops.start, side="right") - 1
known = (of_ops >= 0) & (at >= 0)
answer = (steps.step[at[known]] != of_ops[known]).mean()
""",
    refuses=[0.0, 1.0],
)
steps, of_ops = v2.steps(), v2.analyze().step_ids.of_ops
attribution

# %%
attribution.check(...)

# %% [markdown]
# Whoever attributes kernels by the time at which they ran puts that share into the wrong step.
#
# ## Inside a graph: which kernels
#
# In the recordings above a graph launch is one operation: its inner holes are not seen, so "busy" is an upper bound. The twins `*.node.*` show every
# kernel, and stretch the steps while doing so: read them for **which kernel does what**.

# %%
nodes = mrv2.trace.load(recorded("h200/v2_async.node.sqlite.gz"))
assert v2.overview().busy_is_upper_bound and not nodes.overview().busy_is_upper_bound
kernel_bars(nodes.analyze(), top=10)

# %% jupyter={"source_hidden": true}
stretch = float(np.median(nodes.steps().wall_ns) / np.median(v2.steps().wall_ns))
stretched = Exercise(
    "9.4",
    "By which factor does recording node by node stretch V2's median step?",
    check=lambda a: abs(a - stretch) < 0.02,
    hints=["`nodes` against `v2`."],
    solution="answer = np.median(nodes.steps().wall_ns) / np.median(v2.steps().wall_ns)",
    refuses=[1.0],
)
stretched

# %%
stretched.check(...)

# %% [markdown]
# ## Another engine: vLLM
#
# vLLM 0.24.0 with its V1 runner and with MRV2, recorded **node by node**, through vLLM's own [NVTX](../docs/glossary.md#nvtx) scopes. The same
# analysis, nothing adapted:

# %%
vllm_v1 = mrv2.trace.load(recorded("foreign/vllm_v1_async1.sqlite.gz"))
vllm_v2 = mrv2.trace.load(recorded("foreign/vllm_v2_async1.sqlite.gz"))
Timeline(vllm_v1, window=vllm_v1.steps().take(slice(12, 14)), title="vLLM, V1 runner")

# %%
Timeline(vllm_v2, window=vllm_v2.steps().take(slice(12, 14)), title="vLLM, MRV2 (its stages carry no scopes)")

# %%
other = vllm_v1.compare(vllm_v2, names=("vLLM V1", "vLLM MRV2"))
print(other.verdict)

# %% [markdown]
# Careful! The verdict is about **these recordings**. Tracing each node makes a graph launch cost the host most of a millisecond, which lands in the
# gaps and says nothing about a run without the tool (exercise 9.4 showed by how much). What such a recording does allow: what runs, in which order, and
# who waits for whom. Count the waits:

# %%
for name, trace in (("vLLM V1", vllm_v1), ("vLLM MRV2", vllm_v2), ("our V1", v1), ("our V2", v2)):
    print(f"{name:10} {np.median(trace.steps().syncs):.0f} waits of the host in a step")


# %% jupyter={"source_hidden": true}
def counted(trace) -> int:
    return int(np.median(trace.steps().syncs))


saved = Exercise(
    "9.5",
    "How many waits a step does MRV2 save against V1, in vLLM and in this engine? Answer with a pair.",
    check=lambda a: tuple(a) == (counted(vllm_v1) - counted(vllm_v2), counted(v1) - counted(v2)),
    hints=["The difference of the medians that were just printed."],
    solution="""
median = lambda trace: int(np.median(trace.steps().syncs))
answer = (median(vllm_v1) - median(vllm_v2), median(v1) - median(v2))
""",
    refuses=[(0, 0), (2, 2)],
)
saved

# %%
saved.check(...)

# %% [markdown]
# ## Your own recording
#
# On a machine with Nsight Systems, one command records, scrubs and checks it (any program: `-- python script.py`):
#
# ```
# mrv2 record --workload c --steps 30 --nsys -o mine.sqlite.gz
# mrv2 trace stats mine.sqlite.gz
# ```
#
# Without it, the recorder of this package sees stages and named waits. Its files are read by the same `load`:

# %%
from mrv2 import LLM, SamplingParams

print("nsys:", shutil.which("nsys") or "not on this machine")
with LLM("tiny-llama", load_format="dummy", max_model_len=128, max_num_seqs=8, num_gpu_blocks=60) as llm:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, i] for i in range(6)]
    llm.generate(prompts, params, use_tqdm=False)  # warm-up
    with llm.record() as recording:
        llm.generate(prompts, params, use_tqdm=False)
    mine = mrv2.trace.load(recording.save(Path(tempfile.mkdtemp()) / "mine.npz"))
Timeline(mine, window=mine.steps().take(slice(4, 8)), title="This machine")

# %% [markdown]
# ## One level deeper: kernels of the sampler
#
# [nsight-python](../docs/glossary.md#nsight-python) runs functions under Nsight Compute and returns a table. It must be imported before CUDA is used,
# hence a process of its own. Skipped where there is no `ncu`.

# %%
SCRIPT = """
from mrv2.nsight import compare_samplers, load_nsight
load_nsight()
print(compare_samplers(("gumbel_fused", "gumbel_two_pass", "softmax_race", "torch"), batch=32).to_string())
"""
if torch.cuda.is_available() and shutil.which("ncu"):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110)
    print(done.stdout or done.stderr[-800:])
else:
    print("no GPU with ncu on this machine: nothing is measured here")

# %%
progress()

# %% [markdown]
# **Next:** [10 · A model family of your own](10_model_state.ipynb).
