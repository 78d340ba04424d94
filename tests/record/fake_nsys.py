"""A program that behaves as nsys does, as far as the recorder knows it; `install` puts it into a folder."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

from nsight_files import NsightFile

SESSION = "77"
_PROGRAM = """#!{python}
import json, os, shutil, subprocess, sys
from pathlib import Path

here = Path({folder!r})
args = sys.argv[1:]
traced = sorted(k for k in os.environ if k.startswith(("NSYS_", "QUADD_", "NVTX_INJ", "LD_PRELOAD")))
with (here / "log").open("a") as log:
    log.write(json.dumps({{"args": args, "traced": traced}}) + "\\n")
options = {{}}
rest = list(args[1:])
while rest and rest[0].startswith("-"):
    name, _, value = rest.pop(0).partition("=")
    options[name] = value
busy = here / "busy"


def finish(output):
    (here / "made").touch()
    Path(output + (".qdstrm" if (here / "no-importer").exists() else ".nsys-rep")).write_text("report")


if args[0] == "sessions":
    print("  ID  TIME  STATE  LAUNCH NAME\\n  {session}  00:01  Launched  1  here")
elif args[0] == "start":
    if busy.exists():
        sys.exit("Configuring is not allowed in this state.")
    busy.write_text(options["--output"])
elif args[0] == "stop":
    finish(busy.read_text())
    busy.unlink()
elif args[0] == "export":
    shutil.copy(here / "export.sqlite", options["--output"])
elif args[0] in ("profile", "launch"):
    env = {{**os.environ, "NVTX_INJECTION64_PATH": str(here / "libToolsInjection64.so")}}
    env["NSYS_PROFILING_SESSION_ID"] = "{session}"
    status = subprocess.run(rest, env=env).returncode
    if args[0] == "profile":
        finish(options["--output"])
    sys.exit(status)
else:
    sys.exit("unknown verb " + args[0])
"""


def own_capture(steps: int = 3) -> NsightFile:
    """Return an export with stages of this package, and things that scrubbing must remove."""
    file = NsightFile()
    file.domain(1, "mrv2")
    file.category(1, 4, "host stage")
    for step in range(steps):
        at = 100_000 * step
        file.nvtx("schedule", at, at + 10_000, domainId=1, category=4, int64Value=step)
        file.nvtx("execute_model", at + 10_000, at + 50_000, domainId=1, category=4, int64Value=step)
        file.launch("kernel", at + 20_000, 2_000, at + 25_000, at + 60_000, step + 1)
    file.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='SECRET_TOKEN="abc"')
    return file


class FakeNsys:
    """The program in its folder."""

    def __init__(self, folder: Path, capture: NsightFile | None = None) -> None:
        self.folder = folder
        self.program = folder / "nsys"
        self.library = folder / "libToolsInjection64.so"
        folder.mkdir(parents=True, exist_ok=True)
        self.library.touch()
        (capture or own_capture()).write(folder / "export.sqlite")
        self.program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder), session=SESSION))
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[list[str]]:
        """Return the arguments of every call so far."""
        return [entry["args"] for entry in self._log()]

    def traced_variables(self) -> list[str]:
        """Return the injection variables that any call saw."""
        return [name for entry in self._log() for name in entry["traced"]]

    def _log(self) -> list[dict[str, list[str]]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
