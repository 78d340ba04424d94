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
# # 7 · Structured output
#
# **Goal.** You will follow a grammar token by token, apply its [mask](../docs/glossary.md#grammar-mask), and see where in a step the host makes the next mask: while the forward pass
# runs.
#
# 8 minutes, no GPU needed; needs the extra `structured` (xgrammar). Terms: [glossary](../docs/glossary.md).
#
# The mask of step n+1 depends on the token of step n, which the host must therefore know. So this is the one feature that takes a value back to the
# host inside a step. The question is only **when**.
#
# ```
# blocking   host   | wait out(n) | U G(n+1) | E(n+1) T(n+1) |          device idles through wait, U and G
# deferred   host   | E(n+1) | wait out(n) | U G(n+1) T(n+1) |          G hides behind the forward of n+1
#            device |        [sample n][ forward n+1 ][mask, sample n+1]
# ```

# %%
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
import torch

import mrv2.trace
from mrv2 import LLM, SamplingParams, StructuredOutputsParams
from mrv2.instrument import recording
from mrv2.instrument.intervals import intersect, merge, total
from mrv2.lab.exercise import Exercise, pick, progress
from mrv2.viz import Timeline

# %% [markdown]
# A model with random weights has no tokenizer; we make one: three special tokens, every byte, and some pieces of JSON.


# %% jupyter={"source_hidden": true}
def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer of fewer than 512 tokens."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = ['{"', '":', '": "', '", "', '"}', "true", "false", "null", ", ", ": ", "name", "age"]
    pieces += [f"{n:02d}" for n in range(100)] + [a + b for a in "abcdefghijk" for b in "aeiouxyz"]
    names = ["<pad>", "<bos>", "<eos>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    names += [level.pre_tokenize_str(piece)[0][0] for piece in pieces]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"}))
    return folder


folder = write_tokenizer(Path(tempfile.mkdtemp()))

# %%
llm = LLM(
    "tiny-llama",
    tokenizer=folder,
    load_format="dummy",
    max_model_len=160,
    max_num_seqs=8,
    num_gpu_blocks=100,
    max_num_spec_tokens=3,
)
core, tokenizer = llm.client.core, llm.get_tokenizer()
EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

# %% [markdown]
# ## One sequence, by hand
#
# A *matcher* holds where a sequence is within its grammar. `fill` writes one bit a token: may it come next? `accept` moves on.

