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
# # 11 · Speed
#
# **Goal.** You will say for any batch what limits a decode step, follow the way from an engine like vLLM to this one figure by figure, and know what
# was tried and did not help.
#
# 10 minutes, no GPU needed: the benchmark records of an H200 lie in `traces/bench/` (Qwen3-0.6B, random weights, bfloat16). With a GPU one cell
# measures on it. Terms: [glossary](../docs/glossary.md).

# %%
import json

import torch

import mrv2.trace
from mrv2.bench.projection import DATA_SHEETS, REACHED, project
from mrv2.lab.exercise import Exercise, pick, progress, recorded
from mrv2.viz.kernels import kernel_table
from mrv2_models.config import ModelConfig


def record(name: str) -> dict:
    """Return one of the benchmark records."""
    return json.loads(recorded(f"bench/h200-{name}.json").read_text())


def speeds(name: str, label: str) -> dict[str, float]:
    """Return workload -> output tokens a second of the variants whose label begins with `label`."""
    found = {}
    for workload in record(name)["workloads"]:
        for variant in workload["variants"]:
            if variant["label"].startswith(label):
                # a workload of which an eighth was served is "a/8"
                found[workload["name"].split("/")[0]] = variant["tok_s_best"]
    return found


def table(columns: dict[str, dict], fmt: str = "{:>10,.0f}") -> None:
    """Print columns side by side; a dash where a record has nothing."""
    rows = list(dict.fromkeys(key for column in columns.values() for key in column))
    print(f"{'':12}" + "".join(f"{name:>20}" for name in columns))
    for row in rows:
        cells = (fmt.format(column[row]) if row in column else "-" for column in columns.values())
        print(f"{row!s:12}" + "".join(f"{cell:>20}" for cell in cells))


# %% [markdown]
# ## The floor
#
# A decode step reads every weight once and the keys and values of its context once. Nothing that computes the same tokens one step at a time can be
# faster than that at the bandwidth that the device reaches. So each workload has a floor for its time, hence a ceiling for its rate:

# %%
step = record("graphs-step")
print(
    f"weights {step['workloads'][0]['roofline']['weight_bytes_per_step'] / 1e9:.2f} GB a step, "
    f"read at {step['limits']['read_bytes_per_s'] / 1e12:.2f} TB/s ({step['limits']['read_method']})"
)
for workload in step["workloads"]:
    print(f"{workload['name']}: {workload['description']}")
ceiling = {w["name"]: w["roofline"]["memory_tok_s"] for w in step["workloads"]}
ours = speeds("graphs-step", "v2 async")
table({"ceiling": ceiling, "V2 async": ours})
table({"share of the ceiling": {name: ours[name] / ceiling[name] for name in ours}}, "{:>9.0%}")

# %% jupyter={"source_hidden": true}
room = Exercise(
    "11.1",
    "How many times faster could workload `a` (one request) become before memory is the limit? A number, from `ceiling` and `ours`.",
    check=lambda a: abs(a / (ceiling["a"] / ours["a"]) - 1) < 0.02,
    hints=["The ceiling over what was reached."],
    solution='answer = ceiling["a"] / ours["a"]',
    refuses=[ours["a"] / ceiling["a"], ceiling["f"] / ours["f"]],
)
room

# %%
room.check(...)

# %% [markdown]
# ## Where the time of a step goes in vLLM
#
# Two recordings of vLLM 0.24.0 come along, 32 requests on an H200, node by node in its [CUDA graph](../docs/glossary.md#cuda-graph). Tracing each node
# stretches a step two- to threefold, so read the *durations of kernels* and their number, not the gaps. **Look for** how many short kernels there are: each
# costs about a microsecond before it has done anything.

# %%
vllm = mrv2.trace.load(recorded("foreign/vllm_v2_async1.sqlite.gz"))
kernels = kernel_table(vllm.analyze())
for row in range(12):
    print(
        f"{kernels.name[row][:58]:60}{kernels.count[row]:>6} x {kernels.median_ns[row] / 1e3:>6.1f} us {kernels.share[row]:>6.1%}"
    )
short = [row for row in range(len(kernels.name)) if kernels.median_ns[row] < 4_000]
print(f"kernels below 4 us: {sum(int(kernels.count[row]) for row in short):,} of {int(kernels.count.sum()):,}")

# %% [markdown]
# Attention of short contexts takes longer than its bytes ask for, products of few rows do not reach the bandwidth, and what lies between them is many
# small launches. That names the three jobs: fewer launches, products that read at full speed, attention that does not wait.
#
# ## Job 1: the host out of the way
#
# [Graphs](../docs/glossary.md#cuda-graph) on three levels: `off` launches every kernel from Python, `model` replays the forward, `step` replays everything
# of a decode step. With [async scheduling](../docs/glossary.md#async-scheduling) the host works while the device does. A step at `off` is some 9 to 11 ms of
# launches from Python, the same for every batch (its records have counts and lengths divided by 8). Between `model` and `step` the kernels below have changed as well:
# products take in what surrounds them, attention fetches ahead, and steps of prompts replay graphs too. A few percent between two columns may be noise.

