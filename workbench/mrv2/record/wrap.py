"""Recording a whole command, anybody's, under Nsight Systems."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrv2.record.backend import RecordError
from mrv2.record.nsight import is_sqlite_name, stamp_and_scrub
from mrv2.record.nsys import clean_env, find_nsys, profile_command, require_program, run_through
from mrv2.record.recording import command_line
from mrv2.record.verify import num_ranges, why_no_foreign_ranges
from mrv2.trace.readers.nsys_rep import export

if TYPE_CHECKING:
    from mrv2.trace import Trace


@dataclass(frozen=True)
class CommandRecording:
    """A command that was recorded."""

    trace: Trace
    # exit status of the command, as nsys passes it on
    status: int
    # why the capture holds no NVTX range; None = it holds some
    no_ranges: str | None


def record_command(
    command: Sequence[str],
    out: Path,
    *,
    granularity: str = "graph",
    trace: str = "cuda,nvtx",
    extra: Sequence[str] = (),
) -> CommandRecording:
    """Run `command` under nsys and write its scrubbed recording to `out`.

    Args:
        out: ``.sqlite``, ``.sqlite.gz``, ``.npz`` or a folder.
        granularity: of CUDA graphs; "graph" disturbs the timing least, "node" shows the kernels inside.
        trace: what nsys traces.
        extra: further options of ``nsys profile``.

    Raises:
        RecordError: no nsys, no such command, or no report came out.
        TraceError: the report cannot be exported or scrubbed.
    """
    require_program(command[0])
    check_output_name(out)
    nsys = find_nsys()
    with tempfile.TemporaryDirectory(prefix="mrv2-record-") as folder:
        report = Path(folder) / "capture.nsys-rep"
        line = profile_command(report, command, granularity=granularity, trace=trace, extra=extra)
        status = run_through(line, env=clean_env())
        if not report.exists():
            left = ", ".join(sorted(path.name for path in Path(folder).iterdir())) or "nothing"
            raise RecordError(
                f"nsys wrote no report, only {left} (status {status}): it failed, or its importer, the host part of "
                "Nsight Systems, is missing"
            )
        raw = export(report, report.with_suffix(".sqlite"), nsys=nsys, env=clean_env())
        found = write_scrubbed(raw, out)
        no_ranges = None
        if not num_ranges(found):
            no_ranges = why_no_foreign_ranges(raw, found.meta.get("versions", {}).get("nsys", ""), trace)
        return CommandRecording(found, status, no_ranges)


def check_output_name(out: Path) -> None:
    """Raise `RecordError` for a name whose format a scrubbed Nsight recording cannot have."""
    if out.suffix in (".nsys-rep", ".qdrep", ".json", ".html") or (out.suffix == ".gz" and not is_sqlite_name(out)):
        raise RecordError(
            f"{out}: a recording is written as .sqlite, .sqlite.gz, .npz or a folder; a report itself holds the "
            "environment, and `mrv2 trace export` makes the other formats"
        )


def write_scrubbed(raw: Path, out: Path) -> Trace:
    """Write a scrubbed copy of an export in the format that `out` names, and return it as a trace."""
    from mrv2.trace import load, save

    about = {"command": command_line(), "level": "nsight"}
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_sqlite_name(out):
        stamp_and_scrub(raw, out, about)
        return load(out, cache=False)
    clean = raw.with_name("clean.sqlite")
    stamp_and_scrub(raw, clean, about)
    trace = load(clean, cache=False)
    trace.meta.pop("path", None)
    save(trace, out)
    return trace
