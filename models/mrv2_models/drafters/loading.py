"""From the name or folder of a draft head to a loaded module on its target."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from mrv2_models.causal_lm import CausalLM
from mrv2_models.drafters.config import DraftConfig, DraftMethod, weights_sha256
from mrv2_models.drafters.eagle3 import Eagle3Head
from mrv2_models.drafters.head import DraftHead
from mrv2_models.drafters.mtp import MTPHead
from mrv2_models.errors import ModelFileError
from mrv2_models.layers import share_workspace
from mrv2_models.rope import cos_sin_table
from mrv2_models.shipped import shipped
from mrv2_models.weights import Checkpoint, fill_random

HEADS: dict[DraftMethod, type[DraftHead]] = {"eagle3": Eagle3Head, "mtp": MTPHead}
VOCABULARY = "d2t"

log = logging.getLogger(__name__)


def checkpoint_dir() -> Path | None:
    """Return the folder of the heads that ship, one folder each; None if this installation has none."""
    try:
        return shipped("models/checkpoints")
    except FileNotFoundError:
        return None


def shipped_heads() -> list[str]:
    """Return the names of the heads that ship, sorted."""
    folder = checkpoint_dir()
    return [] if folder is None else sorted(path.parent.name for path in folder.glob("*/config.json"))


def find_head(head: str | Path) -> Path:
    """Return the folder of a head: a folder as given, or the name of a shipped one; else `ModelFileError`."""
    shipped_ones = checkpoint_dir()
    for folder in (Path(head), *(() if shipped_ones is None else (shipped_ones / str(head),))):
        if (folder / "config.json").is_file():
            return folder
    raise ModelFileError(
        f"no draft head {str(head)!r}: neither a folder with a config.json, nor one that ships "
        f"({', '.join(shipped_heads()) or 'this installation has none: they come with the wheel and the repository'})"
    )


def shipped_head_of(method: DraftMethod, target: str) -> Path | None:
    """Return the folder of the shipped head of a method that was trained on the target of that name."""
    for name in shipped_heads():
        folder = find_head(name)
        config = DraftConfig.from_pretrained(folder)
        if config.method == method and config.target_name == target:
            return folder
    return None


def load_head(
    head: str | Path,
    target: CausalLM,
    *,
    target_folder: Path | None = None,
    strict: bool = False,
) -> DraftHead:
    """Build a trained head on its target.

    Args:
        head: folder, or the name of a shipped head.
        target_folder: where the target's weights lie; their hash is held against the one the head was
            trained on.  Another hash is a warning with both, or with `strict` a `ModelFileError`.

    Raises:
        ModelFileError: no such head, its files do not fit its config, or it does not fit the target.
    """
    folder = find_head(head)
    config = DraftConfig.from_pretrained(folder)
    config.check_target(target.config)
    _check_hash(config, target_folder, strict)
    module = _build(config, target)
    sources = list(module.weight_sources())
    with Checkpoint(folder) as checkpoint:
        found, wanted = checkpoint.names(), {source.name for source in sources}
        if wanted - found or found - wanted - {VOCABULARY}:
            raise ModelFileError(
                f"{folder}: a {config.method} head of this config has other tensors: missing "
                f"{sorted(wanted - found)}, unknown {sorted(found - wanted - {VOCABULARY})}"
            )
        for source in sources:
            source.dest.copy_(checkpoint.read(source))
        offsets = checkpoint.read_ids(VOCABULARY) if VOCABULARY in found else None
    module.set_vocabulary(_check_vocabulary(config, offsets))
    return module.eval()


def random_head(
    method: DraftMethod, target: CausalLM, *, seed: int = 0, draft_vocab_size: int | None = None
) -> DraftHead:
    """Build a head of random weights on any target; `draft_vocab_size` < V draws the tokens it can draft, too."""
    config = DraftConfig.for_target(method, target.config, draft_vocab_size)
    module = _build(config, target)
    fill_random(module, seed)
    if config.draft_vocab_size < config.vocab_size:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        module.set_vocabulary(ids - torch.arange(config.draft_vocab_size))
    return module.eval()


def _build(config: DraftConfig, target: CausalLM) -> DraftHead:
    table_dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    table = cos_sin_table(config.layer_config().rope, config.head_dim, target.max_model_len)
    head = HEADS[config.method](config, target, table.to(table_dtype).to(target.device))
    share_workspace(head)
    return head


def _check_hash(config: DraftConfig, folder: Path | None, strict: bool) -> None:
    found = weights_sha256(folder) if folder is not None and config.target_sha256 else ""
    if found == config.target_sha256:
        return
    text = (
        f"draft head {config.name!r} was trained on {config.target_name!r} with weights of sha256 "
        f"{config.target_sha256}, this target's are {found or 'unknown (it has no weights file)'}"
    )
    if strict:
        raise ModelFileError(f"{text}; load the target it was trained on, or load without strict=True")
    log.warning("%s: drafts stay correct, but fewer of them may be accepted", text)


# offsets [V_d] int64
def _check_vocabulary(config: DraftConfig, offsets: torch.Tensor | None) -> torch.Tensor | None:
    size = config.vocab_size if offsets is None else offsets.shape[0]
    if size != config.draft_vocab_size:
        raise ModelFileError(
            f"draft head {config.name!r}: {VOCABULARY} maps {size} tokens, draft_vocab_size={config.draft_vocab_size}"
        )
    if offsets is None:
        return None
    ids = torch.arange(size) + offsets
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size or len(ids.unique()) != size:
        raise ModelFileError(
            f"draft head {config.name!r}: {VOCABULARY} must map each draft id to a target id of its own in "
            f"0..{config.vocab_size - 1}, it reaches from {low} to {high}"
        )
    return offsets
