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
from itertools import pairwise

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
    if all(isinstance(row, int) for row in rows):
        rows.sort()
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
    refuses=[ours["a"] / ceiling["a"], ceiling["a"] - ours["a"]],
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
# products take in what surrounds them, attention fetches ahead, and steps of prompts replay graphs too. `now` is `step` with what came after that: products
# in parts, weights of few rows in registers, the longest contexts first, greedy draws that only read, logits that are read while the last layer runs, and
# what the next step is told, which a graph reads before that step begins. A few percent between two columns may be noise.

# %%
levels = {
    "off": speeds("graphs-off", "v2 async") | speeds("graphs-off-e", "v2 async"),
    "model": speeds("graphs-model", "v2 async"),
    "step": speeds("graphs-step-earlier", "v2 async"),
    "now": {name: speed for name, speed in ours.items() if "-" not in name},
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
        "Divide the column `V2, step` by the one before.",
        "The smallest batches have the shortest steps: what is saved weighs most there.",
    ],
    solution="answer = max(levels['step'], key=lambda name: levels['step'][name] / levels['model'][name])",
    refuses=["d", "c"],
)
gained

# %%
gained.check(...)

# %% [markdown]
# Two knobs are about the last microseconds. With `fetch_ahead` a graph brings from pinned memory what the host has already written for the next step, while its
# logits are computed; off, the next graph begins with that. With `output_wait="sleep"` a host that waits gives its core away and is woken late, on a core that
# has cooled down; with `"spin"` it asks again and again. **Look for** who gains from spinning, and why async scheduling makes so little of it. (Sleeping and
# spinning were measured on two machines, `fetch_ahead` in one run.)

# %%
table(
    {
        "fetch_ahead off": speeds("fetch-ahead", "v2 async graphs=step fetch_ahead=False"),
        "on": speeds("fetch-ahead", "v2 async graphs=step fetch_ahead=True"),
        "sync, sleep": speeds("graphs-step-both", "v2 sync"),
        "sync, spin": speeds("graphs-step-spin", "v2 sync"),
        "async, sleep": speeds("graphs-step-both", "v2 async"),
        "async, spin": speeds("graphs-step-spin", "v2 async"),
    }
)

# %% [markdown]
# ## Job 2: products of few rows
#
# All four products of 28 layers, microseconds; reading the weights takes 199. A kernel that fetches its weights *before its input is there*
# ([dependent launch](../docs/glossary.md#dependent-launch)) hides most of the reading under its predecessor. "none ahead" is the same kernels without that.
# The last column are products on the tensor cores of a [warp group](../docs/glossary.md#warp-group), which leave [partial sums](../docs/glossary.md#partial-sums)
# to the norm behind them. **Look for** the batch at which each column loses to the library, and for the one that holds out longest.

# %%
gemms, in_parts = record("gemms"), record("products-in-parts")
by_rows: dict[str, dict[int, float]] = {}
# the second is a script's, from before the first: what the first has no chain of
for chain in [*gemms["chains"], *in_parts["chains"]]:
    if chain["microseconds"]:
        column = by_rows.setdefault(chain["name"].removeprefix("fastest "), {})
        column.setdefault(chain["num_rows"], chain["microseconds"])


def columns(**names: str) -> dict[str, dict[int, float]]:
    """Return heading -> rows -> microseconds of the chains that the records have."""
    return {heading: by_rows[name] for heading, name in names.items() if name in by_rows}


alone = ("library", "resident", "streamed", "warpgroup", "picked")
parts_alone = "parts, products alone"
shown = columns(**{name: name for name in (*alone, "picked, none ahead")}, **{"in parts": parts_alone})
table(shown, "{:.0f}")
print(f"floor: {gemms['floor_microseconds']:.0f} us")
saved = by_rows["library"][1] - by_rows["picked"][1]
times = [1e6 / levels[level]["a"] for level in ("model", "step")]
print(f"one request: a step {times[0]:,.0f} -> {times[1]:,.0f} us; the products alone save {saved:.0f}")

# %% [markdown]
# A layer has more than products. So that the comparison is of what a model runs, here are the same with norms, activation and additions: as kernels between
# products of the library or of our own, inside the products ("fused"), and in parts, where two norms a layer remain, which add the partial sums.

# %%
table(
    columns(
        **{"library, in layers": "library, in layers", "own, in layers": "picked, in layers"},
        **{"own, fused": "picked, fused", "in parts": "picked, parts"},
    ),
    "{:.0f}",
)

