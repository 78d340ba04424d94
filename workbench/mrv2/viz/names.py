"""What an event's name says: its hue, and a short form that fits on a bar."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from mrv2.trace.table import OpKind, Trace
from mrv2.viz.theme import HUE_ID

# the first pattern found in the lower-case name decides; a wait is a wait whatever it waits for
_HOST_HUES = (
    ("wait", r"wait|synchron|sleep|poll|futex|holding gil"),
    ("sample", r"sample|logits|draft"),
    ("copy", r"copy|memcpy|memset|async.*output"),
    ("forward", r"forward|graphlaunch|step_graph|execute|model"),
    ("prepare", r"prepare|preprocess|upload|staged|gather|build|input"),
    ("schedule", r"schedul|update|process_outputs|postprocess|bookkeep|scatter|detoken|add_request|get_output|stats"),
)
_KERNEL_HUES = (
    (
        "attention",
        r"flash|attn|attention|decode_kernel|combine_splits|fmha|paged|reshape_and_cache|write_kv|rotary|rope",
    ),
    ("sample", r"gumbel|sampl|argmax|top_?k|top_?p|softmax|logprob|min_p|penal|_pick_block|multinomial"),
    (
        "prepare",
        r"gather|slot_map|prepare|decode_inputs|pos_seq|combine|post_update|commit|staged|(apply|packed)_write|num_sampled"
        r"|scatter|index|arange|longest_first|fetch_step",
    ),
    ("forward", r"gemm|nvjet|cutlass|cublas|matmul|splitk|norm|silu|gelu|mul|linear|fused|triton_|elementwise|embed"),
)
# kernel names that say nothing without their template arguments
_GENERIC = re.compile(r"^(device_kernel|kernel\d?|\w*elementwise_kernel\w*|reduce_kernel|gemm_kernel)$", re.I)
_TELLING = re.compile(r"\w*(?:Functor|ArgM\w+Ops|Attn\w+|Gemm\w+|GEMM\w+)|\w+(?=_kernel_cuda|_cuda_out|_kernel_impl)")


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces, template arguments and parameters."""
    text = name.removeprefix("void ").replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    base = re.split(r"[<(]", text, maxsplit=1)[0].strip().rsplit("::", 1)[-1]
    if _GENERIC.match(base) and (found := _TELLING.search(text[len(base) :])):
        base = f"{base}<{found.group()}>"
    return base or name


def host_hue(name: str) -> int:
    """Return the hue number of a host range, API call or wait."""
    name = name.lower()
    hue = _first_match(_HOST_HUES[:1], name)
    # "gpu_model_runner: preprocess" is a kind of preprocess
    return hue or _first_match(_HOST_HUES, name.rsplit(": ", 1)[-1]) or _first_match(_HOST_HUES, name)


def op_hue(name: str, kind: int) -> int:
    """Return the hue number of a device operation; `kind` is an `OpKind`."""
    if kind in (OpKind.MEMCPY, OpKind.MEMSET):
        return HUE_ID["copy"]
    if kind == OpKind.GRAPH:
        return HUE_ID["forward"]
    if kind == OpKind.STAGE:
        return host_hue(name)
    return _first_match(_KERNEL_HUES, name.lower())


def host_hues(trace: Trace, ids: np.ndarray) -> np.ndarray:
    """Return `host_hue` for string ids [n]; uint8 [n]."""
    return _lookup(ids, lambda i: host_hue(trace.name_of(i)))


def op_hues(trace: Trace, ids: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return `op_hue` for string ids and kinds, both [n]; uint8 [n]."""
    return _lookup(ids.astype(np.int64) * 8 + kinds, lambda pair: op_hue(trace.name_of(pair // 8), pair % 8))


def _lookup(keys: np.ndarray, hue_of: Callable[[int], int]) -> np.ndarray:
    """Apply `hue_of` once to each distinct key [n]; keys are small integers."""
    if not len(keys):
        return np.zeros(0, np.uint8)
    # a negative key is an event without a name: the zero at the end
    table = np.zeros(max(int(keys.max()), -1) + 2, np.uint8)
    for key in np.flatnonzero(np.bincount(keys[keys >= 0])).tolist():
        table[key] = hue_of(key)
    return table[np.maximum(keys, -1)]


def _first_match(rules: tuple[tuple[str, str], ...], name: str) -> int:
    for key, pattern in rules:
        if re.search(pattern, name):
            return HUE_ID[key]
    return HUE_ID["other"]


def format_ns(ns: float) -> str:
    """Return a duration or instant with its unit: "950 ns", "12.3 us", "4.56 ms", "1.23 s"."""
    size = abs(ns)
    if size < 1_000:
        return f"{ns:.0f} ns"
    for unit, scale in (("us", 1e3), ("ms", 1e6)):
        if size < scale * 999.5:
            return f"{ns / scale:.3g} {unit}"
    return f"{ns / 1e9:.3g} s" if size < 999.5e9 else f"{ns / 1e9:.0f} s"


def format_bytes(num: float) -> str:
    """Return a size with its unit: "512 B", "4.1 kB", "1.2 GB" (powers of 1000)."""
    for unit in ("B", "kB", "MB"):
        if abs(num) < 999.5:
            return f"{num:.3g} {unit}"
        num /= 1000
    return f"{num:.3g} GB"


def shortened(text: str, room: int) -> str:
    """Return `text`, or as much of it as `room` characters hold, with an ellipsis."""
    return text if len(text) <= room else text[: max(room - 1, 1)] + "\u2026"
