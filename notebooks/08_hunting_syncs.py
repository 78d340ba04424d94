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
# # 8 · Hunting syncs
#
# **Goal.** You will find five hidden waits in a small serving loop, remove them, and put a test into CI that keeps them out.
#
# 10 minutes. On a CPU the [host backend](../docs/glossary.md#host-backend) plays the device: its tensors belong to worker threads, and reading them
# early is a wait (or a race) just as on a GPU. Terms: [glossary](../docs/glossary.md).
#
# A [sync point](../docs/glossary.md#sync-point) seldom looks like one. It costs what the device idles afterwards, not the time in the call:
# the [induced bubble](../docs/glossary.md#induced-bubble).

# %%
import os

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import mrv2.trace
from mrv2 import SyncError
from mrv2.device import make_device
from mrv2.instrument import recording, sync_guard
from mrv2.lab.exercise import Exercise, pick, progress, recorded

device = make_device("auto")
main, copy = device.main, device.stream("copy")
ROWS, VOCAB = 6, 64
print(f"{device.type} backend")

# %% [markdown]
# ## A small serving loop
#
# It decodes `ROWS` sequences with a "model" that is one matrix. Everything runs on the device, stage by stage. Five innocent lines make the host wait.
# Read it first: how many do you see?


# %%
def forward(logits: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor) -> None:
    """Device code: the next token's logits."""
    logits.copy_(weights[tokens])


def sample(tokens: torch.Tensor, alive: torch.Tensor, num_alive: torch.Tensor, logits: torch.Tensor) -> None:
    """Device code: greedy; token 0 ends a sequence, and an ended one stays at 0."""
    tokens.copy_(torch.where(alive, logits.argmax(dim=1), 0))
    alive.logical_and_(tokens != 0)
    num_alive.copy_(alive.sum(dim=0, keepdim=True))


# %%
class Server:
    """Decodes; `step` returns the tokens of the step as a list of ROWS numbers."""

    def __init__(self) -> None:
        self.weights = device.zeros((VOCAB, VOCAB))
        self.logits = device.zeros((ROWS, VOCAB))
        self.tokens = device.zeros((ROWS,), torch.int64)
        self.alive = device.full((ROWS,), True, torch.bool)
        self.num_alive = device.full((1,), ROWS, torch.int64)
        rng = np.random.default_rng(5)
        weights, first = device.pinned((VOCAB, VOCAB)), device.pinned((ROWS,), torch.int64)
        weights.numpy()[:] = rng.normal(size=(VOCAB, VOCAB))
        first.numpy()[:] = rng.integers(1, VOCAB, size=ROWS)
        main.copy("upload", self.weights, weights)
        main.copy("upload", self.tokens, first)
        self.pinned = device.pinned((ROWS,), torch.int64)
        self.log: list[str] = []

    def step(self) -> list[int]:
        main.run("forward", forward, self.logits, self.weights, self.tokens)
        main.run("sample", sample, self.tokens, self.alive, self.num_alive, self.logits)
        if self.is_done():
            self.write_log("done")
        self.write_log(f"step {len(self.log)}: logits {self.logits[0, :3]}")
        self.watch_longest()
        return self.output()

    def is_done(self) -> bool:
        return self.num_alive.item() == 0

    def write_log(self, text: str) -> None:
        self.log.append(text)

    def watch_longest(self) -> None:
        running = self.tokens[self.alive]
        self.log.append(f"{len(running)} running")

    def output(self) -> list[int]:
        buffer = device.pinned((ROWS,), torch.int64)
        main.copy("output_copy", buffer, self.tokens)
        event = main.record_event()
        history = torch.zeros(ROWS, dtype=torch.int64)
        main.copy("history", history, self.tokens)
        event.synchronize("output")
        return buffer.tolist()


NUM_STEPS = pick(20, 6)
server = Server()
reference = [server.step() for _ in range(NUM_STEPS)]
reference[:3]

# %% [markdown]
# ## The guard
#
# [`sync_guard`](../docs/glossary.md#sync-guard) records every wait that has no name, with the call and the place. Arm it after warm-up.

# %%
server = Server()
server.step()
with sync_guard(device, mode="record") as guard:
    server.step()
# on CUDA the guard also notes memory growth and a full launch queue, which are not what we hunt
found = [r for r in guard.violations if r.kind not in ("allocator_growth", "launch_backpressure")]
for record in found:
    line, function = record.stack[0].split(":")[-1].split(" ")
    print(f"{record.kind:14} line {line:>3} of the cell, in {function}: {record.call}")
print("waits with a name, which are fine:", dict(guard.waits))

# %% jupyter={"source_hidden": true}
places = {record.stack[0].split(" ")[-1] for record in found}
where = Exercise(
    "8.1",
    "In which methods of `Server` does the host wait without a name? Answer with a set of method names (from `found`).",
    check=lambda a: set(a) == places,
    hints=[
        "`record.stack[0]` is `file:line function`.",
        "A log message that shows a tensor reads it. `.item()` reads. The size of `tokens[mask]` is known to the device only.",
        "Copies wait too, if their host side is not pinned; and allocating pinned memory waits for the whole device.",
    ],
    solution='answer = {record.stack[0].split(" ")[-1] for record in found}',
    refuses=[{"step"}, {"is_done", "output"}],
)
where

# %%
where.check(...)

