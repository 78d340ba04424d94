"""Weights from a Hugging Face folder, or random ones, into a model's fused and sharded parameters.

Each file is mapped once.  Tensors go one at a time from its pages to their place in the parameter, fused or not: only
the part that this rank keeps is read, and nothing is copied on the host but for another dtype.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mrv2_models.causal_lm import CausalLM
from mrv2_models.errors import ModelFileError
from mrv2_models.layers import WeightSource

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# tables that old checkpoints carry and that follow from the config
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
# more random weights than this are drawn on the target device, where they differ from the CPU's
MAX_CPU_RANDOM = 256_000_000
# attention of a random model must depend on its context, or greedy decoding repeats one token for ever
RANDOM_GAIN = {"q_proj": 2.5, "k_proj": 2.5, "q_norm": 2.0, "k_norm": 2.0, "o_proj": 2.0}
MAX_LISTED = 8


class WeightedModule(Protocol):
    """Says which checkpoint tensors it is made of, and on which device it lives."""

    device: torch.device

    def weight_sources(self) -> Iterator[WeightSource]: ...


class Checkpoint:
    """The safetensors files of a folder, opened lazily and read by tensor name; use as a context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._file_of = self._locate()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def read(self, source: WeightSource) -> torch.Tensor:
        """Return the part of a tensor that `source` keeps, in the stored dtype: a view of the file's mapped pages.

        So whoever copies it to a device reads the page cache; there is no other copy on the host.
        """
        path = self._file_of[source.name]
        try:
            stored = self._handle(path).get_slice(source.name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if shape != source.shape:
                raise ModelFileError(
                    f"{path}: tensor {source.name!r} has shape {list(shape)}, the config asks for {list(source.shape)}"
                )
            if dtype not in FLOAT_DTYPES:
                raise ModelFileError(
                    f"{path}: tensor {source.name!r} is stored as {dtype}; legal are {', '.join(FLOAT_DTYPES)}"
                )
            return stored[source.keep]
        except SafetensorError as error:
            raise ModelFileError(f"{path}: tensor {source.name!r} cannot be read: {error}") from error

    def read_ids(self, name: str) -> torch.Tensor:
        """Return a whole tensor of int64 numbers, on the CPU."""
        path = self._file_of[name]
        try:
            values = self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelFileError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        if values.dtype != torch.int64:
            raise ModelFileError(f"{path}: tensor {name!r} is stored as {values.dtype}; legal is int64")
        return values

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            if not path.is_file():
                raise ModelFileError(f"{path} does not exist, though {INDEX_NAME} names it; download the shard again")
            try:
                self._handles[path] = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{path} is truncated or not a safetensors file: {error}") from error
        return self._handles[path]

    def _locate(self) -> dict[str, Path]:
        index, single = self.folder / INDEX_NAME, self.folder / WEIGHTS_NAME
        if single.is_file():
            return dict.fromkeys(self._handle(single).keys(), single)
        if not index.is_file():
            raise ModelFileError(f"{self.folder} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}")
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): self.folder / str(file) for name, file in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{index} must be JSON with an object 'weight_map': {error!r}") from error
        for path in sorted(set(file_of.values())):
            held = set(self._handle(path).keys())
            absent = sorted(name for name, file in file_of.items() if file == path and name not in held)
            if absent:
                raise ModelFileError(f"{path} lacks tensors that {INDEX_NAME} places there: {_listing(absent)}")
        return file_of


@torch.no_grad()
def load_weights(model: CausalLM, folder: str | Path) -> None:
    """Fill every parameter of `model` from a Hugging Face folder.

    Raises `ModelFileError` when a file is missing or truncated, a tensor is missing, has another shape
    or dtype than expected, or belongs to no part of the model.
    """
    sources = list(model.weight_sources())
    with Checkpoint(folder) as checkpoint:
        found, wanted = checkpoint.names(), {source.name for source in sources}
        extra = {name for name in found - wanted if not DERIVED.fullmatch(name)}
        if model.config.tie_word_embeddings and "lm_head.weight" in extra:
            extra.discard("lm_head.weight")
            _check_tied(checkpoint, next(iter(sources)))
        if wanted - found:
            raise ModelFileError(f"{folder}: missing tensors: {_listing(wanted - found)}")
        if extra:
            raise ModelFileError(
                f"{folder}: tensors that a {model.config.model_type} model of this config does not have: "
                f"{_listing(extra)}"
            )
        for source in sources:
            source.store(checkpoint.read(source))


@torch.no_grad()
def fill_random(model: WeightedModule, seed: int) -> None:
    """Fill every parameter with random numbers that depend on `seed` and the tensor's name only.

    Ranks of a sharded model draw the whole tensor and keep their part; all dtypes round the same float32
    numbers.  Models above `MAX_CPU_RANDOM` weights are drawn on their device, whose numbers are its own.
    """
    sources = list(model.weight_sources())
    total = sum(torch.Size(source.shape).numel() for source in sources)
    device = model.device if total > MAX_CPU_RANDOM else torch.device("cpu")
    for source in sources:
        digest = hashlib.sha256(f"{seed}:{source.name}".encode()).digest()
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(source.shape, generator=generator, dtype=torch.float32, device=device)
        gain = RANDOM_GAIN.get(source.name.split(".")[-2], 1.0)
        source.store(values.mul_(source.std).add_(source.mean).mul_(gain)[source.keep])


def _check_tied(checkpoint: Checkpoint, embedding: WeightSource) -> None:
    """Some tied checkpoints store the shared matrix twice; refuse one whose copies differ."""
    for rows in _row_chunks(embedding.shape[0]):
        keep = (rows, slice(None))
        part = WeightSource(embedding.name, embedding.shape, keep, embedding.dest, 0.0, 0.0)
        twin = WeightSource("lm_head.weight", embedding.shape, keep, embedding.dest, 0.0, 0.0)
        if not torch.equal(checkpoint.read(part), checkpoint.read(twin)):
            raise ModelFileError(
                f"{checkpoint.folder}: tie_word_embeddings is true, but 'lm_head.weight' differs from "
                f"{embedding.name!r}; set tie_word_embeddings to false in config.json"
            )


def _row_chunks(num_rows: int, size: int = 16_384) -> Iterator[slice]:
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return ", ".join(ordered[:MAX_LISTED]) + more
