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
# # 4 · Asynchronous scheduling
#
# **Goal.** You will predict from two numbers what running ahead is worth on *your* machine, then measure it, and see what it cannot
# change.
#
# 10 minutes. Runs on a GPU; on a CPU with the [host backend](../docs/glossary.md#host-backend), whose streams are threads that
# really run beside the host. Terms: [glossary](../docs/glossary.md).
#
# ```
# synchronous    host   | S E T |   wait   | U | S E T |   wait   | U |
#                device |       [  step n  ]           [ step n+1 ]           the device idles while the host works
#
# asynchronous   host   | S E T | U | S E T | U | wait | S E T | U |
#                device |       [  step n  ][ step n+1 ][ step n+2 ]          the host works while the device works
# ```

# %%
import hashlib
import time

import numpy as np
import plotly.graph_objects as go
import torch

import mrv2.trace
from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.instrument import recording, stage, stages
from mrv2.lab.exercise import Exercise, pick, progress, recorded
from mrv2.viz import Timeline, theme
from mrv2.viz.figures import bubble_stack, overlap_bars

ON_GPU = torch.cuda.is_available()
core = EngineCore(
    EngineConfig(
        model="qwen3-0.6b" if ON_GPU else "tiny-llama",
        load_format="dummy",
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        num_gpu_blocks=1500,
        enable_prefix_caching=False,
        knobs=Knobs(async_scheduling=False),
    )
)
NUM_REQUESTS, LENGTH = 8, pick(32, 16)

# %% [markdown]
# ## A load, with a front end
#
# Eight requests decode side by side. Whatever a server does with the tokens of a step (detokenise, stream, log) is work of the host
# too; here it is a checksum over a buffer, so that we can choose how long it takes.

# %%
# large enough that the work runs without Python's lock, as NumPy's and a tokenizer's does
BUFFER = bytes(1 << 20)


