"""The vocabulary as grammars see it: the bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrv2.errors import RequestError
from mrv2.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a model; ids that no grammar may produce (special tokens, padding) have no bytes."""

    # V entries
    tokens: tuple[bytes, ...]
    # ids that end a sequence
    end_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Read the `vocab_size` tokens of a model from its tokenizer.

        Raises `RequestError` for a tokenizer whose tokens are not known byte by byte.
        """
        if not tokenizer.is_byte_level:
            raise RequestError(
                "structured_outputs needs a byte-level tokenizer (as GPT-2, Llama 3, Qwen and SmolLM have); this "
                f"model's decoder is {type(tokenizer.backend.decoder).__name__}"
            )
        special = tokenizer.special_ids
        tokens = tuple(b"" if token in special else tokenizer.token_bytes(token) for token in range(vocab_size))
        return cls(tokens, tuple(token for token in tokenizer.eos_token_ids if token < vocab_size))

    @classmethod
    def from_folder(cls, folder: str | Path | None, vocab_size: int) -> Vocabulary:
        """Read the vocabulary of a tokenizer's folder; raises `RequestError` if there is none."""
        if folder is None:
            raise RequestError(
                "structured_outputs needs the tokenizer's vocabulary, and this engine has no tokenizer (a preset has "
                "none; skip_tokenizer_init leaves it out): load the engine with tokenizer=<folder with tokenizer.json>"
            )
        return cls.of(Tokenizer.from_folder(folder), vocab_size)


# the second bytes that UTF-8 allows behind these first ones; behind any other every continuation byte is legal
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


def utf8_masks(tokens: Sequence[bytes]) -> dict[int, np.ndarray]:
    """Return, for each token behind which not all do, which tokens keep a text valid UTF-8 ([W] int32, as masks are).

    Grammar libraries take overlong forms and surrogates for characters of a negated class.  The tokens of a
    trained vocabulary are cut from valid text, so that only the seam between two tokens can go wrong.
    """
    starts = np.full(_padded(len(tokens)), -1, dtype=np.int16)
    starts[: len(tokens)] = [token[0] if token else -1 for token in tokens]
    is_continuation = (starts >= 0x80) & (starts <= 0xBF)
    masks = {}
    for lead, (low, high) in _SECOND_BYTES.items():
        legal = ~is_continuation | ((starts >= low) & (starts <= high))
        masks[lead] = np.packbits(legal, bitorder="little").view(np.int32)
    return {index: masks[token[-1]] for index, token in enumerate(tokens) if token and token[-1] in masks}


def without_controls(tokens: Sequence[bytes], but: bytes) -> np.ndarray:
    """Return which tokens hold no control character (below U+0020) except those in `but`. [W] int32, as masks are"""
    refused = bytes(set(range(0x20)) - set(but))
    legal = np.ones(_padded(len(tokens)), dtype=bool)
    legal[: len(tokens)] = [token == token.translate(None, refused) for token in tokens]
    return np.packbits(legal, bitorder="little").view(np.int32)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // 32) * 32
