"""A notebook runs without Jupyter, and what it showed becomes a page that needs nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "notebook_report.py"
SOURCE = """# ---
# jupyter: {}
# ---

# %% [markdown]
# # A title
#
# **Goal.** Read `a < b` and the [glossary](../docs/glossary.md#step).
#
# - one
# - two
#
# | name | value |
# |---|---|
# | a | 1 |
#
# ```
# host | S E T
# ```

# %%
number = 6
print("printed <b>")
number * 7

# %% jupyter={"source_hidden": true}
class Shown:
    def _repr_html_(self):
        return "<em>" + __import__("os").environ["MRV2_EXERCISES"] + "</em>"


Shown()

# %%
number;

# %%
1 / 0

# %%
print("never")
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("report")
    (folder / "nb.py").write_text(SOURCE, encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, "run", folder / "nb.py", "-o", folder / "nb.ipynb"], check=False)
    return folder / "nb.ipynb", done.returncode


def test_cells_run_in_order_show_their_last_value_and_stop_at_a_failure(executed: tuple[Path, int]) -> None:
    path, status = executed
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown"] + ["code"] * 5
    printed, value = cells[1]["outputs"]
    assert printed["text"] == "printed <b>\n" and value["data"]["text/plain"] == "42"
    assert cells[2]["outputs"][0]["data"]["text/html"] == "<em>solve</em>"
    assert cells[3]["outputs"] == [], "a semicolon at the end shows nothing"
    assert status == 1 and "ZeroDivisionError" in cells[4]["outputs"][0]["text"]
    assert cells[5]["outputs"] == [], "nothing runs behind a failure"


def test_the_page_is_plain_html(executed: tuple[Path, int], tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    subprocess.run([sys.executable, SCRIPT, "page", executed[0], "-o", target], check=True)
    text = target.read_text(encoding="utf-8")
    assert "<title>A title</title>" in text and "<h1>A title</h1>" in text
    assert "<b>Goal.</b>" in text and "<code>a &lt; b</code>" in text and "<li>two</li>" in text
    assert f"Executed with Python {sys.version_info[0]}.{sys.version_info[1]}" in text
    assert "<td>a</td>" in text.replace(" ", "") and "host | S E T" in text
    assert "printed &lt;b&gt;" in text and "<em>solve</em>" in text and "42" in text
    assert text.count("<details>") == 1, "the folded cell is folded"
    assert "<script" not in text and "http" not in text and "docs/glossary" not in text


def test_a_run_that_is_killed_leaves_what_it_has_shown(tmp_path: Path) -> None:
    (tmp_path / "nb.py").write_text("# %%\n6 * 7\n\n# %%\n__import__('os')._exit(9)\n", encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, "run", tmp_path / "nb.py", "-o", tmp_path / "nb.ipynb"], check=False)
    assert done.returncode == 9
    (cell,) = json.loads((tmp_path / "nb.ipynb").read_text(encoding="utf-8"))["cells"]
    assert cell["outputs"][0]["data"]["text/plain"] == "42"