# %% [markdown]
# ## Remove them
#
# The tools: a buffer that is pinned **once**; a copy on a stream; an event, waited for **with a reason**; and, where the host wanted a number in the
# middle of a step, a computation that stays on the device or an answer that comes a step later with the output.


# %% jupyter={"source_hidden": true}
def is_clean(cls) -> bool | str:
    """Serve with the class under a guard that raises."""
    mine = cls()
    got = [mine.step()]
    try:
        with sync_guard(device, mode="error") as strict:
            got += [mine.step() for _ in range(NUM_STEPS - 1)]
    except SyncError as error:
        return str(error)
    if got != reference:
        return "no hidden wait is left, but the tokens are others than those of `Server`"
    if set(strict.waits) - {"output"}:
        return f"named waits should be for the output only, not {dict(strict.waits)}"
    return True


clean = Exercise(
    "8.2",
    "Write a subclass of `Server` whose `step` returns the same tokens and makes the host wait for nothing but the output. The log may say less.",
    check=is_clean,
    hints=[
        "`self.pinned` exists already: use it instead of allocating.",
        "`is_done` can look at the tokens that the output has brought: all of them 0.",
        "Nobody reads `history`; what `running` counts is `sum(token != 0 for token in tokens)`, once they are on the host.",
    ],
    solution="""
class answer(Server):
    def step(self):
        main.run("forward", forward, self.logits, self.weights, self.tokens)
        main.run("sample", sample, self.tokens, self.alive, self.num_alive, self.logits)
        tokens = self.output()
        if not any(tokens):
            self.write_log("done")
        self.log.append(f"{sum(token != 0 for token in tokens)} running")
        return tokens

    def output(self):
        copy.wait_event(main.record_event())
        copy.copy("output_copy", self.pinned, self.tokens)
        copy.record_event().synchronize("output")
        return self.pinned.tolist()
""",
    refuses=[Server],
)
clean

# %%
clean.check(...)

# %% [markdown]
# ## The engine under the same guard
#
# With `mode="error"` (or `no_sync()`) the first hidden wait raises. The engine's loop passes; that is a test of this project.

# %%
from mrv2 import EngineConfig, SamplingParams
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest

core = EngineCore(
    EngineConfig(model="tiny-llama", load_format="dummy", max_model_len=128, max_num_seqs=4, num_gpu_blocks=40)
)


def submit(tag: str) -> None:
    """Add three requests."""
    for i in range(3):
        params = SamplingParams(temperature=0.7, seed=i, max_tokens=pick(30, 10), ignore_eos=True)
        core.add_request(EngineRequest(req_id=f"{tag}{i}", prompt_token_ids=[5, 6, 7 + i], params=params))


submit("warm-up ")
while core.has_unfinished:
    core.step()
submit("guarded ")
with sync_guard(core.device, mode="error") as guard:
    while core.has_unfinished:
        core.step()
assert set(guard.waits) == {"output"}
print("waited, with a name:", dict(guard.waits))

# %% [markdown]
# ## Assertions on recordings: for CI, and for engines of other people
#
# A recording by Nsight Systems shows every wait of any program. `trace.sync_points()` ranks them by what they cost; this is our V1 runner on an H200:

# %%
v1 = mrv2.trace.load(recorded("h200/v1_async.graph.sqlite.gz"))
v2 = mrv2.trace.load(recorded("h200/v2_async.graph.sqlite.gz"))
v1.sync_points().per_call()

# %% [markdown]
# `assert_no_sync` says "within each step the host waits for nothing", but for what is there by design. It fails with the places:

# %%
from mrv2.trace.assertions import TraceAssertionError

try:
    v1.assert_no_sync()
except TraceAssertionError as error:
    print(str(error)[:300], "...")


# %% jupyter={"source_hidden": true}
def passes(trace, allow: list[str]) -> bool:
    """Say whether the assertion holds."""
    try:
        trace.assert_no_sync(allow=allow)
    except TraceAssertionError:
        return False
    return True


allowed = Exercise(
    "8.3",
    "Give the list of patterns to allow, as short as can be, so that the assertion passes for `v2` (its one designed wait) and still fails for `v1`.",
    check=lambda a: (
        not isinstance(a, str)
        and len(a) == 1
        and passes(v2, list(a))
        and not passes(v1, list(a))
        and not passes(v2, [])
    ),
    hints=[
        "`v2.sync_points().per_call()` shows what V2 waits for.",
        "The reason of a named wait is a range `wait: reason`.",
    ],
    solution='answer = ["wait: output"]',
    refuses=[["*"], [], ["wait: *"]],
)
allowed

# %%
allowed.check(...)

# %% [markdown]
# In CI that is a test like any other:
#
# ```python
# def test_the_step_waits_for_its_output_only():
#     mrv2.trace.load("step.sqlite").assert_no_sync(allow=["wait: output"])
# ```
#
# or on the command line `mrv2 trace assert step.sqlite --no-sync --allow "wait: output"`.
#
# **No evidence is not a pass.** Our own recorder sees stages, not CUDA calls. Asked whether there was a hidden wait, it must not say no:

# %%
submit("recorded ")
with recording(core.device) as recorder:
    while core.has_unfinished:
        core.step()
try:
    mrv2.trace.from_recorder(recorder).assert_no_sync(allow=["wait: output"])
    raise AssertionError("a recording without CUDA calls cannot prove this")
except TraceAssertionError as error:
    print(error)

# %%
core.shutdown()
device.close()
progress()

# %% [markdown]
# **Next:** [9 · Nsight recordings](09_nsight.ipynb).
