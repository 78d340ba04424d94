"""How results look on a terminal: tables and figures on stdout, progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the table as lines; the first `left` columns are left-aligned, the others right-aligned."""
    cells = [list(header), *(list(row) for row in rows)]
    assert all(len(row) == len(header) for row in cells), f"every row needs the {len(header)} cells of the header"
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure; one that was not collected shows as a dash, never as zero."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    """Format a share of one as a percentage; None as a dash."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def note(text: str) -> None:
    """Say on stderr what is going on; stdout carries results only."""
    print(f"mrv2: {text}", file=sys.stderr, flush=True)
