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
# # 3 · Preparing the inputs
#
# **Goal.** You will have written, in NumPy, what five small kernels do between two forward passes, and seen why it is worth having
# them on the device: their inputs are already there.
#
# 10 minutes. Without a GPU the Triton kernels run in Triton's interpreter, slowly but exactly. Terms:
# [glossary](../docs/glossary.md).
#
# | kernel | writes |
# |---|---|
# | `prepare_prefill_inputs` | the prompt tokens of this step |
# | `prepare_pos_seq_lens` | positions and context lengths |
# | `combine_sampled_and_draft_tokens` | the last sampled token (and drafts), and which rows need logits |
# | `compute_slot_mapping` | the [slot](../docs/glossary.md#slot) of each token in the KV cache |
# | `post_update` | history and lengths, once the step has sampled ([post-update](../docs/glossary.md#post-update)) |

# %%
import os

import numpy as np
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
DEVICE = "cuda" if ON_GPU else "cpu"

from mrv2.lab.exercise import Exercise, pick, progress
from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens_torch, combine_sampled_and_draft_tokens_triton
from mrv2_kernels.inputs.post_update import post_update_torch, post_update_triton
from mrv2_kernels.inputs.prepare import (
    prepare_pos_seq_lens_torch,
    prepare_pos_seq_lens_triton,
    prepare_prefill_inputs_torch,
    prepare_prefill_inputs_triton,
)
from mrv2_kernels.state.block_table import compute_slot_mapping_torch, compute_slot_mapping_triton

# %% [markdown]
# ## A batch
#
# Six rows of request state, three requests in the step. Row 4 decodes (1 token), row 0 is in the middle of its prompt (5 tokens),
# row 3 decodes too. This is all that the **host** sends: an index and where each request's tokens begin.

# %%
ROWS, WIDTH, BLOCK_SIZE = 6, 64, 16
idx_mapping = np.array([4, 0, 3], dtype=np.int32)
query_start_loc = np.array([0, 1, 6, 7], dtype=np.int32)

# %% [markdown]
# And this is what the **device** knows already, one entry a stable row. The host need not know the last sampled token.

# %%
rng = np.random.default_rng(3)
prefill_len = np.array([30, 8, 8, 12, 20, 8], dtype=np.int32)
num_computed = np.array([10, 0, 0, 15, 33, 0], dtype=np.int32)
total_len = np.array([30, 8, 8, 16, 34, 8], dtype=np.int32)
last_sampled = np.array([0, 0, 0, 303, 404, 0], dtype=np.int64)
token_ids = rng.integers(1, 500, size=(ROWS, WIDTH)).astype(np.int32)
block_tables = rng.permutation(np.arange(1, 1 + ROWS * 4)).reshape(ROWS, 4).astype(np.int32)


def on_device(array: np.ndarray) -> torch.Tensor:
    """Return a copy on the device."""
    return torch.from_numpy(array.copy()).to(DEVICE)


# %% [markdown]
# ## Each kernel against its reference
#
# Every kernel has a torch twin of the same signature. The outputs are filled with garbage first, so that an entry nobody writes
# would show.

# %%
state = {
    name: on_device(value)
    for name, value in {
        "idx": idx_mapping,
        "starts": query_start_loc,
        "tokens": token_ids,
        "prefill": prefill_len,
        "computed": num_computed,
        "last": last_sampled,
        "tables": block_tables,
    }.items()
}
PAD = 8  # tokens and rows of the padded bucket
no_drafts = torch.empty(ROWS, 0, dtype=torch.int64, device=DEVICE)
one_row_each = on_device(np.arange(4, dtype=np.int32))


def build(prefill, lengths, combine, slots) -> dict[str, np.ndarray]:
    """Run the four kernels in the order of a step and return what the model would read."""
    garbage = lambda size: torch.full((size,), -77, dtype=torch.int32, device=DEVICE)  # noqa: E731
    ids, positions, seq_lens, logits, slot = garbage(PAD), garbage(PAD), garbage(4), garbage(4), garbage(PAD)
    s = state
    prefill(ids, s["idx"], s["starts"], s["tokens"], s["prefill"], s["computed"], max_query_len=5)
    lengths(positions, seq_lens, s["idx"], s["starts"], s["computed"], max_query_len=5)
    combine(ids, logits, s["idx"], s["starts"], seq_lens, s["prefill"], s["last"], no_drafts, one_row_each)
    slots(slot, s["tables"], s["idx"], s["starts"], positions, block_size=BLOCK_SIZE)
    made = {"input_ids": ids, "positions": positions, "seq_lens": seq_lens, "logits_indices": logits, "slots": slot}
    return {name: tensor.cpu().numpy() for name, tensor in made.items()}


