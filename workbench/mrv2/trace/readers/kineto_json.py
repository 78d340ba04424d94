"""The JSON side of a torch profiler recording: parsing, and times without loss."""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.readers.sqlite_source import is_gzip
from mrv2.trace.table import TraceError


def load_json(path: Path, parse_float: Callable[[str], Any] = str) -> Any:
    """Parse a file (plain or gzip); `parse_float` sees the text of numbers with a point.

    By default they stay text, so that no digit is lost.

    Raises:
        TraceError: truncated, damaged or not UTF-8.
    """
    try:
        if is_gzip(path):
            with gzip.open(path) as file:
                raw = file.read()
        else:
            raw = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read, damaged or truncated ({error})") from error
    try:
        return json.loads(raw, parse_float=parse_float)
    except RecursionError:
        raise TraceError(f"{path}: damaged JSON (nested too deeply)") from None
    except ValueError as error:
        raise TraceError(f"{path}: truncated or damaged JSON ({error})") from error


def to_ns(microseconds: Any) -> int:
    """Return nanoseconds, exactly, for a JSON number of microseconds (an int, or its text).

    Raises:
        ValueError: not a number.
    """
    if isinstance(microseconds, int):
        return microseconds * 1000
    text = str(microseconds)
    whole, _, fraction = text.partition(".")
    if len(fraction) <= 3 and whole.lstrip("-").isdecimal() and (fraction or "0").isdecimal():
        # "-0.5" keeps its sign: the digits are joined before they become a number
        return int(whole + fraction.ljust(3, "0"))
    try:
        return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(f"{microseconds!r} is not a time in microseconds") from None


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch the cyclic garbage collector off: millions of objects that all stay alive make it most of the work."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def to_int(value: Any, default: int = -1) -> int:
    """Return an integer from a JSON value of any type, or `default`."""
    if isinstance(value, bool) or value is None:
        return default
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else default
    try:
        number = int(str(value).strip())
        return number if -(2**63) <= number < 2**63 else default
    except ValueError:
        found = re.fullmatch(r"\D*(\d{1,18})\D*", str(value))
        return int(found[1]) if found else default


def argument(event: dict[str, Any], *names: str) -> Any:
    """Return the first of several spellings of an event's argument, or None."""
    arguments = event.get("args")
    if isinstance(arguments, dict):
        for name in names:
            if name in arguments:
                return arguments[name]
    return None


def integers(events: list[dict[str, Any]], *names: str, default: int = -1) -> np.ndarray:
    """Return one argument of each event as int64 [events]."""
    return np.fromiter((to_int(argument(event, *names), default) for event in events), np.int64, len(events))
