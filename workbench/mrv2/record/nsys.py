"""The program nsys: where it is, the session that this process runs in, and calls of it from inside that session."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrv2.record.backend import RecordError
from mrv2.trace.readers.nsys_rep import ENV_NAME, KNOWN_PLACES, export
from mrv2.trace.readers.nsys_rep import find_nsys as find_installed

SESSION_ENV = "MRV2_NSYS_SESSION"
_SESSION_ID = "NSYS_PROFILING_SESSION_ID"
_INJECTED = ("LD_PRELOAD", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "CUDA_INJECTION64_PATH")
_INJECTED_PREFIXES = ("NSYS_", "QUADD_")
_TOOL_LIBRARY = "libToolsInjection"
_CALL_TIMEOUT_S = 600


def find_nsys() -> str:
    """Return the nsys that launched this process, else ``$MRV2_NSYS``, PATH, or NVIDIA's usual folders.

    Raises:
        RecordError: there is none.
    """
    found = _launcher(os.environ) or find_installed()
    if found is None:
        raise RecordError(
            f"nsys is not on PATH nor in {' or '.join(KNOWN_PLACES)}; install Nsight Systems (Nsight Compute brings "
            f"one along) or set {ENV_NAME} to the program"
        )
    return found


def _launcher(env: Mapping[str, str]) -> str | None:
    """Return the nsys beside the libraries that it put into this process."""
    for name in _INJECTED:
        for library in env.get(name, "").split(":"):
            program = Path(library).parent / "nsys"
            if _TOOL_LIBRARY in Path(library).name and os.access(program, os.X_OK):
                return str(program)
    return None


def clean_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a child process is not traced."""
    env = os.environ if env is None else env
    kept = {k: v for k, v in env.items() if k not in _INJECTED and not k.startswith(_INJECTED_PREFIXES)}
    others = [p for p in env.get("LD_PRELOAD", "").split(":") if p and not (Path(p).parent / "nsys").exists()]
    return {**kept, "LD_PRELOAD": ":".join(others)} if others else kept


def call(nsys: str, arguments: Sequence[str]) -> str:
    """Run nsys, untraced, and return what it printed; raises `RecordError` with its last line if it fails."""
    verb = f"nsys {arguments[0]}"
    try:
        done = subprocess.run(
            [nsys, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=clean_env(),
            timeout=_CALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecordError(f"{verb} could not be run ({nsys}): {error}") from error
    if done.returncode:
        said = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        raise RecordError(f"{verb} failed (status {done.returncode}): {said[-1] if said else 'no message'}")
    return done.stdout


def run_through(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command with this process's terminal and return its exit status.

    Ctrl-C reaches the command as well, which then ends in its own way; this process waits for that.
    """
    process = subprocess.Popen(list(command), env=env)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


@dataclass(frozen=True)
class Session:
    """The session of nsys that this process was launched in."""

    nsys: str
    # its name or number
    key: str

    def start(self, report: Path) -> None:
        """Begin to record into `report`, a name that ends in ``.nsys-rep``; raises `RecordError`."""
        # nsys would open a new session under a key that it does not know
        if self.key not in call(self.nsys, ["sessions", "list"]).split():
            raise RecordError(f"the nsys session {self.key!r} has ended; start the process again under `nsys launch`")
        output = str(report.with_suffix(""))
        options = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
        try:
            call(self.nsys, ["start", f"--session={self.key}", f"--output={output}", *options])
        except RecordError as error:
            if "not allowed in this state" not in str(error):
                raise
            raise RecordError(
                f"the nsys session {self.key!r} is recording already; stop it, and start processes that record "
                "themselves with `nsys launch`, not `nsys profile`"
            ) from error

    def stop(self, report: Path) -> None:
        """End the recording; raises `RecordError` unless `report` appears."""
        call(self.nsys, ["stop", f"--session={self.key}"])
        if not report.exists():
            left = sorted(path.name for path in report.parent.iterdir())
            raise RecordError(
                f"nsys wrote no report, only {', '.join(left) or 'nothing'}: its importer (the host part of Nsight "
                "Systems) is missing or of another version"
            )

    def export(self, report: Path, out: Path) -> Path:
        """Convert a report to SQLite."""
        return export(report, out, nsys=self.nsys, env=clean_env())


def current_session() -> Session | None:
    """Return the session that this process runs in, or None."""
    key = os.environ.get(SESSION_ENV) or os.environ.get(_SESSION_ID)
    if _launcher(os.environ) is None:
        # variables alone are inherited by processes that are not traced
        return None
    nsys = find_nsys()
    if not key:
        # a table: number, time, state, launches, name
        rows = [line.split() for line in call(nsys, ["sessions", "list"]).splitlines()]
        numbers = [row[0] for row in rows if row and row[0].isdigit()]
        key = numbers[0] if len(numbers) == 1 else None
    return Session(nsys, key) if key else None


def launch_command(session: str, command: Sequence[str], *, granularity: str, trace: str = "cuda,nvtx") -> list[str]:
    """Return the command that starts `command` in a new session of nsys, ready to record itself."""
    options = [f"--session-new={session}", f"--trace={trace}", f"--cuda-graph-trace={granularity}", "--wait=primary"]
    return [find_nsys(), "launch", *options, *command]


def profile_command(
    report: Path, command: Sequence[str], *, granularity: str, trace: str = "cuda,nvtx", extra: Sequence[str] = ()
) -> list[str]:
    """Return the command that records all of `command` into `report`."""
    options = [
        f"--trace={trace}",
        "--sample=none",
        "--cpuctxsw=none",
        f"--cuda-graph-trace={granularity}",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",
    ]
    return [find_nsys(), "profile", *options, *extra, *command]


def require_program(name: str) -> None:
    """Raise `RecordError` if `name` cannot be run."""
    if shutil.which(name) is None:
        raise RecordError(f"{name!r} is not a program: after -- comes the command to record, as in -- python script.py")