# %%
by_triton = build(
    prepare_prefill_inputs_triton,
    prepare_pos_seq_lens_triton,
    combine_sampled_and_draft_tokens_triton,
    compute_slot_mapping_triton,
)
by_torch = build(
    prepare_prefill_inputs_torch,
    prepare_pos_seq_lens_torch,
    combine_sampled_and_draft_tokens_torch,
    compute_slot_mapping_torch,
)
num_tokens = int(query_start_loc[-1])
for name in by_triton:
    used = num_tokens if name == "input_ids" else None
    assert np.array_equal(by_triton[name][:used], by_torch[name][:used]), name
    print(f"{name:15} {by_triton[name]}")

# %% [markdown]
# **Look for** the padding at the end: position 0, length 0, slot -1. Padding rows read one null block and write nothing, so a
# [CUDA graph](../docs/glossary.md#cuda-graph) that was captured for a larger batch can be replayed for this one.
#
# A batch of decodes alone needs one launch for the first four kernels (`mrv2_kernels/inputs/decode.py`). The source of one of the four;
# one program a request:

# %%
import inspect

from mrv2_kernels.inputs import prepare

print(inspect.getsource(prepare._pos_seq_lens_kernel.fn))

# %% [markdown]
# ## Now you, in NumPy
#
# This is also what `input_prep="host"` does in every step (`workbench/mrv2/runner/v2/host_inputs.py`); you meet it below.


# %% jupyter={"source_hidden": true}
def random_batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return idx_mapping, query_start_loc, num_computed of some batch."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, ROWS + 1))
    lens = draw.integers(1, 9, size=size)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    return draw.permutation(ROWS)[:size].astype(np.int32), starts, draw.integers(0, 40, size=ROWS).astype(np.int32)


