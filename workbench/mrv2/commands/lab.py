"""``mrv2 lab``: JupyterLab on the quickstart, or the panel alone as a page."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrv2.errors import ConfigError

QUICKSTART = Path("notebooks/00_quickstart.ipynb")
DEFAULT_MODEL = "smollm2-135m-instruct"
# Jupytext's extension is for JupyterLab: on a page without its document manager it only logs an error
APP_OPTIONS = ["--VoilaConfiguration.extension_denylist=jupyterlab-jupytext"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "lab",
        help="open JupyterLab on the quickstart",
        description="Open JupyterLab on the folder's quickstart. A folder without notebooks gets a working copy of "
        "those that ship; what is there is never overwritten.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to work (default: here)")
    parser.add_argument("--model", help=f"write a notebook of three cells that serves it (--app: {DEFAULT_MODEL})")
    parser.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    parser.add_argument("--app", action="store_true", help="show the panel alone, as a page (needs voila)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Start the server; returns when it ends."""
    command = lab_command(args)
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 0


def lab_command(args: argparse.Namespace) -> list[str]:
    """Return the command line; raises `ConfigError` if what it needs is not installed."""
    from mrv2.lab.starter import copy_notebooks, write_starter

    module = "voila" if args.app else "jupyterlab"
    if find_spec(module) is None:
        extra = "app" if args.app else "notebook"
        raise ConfigError(f"mrv2 lab{' --app' * args.app} needs {module}: pip install 'mrv2-workbench[{extra}]'")
    if args.app:
        notebook = write_starter(Path(tempfile.mkdtemp(prefix="mrv2-app-")), args.model or DEFAULT_MODEL)
    elif args.model is not None:
        notebook = write_starter(args.folder, args.model, f"quickstart-{Path(args.model).name}.ipynb")
    else:
        found = [place for place in (args.folder / QUICKSTART, args.folder / QUICKSTART.name) if place.is_file()]
        notebook = found[0] if found else copy_notebooks(args.folder) or write_starter(args.folder, DEFAULT_MODEL)
    command = [sys.executable, "-m", module, str(notebook)]
    if args.no_browser:
        command.append("--no-browser")
    if args.port is not None:
        command.append(f"--port={args.port}")
    if args.app:
        command += APP_OPTIONS
    elif hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command
