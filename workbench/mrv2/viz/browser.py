"""A browser that is already on the machine, used without a window to turn a page into a picture."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mrv2.trace.table import TraceError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def find_browser() -> str | None:
    """Return the path of an installed Chromium or a relative of it: ``$BROWSER_PATH``, else the first on the PATH."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def run_page(page: Path, *arguments: str, timeout_s: float = 60) -> str:
    """Open `page` with further command line arguments, wait until its programs have nothing left to do, return stdout.

    Raises:
        TraceError: no browser is installed, or it failed.
    """
    browser = find_browser()
    if browser is None:
        raise TraceError(
            "a picture needs a browser: install Chromium or Chrome (or point BROWSER_PATH at one), "
            "or save as .html, which needs none"
        )
    # the sandbox refuses to start for root
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="mrv2-browser-") as profile:
        command = [browser, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "--virtual-time-budget=20000", *arguments]
        try:
            done = subprocess.run(
                [*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TraceError(f"{browser} did not finish the page: {error}") from error
    if done.returncode:
        raise TraceError(f"{browser} failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done.stdout


def screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    """Write a PNG of `page` as a window of `width` times `height` pixels shows it.

    Raises:
        TraceError: no browser is installed, or it failed.
    """
    run_page(page, f"--screenshot={picture.resolve()}", f"--window-size={width},{height}")
    if not picture.is_file():
        raise TraceError(f"{picture}: the browser wrote no picture")