# %% jupyter={"source_hidden": true}
fused, parts = by_rows["picked, fused"], by_rows["picked, parts"]
won = min((rows for rows, us in parts.items() if us < fused.get(rows, us)), default=0)
rows_at = Exercise(
    "11.3",
    "From how many rows on is a layer in parts faster than one whose products take in what surrounds them? A number of rows of the table, 0 = never.",
    check=lambda a: a == won,
    hints=[
        "Compare the last two columns, line by line.",
        "Up to two rows the parts take in a norm as well.",
    ],
    solution="answer = min((n for n, us in parts.items() if us < fused.get(n, us)), default=0)",
    refuses=[rows for rows in (1, 4, 32, 64) if rows != won],
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
# At 1 and at 32 requests with short contexts, from the same records: the products and attention. Norms stand between them (`mrv2 bench --explain`
# attributes every kernel of a live step; kernels that start ahead wait inside themselves, so its times add up to more than the step).

# %%
for rows, place in ((1, "1 x 128"), (32, "32 x 128")):
    products = by_rows[parts_alone][rows] / gemms["num_layers"]
    floor = gemms["floor_microseconds"] / gemms["num_layers"]
    print(
        f"{rows:3} rows: products {products:5.1f} us (reading them takes {floor:.1f}), attention {best['fused'][place]:5.1f} us"
    )
for budget in record("explain")["budgets"]:
    print(
        f"{budget['num_requests']:3} requests, a live step: {budget['span_us']:6,.0f} us; its kernels one by one {budget['kernel_us']:6,.0f}"
    )

# %% [markdown]
# ## Longest first
#
# Where no context is split, a program walks a whole one. Contexts of unlike lengths end one by one, and a long one that starts late runs on beside an idle
# device. [Longest first](../docs/glossary.md#longest-first) starts them in order, the heads of a request side by side. Microseconds of one layer; `m256` are
# 256 requests of workload `e`, `u64` 64 of one length. **Look for** what each half does alone, and whether equal lengths lose.

# %%
mixed = record("attention-mixed")
orders = {row["plan"]: row for row in mixed["rows"] if "in force" in row["plan"].lower()}
names = {"IN FORCE": "as they come", "SORTED, in force": "sorted", "SORTED, in force heads first": "longest first"}
table({heading: orders[plan]["microseconds"] for plan, heading in names.items()}, "{:.1f}")
longest = orders["SORTED, in force heads first"]
print(f"workload e: {longest['e_ms']} ms; equal lengths: d {longest['d_percent']} %, f {longest['f_percent']} %")

# %% [markdown]
# ## Drawing the token
#
# One pass over 151,936 logits, against two passes and against the softmax that most samplers begin with (microseconds, plain temperature sampling). Then
# greedy rows, which are read once and hashed never, as a share of the bandwidth of reads:

# %%
draws: dict[str, dict[int, float]] = {}
greedy: dict[str, dict[int, float]] = {}
# the second is the later one
for entry in [*record("samplers")["times"], *record("samplers-spans")["times"]]:
    if entry["case"] == "plain" and entry["microseconds"]:
        draws.setdefault(entry["variant"], {})[entry["num_rows"]] = entry["microseconds"]
    if entry["case"] == "greedy":
        greedy.setdefault(entry["variant"], {})[entry["num_rows"]] = entry["share_of_read_bandwidth"]
table(draws, "{:.0f}")
table(greedy, "{:.0%}")

# %% [markdown]
# ## The way, step by step
#
# Output tokens per second, each column with all that stands in the columns before. The first is what an engine like vLLM's V1 does: graphs of the forward
# pass, inputs from the host, a step ahead. `in parts` is products in parts, longest first and the greedy draws of today, measured together: what a part of it
# brings is in the tables above, and summed up below: computed, for steps were not measured with one alone. Of the 8 % that longest first should take off
# workload `e`, with the products besides, the record shows 4; single runs on another GPU showed 6 to 10.

# %%
way = {
    "V1 async": speeds("graphs-model", "v1 async"),
    "V2 async": levels["model"],
    "whole steps, ahead": levels["step"],
}
way["in parts"] = levels["now"]
table(way)
gain = {f"{b} / {a}": {n: way[b][n] / way[a][n] for n in way["V1 async"]} for a, b in pairwise(way)}
for name, factors in gain.items():
    print(f"{name:32}", "  ".join(f"{workload} {factor:.2f}" for workload, factor in factors.items()))
by_parts = {rows: round(us - parts[rows]) for rows, us in sorted(fused.items()) if rows in parts}
by_parts |= {rows: round(us - parts[rows]) for rows, us in by_rows["library, in layers"].items() if rows >= 64}
print("of the last step, products alone, microseconds a step by rows:", by_parts)
print(f"of the last step, longest first alone, workload e: {-longest['e_ms'] / 5310:.0%} of its time")

# %% [markdown]
# ## What was tried and did not help
#
# Each of these is in the tables above, and the code that lost is still there to be measured again on another GPU:
#
# * **Streaming weights through L2** (`gemm/streamed.py`): prefetched before the wait, read after it. The second hop costs more than the library loses.
# * **Resident weights at 64 rows and more** (`gemm/resident.py`): every program reads the whole input anew, which then outweighs the weights.
# * **Norms, activation and additions inside the products**: each program reads and normalises the whole input anew. It paid up to 32 rows while whole products
#   were slower than they are now, and pays for one row since; products in parts take the norm in for 1 and 2 rows only, for at 8 it costs them 18 %.
# * **Launching fused attention ahead** (`fused pdl`): a gain at some shapes, a loss at others; it is decided shape by shape.
# * **The fused attention at 256 requests, launch by launch**: the chain is faster there. In a forward pass, with tiles of few keys in one warp, it is not.
# * **Splits of long contexts and fewer registers for mixed batches**: up to 4 % of workload `e`, but 4 % and more lost with 64 contexts of one length.
# * **Attention that starts late behind a product of 64 rows**: 12 % in a script with mixed contexts, 3 % lost in workload `d`. Measure where it works.

# %%
between = by_rows["picked, in layers"]
inside = {rows: between[rows] - us for rows, us in sorted(fused.items()) if rows in between}
print("microseconds a step that fusing saves, by rows:", {rows: round(gain) for rows, gain in inside.items()})
ahead = {place: best["fused"][place] - best["fused pdl"][place] for place in order}
print("microseconds that launching ahead saves a layer:", {place: round(gain, 1) for place, gain in ahead.items()})
for batch in in_parts["with_attention"]["batches"]:
    passes = {(t["contexts"], t["name"]): t["microseconds"] for t in batch["times"]}
    for (contexts, name), us in passes.items():
        if name == "late qkv":
            print(f"{batch['num_rows']:3} rows, {contexts}: attention late {us / passes[contexts, 'base'] - 1:+.1%}")

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
# 2. A step of few rows is launches and latencies, one of many bytes: what pays in one may cost in the other, so plans are per number of rows.
# 3. Keep what lost: on another GPU it may win, and the record says what to beat.

# %%
progress()
