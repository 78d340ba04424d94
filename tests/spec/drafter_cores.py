"""Engines with one drafter of random weights, and comparisons of their drafts with plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.engine.core import EngineCore
from mrv2.sampling_params import SamplingParams
from mrv2_models.drafters.loading import random_head
from serving import make_core
from spec.plain_models import PlainHead, PlainModel, PlainTarget, weights_of

K = 3
METHODS = ("draft_model", "eagle3", "mtp")
ENTRY = {"draft_model": "draft_model=tiny-llama", "eagle3": "eagle3", "mtp": "mtp"}


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def drafting_core(method: str, *, num_drafts: int = K, delay: float = 0.0, seed: int = 0, **options: Any) -> EngineCore:
    """An engine whose memory is poisoned, with one drafter of random weights."""
    knobs = dict(spec_method=method, num_spec_tokens=num_drafts) | options.pop("knobs", {})
    device = make_device("host", poison=True, random_delay_s=delay, seed=seed)
    options = {"max_num_spec_tokens": K, "speculators": (ENTRY[method],)} | options
    return make_core(device, knobs=Knobs(**knobs), **options)


def perturb(core: EngineCore, scale: float) -> None:
    """Turn the draft model into one that is wrong now and then."""
    generator = torch.Generator().manual_seed(5)
    for parameter in core.executor.drafters[0].model.parameters():  # type: ignore[attr-defined]
        parameter.mul_(1.0 + scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def plain_drafter(core: EngineCore) -> Any:
    """The drafter in plain torch."""
    drafter = core.executor.drafters[0]
    if drafter.method == "draft_model":
        return PlainModel(drafter.model)  # type: ignore[attr-defined]
    return PlainHead(drafter.head, PlainTarget(core.executor.model))  # type: ignore[attr-defined]


def use_small_vocabulary(core: EngineCore, size: int = 200) -> None:
    """Let the head draft `size` tokens only."""
    drafter: Any = core.executor.drafters[0]
    small = random_head(drafter.method, core.executor.model, seed=3, draft_vocab_size=size)
    drafter.head.set_vocabulary(small.to_target.cpu() - torch.arange(size))
    drafter.to_target, drafter.draft_vocab_size = drafter.head.to_target, size


def check_drafts(core: EngineCore, plain: Any, num_drafts: int, pick: Any = None) -> int:
    """Compare the drafts of every running request with the plain simulation; return how many were compared."""
    core.drain()
    core.device.synchronize("test")
    state, compared = core.executor.runner.state, 0  # type: ignore[attr-defined]
    for request in core.scheduler.running:
        if not request.has_row:
            continue
        found = state.draft_tokens[state.row_of[request.req_id]].tolist()
        history = request.token_ids
        if request.num_computed != len(history) - 1 or request.num_computed < request.prompt_len:
            continue
        num_real = min(num_drafts, core.max_model_len - len(history))
        picked = None if pick is None else (lambda step, logits, r=request: pick(r, step, logits))
        assert found[:num_real] == plain.drafts(history, num_real, picked), f"{request.req_id} after {len(history)}"
        assert found[num_drafts:] == [-1] * (K - num_drafts)
        compared += num_real
    return compared


def write_head(head: Any, folder: Path, sha256: str = "") -> None:
    """Write a head's folder as training does."""
    c = head.config
    config = {
        **{k: getattr(c, k) for k in ("method", "hidden_size", "intermediate_size", "num_attention_heads")},
        **{k: getattr(c, k) for k in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")},
        **{k: getattr(c, k) for k in ("vocab_size", "draft_vocab_size")},
        "target": {"name": "tiny-llama", "sha256": sha256, "num_hidden_layers": c.target_num_layers},
    }
    if c.method == "eagle3":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(c.aux_layer_ids)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(head).items()}
    if head.to_target is not None:
        tensors["d2t"] = head.to_target - torch.arange(c.draft_vocab_size)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
