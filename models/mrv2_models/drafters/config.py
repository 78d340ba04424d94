"""`DraftConfig`: what a draft head is built from, and whether it belongs to a target."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mrv2_models.config import ModelConfig, RopeConfig
from mrv2_models.errors import ModelFileError, UnsupportedModelError

DraftMethod = Literal["eagle3", "mtp"]


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of a draft head, read from its ``config.json``; sizes as in `ModelConfig`."""

    name: str
    method: DraftMethod
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    # of the target; the embedding and the rows of the output matrix are the target's
    vocab_size: int
    # tokens that the head can draft; vocab_size = all of them
    draft_vocab_size: int
    # the target the head was trained on; "" = a head of random weights, which belongs to any
    target_name: str = ""
    # SHA-256 of the target's weights file
    target_sha256: str = ""
    target_num_layers: int
    # eagle3: the target's residual stream is tapped after so many layers, in this order
    aux_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelFileError(
                f"draft head {self.name!r}: num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ModelFileError(
                f"draft head {self.name!r}: draft_vocab_size={self.draft_vocab_size} must be in "
                f"1..vocab_size={self.vocab_size}"
            )
        outside = [i for i in self.aux_layer_ids if not 0 <= i <= self.target_num_layers]
        if outside or bool(self.aux_layer_ids) != (self.method == "eagle3"):
            raise ModelFileError(
                f"draft head {self.name!r} of method {self.method!r}: eagle_aux_hidden_state_layer_ids="
                f"{list(self.aux_layer_ids)} must be numbers of layers in 0..{self.target_num_layers} for 'eagle3' "
                "and absent otherwise"
            )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> DraftConfig:
        """Read ``config.json`` of a draft head's folder; raises `ModelFileError` if it is missing or malformed."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelFileError(
                f"{path} does not exist; a draft head's folder holds config.json and model.safetensors"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            target = raw["target"]
            method = raw["method"]
            if method not in get_args(DraftMethod):
                raise UnsupportedModelError(
                    f"{path}: method {method!r} is not implemented; legal are {', '.join(get_args(DraftMethod))}"
                )
            return cls(
                name=Path(folder).resolve().name,
                method=cast(DraftMethod, method),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=float(raw["rope_theta"]),
                target_name=str(target["name"]),
                target_sha256=str(target.get("sha256") or ""),
                target_num_layers=int(target["num_hidden_layers"]),
                aux_layer_ids=tuple(raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", ())),
                draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
                **{
                    key: int(raw[key])
                    for key in (
                        "hidden_size",
                        "intermediate_size",
                        "num_attention_heads",
                        "num_key_value_heads",
                        "head_dim",
                        "vocab_size",
                    )
                },
            )
        except KeyError as error:
            raise ModelFileError(f"{path}: key {error.args[0]!r} is missing") from error
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{path} does not describe a draft head: {error}") from error

    @classmethod
    def for_target(cls, method: DraftMethod, target: ModelConfig, draft_vocab_size: int | None = None) -> DraftConfig:
        """Return the shape of a head for any target: one layer as the target's own."""
        layers = target.num_hidden_layers
        return cls(
            name=f"{method} of random weights",
            method=method,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope.theta,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
            target_num_layers=layers,
            # an early, the middle and a late layer, all different where there are three
            aux_layer_ids=(min(2, layers - 1), layers // 2, max(layers - 3, 1)) if method == "eagle3" else (),
        )

    def check_target(self, target: ModelConfig) -> None:
        """Raise `ModelFileError`, with both numbers, if the head cannot run on `target`."""
        for name, ours, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_hidden_layers", self.target_num_layers, target.num_hidden_layers),
        ):
            if ours != theirs:
                raise ModelFileError(
                    f"draft head {self.name!r} was made for a target with {name}={ours} "
                    f"({self.target_name or 'no name'}), {target.name!r} has {theirs}; load a head for this target"
                )

    def layer_config(self) -> ModelConfig:
        """Return the head's one decoder layer as a model config."""
        return ModelConfig(
            name=self.name,
            model_type="llama",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position_embeddings=1,
            rms_norm_eps=self.rms_norm_eps,
            rope=RopeConfig(theta=self.rope_theta),
            tie_word_embeddings=True,
        )


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 that identifies a model folder's weights: of what they were converted from, else their own."""
    provenance = folder / "provenance.json"
    if provenance.is_file():
        recorded: dict[str, Any] = json.loads(provenance.read_text(encoding="utf-8"))
        if "gguf_sha256" in recorded:
            return str(recorded["gguf_sha256"])
    weights = folder / "model.safetensors"
    if not weights.is_file():
        return ""
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
