"""Incremental detokenisation: token by token, with incomplete UTF-8 and possible stop strings held back.

```
tokens ->  decoder          ->  text  ->  stop strings  ->  text that may be shown
           holds bytes of an             holds a tail that
           unfinished character          may begin a stop string
```
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from mrv2.sampling_params import SamplingParams
from mrv2.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Turns token ids into text; the pieces joined equal the decode of all ids at once."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        ...

    def flush(self) -> str:
        """Return what is still held back; the last call."""
        ...


class ByteLevelDecoder:
    """For byte-level vocabularies: every token is a byte string, UTF-8 does the rest; exact, O(1) a token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other vocabulary: decode a short window twice, without and with the new tokens.

    The window starts at the last token that brought text, so that rules which look at a neighbour
    (a stripped leading space) see one.  A text that ends in U+FFFD waits for more.  Ill-formed byte
    tokens right behind a complete character may make the whole decode replace that character too,
    which has been given out by then.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # tokens already given out (kept as context), then tokens held back
        self._window: list[int] = []
        self._num_context = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        context, text = self._decode()
        if len(text) <= len(context) or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        return text[len(context) :]

    def flush(self) -> str:
        context, text = self._decode()
        self._num_context = len(self._window)
        return text[len(context) :]

    def _decode(self) -> tuple[str, str]:
        context = self._tokenizer.decode(self._window[: self._num_context], skip_special_tokens=False)
        return context, self._tokenizer.decode(self._window, skip_special_tokens=False)


def make_decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TextDecoder:
    """Return the exact decoder where the vocabulary allows it, else the general one."""
    kind = ByteLevelDecoder if tokenizer.is_byte_level else WindowDecoder
    return kind(tokenizer, skip_special_tokens=skip_special_tokens)


class StopStrings:
    """Finds the first stop string in a text that grows, and says how much of the text is safe to show."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self.stops), default=0)

    def find(self, text: str, num_old: int) -> tuple[str, int] | None:
        """Return the stop string that begins first and the length at which `text` is to be cut.

        Args:
            num_old: characters of `text` that were searched before.
        """
        start = max(0, num_old - self._longest + 1)
        hits = [(at, order) for order, stop in enumerate(self.stops) if (at := text.find(stop, start)) >= 0]
        if not hits:
            return None
        at, order = min(hits)
        stop = self.stops[order]
        return stop, at + len(stop) if self._include else at

    def num_held(self, text: str) -> int:
        """Return the length of the longest tail of `text` that may become a stop string."""
        if self._include:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self.stops):
                return size
        return 0


class Detokenizer:
    """Text of one sequence: decoder, stop strings and how much was shown."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = make_decoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self.text = ""
        # the stop string that was found; nothing may be pushed after it
        self.stop_reason: str | None = None
        self._num_shown = 0
        self._finished = False

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Take one token; return True if it completed a stop string, where the text now ends.

        Without `may_stop` no stop string is looked for in what the token adds.
        """
        return self._extend(self._decoder.push(token_id), may_stop)

    def finish(self) -> bool:
        """End the sequence and release what was held back; return True if that completed a stop string."""
        self._finished = True
        return self.stop_reason is None and self._extend(self._decoder.flush())

    def take(self) -> str:
        """Return the text that may be shown and was not yet."""
        start = self._num_shown
        self._num_shown = max(start, len(self.visible))
        return self.text[start : self._num_shown]

    @property
    def visible(self) -> str:
        """Return the text that may be shown: all of it once finished, before that less what may yet be cut."""
        if self._finished or self.stop_reason is not None or not self._stops.stops:
            return self.text
        return self.text[: len(self.text) - self._stops.num_held(self.text)]

    def _extend(self, piece: str, may_stop: bool = True) -> bool:
        if not piece:
            return False
        num_old = len(self.text)
        self.text += piece
        found = self._stops.find(self.text, num_old) if self._stops.stops and may_stop else None
        if found is None:
            return False
        self.stop_reason, length = found
        self.text = self.text[:length]
        return True
