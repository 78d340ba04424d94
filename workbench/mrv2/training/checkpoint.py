"""The folder of a draft head: ``config.json``, ``model.safetensors`` (bfloat16), a model card and the record.

``d2t`` holds offsets: target id = draft id + d2t[draft id].  The target's weights are not part of the
folder; ``target.sha256`` in the config names the file that the head was made for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mrv2.errors import ConfigError
from mrv2.training.heads import DraftHead, HeadShape, build_head
from mrv2.training.target import FrozenTarget

WEIGHTS, CONFIG, CARD, RECORD = "model.safetensors", "config.json", "README.md", "training.json"
TAPS = "eagle_aux_hidden_state_layer_ids"


# draft_ids [V] int64, on the CPU
def save_head(folder: Path, method: str, head: DraftHead, draft_ids: torch.Tensor, target: FrozenTarget) -> None:
    """Write the weights and the config; both files appear whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in head.state_dict().items()}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    shape = asdict(head.shape)
    taps = shape.pop("tap_layers")
    config: dict[str, Any] = {
        "method": method,
        **shape,
        "rope_theta": target.config.rope.theta,
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": len(draft_ids),
        "target": {
            "name": target.name,
            "sha256": target.sha256(),
            "num_hidden_layers": target.config.num_hidden_layers,
        },
    }
    if taps:
        config["eagle_config"] = {TAPS: list(taps)}
    write_json(folder / CONFIG, config)


def load_head(folder: Path) -> tuple[str, DraftHead, torch.Tensor]:
    """Return a folder's method, its head in float32 on the CPU and the target ids of its draft ids ``[V]``.

    Raises `ConfigError` if a file is missing or does not fit.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        shape = HeadShape(
            *(config[name] for name in HeadShape.__dataclass_fields__ if name != "tap_layers"),
            tap_layers=tuple(config.get("eagle_config", {}).get(TAPS, ())),
        )
        head = build_head(config["method"], shape)
        offsets = tensors.pop("d2t")
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{folder} does not hold a draft head: {error}") from error
    return config["method"], head.eval(), offsets + torch.arange(len(offsets))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object, replacing the file at once."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    _replace(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def write_card(folder: Path, record: dict[str, Any]) -> None:
    """Write the model card from the record of the run."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    is_smollm2 = config["target"]["name"].startswith("smollm2")
    base = "HuggingFaceTB/SmolLM2-135M-Instruct" if is_smollm2 else config["target"]["name"]
    shape = {"eagle3": "EAGLE-3", "mtp": "multi-token prediction (MTP)"}[config["method"]]
    rows = []
    for split, figures in record["results"].items():
        for drafter, values in figures.items():
            tau = values["tau"]
            cells = [
                split,
                drafter,
                *(f"{a:.2f}" for a in values["alpha"][:3]),
                *(f"{tau[k - 1]:.2f}" for k in (1, 3, 5, 7)),
            ]
            rows.append("| " + " | ".join(cells) + " |")
    attribution = (
        f"The target is {base} by HuggingFaceTB (Apache-2.0); this head starts from its last layer\n"
        "and is under the same license."
        if is_smollm2
        else f"The target is {base}; this head starts from its last layer and shares the target's terms."
    )
    license_line = "license: apache-2.0\n" if is_smollm2 else ""
    dialogues, training = record["dialogues"], record["training"]
    card = f"""---
{license_line}base_model: {base}
tags: [speculative-decoding, draft-model]
---

# {shape} draft head for {config["target"]["name"]}

One decoder layer that drafts the next tokens of its target for speculative decoding. Embedding and output rows
are the target's own and are not in this folder; the head drafts {config["draft_vocab_size"]:,} of the target's
{config["vocab_size"]:,} tokens, the most frequent of its answers (they are {record["coverage"]["chat"]:.1%} of the
held-out ones).

{record["num_parameters"]:,} parameters in bfloat16, made for the weights with sha256
`{config["target"]["sha256"]}`.

## Training

Data: {dialogues["num_train"]:,} dialogues with {dialogues["num_train_answer_tokens"]:,} answer tokens, questions and
answers written by the target itself; no other data set. {training["num_steps"]:,} steps of
{training["options"]["batch_dialogues"]} dialogues in {training["seconds"]:.0f} s, loss against the target's own
distribution, {training["options"]["unroll"]} unrolled steps. `training.json` holds the options, seeds and curves.

`mrv2 train-draft --method {config["method"]} --model {config["target"]["name"]}` makes it anew.

## Acceptance

Greedy drafting simulated exactly on answers that were never trained on. alpha: share of first, second and third
drafts accepted, given those before; tau(k): tokens for each target step with k drafts; n-gram: lookup of the last
1 to 3 tokens in the same dialogue.

| answers | drafter | alpha 1 | alpha 2 | alpha 3 | tau(1) | tau(3) | tau(5) | tau(7) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

## Attribution

{attribution}
"""
    _replace(folder / CARD, lambda path: path.write_text(card, encoding="utf-8"))


def _replace(path: Path, write: Any) -> None:
    scratch = path.with_name(path.name + ".part")
    write(scratch)
    scratch.replace(path)