def kernel_positions(idx: np.ndarray, starts: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the engine's own kernel writes."""
    out = torch.zeros(int(starts[-1]), dtype=torch.int32), torch.zeros(len(idx), dtype=torch.int32)
    prepare_pos_seq_lens_torch(*out, *map(torch.from_numpy, (idx, starts, computed)), max_query_len=8)
    return out[0].numpy(), out[1].numpy()


def positions_agree(f) -> bool | str:
    """Compare with the kernel on random batches."""
    for seed in range(20):
        batch = random_batch(seed)
        wanted, mine = kernel_positions(*batch), f(*batch)
        for name, a, b in zip(("positions", "seq_lens"), mine, wanted):
            if not np.array_equal(a, b):
                return (
                    f"{name} of the batch idx_mapping={batch[0]}, query_start_loc={batch[1]}: {a}, the kernel says {b}"
                )
    return True


positions = Exercise(
    "3.1",
    "Write `f(idx_mapping, query_start_loc, num_computed)` that returns `(positions, seq_lens)` without padding.",
    check=positions_agree,
    hints=[
        "A request's tokens are at num_computed, num_computed + 1, ...",
        "Token t of request b stands at `num_computed[idx_mapping[b]] + t - query_start_loc[b]`.",
        "`np.repeat(values, lengths)` gives each token its request's value.",
    ],
    solution="""
def answer(idx_mapping, query_start_loc, num_computed):
    lengths = np.diff(query_start_loc)
    first = num_computed[idx_mapping]
    within = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], lengths)
    return np.repeat(first, lengths) + within, first + lengths
""",
    refuses=[lambda idx, starts, computed: (np.arange(starts[-1]), np.diff(starts))],
)
positions

# %%
positions.check(...)


# %% jupyter={"source_hidden": true}
def slots_agree(f) -> bool | str:
    """Compare with the kernel on random batches."""
    for seed in range(20):
        idx, starts, computed = random_batch(seed)
        where = kernel_positions(idx, starts, computed)[0]
        wanted = torch.zeros(len(where), dtype=torch.int32)
        compute_slot_mapping_torch(
            wanted, *map(torch.from_numpy, (block_tables, idx, starts, where)), block_size=BLOCK_SIZE
        )
        mine = f(block_tables, idx, starts, where)
        if not np.array_equal(mine, wanted.numpy()):
            return f"idx_mapping={idx}, positions={where}: {mine}, the kernel says {wanted.numpy()}"
    return True


slots = Exercise(
    "3.2",
    "Write `f(block_tables, idx_mapping, query_start_loc, positions)` that returns the slot of each token. A block holds "
    "`BLOCK_SIZE` tokens.",
    check=slots_agree,
    hints=["Slot = block * BLOCK_SIZE + offset.", "The block is `block_tables[row, position // BLOCK_SIZE]`."],
    solution="""
def answer(block_tables, idx_mapping, query_start_loc, positions):
    row = np.repeat(idx_mapping, np.diff(query_start_loc))
    return block_tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
""",
    refuses=[lambda tables, idx, starts, positions: positions],
)
slots

# %%
slots.check(...)

# %% [markdown]
# ## The loop closes on the device
#
# After sampling, `post_update` appends the token and advances the lengths. The next step's inputs come from what it wrote. No number
# has visited the host.


# %%
def after_sampling(kernel) -> dict[str, np.ndarray]:
    """Return the state after a step in which rows 4 and 3 sampled 11 and 33; row 0 is inside its prompt."""
    changed = {
        "num_computed": on_device(num_computed),
        "total_len": on_device(total_len),
        "last_sampled": on_device(last_sampled),
        "token_ids": on_device(token_ids),
    }
    sampled = on_device(np.array([[11], [22], [33]], dtype=np.int64))
    num_sampled = on_device(np.array([1, 0, 1], dtype=np.int32))
    none_rejected = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    kernel(*changed.values(), state["idx"], state["starts"], sampled, num_sampled, none_rejected)
    return {name: tensor.cpu().numpy() for name, tensor in changed.items()}


after, reference = after_sampling(post_update_triton), after_sampling(post_update_torch)
for name in after:
    assert np.array_equal(after[name], reference[name]), name
print("computed    ", num_computed, "->", after["num_computed"])
print("last sampled", last_sampled, "->", after["last_sampled"])
assert (after["num_computed"] - num_computed)[idx_mapping].tolist() == np.diff(query_start_loc).tolist()
assert after["token_ids"][4, total_len[4]] == 11 and after["last_sampled"][0] == last_sampled[0]

# %% [markdown]
# ## Host or device: what the host does per step
#
# The knob `input_prep`. **device**: the host sends an index and submits kernels. **host**: NumPy builds what you just wrote, from
# tables that the host keeps, and uploads it array by array; the sampled tokens are still put in on the device, which alone knows
# them. Nothing else changes. We look at the time that the **host** spends inside `execute_model`.

# %%
from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.instrument import Recorder, recording

core = EngineCore(
    EngineConfig(
        model="tiny-llama",
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=32,
        num_gpu_blocks=300,
        max_num_spec_tokens=3,
        knobs=Knobs(async_scheduling=False),
    )
)


def serve(num_requests: int, length: int) -> tuple[Recorder, dict[str, list[int]]]:
    """Serve requests that decode side by side; return what was recorded and generated."""
    tokens: dict[str, list[int]] = {}
    for i in range(num_requests):
        prompt = np.random.default_rng(i).integers(3, 500, size=8).tolist()
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=length, ignore_eos=True)
        core.add_request(EngineRequest(req_id=str(i), prompt_token_ids=prompt, params=params))
    with recording(core.device) as recorder:
        while core.has_unfinished:
            for said in core.step():
                tokens.setdefault(said.req_id, []).extend(said.new_token_ids)
        core.device.synchronize("end of the recording")
    return recorder, tokens


def median_us(recorder: Recorder, name: str) -> float:
    """Return the median length of a host stage in microseconds; 0 if it is not there."""
    found = [s.end_ns - s.start_ns for s in recorder.spans() if s.name == name and s.kind == "host"]
    return float(np.median(found)) / 1e3 if found else 0.0


# %%
SIZES = pick([1, 8, 16, 32], [1, 8])
measured: dict[str, list[float]] = {}
building: dict[str, list[float]] = {}
said: dict[str, list[dict[str, list[int]]]] = {}
for prep in ("device", "host"):
    core.set_knobs(input_prep=prep)
    serve(2, 4)  # warm-up
    results = [serve(size, pick(24, 8)) for size in SIZES]
    measured[prep] = [median_us(recorder, "execute_model") for recorder, _ in results]
    building[prep] = [median_us(recorder, "build_inputs") for recorder, _ in results]
    said[prep] = [tokens for _, tokens in results]
