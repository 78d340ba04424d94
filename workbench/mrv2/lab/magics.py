"""``%load_ext mrv2``: the workbench from a line of a notebook.

```
%wb                            the state in a few lines
%wb set async_scheduling=off   change knobs
%wb preset V2 sync             set every knob
%wb load pack=code users=2     change the load
%wb start | pause | stop
%wb save FOLDER | report FILE.html
%%wb_record [-n STEPS] [NAME]  record while the cell runs; the trace is left in NAME (default: trace)
```
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from mrv2.config import Knobs, legal_values
from mrv2.errors import ConfigError, nearest
from mrv2.lab.load import Load
from mrv2.lab.workbench import open_workbench
from mrv2.record import record

VERBS = ("status", "set", "preset", "load", "start", "pause", "stop", "save", "report")


def run_line(line: str) -> Any:
    """Run the text behind ``%wb`` on the workbench that is open; raises `ConfigError` for what it does not know."""
    words = shlex.split(line)
    verb, rest = (words[0], words[1:]) if words else ("status", [])
    workbench = open_workbench()
    if verb == "status":
        return workbench
    if verb == "set":
        return workbench.set(**{name: knob_value(name, text) for name, text in _pairs(rest)})
    if verb == "preset":
        return workbench.preset(" ".join(rest))
    if verb == "load":
        return workbench.set_load(**{name: _load_value(name, text) for name, text in _pairs(rest)})
    if verb in ("start", "pause", "stop"):
        return getattr(workbench, verb)()
    if verb in ("save", "report"):
        if len(rest) != 1:
            raise ConfigError(f"%wb {verb} needs one name, for example: %wb {verb} run1{'.html' * (verb == 'report')}")
        return getattr(workbench, verb)(rest[0])
    raise ConfigError(f"%wb {verb}{nearest(verb, VERBS)}; there are {', '.join(VERBS)}")


def knob_value(name: str, text: str) -> Any:
    """Return the legal value of knob `name` that `text` names ("on" and "off" for switches)."""
    names = [f.name for f in fields(Knobs)]
    if name not in names:
        raise ConfigError(f"unknown knob {name!r}{nearest(name, names)}; knobs are {', '.join(names)}")
    shown = {_shown(value): value for value in legal_values(name)}
    if text not in shown:
        raise ConfigError(f"knob {name}={text!r}: legal values are {', '.join(shown)}")
    return shown[text]


def record_cell(line: str, cell: str, shell: Any) -> None:
    """Run `cell` while the engine is recorded; leave the trace in the notebook's name space."""
    words = shlex.split(line)
    steps = None
    if "-n" in words:
        at = words.index("-n")
        if at + 1 >= len(words) or not words[at + 1].isdigit():
            raise ConfigError("%%wb_record -n needs a number of steps")
        steps = int(words[at + 1])
        del words[at : at + 2]
    if len(words) > 1 or not (words or ["trace"])[0].isidentifier():
        raise ConfigError(f"%%wb_record takes one name for the trace, not {' '.join(words)!r}")
    workbench = open_workbench()
    recording = record(steps, "stages", engine=workbench.driver.client)

    def begin() -> None:
        workbench.driver.windows.collect()
        workbench.driver.windows.enabled = False
        recording.start()

    workbench.call(begin)
    try:
        shell.run_cell(cell).raise_error()
    finally:
        workbench.driver.windows.enabled = True
        workbench.call(recording.stop)
    shell.user_ns[(words or ["trace"])[0]] = recording.trace()


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; again is harmless."""
    shell.register_magic_function(run_line, "line", "wb")

    def wb_record(line: str, cell: str) -> None:
        record_cell(line, cell, shell)

    shell.register_magic_function(wb_record, "cell", "wb_record")


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    parts = [word.partition("=") for word in words]
    pairs = [(name, text) for name, _, text in parts]
    if not pairs or any(not name or not text for name, text in pairs):
        raise ConfigError("write settings as name=value, for example: %wb set async_scheduling=off")
    return pairs


def _load_value(name: str, text: str) -> Any:
    kinds = {f.name: f.type for f in fields(Load)}
    if name not in kinds or "Literal" in str(kinds[name]) or kinds[name] in ("str", "LoadMode"):
        return text
    if text == "none":
        return None
    if kinds[name] == "bool":
        return text in ("on", "true", "True", "1")
    try:
        return int(text) if "int" in str(kinds[name]) else float(text)
    except ValueError as error:
        raise ConfigError(f"load {name}={text!r} must be a number") from error


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
