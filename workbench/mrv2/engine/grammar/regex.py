"""Which regular expressions are enforced as they are meant."""

from __future__ import annotations

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
