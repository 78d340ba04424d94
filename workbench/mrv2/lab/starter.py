"""Notebooks for a folder that has none: a working copy of those that ship, or the smallest one that shows the panel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mrv2_models.shipped import shipped

NAME = "quickstart.ipynb"
_CELLS = (
    ("markdown", "# MRV2 Workbench\nTurn `async scheduling` off and on and watch the timeline."),
    ("code", "from mrv2.lab import Load, Workbench"),
    ("code", "wb = Workbench({model!r}, max_num_spec_tokens=3, load=Load(users=4, max_tokens=96))"),
    ("code", "wb"),
)


def starter_notebook(model: str) -> dict[str, Any]:
    """Return a notebook of three code cells, as nbformat 4 has it."""
    cells = []
    for number, (kind, text) in enumerate(_CELLS):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"starter-{number}",
            "metadata": {},
            "source": text.format(model=model) if kind == "code" else text,
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_starter(folder: Path, model: str, name: str = NAME) -> Path:
    """Write the smallest notebook into `folder` unless one of its name is there; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    if not file.exists():
        file.write_text(json.dumps(starter_notebook(model), indent=1), encoding="utf-8")
    return file


def copy_notebooks(folder: Path) -> Path | None:
    """Copy the notebooks that ship, and the glossary that they link to, under `folder`; return the quickstart.

    A file that is there stays as it is.  None if this installation has no notebooks.
    """
    try:
        source, glossary = shipped("notebooks"), shipped("docs/glossary.md")
    except FileNotFoundError:
        return None
    copies = [(file, folder / "notebooks" / file.name) for file in (*source.glob("*.ipynb"), source / "README.md")]
    for file, copy in (*copies, (glossary, folder / "docs" / glossary.name)):
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return folder / "notebooks" / "00_quickstart.ipynb"
