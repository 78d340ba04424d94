"""JupyterLab in a headless Chromium: a server of its own, a page, and what tests do with a notebook."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from checks.source_tree import REPO
from mrv2.viz import browser

needs_lab = pytest.mark.skipif(
    browser.find_browser() is None or find_spec("playwright") is None or find_spec("jupyterlab") is None,
    reason="no Chromium, playwright or JupyterLab on this machine",
)
TOKEN = "lab-tests"
# software rendering, as root, without a sandbox or anything that phones home
CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
_PLUGIN = "@jupyterlab/apputils-extension"
_SETTINGS = {
    f"{_PLUGIN}/notification.jupyterlab-settings": '{"fetchNews": "false", "checkForUpdates": false}',
    f"{_PLUGIN}/themes.jupyterlab-settings": '{"theme": "%s"}',
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(home: Path) -> dict[str, str]:
    roots = [str(REPO / root) for root in ("workbench", "models", "kernels")]
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        **os.environ,
        "HOME": str(home),
        # the model that was fetched is the user's, not this home's
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join([*roots, *inherited]),
        "OMP_NUM_THREADS": "1",
        "FAST": "1",
    }


@contextmanager
def lab_server(root: Path, home: Path, *, theme: str = "JupyterLab Light") -> Iterator[str]:
    """Serve `root` on a loopback port; yields the address."""
    for name, text in _SETTINGS.items():
        file = home / "settings" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text % theme if "%s" in text else text, encoding="utf-8")
    port = _free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}",
        "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with _serving(command, port, home, f"api?token={TOKEN}") as base:
        yield base


@contextmanager
def app_server(home: Path, model: str) -> Iterator[str]:
    """Serve the panel alone, as ``mrv2 lab --app`` does; yields the address."""
    port = _free_port()
    command = [sys.executable, "-m", "mrv2.cli", "lab", "--app", "--model", model, "--no-browser", "--port", str(port)]
    with _serving(command, port, home, "voila/api") as base:
        yield base


@contextmanager
def _serving(command: list[str], port: int, home: Path, probe: str) -> Iterator[str]:
    """Run a server until the block ends, and its whole process group with it; yields its address once it answers."""
    log, base = home / "server.log", f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=_environment(home), cwd=home, start_new_session=True
        )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{base}/{probe}", timeout=1).read()
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                assert server.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)
        else:
            raise AssertionError("the server did not start: " + log.read_text(errors="replace")[-2000:])
        yield base
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


class LabPage:
    """One notebook in one browser page; never sleeps outside the page, or its events would not be seen."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self.base = page, base
        self.problems: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"{message.text} ({(message.location or {}).get('url', '')})")

    def _request(self, request: Any) -> None:
        local = (self.base, self.base.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(local):
            self.foreign.append(request.url)

    def open(self, notebook: str) -> None:
        """Open a notebook and wait until its kernel is idle."""
        self.page.goto(f"{self.base}/lab/tree/{notebook}?token={TOKEN}&reset", wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.idle()

    def idle(self, timeout: float = 60_000) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=timeout, state="attached"
        )

    def save(self) -> None:
        """Save the notebook; returns when the server has it."""
        self.command("docmanager:save")
        self.wait("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")

    def frame(self) -> None:
        """Wait until the page has drawn what happened so far."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def command(self, name: str, **arguments: Any) -> None:
        """Run a command of JupyterLab and wait for its end."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def run_cells(self, count: int) -> str:
        """Run that many code cells from the top; return the execution counts of all."""
        script = """async (count) => {
          const panel = window.jupyterapp.shell.currentWidget, notebook = panel.content;
          await panel.context.ready;
          await panel.sessionContext.ready;
          await panel.sessionContext.session.kernel.info;
          let done = 0;
          for (let i = 0; i < notebook.widgets.length && done < count; i++) {
            if (notebook.widgets[i].model.type !== "code") continue;
            notebook.activeCellIndex = i;
            await window.jupyterapp.commands.execute("notebook:run-cell");
            done += 1;
          }
          return notebook.widgets.filter((w) => w.model.type === "code").map((w) => w.model.executionCount).join();
        }"""
        return self.page.evaluate(script, count)

    def wait(self, script: str, argument: Any = None, timeout: float = 60_000) -> Any:
        """Wait until JavaScript is true of the page; return its value."""
        return self.page.wait_for_function(script, arg=argument, timeout=timeout, polling=100).json_value()


@contextmanager
def lab_page(base: str, *, width: int = 1500, height: int = 1400) -> Iterator[LabPage]:
    """Open a browser page; it closes with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(browser.find_browser()), args=CHROMIUM_ARGS)
        try:
            page = chromium.new_page(viewport={"width": width, "height": height})
            yield LabPage(page, base)
        finally:
            chromium.close()