# %%
levels = {
    "off": speeds("graphs-off", "v2 async") | speeds("graphs-off-e", "v2 async"),
    "model": speeds("graphs-model", "v2 async"),
    "step": ours,
}
both = record("graphs-step-both")
table({"V1 async, model": speeds("graphs-model", "v1 async"), **{f"V2, {k}": v for k, v in levels.items()}})
for mode in ("sync", "async"):
    profile = {
        w["name"]: v["profile"] for w in both["workloads"] for v in w["variants"] if v["label"].startswith(f"v2 {mode}")
    }
    print(f"\nV2 {mode}, milliseconds a step:")
    table(
        {
            "host": {n: p["host_ms"] for n, p in profile.items()},
            "device": {n: p["device_ms"] for n, p in profile.items()},
        },
        "{:.2f}",
    )

# %% jupyter={"source_hidden": true}
gains = {name: levels["step"][name] / levels["model"][name] for name in levels["step"]}
most = max(gains, key=gains.__getitem__)
gained = Exercise(
    "11.2",
    "Which workload gained most from `model` to `step`, with all that changed between the two records? Answer with its letter.",
    check=lambda a: a == most or f"`{a}` gained a factor {gains[a]:.2f}, another one {gains[most]:.2f}",
    hints=[
        "Divide the last column by the one before.",
        "The smallest batches have the shortest steps: what is saved weighs most there.",
    ],
    solution="answer = max(levels['step'], key=lambda name: levels['step'][name] / levels['model'][name])",
    refuses=["d", "c"],
)
gained

# %%
gained.check(...)

# %% [markdown]
# ## Job 2: products of few rows
#
# All four products of 28 layers, microseconds; reading the weights takes 199. A kernel that fetches its weights *before its input is there* (programmatic
# dependent launch) hides most of the reading under its predecessor. "none ahead" is the same kernels without that. **Look for** the batch at
# which it no longer pays, and at the last two columns: the products with norms, activation and additions as kernels between them ("in layers"),
# and with those inside the products ("fused").

# %%
gemms = record("gemms")
by_rows: dict[str, dict[int, float]] = {}
for chain in gemms["chains"]:
    if chain["microseconds"]:
        by_rows.setdefault(chain["name"].removeprefix("fastest "), {})[chain["num_rows"]] = chain["microseconds"]
names = ("library", "resident", "streamed", "picked", "picked, none ahead", "picked, in layers", "picked, fused")
table({name: by_rows[name] for name in names}, "{:.0f}")
print(f"floor: {gemms['floor_microseconds']:.0f} us")
saved = by_rows["library"][1] - by_rows["picked"][1]
times = [1e6 / levels[level]["a"] for level in ("model", "step")]
print(f"one request: a step {times[0]:,.0f} -> {times[1]:,.0f} us; the products alone save {saved:.0f}")

# %% jupyter={"source_hidden": true}
own = ("resident", "streamed", "gemv")
beaten = min(rows for rows, us in by_rows["library"].items() if all(by_rows[n].get(rows, us + 1) > us for n in own))
rows_at = Exercise(
    "11.3",
    "From how many rows on is torch's library faster than each kernel of our own? A number of rows of the table.",
    check=lambda a: a == beaten,
    hints=[
        "Compare the columns `resident` and `streamed` with `library`, line by line (`gemv` is for up to four rows)."
    ],
    solution="answer = min(n for n, us in by_rows['library'].items() if all(by_rows[k].get(n, us + 1) > us for k in own))",
    refuses=[32, 128],
)
rows_at

# %%
rows_at.check(...)

# %% [markdown]
# ## Job 3: attention, and what surrounds it
#
# Norms of the heads, rotation, the write of keys and values and attention as a chain of kernels, or all in one launch; microseconds of one layer, the best
# plan of each. `attention` is the attention kernel alone.

# %%
layers = record("layers")
best: dict[str, dict[str, float]] = {}
for entry in layers["times"]:
    if entry["model"] == "qwen3-0.6b" and entry["context"] <= 4096:
        place = f"{entry['batch']} x {entry['context']}"
        column = best.setdefault(entry["variant"], {})
        column[place] = min(column.get(place, 1e9), entry["microseconds"])
order = sorted(best["chain"], key=lambda place: [int(n) for n in place.split(" x ")])
table(
    {name: {place: best[name][place] for place in order} for name in ("attention", "chain", "fused", "fused pdl")},
    "{:.1f}",
)

# %% [markdown]
# ## What one layer costs now
#
# At 1 and at 32 requests with short contexts, from the same two records: the products and attention. Norms and activation stand between them
# (`mrv2 bench --explain` attributes every kernel of a live step).

