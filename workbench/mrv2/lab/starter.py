"""The smallest notebook that shows the panel, for a package that was installed without the notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def write_starter(folder: Path, model: str) -> Path:
    """Write the notebook into `folder` unless one of its name is there; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    if not file.exists():
        file.write_text(json.dumps(starter_notebook(model), indent=1), encoding="utf-8")
    return file
