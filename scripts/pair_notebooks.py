"""Write each notebook's .ipynb from its .py (jupytext, py:percent): same cells, no outputs.

    python scripts/pair_notebooks.py            # write what is missing or out of step
    python scripts/pair_notebooks.py --check    # say what is out of step, and fail if anything is

The .py is the source; edit it, or edit in JupyterLab with the jupytext extension, which keeps both in step.
Cell ids are numbers, so that a change of one cell is a change of one cell in git.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jupytext

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def paired(source: str) -> dict[str, Any]:
    """Return the notebook of a py:percent text, without outputs."""
    notebook = jupytext.reads(source, fmt="py:percent")
    cells = []
    for number, cell in enumerate(notebook.cells):
        kept = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
        made: dict[str, Any] = {"cell_type": cell.cell_type, "id": f"cell-{number:02d}", "metadata": kept}
        if cell.cell_type == "code":
            made |= {"execution_count": None, "outputs": []}
        cells.append({**made, "source": cell.source.splitlines(keepends=True)})
    metadata = {"jupytext": {"formats": "ipynb,py:percent"}, "kernelspec": KERNEL}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_of(notebook: dict[str, Any]) -> str:
    """Return the file's content."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Pair the notebooks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of step")
    check = parser.parse_args().check
    sources = sorted(NOTEBOOKS.glob("*.py"))
    orphans = sorted({p.stem for p in NOTEBOOKS.glob("*.ipynb")} - {p.stem for p in sources})
    stale = []
    for source in sources:
        target, wanted = source.with_suffix(".ipynb"), text_of(paired(source.read_text(encoding="utf-8")))
        if target.exists() and target.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(target.name)
        if not check:
            target.write_text(wanted, encoding="utf-8")
    for name in orphans:
        print(f"{name}.ipynb has no {name}.py beside it")
    for name in stale:
        print(f"{name}: {'out of step with its .py; run scripts/pair_notebooks.py' if check else 'written'}")
    return int(bool(orphans or (check and stale)))


if __name__ == "__main__":
    sys.exit(main())
