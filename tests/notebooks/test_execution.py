"""Every workshop notebook runs from top to bottom, once, in a fresh kernel, exercises answered by their solutions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

nbclient = pytest.importorskip(
    "nbclient", reason="notebooks are executed by nbclient: pip install 'mrv2-workbench[test]'"
)
pytest.importorskip("ipykernel", reason="a notebook needs a kernel: pip install 'mrv2-workbench[test]'")
import nbformat  # noqa: E402  # comes with nbclient

REPO = Path(__file__).resolve().parents[2]
# the quickstart, which needs the cores to itself, is executed by tests/lab/test_quickstart.py
NOTEBOOKS = sorted(path for path in (REPO / "notebooks").glob("*.ipynb") if not path.stem.startswith("00"))
MAX_BYTES = 6_000_000
# a hang, not slowness, is what this is for
CELL_TIMEOUT_S = 120


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_restart_and_run_all(path: Path, monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    roots = [str(REPO / root) for root in ("workbench", "models", "kernels")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAST", os.environ.get("FAST", "1"))
    monkeypatch.setenv("MRV2_EXERCISES", "solve")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    client.execute()
    record_property("seconds", round(time.perf_counter() - start, 1))
    assert len(nbformat.writes(notebook).encode()) <= MAX_BYTES, "the file after a run is too large to share"
    written = os.environ.get("MRV2_NOTEBOOKS_OUT")
    if written:
        nbformat.write(notebook, Path(written) / path.name)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", f"{cell.id} writes to stderr: {output.get('text')}"
