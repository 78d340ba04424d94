# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: an engine at work
#
# Run the next three cells. The second loads a small model and begins to serve requests in the background; the third
# shows the panel. Turn `async scheduling` off and on again and watch the timeline: **off**, the device idles while the
# host works; **on**, the forwards stand shoulder to shoulder. The tokens of a seeded request stay the same.

# %%
import os

import torch

from mrv2.lab import Load, Workbench, model_or

# about 93 MB are fetched on first use; where that cannot be, a model with random weights stands in
stand_in = "qwen3-0.6b" if torch.cuda.is_available() else "tiny-llama"
# FAST=1: a tiny model, for a quick look and for tests
model = "tiny-llama" if os.environ.get("FAST") else model_or("smollm2-135m-instruct", stand_in)
limit = 512 if model == "tiny-llama" else 1024

# %%
wb = Workbench(model, max_model_len=limit, max_num_seqs=16, max_num_spec_tokens=3, load=Load(users=4, max_tokens=96))

# %%
wb

# %% [markdown]
# ## The same from code
#
# Every control of the panel has its line of Python. `wb.set` waits until the engine has switched, between two steps,
# and says at which step.

# %%
wb.wait(requests=2)
print(wb.set(async_scheduling=False).step, wb.set(async_scheduling=True).step)

# %% [markdown]
# Two settings, the same requests with the same seeds, in alternation:

# %%
fast = bool(os.environ.get("FAST"))
result = wb.ab(
    "V2 sync", "V2 async", load=Load(max_tokens=24), requests=4, repetitions=2 if fast else 3, recorded=not fast
)
result

# %% [markdown]
# What was recorded last, as a trace: everything in `mrv2.trace` and `mrv2.viz` works on it.

# %%
trace = wb.record(steps=12)
print(trace.analyze().overview())

# %%
from mrv2.viz import Timeline

Timeline(trace, window=trace.steps().take(slice(4, 7)))

# %% [markdown]
# `wb.check()` raises what went wrong in a button or a background thread. The panel stays alive; `wb.close()` stops the
# engine.

# %%
wb.check()