# %%
params = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
matcher = core.grammars.compiler.submit(params, (EOS,)).matcher()
WORDS = -(-core.executor.vocab_size // 32)


def mask_now() -> np.ndarray:
    """Return the current mask, one row of 32-bit words."""
    bits = np.zeros((1, WORDS), dtype=np.int32)
    matcher.fill(bits, 0)
    return bits


def allowed(bits: np.ndarray) -> list[int]:
    """Return the tokens whose bit is set."""
    return [t for t in range(core.executor.vocab_size) if bits[0, t // 32] >> (t % 32) & 1]


for _ in range(6):
    legal = allowed(mask_now())
    token = max(legal, key=lambda t: len(tokenizer.decode([t])))
    print(
        f"{len(legal):3} tokens may come next, e.g. {[tokenizer.decode([t]) for t in legal[:4]]}; we take {tokenizer.decode([token])!r}"
    )
    assert matcher.accept(token), "what the mask allows, the grammar accepts"
refused = next(t for t in range(3, core.executor.vocab_size) if t not in allowed(mask_now()))
assert not matcher.accept(refused), "and what it forbids, the grammar refuses"

# %% jupyter={"source_hidden": true}
BITS = np.random.default_rng(0).integers(-(2**31), 2**31, size=(1, WORDS)).astype(np.int32)
unpack = Exercise(
    "7.1",
    "Write `f(bits)` that takes one row of 32-bit words `[W] int32` and returns a boolean array of `32 * W` entries: may the token come next? No "
    "loop over tokens.",
    check=lambda f: (
        np.flatnonzero(f(BITS[0])).tolist() == [t for t in range(32 * WORDS) if int(BITS[0, t // 32]) >> (t % 32) & 1]
    ),
    hints=["Bit t % 32 of word t // 32.", "`bits[:, None] >> np.arange(32)` has shape `[W, 32]`."],
    solution="""
def answer(bits):
    return ((bits[:, None] >> np.arange(32)) & 1).astype(bool).reshape(-1)
""",
    refuses=[lambda bits: np.unpackbits(bits.view(np.uint8)).astype(bool)],
)
unpack

# %%
unpack.check(...)

# %% [markdown]
# On the device the mask is applied to the logits, in place and before sampling: what is not allowed becomes minus infinity.

# %%
from mrv2_kernels.sampling.bitmask import apply_bitmask_torch

logits = torch.randn(3, core.executor.vocab_size)
masked = logits.clone()
apply_bitmask_torch(masked, torch.from_numpy(mask_now()), torch.tensor([1], dtype=torch.int32))
assert torch.equal(masked[[0, 2]], logits[[0, 2]]), "requests without a grammar are not touched"
assert (masked[1] > float("-inf")).nonzero().flatten().tolist() == allowed(mask_now())

# %% [markdown]
# ## In the engine
#
# Half of the requests follow a grammar, half are free; they share every step. Random weights, yet every constrained answer has the form that was
# asked for.

# %%
CONSTRAINTS = [
    StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    StructuredOutputsParams(regex=r"\d{3}-\d{2}"),
    StructuredOutputsParams(choice=["yes", "no", "maybe"]),
]
sampling = [
    SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=c) for i, c in enumerate(CONSTRAINTS)
]
sampling += [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
outputs = [o.outputs[0] for o in llm.generate(["ab"] * len(sampling), sampling, use_tqdm=False)]
for output in outputs[:3]:
    print(output.finish_reason, repr(output.text))

person = json.loads(outputs[0].text)
assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120
assert re.fullmatch(r"\d{3}-\d{2}", outputs[1].text) and outputs[2].text in ("yes", "no", "maybe")

# %% [markdown]
# ## When is the mask made?
#
# The knob `grammar_overlap`. **deferred**: launch the forward first, then wait for the last token and make the mask. **blocking**: wait and make the
# mask, then launch.


# %%
def record(overlap: str):
    """Serve constrained requests; return the spans, the trace and the texts."""
    llm.set(grammar_overlap=overlap)
    bound = SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=CONSTRAINTS[0])
    params = [bound.replace(seed=i) for i in range(pick(8, 4))]
    with recording(core.device) as recorder:
        outputs = llm.generate(["ab"] * len(params), params, use_tqdm=False)
        core.device.synchronize("end of the recording")
    return recorder.spans(), mrv2.trace.from_recorder(recorder), [o.outputs[0].text for o in outputs]


record("deferred")  # warm-up
spans, trace, texts = record("deferred")
blocking_spans, blocking_trace, blocking_texts = record("blocking")
assert texts == blocking_texts, "the same tokens either way"
Timeline(trace, window=trace.steps().take(slice(4, 7)), title="deferred: the mask under the forward")

# %%
Timeline(
    blocking_trace,
    window=blocking_trace.steps().take(slice(4, 7)),
    title="blocking: the device waits for the mask",
)

# %% [markdown]
# **Look for** `fill_grammar_mask` on the host, and what the main stream does meanwhile. As laws:


# %%
def times(spans, name: str) -> dict[int, tuple[int, int]]:
    """Return step -> (start, end) of a host stage."""
    return {s.step: (s.start_ns, s.end_ns) for s in spans if s.name == name and s.kind == "host"}


for kind, shown in (("deferred", spans), ("blocking", blocking_spans)):
    launch, fill, draw = (times(shown, name) for name in ("execute_model", "fill_grammar_mask", "sample_tokens"))
    for step, (start, end) in fill.items():
        assert end <= draw[step][0], "a mask is there before its step samples"
        if kind == "deferred":
            assert launch[step][1] <= start, "deferred: the forward was launched first"
        else:
            assert end <= launch[step][0], "blocking: nothing of the step was launched yet"
    print(f"{kind}: {len(fill)} masks")


# %% jupyter={"source_hidden": true}
def share_hidden(spans) -> float:
    """The share of mask-making that ran while some stream of the device was inside a stage."""
    fill = merge((s.start_ns, s.end_ns) for s in spans if s.name == "fill_grammar_mask")
    busy = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "device")
    return total(intersect(fill, busy)) / total(fill)


hidden = Exercise(
    "7.2",
    "Write `f(spans)`: the share of the time in `fill_grammar_mask` during which the device was busy. Then compare `f(spans)` with "
    "`f(blocking_spans)`.",
    check=lambda f: all(abs(f(shown) - share_hidden(shown)) < 1e-6 for shown in (spans, blocking_spans)),
    hints=[
        "`merge`, `intersect` and `total` of `mrv2.instrument.intervals` are imported.",
        "Busy: the union of all spans of kind 'device'.",
    ],
    solution="""
def answer(spans):
    fill = merge((s.start_ns, s.end_ns) for s in spans if s.name == "fill_grammar_mask")
    busy = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "device")
    return total(intersect(fill, busy)) / total(fill)
""",
    refuses=[lambda spans: 1 - share_hidden(spans)],
)
hidden

# %%
hidden.check(...)

# %%
for kind, shown in (("deferred", spans), ("blocking", blocking_spans)):
    print(f"{kind}: {100 * share_hidden(shown):5.1f} % of the mask-making is hidden behind the device")

# %% [markdown]
# Hidden behind *what*? Deferred, it is the forward of the step that needs the mask. Blocking, there is only the rest of the step before (post-update), which
# a GPU finishes at once and a busy CPU does not.
#
# ## What it costs in depth
#
# At most one step is launched and not yet sampled, so at most two are in flight while a constrained request runs, whatever `queue_depth` says. The
# engine says so:

# %%
llm.set(grammar_overlap="deferred", queue_depth=4)
bound = SamplingParams(temperature=1.0, seed=0, max_tokens=60, structured_outputs=CONSTRAINTS[0])
stream = llm.stream("ab", bound)
next(stream)
picture = llm.snapshot()
print(f"queue_depth={picture.knobs['queue_depth']}, effective depth {picture.effective_depth}")
effective = picture.effective_depth
stream.close()

# %% jupyter={"source_hidden": true}
depth = Exercise(
    "7.3",
    "How many steps would be in flight at most, with `queue_depth=4`, if **no** running request followed a grammar, and how many while one does? "
    "Answer with a pair.",
    check=lambda a: tuple(a) == (picture.knobs["queue_depth"], effective),
    hints=["You have just printed both."],
    solution='answer = (picture.knobs["queue_depth"], picture.effective_depth)',
    refuses=[(2, 4), (4, 4)],
)
depth

# %%
depth.check(...)

# %% [markdown]
# ## With drafts
#
# A step that verifies K drafts draws at 1 + K positions, and what the grammar allows differs from one to the next: each has a mask of its own. To make them
# the host must know the drafts too. That is a second named wait, and still nothing waits that follows no grammar.


# %%
def with_drafts(method: str) -> tuple[list[str], dict[str, int]]:
    """Serve constrained and free requests; return their texts and the waits by reason."""
    llm.set(spec_method=method, queue_depth=2)
    before = dict(core.device.waits)
    params = [bound.replace(seed=i, temperature=0.3) for i in range(3)]
    params += [SamplingParams(temperature=0.3, seed=i, max_tokens=30, ignore_eos=True) for i in range(2)]
    texts = [o.outputs[0].text for o in llm.generate(["ab"] * len(params), params, use_tqdm=False)]
    return texts, {
        reason: n - before.get(reason, 0) for reason, n in core.device.waits.items() if n > before.get(reason, 0)
    }


without, plain_waits = with_drafts("off")
drafted, draft_waits = with_drafts("ngram")
assert drafted == without, "drafts change no token, with a grammar or without"
for text in drafted[:3]:
    assert set(json.loads(text)) == {"name", "age"}
print("waits without drafts:", plain_waits)
print("waits with drafts:   ", draft_waits)

# %%
llm.close()
progress()

# %% [markdown]
# **Next:** [8 · Hunting syncs](08_hunting_syncs.ipynb).
