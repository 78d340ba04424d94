"""Reader for ``.nsys-rep``: an installed nsys exports it, then the SQLite reader takes over."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mrv2.trace.readers import nsight_sqlite
from mrv2.trace.table import Trace, TraceError

SUFFIXES = (".nsys-rep", ".qdrep")
ENV_NAME = "MRV2_NSYS"
# where NVIDIA's installers put it; Nsight Compute brings one along
KNOWN_PLACES = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
)
_TIMEOUT_S = 1800


def find_nsys() -> str | None:
    """Return the nsys to use: ``$MRV2_NSYS`` (program or its folder), PATH, `KNOWN_PLACES` (newest), else None.

    Raises:
        TraceError: ``$MRV2_NSYS`` names no program.
    """
    named = os.environ.get(ENV_NAME)
    if not named:
        return shutil.which("nsys") or _newest_known()
    found = shutil.which(str(Path(named) / "nsys") if Path(named).is_dir() else named)
    if found is None:
        raise TraceError(f"{ENV_NAME}={named!r} is not a program; set it to the path of nsys or unset it")
    return found


def _newest_known() -> str | None:
    for pattern in KNOWN_PLACES:
        found = [path for path in glob.glob(pattern) if os.access(path, os.X_OK)]
        if found:
            return max(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path)])
    return None


def export(
    report: str | Path, out: str | Path, *, nsys: str | None = None, env: Mapping[str, str] | None = None
) -> Path:
    """Convert a report to SQLite at `out`.

    Args:
        nsys: the program, by default the one that `find_nsys` finds.
        env: environment of the program, by default this process's.

    Raises:
        TraceError: no nsys, or it refuses the report (it reads only reports of its own or older versions).
    """
    report, out = Path(report), Path(out)
    nsys = nsys or find_nsys()
    if nsys is None:
        raise TraceError(
            f"{report}: reading a report needs nsys: put it on PATH, set {ENV_NAME}, "
            f"or export where it was recorded: nsys export -t sqlite {report.name}"
        )
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={out}", str(report)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TraceError(f"{report}: {nsys} could not export it ({error})") from error
    if done.returncode or not out.is_file():
        said = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        raise TraceError(
            f"{report}: {nsys} refused it (status {done.returncode}): {said[-1] if said else 'no message'}"
        )
    return out


def read(path: str | Path) -> Trace:
    """Export a report to a temporary file and read that.

    Raises:
        TraceError: as `export` and as the SQLite reader.
    """
    with tempfile.TemporaryDirectory(prefix="mrv2-trace-") as folder:
        trace = nsight_sqlite.read(export(path, Path(folder) / "report.sqlite"))
    trace.meta["path"] = str(path)
    return trace
