"""A small reader of GGUF files (version 2 and 3): metadata, and tensors in Q4_1, Q8_0 or F32.

Layout, little-endian: magic, version, counts; key-value pairs; tensor descriptions; padding; data.
Quantised tensors are rows of blocks of 32 values:

    Q8_0: fp16 scale d, 32 int8 codes                       x = d * code
    Q4_1: fp16 scale d, fp16 minimum m, 16 bytes of codes   x = d * code + m
          (low nibbles are values 0..15, high nibbles 16..31)
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrv2_models.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BLOCK = 32
STRING, ARRAY = 8, 9
# metadata type id -> struct format
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, Q4_1, Q8_0 = 0, 3, 8
Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", (BLOCK // 2,))])
Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", (BLOCK,))])


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies; `shape` in row-major order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    # bytes from the start of the file
    offset: int


class GGUFFile:
    """A GGUF file in memory: `metadata` by key, `tensors` by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file() or self.path.stat().st_size < len(MAGIC):
            raise ModelFileError(f"{self.path} does not exist or is empty")
        with self.path.open("rb") as file:
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelFileError(f"{self.path} is damaged or ends inside its header; download it again") from error

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        tensor = self.tensors[name]
        size = math.prod(tensor.shape)
        if tensor.type_id == F32:
            return self._block_array(tensor, np.dtype("<f4"), size).reshape(tensor.shape).copy()
        if tensor.type_id not in (Q4_1, Q8_0):
            raise ModelFileError(
                f"{self.path}: tensor {name!r} has type {tensor.type_id}; only F32, Q4_1 and Q8_0 are read"
            )
        if tensor.shape[-1] % BLOCK:
            raise ModelFileError(f"{self.path}: rows of tensor {name!r} must be a multiple of {BLOCK}: {tensor.shape}")
        if tensor.type_id == Q8_0:
            blocks = self._block_array(tensor, Q8_0_BLOCK, size // BLOCK)
            values = blocks["codes"].astype(np.float32)
            values *= blocks["scale"].astype(np.float32)[:, None]
        else:
            blocks = self._block_array(tensor, Q4_1_BLOCK, size // BLOCK)
            codes = blocks["codes"]
            values = np.concatenate([codes & 0x0F, codes >> 4], axis=1).astype(np.float32)
            values *= blocks["scale"].astype(np.float32)[:, None]
            values += blocks["minimum"].astype(np.float32)[:, None]
        return values.reshape(tensor.shape)

    def _block_array(self, tensor: GGUFTensor, dtype: np.dtype, count: int) -> np.ndarray:
        stop = tensor.offset + count * dtype.itemsize
        if stop > len(self._data):
            raise ModelFileError(
                f"{self.path} has {len(self._data)} bytes, but tensor {tensor.name!r} ends at byte {stop}; "
                "the file is truncated, download it again"
            )
        return np.frombuffer(self._data[tensor.offset : stop], dtype)

    def _parse(self) -> None:
        if self._data[:4].tobytes() != MAGIC:
            raise ModelFileError(f"{self.path} is not a GGUF file")
        self._position = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ModelFileError(f"{self.path}: GGUF version {version} is not one of {VERSIONS}")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        described = []
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            described.append((name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._position // alignment) * alignment
        self.tensors = {d[0]: GGUFTensor(d[0], d[1], d[2], start + d[3]) for d in described}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._position = self._position, self._position + length
        return self._data[start : start + length].tobytes().decode("utf-8")

    def _value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self._string()
        if type_id == ARRAY:
            item_type, length = self._scalar("I"), self._scalar("Q")
            return [self._value(item_type) for _ in range(length)]
        if type_id not in SCALARS:
            raise ModelFileError(f"{self.path}: metadata type {type_id} is unknown")
        return self._scalar(SCALARS[type_id])
