"""Which regular expressions are enforced as they are meant."""

from __future__ import annotations

import re

# letters behind a backslash; other characters there stand for themselves
_ESCAPES = frozenset("dDwWsSntrfvxuc")


def regex_error(pattern: str) -> str | None:
    """Return what in `pattern` the grammar library would drop or read literally, with its position; None if nothing.

    The whole text must match, so anchors are redundant: they are accepted at the ends of the pattern and
    of its alternatives only.
    """
    depth, index, is_class = 0, 0, False
    while index < len(pattern):
        char, at = pattern[index], f"position {index + 1}"
        if char == "\\":
            escaped = pattern[index + 1 : index + 2]
            if not escaped or (escaped.isalnum() and escaped not in _ESCAPES):
                return f"{at}: the escape '\\{escaped}' is not supported"
            index += 1
        elif is_class:
            if pattern.startswith("[:", index):
                return f"{at}: POSIX classes are not supported"
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char == "(":
            if pattern.startswith("(?", index) and not pattern.startswith("(?:", index):
                return f"{at}: of the groups '(?...' only '(?:' is supported (no lookaround, flags or names)"
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "^" and not (index == 0 or (depth == 0 and pattern[index - 1] == "|")):
            return f"{at}: '^' is supported at the start only"
        elif char == "$" and not (index == len(pattern) - 1 or (depth == 0 and pattern[index + 1] == "|")):
            return f"{at}: '$' is supported at the end only"
        index += 1
    return None


# a repetition with bounds, at the place where one may stand
_BOUNDS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def num_states(pattern: str) -> tuple[int, int]:
    """Estimate the states of an automaton that unrolls every repetition, and return the largest bound of one."""
    index, largest = 0, 0
    # states of each open group, and of the item just read in it
    totals, last = [0], 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if (bounds := _BOUNDS.match(pattern, index - 1)) is not None:
            count = int(bounds[2] or bounds[1])
            totals[-1] += (count - 1) * last
            largest, index = max(largest, count), bounds.end()
        elif char == "(":
            totals.append(0)
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif char not in "|*+?^$":
            if char == "\\":
                index += 1
            elif char == "[":
                index = _end_of_class(pattern, index)
            last = 1
            totals[-1] += 1
    return sum(totals), largest


def _end_of_class(pattern: str, index: int) -> int:
    """Return the index behind the bracket that closes the class whose inside begins at `index`."""
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