def front_end(seconds: float, waits: bool) -> None:
    """Keep the host for about that long: with work, or (`waits`) by waiting for a slow client."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        if waits:
            time.sleep(left)
        else:
            hashlib.sha256(BUFFER).digest()


def serve(
    front_end_s: float = 0.0, waits: bool = False, stop_at: dict[str, int] | None = None, num: int = NUM_REQUESTS
):
    """Serve the load; return generated tokens, seconds, engine steps."""
    tokens: dict[str, list[int]] = {}
    first = core.scheduler.step
    for i in range(num):
        prompt = np.random.default_rng(i).integers(3, 500, size=16).tolist()
        stop = [stop_at[str(i)]] if stop_at else None
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=LENGTH, ignore_eos=True, stop_token_ids=stop)
        core.add_request(EngineRequest(req_id=str(i), prompt_token_ids=prompt, params=params))
    start = time.perf_counter()
    while core.has_unfinished:
        outputs = core.step()
        with stage(stages.PROCESS_OUTPUTS):
            if front_end_s and outputs:
                front_end(front_end_s, waits)
            for said in outputs:
                tokens.setdefault(said.req_id, []).extend(said.new_token_ids)
    return tokens, time.perf_counter() - start, core.scheduler.step - first


def record(**load):
    """Serve the load under the recorder; return the trace and what `serve` returned."""
    with recording(core.device) as recorder:
        served = serve(**load)
        core.device.synchronize("end of the recording")
    return mrv2.trace.from_recorder(recorder), served


serve()  # warm-up
reference, _, _ = serve()

# %% [markdown]
# ## The two numbers
#
# **h**, the time that a step keeps the host (its waits for the device left out), and **d**, the time that it keeps the device. In a synchronous engine they take turns, so a step lasts
# about h + d. An engine that runs ahead is held up only by the slower of the two: max(h, d). So
#
# $$\text{speed-up} \;\le\; \frac{h + d}{\max(h, d)} \;\le\; 2$$
#
# We choose the front end so that it takes about as long as the device.

# %%
trace, _ = record()
steps = trace.steps()
device_s = float(np.median(steps.gpu_busy_ns)) / 1e9
FRONT_END_S = device_s
trace_sync, (tokens_sync, _, _) = record(front_end_s=FRONT_END_S, waits=True)
steps = trace_sync.steps()
h, d = (float(np.median(column)) / 1e6 for column in (steps.cpu_ns, steps.gpu_busy_ns))
print(f"h = {h:.2f} ms on the host, d = {d:.2f} ms on the device, a step lasts {np.median(steps.wall_ns) / 1e6:.2f} ms")

# %% jupyter={"source_hidden": true}
predict = Exercise(
    "4.1",
    "Predict the speed-up of async scheduling for this load from `h` and `d`. Answer with the formula's value.",
    check=lambda a: (
        (abs(a - (h + d) / max(h, d)) < 0.02)
        or f"{a:.2f} is not what (h + d) / max(h, d) gives for h={h:.2f}, d={d:.2f}"
    ),
    hints=["Both variables are in milliseconds; the ratio has no unit."],
    solution="answer = (h + d) / max(h, d)",
    refuses=[0.5, (h + d) / min(h, d) + 0.1],
)
predict

# %%
predict.check(...)

# %% [markdown]
# ## Measure
#
# Synchronous and asynchronous in turns, several times, so that what else your machine does meets both. And two kinds of front end: one that computes,
# and one that waits for a slow client, which takes the host's time but no core.

# %%
bound = (h + d) / max(h, d)
seconds: dict[tuple[bool, bool], list[float]] = {
    (waits, ahead): [] for waits in (False, True) for ahead in (False, True)
}
for _ in range(pick(3, 1)):
    for (waits, ahead), taken in seconds.items():
        core.set_knobs(async_scheduling=ahead, queue_depth=2)
        tokens, took, _ = serve(front_end_s=FRONT_END_S, waits=waits)
        assert tokens == reference, "running ahead changes no token"
        taken.append(took)
for waits, label in ((False, "a front end that computes"), (True, "a front end that waits")):
    speed_up = np.median(seconds[waits, False]) / np.median(seconds[waits, True])
    print(f"{label:26}: asynchronous is {speed_up:.2f} times as fast, predicted at most {bound:.2f}")

# %% [markdown]
# How much of the predicted gain did you get? The formula assumes that each side is as fast beside the other as alone. On a GPU it is. On a CPU host and
# device compete for cores and for the [GIL](../docs/glossary.md#gil): d grows while they overlap, the more the fewer cores are free, and the first line may
# show no gain at all; the second takes most of that competition out.
#
# ## The picture
#
# Synchronous first, with the waiting front end. **Look for** the device's gap under the host's `process_outputs`.

# %%
Timeline(trace_sync, window=trace_sync.steps().take(slice(4, 7)), title="Synchronous")

# %% [markdown]
# Asynchronous: the same work, but the device has its next step already when the host begins to work on the last one's tokens.

# %%
core.set_knobs(async_scheduling=True, queue_depth=2)
trace_async, (tokens_async, _, _) = record(front_end_s=FRONT_END_S, waits=True)
assert tokens_async == tokens_sync
Timeline(trace_async, window=trace_async.steps().take(slice(4, 7)), title="Asynchronous")

# %% [markdown]
# Each step's time in four parts that always sum to the whole:

# %%
overlap_bars(trace_sync.analyze())

# %%
overlap_bars(trace_async.analyze())

# %%
for name, shown in (("synchronous", trace_sync), ("asynchronous", trace_async)):
    figures = shown.overview().devices[0]
    parts = (figures.overlap_ns, figures.exposed_ns, figures.gpu_only_ns, figures.idle_both_ns)
    assert sum(parts) == figures.window_ns, "both + host alone + device alone + neither = everything"
    print(
        f"{name:13} overlap {100 * figures.overlap_cpu:5.1f} % of the host's work, device idle {100 * figures.idle_share:5.1f} %"
    )

# %% jupyter={"source_hidden": true}
exposed = Exercise(
    "4.2",
    "How many milliseconds of host work stood **exposed** (device idle) in `trace_sync`, over the whole window? Answer from "
    "`trace_sync.overview()`.",
    check=lambda a: abs(a - trace_sync.overview().devices[0].exposed_ns / 1e6) < 0.01,
    hints=["`overview().devices[0]` has a field for it, in nanoseconds."],
    solution="answer = trace_sync.overview().devices[0].exposed_ns / 1e6",
    refuses=[0.0, trace_sync.overview().devices[0].exposed_ns],
)
exposed

# %%
exposed.check(...)

# %% [markdown]
# ## How far ahead? Depth 1 to 4
#
# `queue_depth` is how many steps may be in flight. One is synchronous. Two hides the host behind the device, if the host's work per step
# is steady. More depth only helps against jitter.

# %%
DEPTHS = (1, 2, 3, 4)
by_depth: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
for _ in range(pick(2, 1)):
    for depth in DEPTHS:
        core.set_knobs(async_scheduling=True, queue_depth=depth)
        tokens, took, num_steps = serve(front_end_s=FRONT_END_S, waits=True)
        assert tokens == reference
        by_depth[depth].append(1e3 * took / num_steps)
go.Figure(
    [
        go.Bar(
            x=[f"depth {depth}" for depth in DEPTHS],
            y=[float(np.median(by_depth[depth])) for depth in DEPTHS],
            text=[f"{np.median(by_depth[depth]):.1f} ms" for depth in DEPTHS],
            marker={"color": ["#D55E00", "#0072B2", "#0072B2", "#0072B2"]},
        ),
        go.Scatter(x=[f"depth {depth}" for depth in DEPTHS], y=[max(h, d)] * 4, mode="lines", line={"dash": "dash"}),
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": "Milliseconds a step; dashed: max(h, d)"},
        height=320,
        showlegend=False,
        yaxis={"title": {"text": "ms"}},
    ),
)


# %% [markdown]
# Was the host ever further ahead than allowed? Count, whenever a step is launched, how many steps are launched but not yet waited for.


# %%
def run_ahead(trace) -> list[int]:
    """Return, for each step after the first, how many earlier steps were still in flight when it was launched."""
    names = np.array(trace.strings)[trace.ranges.name]
    launched = dict(zip(trace.ranges.step[names == "execute_model"], trace.ranges.start[names == "execute_model"]))
    settled = dict(zip(trace.ranges.step[names == "wait_output"], trace.ranges.end[names == "wait_output"]))
    return [sum(settled[m] > start for m in launched if m < n) for n, start in launched.items()][1:]


# %%
for depth in DEPTHS:
    core.set_knobs(async_scheduling=True, queue_depth=depth)
    trace, _ = record(front_end_s=FRONT_END_S, waits=True)
    ahead = run_ahead(trace)
    assert max(ahead) <= depth - 1, "the depth is a law"
    print(f"depth {depth}: in flight at a launch {sorted(set(map(int, ahead)))}")

# %% [markdown]
# ## The price: steps for a request that is already over
#
# A host that runs ahead learns late that a request has stopped. One request alone, ended by a stop token that the host sees only when
# the token arrives:

# %%
# served alone: on a GPU a matrix product of one row may round otherwise than one of eight
alone, _, _ = serve(num=1)
STOP = alone["0"][6]
needed = alone["0"].index(STOP) + 1
wasted = {}
for depth in DEPTHS:
    core.set_knobs(async_scheduling=True, queue_depth=depth)
    tokens, _, num_steps = serve(stop_at={"0": STOP}, num=1)
    assert tokens["0"] == alone["0"][:needed], "what comes after the stop is thrown away"
    wasted[depth] = num_steps - needed
wasted

# %% jupyter={"source_hidden": true}
waste = Exercise(
    "4.3",
    "Write a function of the depth that gives the **most** steps that a stopped request can waste.",
    check=lambda f: (
        all(wasted[depth] <= f(depth) for depth in DEPTHS)
        and f(1) == 0
        and all(f(depth + 1) - f(depth) == 1 for depth in DEPTHS[:-1])
    ),
    hints=["Synchronous wastes nothing.", "Compare with `wasted`, which your engine has just measured."],
    solution="answer = lambda depth: depth - 1",
    refuses=[lambda depth: depth, lambda depth: 0],
)
waste

# %%
waste.check(...)

# %% [markdown]
# ## On an H200
#
# The same two settings, recorded with Nsight Systems: 32 requests of Qwen3-0.6B. Here the host *is* the bottleneck, without any front end.

# %%
gpu_sync = mrv2.trace.load(recorded("h200/v2_sync.graph.sqlite.gz"))
gpu_async = mrv2.trace.load(recorded("h200/v2_async.graph.sqlite.gz"))
Timeline(gpu_sync, window=gpu_sync.steps().take(slice(10, 13)), title="H200, V2 synchronous")

# %%
Timeline(gpu_async, window=gpu_async.steps().take(slice(10, 13)), title="H200, V2 asynchronous")

# %% [markdown]
# The gaps of the device in the synchronous run, step by step, are [bubbles](../docs/glossary.md#bubble); each nanosecond of one is given to what the host
# did meanwhile. **Look for** who fills them: schedule, execute_model, preparation, the wait itself.

# %%
bubble_stack(gpu_sync.analyze())

# %%
for name, shown in (("synchronous", gpu_sync), ("asynchronous", gpu_async)):
    bubbles, num_steps = shown.bubbles(), len(shown.steps())
    assert sum(bubbles.by_cause().values()) == bubbles.total_ns, "every nanosecond of a bubble has one cause"
    ahead = shown.steps().run_ahead
    print(
        f"{name:13} {bubbles.total_ns / num_steps / 1e3:6.0f} us of bubbles a step; at a launch the host is "
        f"{np.nanmean(ahead):.2f} steps ahead"
    )

# %% jupyter={"source_hidden": true}
walls = [float(np.median(t.steps().wall_ns)) for t in (gpu_sync, gpu_async)]
h200 = Exercise(
    "4.4",
    "By which factor is the median step of `gpu_async` shorter than that of `gpu_sync`?",
    check=lambda a: abs(a - walls[0] / walls[1]) < 0.02,
    hints=["`trace.steps().wall_ns` has one entry a step.", "`np.median`"],
    solution="answer = np.median(gpu_sync.steps().wall_ns) / np.median(gpu_async.steps().wall_ns)",
    refuses=[1.0, walls[1] / walls[0]],
)
h200

# %%
h200.check(...)

# %%
core.shutdown()
progress()

# %% [markdown]
# **Next:** [5 · The sampler](05_sampler.ipynb).