# %%
for rows, place in ((1, "1 x 128"), (32, "32 x 128")):
    products = by_rows["picked"][rows] / gemms["num_layers"]
    floor = gemms["floor_microseconds"] / gemms["num_layers"]
    print(
        f"{rows:3} rows: products {products:5.1f} us (reading them takes {floor:.1f}), attention {best['fused'][place]:5.1f} us"
    )

# %% [markdown]
# ## Drawing the token
#
# One pass over 151,936 logits, against two passes and against the softmax that most samplers begin with (microseconds, plain temperature sampling):

# %%
draws: dict[str, dict[int, float]] = {}
for entry in record("samplers")["times"]:
    if entry["case"] == "plain" and entry["microseconds"]:
        draws.setdefault(entry["variant"], {})[entry["num_rows"]] = entry["microseconds"]
table(draws, "{:.0f}")

# %% [markdown]
# ## What was tried and did not help
#
# Each of these is in the tables above, and the code that lost is still there to be measured again on another GPU:
#
# * **Streaming weights through L2** (`gemm/streamed.py`): prefetched before the wait, read after it. The second hop costs more than the library loses.
# * **Resident weights at 64 rows and more** (`gemm/resident.py`): every program reads the whole input anew, which then outweighs the weights.
# * **Norms, activation and additions inside the products at 64 rows**: each program reads and normalises the whole input anew. Up to 32 rows it pays.
# * **Launching fused attention ahead** (`fused pdl`): a gain at some shapes, a loss at others; it is decided shape by shape.
# * **The fused attention at 256 requests**: enough work to fill the device without it, so the chain is chosen there.

# %%
inside = {rows: by_rows["picked, in layers"][rows] - us for rows, us in by_rows["picked, fused"].items()}
print("microseconds a step that fusing saves, by rows:", {rows: round(gain) for rows, gain in inside.items()})
ahead = {place: best["fused"][place] - best["fused pdl"][place] for place in order}
print("microseconds that launching ahead saves a layer:", {place: round(gain, 1) for place, gain in ahead.items()})

# %% [markdown]
# ## On this machine
#
# With a GPU: the three graph levels, live, at 32 requests. Without one this cell says so and measures nothing.

# %%
if torch.cuda.is_available():
    from mrv2.bench.growth import decoding, run_steps
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config

    sizes = {"max_num_seqs": 32, "max_model_len": 1024, "warm_up": "all"}
    core = EngineCore(build_config("qwen3-0.6b", load_format="dummy", **sizes))
    for level in ("off", "model", "step"):
        core.set_knobs(cuda_graphs=level)
        with decoding(core, 32, 128, 2 * pick(64, 16)):
            run_steps(core, pick(64, 16))
            seconds = run_steps(core, pick(64, 16))
        print(f"{level:6} {1e3 * sum(seconds) / len(seconds):6.2f} ms a step")
    core.shutdown()
else:
    print("no GPU here: nothing was measured")

# %% [markdown]
# ## Another GPU: computed, not measured
#
# What does not change with the GPU is the number of bytes. So the *ceiling* can be computed from a data sheet, at the share of it that reads reach on the
# H200; how near an engine comes to it there is for a measurement to say.

# %%
config = ModelConfig.from_preset("qwen3-0.6b")
projected = project(["gb200"], ["a", "b", "c", "d"], config, torch.bfloat16)
print(f"computed from data sheets at {REACHED:.0%} of their bandwidth; output tokens a second of the memory floor")
table({gpu: {name: rates[gpu] for name, rates in projected.items()} for gpu in ("h200", "gb200")})

# %% jupyter={"source_hidden": true}
times_faster = projected["a"]["gb200"] / projected["a"]["h200"]
ratio = Exercise(
    "11.4",
    "By which factor does the computed ceiling of workload `a` grow from an H200 to a GB200, and which line of the data sheet is that? "
    "Answer with the pair (factor, `'bandwidth'` or `'flops'`).",
    check=lambda a: abs(a[0] / times_faster - 1) < 0.02 and a[1] == "bandwidth",
    hints=[
        "`DATA_SHEETS['gb200']` and `DATA_SHEETS['h200']` have both lines.",
        "A step of one request multiplies little and reads everything.",
    ],
    solution="answer = (DATA_SHEETS['gb200'].bandwidth / DATA_SHEETS['h200'].bandwidth, 'bandwidth')",
    refuses=[(DATA_SHEETS["gb200"].flops / DATA_SHEETS["h200"].flops, "flops"), (1.0, "bandwidth")],
)
ratio

# %%
ratio.check(...)

# %% [markdown]
# ## To take home
#
# 1. Compute the floor first: it says whether there is anything to win, and where.
# 2. Below some 64 rows a step is launches and latencies, above it bytes: the same optimisation does not pay in both.
# 3. Keep what lost: on another GPU it may win, and the record says what to beat.

# %%
progress()
