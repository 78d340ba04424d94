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
# # 2 · The persistent batch
#
# **Goal.** You will see, on a schedule that really ran, why a batch that *is* the model input must be moved about in memory,
# and why a batch that is only an *index* need not.
#
# 10 minutes, no GPU needed. Terms: [glossary](../docs/glossary.md).
#
# | | V1 | V2 |
# |---|---|---|
# | where a request lives | a row of the dense batch | a [stable row](../docs/glossary.md#stable-row) |
# | what the model reads | those rows, as they stand | rows picked by [`idx_mapping`](../docs/glossary.md#idx_mapping) |
# | a request finishes | the last row moves into the hole ([condense](../docs/glossary.md#condense)) | its row is free |
# | the order must change | rows are swapped, field by field | another index vector |

# %%
import numpy as np
import plotly.graph_objects as go

from mrv2 import EngineConfig, Knobs, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.lab.exercise import Exercise, progress
from mrv2.viz import theme

ROWS = 6
# arrival step, prompt length, tokens to generate
LOAD = {
    "a": (0, 6, 14),
    "b": (0, 9, 5),
    "c": (0, 4, 9),
    "d": (0, 7, 18),
    "e": (3, 5, 10),
    "f": (6, 60, 8),
    "g": (8, 8, 12),
    "h": (12, 5, 6),
}


# %% [markdown]
# The same requests arrive at the same steps, once with each runner. After every step we write down where each request lives.


# %%
def run(runner: str) -> tuple[list[dict[str, int]], list[list[str]], dict[str, list[int]], EngineCore]:
    """Return, by step, request -> row of state, the batch in order; the tokens; and the engine."""
    knobs = Knobs(runner=runner, async_scheduling=False)
    core = EngineCore(
        EngineConfig(
            model="tiny-llama",
            load_format="dummy",
            max_model_len=128,
            max_num_seqs=ROWS,
            max_num_batched_tokens=32,
            num_gpu_blocks=64,
            enable_prefix_caching=False,
            knobs=knobs,
        )
    )
    homes, batches, tokens, left = [], [], {}, dict(LOAD)
    while left or core.has_unfinished:
        for name in [n for n, (arrival, _, _) in left.items() if arrival <= len(homes)]:
            _, prompt_len, max_tokens = left.pop(name)
            prompt = np.random.default_rng(ord(name)).integers(3, 500, size=prompt_len).tolist()
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens, ignore_eos=True)
            core.add_request(EngineRequest(req_id=name, prompt_token_ids=prompt, params=params))
        for said in core.step():
            tokens.setdefault(said.req_id, []).extend(said.new_token_ids)
        state = core.executor.runner
        homes.append(dict(state.batch.req_id_to_index if runner == "v1" else state.state.row_of))
        batches.append([name for name in state.batch.req_ids if name] if runner == "v1" else list(homes[-1]))
    return homes, batches, tokens, core


v1_homes, v1_batches, v1_tokens, v1 = run("v1")
v2_homes, v2_batches, v2_tokens, v2 = run("v2")
assert v1_tokens == v2_tokens, "another way to keep the books is not another result"
print(f"{len(v1_homes)} steps with V1, {len(v2_homes)} with V2, the same tokens")

# %% [markdown]
# ## Where each request lives
#
# Rows over steps, one colour a request. Press ▶, or drag the slider.

