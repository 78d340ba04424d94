"""Finding and removing what must not leave a machine: paths, variables, names of hosts and users."""

from __future__ import annotations

import gzip
import os
import re
import socket
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from mrv2.trace.readers.sqlite_source import plain_file, quote_name

# an absolute path of two parts or more, not the tail of a relative one or of a URL
_PATH = re.compile(r"(?<![\w./\\~-])(?:/[\w.+@~%,=-]+)+/+([\w.+@~%,=-]*)")
_WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\\\s\"'<>|]+\\)*([^\\\s\"'<>|]*)")
# one part is a path only below a folder that every system has
_ROOT = re.compile(
    r"(?<![\w./\\-])/(?:home|root|usr|opt|tmp|var|etc|mnt|srv|dev|proc|lib|lib64|bin|run|data|scratch|Users)\b"
)
_HOME = re.compile(r"~[\w-]*/(?:[\w.+@~%,=-]+/)*([\w.+@~%,=-]*)")
_VARIABLE = re.compile(
    r"\b(?:PATH|HOME|USER|LOGNAME|HOSTNAME|SHELL|PWD|OLDPWD|LANG|TERM|MAIL|VIRTUAL_ENV|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|PYTHONPATH|PYTHONHOME"
    r"|(?:[A-Z][A-Z0-9_]*)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|APIKEY|CREDENTIALS?|PROXY)[A-Z0-9_]*)=[^\s\"']*"
)
_FILE_URL = re.compile(r"file://\S*")
_PATTERNS = (_VARIABLE, _FILE_URL, _PATH, _WINDOWS_PATH, _HOME, _ROOT)
# in the bytes of numbers, which now and then look like "/aA@/" or "~/": a path of words
_PATH_OF_WORDS = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][A-Za-z][\w.+-]{2,}){2,}")
_SHORTEST_NAME_IN_BYTES = 5
_PATTERNS_IN_BYTES = (_VARIABLE, _FILE_URL, _PATH_OF_WORDS, _ROOT)
# host names that say nothing
_GENERIC = frozenset({"", "localhost", "vm", "host", "root", "user", "unknown", "none"})


def redact(text: str, names: Iterable[str] = ()) -> str:
    """Return `text` with paths cut to their last part, variables and `names` (of hosts, users) replaced."""
    text = _VARIABLE.sub("<variable>", text.replace("file://", ""))
    for pattern in (_HOME, _PATH, _WINDOWS_PATH):
        text = pattern.sub(lambda found: found[1] or "<path>", text)
    text = _ROOT.sub("<path>", text)
    for name in names:
        text = _word(name).sub("<name>", text)
    return text


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE)


def telling(names: Iterable[str | None]) -> list[str]:
    """Return those names of hosts and users that would tell something, longest first."""
    return sorted({n for n in names if n and len(n) > 2 and n.lower() not in _GENERIC}, key=lambda n: (-len(n), n))


def own_names() -> list[str]:
    """Return the names of this host and of its user, as far as they tell something."""
    return telling([socket.gethostname(), os.environ.get("USER"), os.environ.get("LOGNAME")])


def leaks(text: str, names: Iterable[str] = (), *, in_bytes: bool = False) -> list[str]:
    """Return the pieces of `text` that tell of a path, a variable, or one of `names`; each once.

    With `in_bytes`, of something that need not be text at all: a path is what consists of words then, and names of
    fewer than five letters are not looked for.
    """
    patterns = _PATTERNS_IN_BYTES if in_bytes else _PATTERNS
    # three letters stand in any megabyte of numbers
    names = [name for name in names if len(name) >= _SHORTEST_NAME_IN_BYTES] if in_bytes else names
    found = [match[0] for pattern in patterns for match in pattern.finditer(text)]
    found += [name for name in names if _word(name).search(text)]
    return list(dict.fromkeys(found))


def find_leaks(path: str | Path, names: Iterable[str] = ()) -> list[str]:
    """Search every text of a recording (SQLite, JSON, anything; plain or gzip) for what must not leave a machine.

    Args:
        names: hosts and users to look for besides paths and variables.

    Returns:
        Findings, at most 50, empty when clean.
    """
    names, found = list(names), dict[str, None]()
    for text, in_bytes in _texts(Path(path)):
        found |= dict.fromkeys(leaks(text, names, in_bytes=in_bytes))
        if len(found) >= 50:
            break
    return list(found)[:50]


def _texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield every text of a file, and whether it comes from bytes that may be numbers."""
    with plain_file(path) as plain:
        with plain.open("rb") as file:
            is_sqlite = file.read(16) == b"SQLite format 3\0"
        if is_sqlite:
            yield from ((text, False) for text in _sqlite_texts(plain))
        # what the tables no longer show may still lie in free pages
        yield from ((text, is_sqlite) for text in _printable(plain))


def _sqlite_texts(path: Path) -> Iterator[str]:
    with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({quote_name(table)})")]
            for column in map(quote_name, columns):
                query = f"SELECT DISTINCT {column} FROM {quote_name(table)} WHERE TYPEOF({column}) = 'text'"
                yield from (text for (text,) in connection.execute(query))


def _printable(path: Path) -> Iterator[str]:
    """Yield runs of printable characters, as `strings` does."""
    run = re.compile(rb"[\x20-\x7e]{6,}")
    tail = b""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            block = tail + block
            cut = len(block) if len(block) < 4096 else len(block) - 1024
            yield from (piece.decode("ascii") for piece in run.findall(block[:cut]))
            # a run may straddle two blocks
            tail = block[cut - min(cut, 1024) :]
    yield from (piece.decode("ascii") for piece in run.findall(tail))


def write_packed(plain: Path, out: Path) -> None:
    """Copy `plain` to `out`, as gzip when the name ends so; the same input gives the same bytes."""
    raw = plain.read_bytes()
    if out.suffix == ".gz":
        with out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(raw)
    else:
        out.write_bytes(raw)