assert said["host"] == said["device"], "the knob changes who prepares, not what is generated"
assert all(building["host"]) and not any(building["device"])

# %%
import plotly.graph_objects as go

from mrv2.viz import theme

go.Figure(
    [
        go.Scatter(x=SIZES, y=values, name=label, mode="lines+markers", line={"color": colour, "dash": dash})
        for values, label, colour, dash in (
            (measured["host"], "host: execute_model", "#D55E00", "dash"),
            (building["host"], "host: build_inputs in it", "#D55E00", "dot"),
            (measured["device"], "device: execute_model", "#0072B2", "solid"),
        )
    ],
    theme.layout(
        theme.theme("light"),
        title={"text": "Host time by input_prep, median of the steps"},
        height=340,
        margin={"t": 80},
        xaxis={"title": {"text": "requests in the batch"}},
        yaxis={"title": {"text": "us"}, "rangemode": "tozero"},
    ),
)

# %% [markdown]
# **Look for** two things: which line is higher, and which one grows with the batch. The block tables grow with the longest context
# that a request may have, too; here that is 128 tokens. On a CPU the two "devices" share the cores and the
# [GIL](../docs/glossary.md#gil), so the lines are noisy. `runner="v1"` prepares on the host as well, from a dense batch; recordings of
# both runners on an H200 are in `traces/` ([notebook 9](09_nsight.ipynb)).

# %% [markdown]
# ## The number that the host lacks
#
# So far the host could count: a decode moves each request by one token. With [drafts](../docs/glossary.md#draft) it cannot: how many
# were kept is known on the device, when the step has run. Whoever builds positions and slots on the host must wait for that number, the
# [count sync](../docs/glossary.md#count-sync), before the next step can be built. Three drafts, one step launched ahead:

# %%
waits: dict[str, dict[str, int]] = {}
drafted: dict[str, Recorder] = {}
for prep in ("device", "host"):
    core.set_knobs(input_prep=prep, async_scheduling=True, spec_method="ngram", num_spec_tokens=3)
    serve(2, 4)
    before = core.device.waits.copy()
    drafted[prep], tokens = serve(4, pick(24, 12))
    waits[prep] = dict(core.device.waits - before)
    said[prep] = [tokens]
    print(f"input_prep={prep:6}  waits: {waits[prep]}")
assert said["host"] == said["device"]
assert "accepted tokens" not in waits["device"] and waits["host"]["accepted tokens"] > 0

# %%
import mrv2.trace
from mrv2.viz import Timeline

trace = mrv2.trace.from_recorder(drafted["host"])
Timeline(trace, window=trace.steps().take(slice(3, 6)), title="Three steps with drafts, inputs built on the host")

# %% [markdown]
# **Look for** `wait: accepted tokens` at the start of `execute_model`, `build_inputs` behind it, and the main stream, which has nothing
# to do from its draft stage until the host is done. One step ahead is what the knob asks for; there is no ahead left.

# %% jupyter={"source_hidden": true}
recorder = drafted["host"]


def next_stage() -> str:
    """The host stage that begins first behind each wait for accepted tokens, if it is always the same one."""
    spans = sorted((s for s in recorder.spans() if s.kind != "device"), key=lambda s: s.start_ns)
    ends = [s.end_ns for s in spans if s.name == "wait: accepted tokens"]
    followers = {next(s.name for s in spans if s.start_ns >= end) for end in ends}
    return followers.pop() if len(followers) == 1 else ""


where = Exercise(
    "3.3",
    "`recorder` holds the run with `input_prep='host'`. Which stage of the host begins right after each `wait: accepted tokens`, and "
    "could not begin before? Answer with its name.",
    check=lambda a: a == next_stage(),
    hints=[
        "`recorder.spans()` has `name`, `kind` ('host', 'wait' or 'device'), `start_ns` and `end_ns`.",
        "For the end of each wait: the span with the smallest `start_ns` that is not before it, those of the device left out.",
    ],
    solution="""
spans = sorted((s for s in recorder.spans() if s.kind != "device"), key=lambda s: s.start_ns)
end = next(s.end_ns for s in spans if s.name == "wait: accepted tokens")
answer = next(s.name for s in spans if s.start_ns >= end)
""",
    refuses=["wait: accepted tokens", "prepare_inputs"],
)
where

# %%
where.check(...)

# %%
core.shutdown()
progress()

# %% [markdown]
# **Next:** [4 · Asynchronous scheduling](04_async_scheduling.ipynb).
