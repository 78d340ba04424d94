"""Sessions: what a workbench did, as a directory that opens on any machine without an engine.

```
session.json    schema, model, options, knobs, load, changes, A/B, versions
metrics.json    series and marks; seconds from the start
requests.jsonl  one finished request a line
trace.npz       the newest recorded window, if there is one
```
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.errors import ConfigError
from mrv2.lab.load import Load

if TYPE_CHECKING:
    from mrv2.lab.workbench import Workbench
    from mrv2.trace import Trace
    from mrv2.viz import Timeline

SCHEMA = 1


@dataclass
class Session:
    """A saved workbench; shows itself as a card."""

    # what session.json holds
    about: dict[str, Any]
    # {"series": {key: [[seconds, value], ...]}, "marks": [...]}
    metrics: dict[str, Any]
    # see `LabRequest.as_dict`
    requests: list[dict[str, Any]] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs that were in force at the end."""
        return self.about["knobs"]

    @property
    def load(self) -> Load:
        """The load at the end."""
        return Load(**self.about["load"])

    def timeline(self, **options: Any) -> Timeline:
        """Return the timeline of the recorded window; raises `ConfigError` if there is none."""
        from mrv2.viz import Timeline

        if self.trace is None:
            raise ConfigError("this session holds no recorded window")
        return Timeline(self.trace, **options)

    def code(self) -> str:
        """Return Python that makes a workbench like the one that was saved."""
        from mrv2.lab.code import code_of

        return code_of(self.about["model"], self.about["options"], self.knobs, self.load)

    def metrics_view(self) -> dict[str, Any]:
        """Return all metrics as `Metrics.view` does: times are seconds before the end."""
        from mrv2.lab.metrics import quantile

        series = self.metrics["series"]
        end = max((points[-1][0] for points in series.values() if points), default=0.0)
        drawn = {}
        for key, points in series.items():
            values = [value for _, value in points]
            drawn[key] = {
                "t": [at - end for at, _ in points],
                "v": values,
                "p50": quantile(values, 0.5),
                "p99": quantile(values, 0.99),
            }
        marks = [{**mark, "t": mark["t"] - end} for mark in self.metrics["marks"]]
        return {"seconds": max(end, 1.0), "series": drawn, "marks": marks}

    def save(self, folder: Path) -> Path:
        """Write the directory; raises `ConfigError` if the place is taken by something else."""
        if folder.exists() and not (folder / "session.json").is_file() and (folder.is_file() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is no session: choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "session.json").write_text(json.dumps(self.about, indent=1), encoding="utf-8")
        (folder / "metrics.json").write_text(json.dumps(self.metrics), encoding="utf-8")
        lines = "".join(json.dumps(request) + "\n" for request in self.requests)
        (folder / "requests.jsonl").write_text(lines, encoding="utf-8")
        (folder / "trace.npz").unlink(missing_ok=True)
        if self.trace is not None:
            from mrv2.trace import save, scrub_trace

            save(scrub_trace(self.trace), folder / "trace.npz")
        return folder

    def __repr__(self) -> str:
        about = self.about
        window = "no recorded window" if self.trace is None else "a recorded window"
        return f"Session({about['model']!r}, {about['hardware']}, {len(self.requests)} requests, {window})"

    def _repr_html_(self) -> str:
        from mrv2.lab.card import metric_tiles

        return f"<div><b>{html.escape(repr(self))}</b>{metric_tiles(self.metrics_view())}</div>"


def capture(workbench: Workbench) -> Session:
    """Return what a workbench has done so far, as plain values."""
    from mrv2.bench.environment import environment

    metrics = workbench.call(workbench.driver.metrics.as_dict)
    ab = workbench.last_ab
    about = {
        "schema": SCHEMA,
        "model": workbench.model_name,
        "place": workbench.place,
        "hardware": workbench.hardware,
        "options": {name: value for name, value in workbench.options.items() if _is_plain(value)},
        "knobs": workbench.knobs,
        "load": asdict(workbench.load),
        "changes": [intent.as_dict() for intent in workbench.intents],
        "ab": None if ab is None else ab.as_dict(),
        "environment": environment(),
    }
    return Session(about, metrics, [request.as_dict() for request in workbench.requests], workbench.trace)


def open_session(folder: str | Path) -> Session:
    """Read a session directory; raises `ConfigError` if it is none, or of a newer schema."""
    folder = Path(folder)
    file = folder / "session.json"
    if not file.is_file():
        raise ConfigError(f"{folder} is no session directory: it holds no session.json")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        requests = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be read as a session: {error}") from error
    if about.get("schema") != SCHEMA:
        raise ConfigError(f"{folder} has schema {about.get('schema')!r}; this version reads schema {SCHEMA}")
    trace = None
    if (folder / "trace.npz").is_file():
        from mrv2.trace import load

        trace = load(folder / "trace.npz")
    return Session(about, metrics, requests, trace)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, type(None)))