# %% jupyter={"source_hidden": true}
COLOURS = dict(zip(LOAD, ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#777777"]))


def cells(homes: list[dict[str, int]], upto: int, axis: str) -> go.Scatter:
    """Return the squares of steps 0..upto, labelled with the request."""
    at = [(step, row, name) for step in range(upto + 1) for name, row in homes[step].items()]
    return go.Scatter(
        x=[a[0] for a in at],
        y=[a[1] for a in at],
        text=[a[2] for a in at],
        mode="markers+text",
        marker={"symbol": "square", "size": 19, "color": [COLOURS[a[2]] for a in at]},
        textfont={"color": "white", "size": 11},
        hovertemplate="step %{x}, row %{y}: request %{text}<extra></extra>",
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        showlegend=False,
    )


def life_of_rows() -> go.Figure:
    """Return both runners' rows, one frame a step."""
    last = max(len(v1_homes), len(v2_homes)) - 1
    frames = [
        go.Frame(name=str(step), data=[cells(v1_homes, step, ""), cells(v2_homes, min(step, len(v2_homes) - 1), "2")])
        for step in range(last + 1)
    ]
    grid = {"gridcolor": theme.theme("light").grid, "zeroline": False}
    rows = {"range": [ROWS - 0.4, -0.6], "dtick": 1, "title": {"text": "row"}, **grid}
    steps = {"range": [-0.7, last + 0.7], "dtick": 2, **grid}
    play = {"frame": {"duration": 350, "redraw": False}, "fromcurrent": True, "transition": {"duration": 0}}
    stop = {"frame": {"duration": 0}, "mode": "immediate"}
    layout = theme.layout(
        theme.theme("light"),
        height=560,
        margin={"l": 110, "r": 16, "t": 44, "b": 20},
        xaxis={**steps, "anchor": "y"},
        yaxis={**rows, "domain": [0.56, 1.0]},
        xaxis2={**steps, "anchor": "y2", "title": {"text": "step"}},
        yaxis2={**rows, "domain": [0.0, 0.44]},
        annotations=[
            {"text": text, "x": 0, "y": y, "xref": "paper", "yref": "paper", "showarrow": False, "yanchor": "bottom"}
            for text, y in (("<b>V1: rows of the dense batch</b>", 1.01), ("<b>V2: stable rows</b>", 0.45))
        ],
        sliders=[
            {
                "active": last,
                "currentvalue": {"prefix": "after step "},
                "pad": {"t": 44, "l": 10},
                "steps": [{"method": "animate", "label": f.name, "args": [[f.name], stop]} for f in frames],
            }
        ],
        updatemenus=[
            {
                "type": "buttons",
                "x": 0.0,
                "y": -0.16,
                "xanchor": "right",
                "yanchor": "top",
                "direction": "left",
                "buttons": [
                    {"label": "▶", "method": "animate", "args": [None, play]},
                    {"label": "❚❚", "method": "animate", "args": [[None], stop]},
                ],
            }
        ],
    )
    return go.Figure(data=frames[-1].data, layout=layout, frames=frames)


life_of_rows()

# %% [markdown]
# **Look for:** in V1 a request changes its row when somebody above it leaves, or when a prompt has to stand behind the decodes.
# In V2 a colour is a straight line from its first step to its last.
#
# As statements about what has just run:


# %%
def rows_of(homes: list[dict[str, int]]) -> dict[str, list[int]]:
    """Return the rows that each request lived in, in order, without repetitions."""
    seen: dict[str, list[int]] = {}
    for home in homes:
        for name, row in home.items():
            if seen.setdefault(name, [row])[-1] != row:
                seen[name].append(row)
    return seen


assert all(len(rows) == 1 for rows in rows_of(v2_homes).values()), "a stable row is for life"
for homes in v1_homes:
    assert sorted(homes.values()) == list(range(len(homes))), "V1's batch has no hole after a step"
for name, rows in rows_of(v1_homes).items():
    print(f"V1: {name} lived in {' -> '.join(map(str, rows)):12}   V2: in {rows_of(v2_homes)[name][0]}")

# %% jupyter={"source_hidden": true}
moved = Exercise(
    "2.1",
    "How many times did V1 change the row of a request that it had already? Count from `rows_of(v1_homes)`.",
    check=lambda a: a == sum(len(rows) - 1 for rows in rows_of(v1_homes).values()),
    hints=["A request that lived in k rows has moved k - 1 times."],
    solution="answer = sum(len(rows) - 1 for rows in rows_of(v1_homes).values())",
    refuses=[-1],
)
moved

# %%
moved.check(...)

# %% [markdown]
# ## What one move costs
#
# V1 counts the rows that it moves or swaps. This is what it does for each of them:

# %%
import inspect

from mrv2.runner.v1.input_batch import InputBatch

print(f"V1 moved or swapped {v1.executor.runner.batch.num_moves} rows,")
print(f"and described its sampling parameters anew {v1.executor.runner.batch.num_refreshes} times.\n")
print(inspect.getsource(InputBatch._move_row))

# %% [markdown]
# Python, one line a field, while the GPU may be waiting for the step. It also grows: each new feature of a sampler adds a field that
# has to be moved and swapped, and forgetting one is a bug that shows itself only when rows change places.


# %% jupyter={"source_hidden": true}
def condensed(rows: list[str | None]) -> list[str]:
    """The law of `InputBatch.condense`: the last row moves into the lowest hole, until there is none."""
    rows = list(rows)
    while None in rows:
        if rows[-1] is None:
            rows.pop()
        else:
            rows[rows.index(None)] = rows.pop()
    return rows


HOLES = [["a", None, "c", "d"], [None, "b", None, "d", "e"], ["a", None], [None], ["a", "b"], [None, None, "c"]]
condense = Exercise(
    "2.2",
    "Write `condense(rows)`: it takes a list of request names with `None` for holes and returns the batch that V1 is left "
    "with. The **last** row moves into the **lowest** hole.",
    check=lambda f: next(
        (
            f"{rows} should become {condensed(rows)}, not {f(list(rows))}"
            for rows in HOLES
            if f(list(rows)) != condensed(rows)
        ),
        True,
    ),
    hints=["Holes at the end just vanish.", "`rows.index(None)` is the lowest hole; `rows.pop()` is the last row."],
    solution="""
def answer(rows):
    while None in rows:
        last = rows.pop()
        if last is not None:
            rows[rows.index(None)] = last
    return rows
""",
    refuses=[lambda rows: [name for name in rows if name]],
)
condense

# %%
condense.check(...)

# %% [markdown]
# ## What takes its place: a gather
#
# V2's step has no rows to move. The batch is `idx_mapping`, and whatever the step needs of the state is picked by it.
# On the device this is one kernel; in NumPy it is one line:

# %%
state = np.array([30, 10, 0, 20, 50, 40])  # one number a stable row
idx_mapping = np.array([4, 0, 3])  # the batch: three requests, in the order of this step
state[idx_mapping]

# %% jupyter={"source_hidden": true}
rng = np.random.default_rng(0)
TABLES = rng.integers(1, 99, size=(ROWS, 4))
COUNTS = np.array([2, 4, 0, 1, 3, 2])


def gathered(tables: np.ndarray, counts: np.ndarray, idx: np.ndarray) -> np.ndarray:
    """Row b: the used blocks of request idx[b], then zeros."""
    return np.where(np.arange(tables.shape[1]) < counts[idx][:, None], tables[idx], 0)


gather = Exercise(
    "2.3",
    "Write `gather(tables, counts, idx_mapping)` in NumPy: row b of the result holds the first `counts[...]` entries of the "
    "block table of request `idx_mapping[b]`, and 0 (the null block) behind them.",
    check=lambda f: all(
        np.array_equal(f(TABLES, COUNTS, idx), gathered(TABLES, COUNTS, idx))
        for idx in (np.array([4, 0, 3]), np.array([1]), np.array([5, 2, 1, 0]))
    ),
    hints=[
        "`tables[idx_mapping]` picks the rows.",
        "`np.arange(width) < counts[idx_mapping][:, None]` says what is used.",
    ],
    solution="""
def answer(tables, counts, idx_mapping):
    used = np.arange(tables.shape[1]) < counts[idx_mapping][:, None]
    return np.where(used, tables[idx_mapping], 0)
""",
    refuses=[lambda tables, counts, idx: tables[idx]],
)
gather

# %%
gather.check(...)

# %% [markdown]
# The engine's own gather, next to yours, on the block tables of a batch:

# %%
import torch

from mrv2_kernels.state.block_table import gather_block_tables_torch

idx = np.array([4, 0, 3], dtype=np.int32)
out = torch.full((4, 4), -1, dtype=torch.int32)
gather_block_tables_torch(
    out, torch.from_numpy(TABLES.astype(np.int32)), torch.from_numpy(COUNTS.astype(np.int32)), torch.from_numpy(idx)
)
assert (out[:3].numpy() == gathered(TABLES, COUNTS, idx)).all()
assert (out[3] == 0).all(), "a padding row points at the null block only"
out

# %% [markdown]
# ## Why the row must be stable
#
# Nothing of a request's state moves, so a step in flight can still read it while the host already prepares the next step. With
# rows that move, the host must first be sure that nobody reads them: V1's [barrier event](../docs/glossary.md#barrier-event).

# %%
v1.shutdown()
v2.shutdown()
progress()

# %% [markdown]
# **Next:** [3 · Preparing the inputs](03_input_prep.ipynb).
