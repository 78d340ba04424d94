"""The GGUF reader against a file written here, value by value."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mrv2_models.errors import ModelFileError
from mrv2_models.gguf import F32, Q4_1, Q8_0, GGUFFile

METADATA = {"general.architecture": "llama", "some.count": 7, "some.eps": 0.5, "some.names": ["a", "é"]}


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(item: object) -> bytes:
    match item:
        case str():
            return struct.pack("<I", 8) + string(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case list():
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    raise AssertionError(f"no encoding for {item!r}")


def write(path: Path, tensors: dict[str, tuple[tuple[int, ...], int, bytes]], magic: bytes = b"GGUF") -> Path:
    head = magic + struct.pack("<IQQ", 3, len(tensors), len(METADATA))
    head += b"".join(string(key) + value(item) for key, item in METADATA.items())
    data = b""
    for name, (shape, type_id, payload) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
        head += struct.pack("<IQ", type_id, len(data))
        data += payload + b"\0" * (-len(payload) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_metadata_and_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.standard_normal((3, 5)).astype("<f4")
    gguf = GGUFFile(write(tmp_path / "x.gguf", {"w": ((3, 5), F32, values.tobytes())}))
    assert gguf.metadata == METADATA
    assert gguf.tensors["w"].shape == (3, 5)
    np.testing.assert_array_equal(gguf.read("w"), values)


def test_q8_0_is_scale_times_code(tmp_path: Path, rng: np.random.Generator) -> None:
    scales = rng.standard_normal(6).astype(np.float16)
    codes = rng.integers(-128, 128, (6, 32), dtype=np.int8)
    payload = b"".join(scale.tobytes() + row.tobytes() for scale, row in zip(scales, codes, strict=True))
    found = GGUFFile(write(tmp_path / "x.gguf", {"w": ((3, 64), Q8_0, payload)})).read("w")
    expected = np.array([np.float32(scales[b]) * codes[b, i] for b in range(6) for i in range(32)], np.float32)
    np.testing.assert_array_equal(found, expected.reshape(3, 64))


def test_q4_1_is_minimum_plus_scale_times_code_low_nibbles_first(tmp_path: Path, rng: np.random.Generator) -> None:
    scales, minima = rng.standard_normal((2, 4)).astype(np.float16)
    codes = rng.integers(0, 16, (4, 32))
    payload = b""
    for b in range(4):
        packed = bytes(int(codes[b, i]) | int(codes[b, i + 16]) << 4 for i in range(16))
        payload += scales[b].tobytes() + minima[b].tobytes() + packed
    # a leading tensor shifts the offset of the second one
    first = ((1, 1), F32, struct.pack("<f", 3.0))
    gguf = GGUFFile(write(tmp_path / "x.gguf", {"first": first, "w": ((4, 32), Q4_1, payload)}))
    expected = np.float32(scales)[:, None] * codes.astype(np.float32) + np.float32(minima)[:, None]
    np.testing.assert_array_equal(gguf.read("w"), expected)
    assert gguf.read("first").item() == 3.0


def test_other_tensor_types_are_refused(tmp_path: Path) -> None:
    gguf = GGUFFile(write(tmp_path / "x.gguf", {"w": ((1, 256), 12, bytes(144))}))
    with pytest.raises(ModelFileError, match="tensor 'w' has type 12; only F32, Q4_1 and Q8_0 are read"):
        gguf.read("w")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.gguf", {"w": ((8, 8), F32, bytes(256))}).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-1])
    with pytest.raises(ModelFileError, match="tensor 'w' ends at byte .* truncated"):
        GGUFFile(cut).read("w")
    cut.write_bytes(whole[:60])
    with pytest.raises(ModelFileError, match="damaged or ends inside its header"):
        GGUFFile(cut)
    cut.write_bytes(b"")
    with pytest.raises(ModelFileError, match="does not exist or is empty"):
        GGUFFile(cut)
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        GGUFFile(write(cut, {}, magic=b"GGML"))
