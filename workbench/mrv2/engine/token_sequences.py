"""Texts of sampling parameters as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from mrv2.errors import RequestError
from mrv2.tokenizer import Tokenizer


def bad_word_ids(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the sequences to forbid: a text as it starts an output, and as it follows a space.

    The second form is left out where the vocabulary has no token of its own for it (it would be the
    first with a lone space before it).  Raises `RequestError` for a text without a tokenizer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        plain = marker_ids("bad_words", word.lstrip() or word, tokenizer)
        spaced = marker_ids("bad_words", " " + word.lstrip(), tokenizer)
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)


def marker_ids(name: str, marker: str | Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return `marker` as token ids, without special tokens around it."""
    if not isinstance(marker, str):
        return tuple(marker)
    if tokenizer is None:
        raise RequestError(f"{name}={marker!r} needs a tokenizer, and this engine has none: give token ids")
    return tuple(tokenizer.encode(marker, add_special_tokens=False))
