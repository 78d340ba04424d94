"""Prompt packs: small files of prompts that a load generator replays."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mrv2.errors import ConfigError, nearest
from mrv2.tokenizer import Tokenizer

_FOLDER = Path(__file__).parent / "packs"


@dataclass(frozen=True)
class Pack:
    """Named prompts; an item holds "chat" (one user turn) or "text", and may hold "json_schema" and "num_tokens"."""

    name: str
    title: str
    about: str
    items: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine."""

    text: str
    token_ids: list[int]
    json_schema: dict[str, Any] | None = None


@cache
def pack_names() -> tuple[str, ...]:
    """Return the packs that come along."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


@cache
def load_pack(name: str) -> Pack:
    """Read a pack by name; raises `ConfigError` for an unknown one."""
    if name not in pack_names():
        raise ConfigError(f"pack={name!r}{nearest(name, pack_names())}; packs are {', '.join(pack_names())}")
    raw = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Pack(name, raw["title"], raw["about"], tuple(raw["items"]))


def encode(item: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int, max_tokens: int) -> Prompt:
    """Return an item as tokens, at most `max_tokens` of them.

    Without a tokenizer each word becomes a token by its checksum, so the same prompt is the same ids everywhere; such a
    model cannot follow a schema, which is left out.
    """
    text = item.get("chat") or item["text"]
    if tokenizer is None:
        ids = [zlib.crc32(word.encode()) % vocab_size for word in text.split()]
    elif "chat" in item and tokenizer.chat_template:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        ids = tokenizer.encode(shown, add_special_tokens=False)
    else:
        ids = tokenizer.encode(text)
    wanted = min(item.get("num_tokens", len(ids)), max_tokens)
    ids = (ids * (1 + wanted // len(ids)))[:wanted]
    return Prompt(text, ids, item.get("json_schema") if tokenizer is not None else None)
