"""A small byte-level tokenizer (512 tokens), its folder on disk, and constraints with what they accept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mrv2.tokenizer import _BYTE_OF_CHAR

PAD, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 512
_PIECES = ['{"', '":', '": "', '", "', '"}', '"]', "true", "false", "null", ", ", ": ", "[]", "{}", "name", "age", "ab"]
_PIECES += [f"{n:02d}" for n in range(100)]
_PIECES += [a + b for a in "abcdefghijk" for b in "aeiouxyz "]


@cache
def toy_tokenizer_json() -> str:
    """Return the ``tokenizer.json``: three special tokens, all bytes, pieces of JSON, numbers and syllables."""
    char_of_byte = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
    names = ["<pad>", "<bos>", "<eos>", *(char_of_byte[byte] for byte in range(256))]
    names += ["".join(char_of_byte[byte] for byte in piece.encode()) for piece in _PIECES]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    # the last ids of the model are padding: no token has them
    assert 400 < len(vocab) < VOCAB_SIZE, f"{len(vocab)} toy tokens do not fit the model's {VOCAB_SIZE}"
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return backend.to_str()


def write_toy_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(toy_tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"}))
    return folder
