"""The quickstart as a file: paired, without outputs, executed once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checks.source_tree import REPO

NOTEBOOK = REPO / "notebooks" / "00_quickstart.ipynb"


def test_the_notebook_is_what_its_text_says_and_holds_no_outputs() -> None:
    jupytext = pytest.importorskip("jupytext")
    paired = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    source = jupytext.read(NOTEBOOK.with_suffix(".py"))

    def text(cell: dict[str, Any]) -> str:
        return "".join(cell["source"])

    assert [(c["cell_type"], text(c)) for c in paired["cells"]] == [(c.cell_type, c.source) for c in source.cells]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in paired["cells"])
    assert "widgets" not in paired["metadata"]


@pytest.mark.serial
@pytest.mark.timeout(180)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    roots = os.pathsep.join(str(REPO / root) for root in ("workbench", "models", "kernels"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [roots, os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("FAST", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, store_widget_state=False, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    # the panel, with its static twin for readers without a kernel
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert any("MRV2 Workbench" in output["data"].get("text/html", "") for output in outputs if "data" in output)
    assert len(nbformat.writes(notebook)) < 6e6
